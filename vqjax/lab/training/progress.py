"""How does a person see how far a run is?"""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  Progress,
  TextColumn,
  TimeRemainingColumn,
)

from vqjax.lab.training.distributed import is_main

Report = Callable[[int, float], None]
"""(step, loss in nats) -> None."""


@contextlib.contextmanager
def progress_bar(
  name: str, start: int, steps: int, tokens_per_step: int, console: Console | None = None
) -> Iterator[Report]:
  """A live bar with tokens/s, loss and time left; ten lines in all where there is no terminal.

  Of several processes the first shows it.
  """
  console = console or Console(stderr=True, quiet=not is_main())
  if not console.is_terminal:
    yield _lines(name, start, steps, tokens_per_step, console)
    return
  columns = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("{task.fields[rate]:>8} tokens/s  loss {task.fields[loss]}"),
    TimeRemainingColumn(),
    TextColumn("left"),
  )
  with Progress(*columns, console=console) as bar:
    task = bar.add_task(name, total=steps, completed=start, rate="-", loss="-")
    began = time.perf_counter()

    def report(step: int, loss: float) -> None:
      rate = (step - start) * tokens_per_step / max(time.perf_counter() - began, 1e-9)
      bar.update(task, completed=step, rate=f"{rate:,.0f}", loss=f"{loss:.3f}")

    yield report


def _lines(name, start, steps, tokens_per_step, console) -> Report:
  began, every = time.perf_counter(), max(1, steps // 10)

  def report(step: int, loss: float) -> None:
    if step % every == 0 or step == steps:
      seconds = max(time.perf_counter() - began, 1e-9)
      rate = (step - start) * tokens_per_step / seconds
      left = (steps - step) * seconds / max(step - start, 1)
      console.print(
        f"{name}  step {step}/{steps}  {rate:,.0f} tokens/s  loss {loss:.3f}  {left:.0f} s left",
        highlight=False,
        soft_wrap=True,
      )

  return report
