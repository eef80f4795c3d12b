"""The metrics that a run writes, and the progress that it shows."""

import contextlib
import pathlib
import shutil
import time
import warnings
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vqjax.lab.run_files import read_metrics
from vqjax.lab.training.distributed import is_main
from vqjax.lab.training.run_folder import disk_errors
from vqjax.lab.training.throughput import Throughput
from vqjax.lab.training.trackers import TRACKERS, TensorBoard
from vqjax.lm import records
from vqjax.outputs import write_text

__all__ = []


class MetricsLog:
  """Rows of JSON in `metrics.jsonl`, and the same numbers for TensorBoard and another tracker.

  A row is {"step": n, name: value, ...}; the values of an evaluation are under the name of its
  split.
  """

  def __init__(
    self, folder: pathlib.Path, step: int, last: str | None = None, tracker: str | None = None
  ):
    """Open the log of a run that goes on after `step`, and drop the rows after it.

    Args:
      folder: the run folder.
      step: the step of the checkpoint that the run goes on from; 0 for a fresh run.
      last: the checksum of the last row before the checkpoint, as `last` was then; "": there was
        none; None without a checkpoint.
      tracker: a name of `TRACKERS`; None: TensorBoard alone.
    """
    self.path = folder / "metrics.jsonl"
    with disk_errors(self.path):
      self.last = _keep_until(self.path, step, last)
      self._file = self.path.open("a", encoding="utf-8")
      kinds = [TensorBoard] if tracker is None else [TensorBoard, TRACKERS[tracker]]
      self._trackers = [kind(folder, step) for kind in kinds]

  def write(self, row: dict, speed: dict[str, float | None] | None = None) -> None:
    """Append and flush a row.

    A `speed` is for the trackers alone: a run that is resumed writes its rows again bit by bit.
    """
    row = records.sealed(row, self.last)
    with disk_errors(self.path):
      self._file.write(records.dumps(row))
      self._file.flush()  # a killed process loses its buffer
    self.last = row.pop(records.CHECKSUM)
    step, numbers = row.pop("step"), {}
    for name, value in row.items():
      inner = value.items() if isinstance(value, dict) else [("", value)]
      numbers |= {f"{name}/{key}" if key else f"train/{name}": number for key, number in inner}
    speeds = {f"speed/{key}": x for key, x in (speed or {}).items() if x is not None}
    for tracker in self._trackers:
      tracker.write(numbers | speeds, step)

  def close(self) -> None:
    """Flush and close all files."""
    self._file.close()
    for tracker in self._trackers:
      tracker.close()


def _keep_until(path: pathlib.Path, step: int, last: str | None) -> str:
  """Drop the rows after a checkpoint; return the checksum of the last row that is kept.

  Damaged rows before the checkpoint are dropped with a warning.
  """
  if not path.exists() and not last:
    return ""
  found = read_metrics(path.parent)
  if last in found.checksums:
    kept = found.lines[: found.checksums.index(last) + 1]
  elif not last:
    kept, rows = [], len(found.rows)
    if last is None and rows:
      warnings.warn(
        f"{path.parent} has no checkpoint yet: the run starts again at step 0, and {rows} rows of"
        f" {path.name} are written again",
        stacklevel=3,
      )
  else:
    kept, last = [], ""
    rows = [row for row in found.rows if row["step"] <= step]
    for row in rows:
      row = records.sealed(row, last)
      last = row[records.CHECKSUM]
      kept.append(records.dumps(row).removesuffix("\n"))
    problem = str(found.problem or f"{path} lacks rows").partition(". ")[0]
    aside = path.parent / "damaged" / path.name
    if path.exists():
      aside.parent.mkdir(exist_ok=True)
      shutil.copy(path, aside)
      problem += f"; it is copied to {aside}"
    kept_rows = f"{len(rows)} rows until checkpoint {step} are intact and kept"
    warnings.warn(f"{problem}. {kept_rows}, and the run goes on", stacklevel=3)
  write_text(path, "".join(f"{line}\n" for line in kept))
  return last or ""


ShowProgress = Callable[[int, float], None]
"""Function of the step and the loss in nats that shows progress."""


@contextlib.contextmanager
def progress_bar(
  name: str,
  first_step: int,
  steps: int,
  tokens_per_step: int,
  throughput: Throughput,
  console: Console | None = None,
) -> Iterator[ShowProgress]:
  """Show a live bar on a terminal, else ten lines; yield a `ShowProgress`.

  Of several processes the first shows it.
  """
  console = console or Console(stderr=True, quiet=not is_main())
  last = time.perf_counter(), first_step

  def pace(step: int) -> tuple[float, float]:
    """Tokens per second since the last call, and seconds left at this rate."""
    nonlocal last
    (began, first), last = last, (time.perf_counter(), step)
    # Not since the start: the first steps wait for the compiler.
    seconds, done = max(last[0] - began, 1e-9), max(step - first, 1)
    return done * tokens_per_step / seconds, (steps - step) * seconds / done

  def print_line(step: int, loss: float) -> None:
    if step == first_step + 1 < steps:
      pace(step)
    elif step % max(1, steps // 10) == 0 or step == steps:
      rate, left = pace(step)
      console.print(
        f"{name}  step {step}/{steps}  {throughput.text(rate)}  loss {loss:.3f}  {left:.0f} s left",
        highlight=False,
        soft_wrap=True,
      )

  if not console.is_terminal:
    yield print_line
    return
  columns = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("{task.fields[rate]}  loss {task.fields[loss]}"),
    TimeRemainingColumn(),
    TextColumn("left"),
  )
  with Progress(*columns, console=console) as bar:
    task = bar.add_task(name, total=steps, completed=first_step, rate="-", loss="-")

    def update(step: int, loss: float) -> None:
      rate, _ = pace(step)
      bar.update(task, completed=step, rate=throughput.text(rate), loss=f"{loss:.3f}")

    yield update
