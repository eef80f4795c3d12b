"""Long calls: what they keep on the disk, the room that they need, and their progress."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vqjax.lm import records

__all__ = ["ProgressBars", "open_work"]

OTHER_FILES = 2**24
"""Bytes of the disk that are left for the tokenizer, the config and the report."""


LINES = 10.0
"""Seconds between lines of progress where there is no terminal."""


@dataclasses.dataclass
class _Identity:
  identity: str


def work_of(out: pathlib.Path) -> pathlib.Path:
  """The folder of an interrupted call."""
  return out.with_name(f".{out.name}.partial")


@contextlib.contextmanager
def open_work(work: pathlib.Path, identity: str) -> Iterator[None]:
  """The folder of an interrupted call, empty if it was one of another model or other texts.

  Raises:
    ValueError: another process uses it, or it is not one of such a call.
  """
  record = work / "identity.json"
  is_ours = work.is_dir() and ((work / "lock").is_file() or not any(work.iterdir()))
  if work.exists() and not is_ours:
    raise ValueError(
      f"{work} must be what an interrupted call left; got something else. Move it, or give another"
      " `--out`."
    )
  work.mkdir(exist_ok=True)
  with open(work / "lock", "a") as lock:
    # The kernel releases it when the process ends, even when it is killed.
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f"another process is working in {work}. Wait for it, or give another `--out`."
      ) from None
    with_it = records.read(record, _Identity)
    for path in work.iterdir():
      is_kept = with_it is not None and with_it["identity"] == identity and path.name != "model"
      if path.name == "lock" or is_kept:
        continue
      shutil.rmtree(path) if path.is_dir() else path.unlink()
    records.write(record, {"identity": identity})
    try:
      yield
    except BaseException:
      # A text that is refused leaves nothing to go on from.
      if {path.name for path in work.iterdir()} <= {"lock", record.name}:
        shutil.rmtree(work)
      raise


class ProgressBars:
  """Bars on standard error, of which each is made by calling this with its title.

  Where standard error is not a terminal, a line each `LINES` seconds says how far a part is.
  """

  def __enter__(self) -> Callable[[str], Callable[[float], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    self._bars = Progress(
      *columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not sys.stderr.isatty()
    )
    self._bars.start()

    shown = time.monotonic()

    def bar(title: str) -> Callable[[float], None]:
      task = self._bars.add_task(title, total=1.0)

      def update(part: float) -> None:
        nonlocal shown
        self._bars.update(task, completed=part)
        if self._bars.disable and time.monotonic() - shown > LINES:
          shown = time.monotonic()
          print(f"{title}: {100 * part:.0f} %", file=sys.stderr, flush=True)

      return update

    return bar

  def __exit__(self, *error: object) -> None:
    self._bars.stop()


def check_free(folder: pathlib.Path, weights: int) -> None:
  """Raise OSError unless the disk of a folder has room for so many bytes and `OTHER_FILES`."""
  needed, free = weights + OTHER_FILES, shutil.disk_usage(folder).free
  if free < needed:
    raise OSError(
      f"`--out` must be on a disk with {needed:,} bytes free; got {free:,}. Free some space, and"
      " run the same command again."
    )


def job_identity(job: Any, mark: np.ndarray) -> str:
  """A hash of the fields of a job but `out`, and of `model_mark` of its model.

  What is kept of an interrupted call depends on nothing else.
  """
  facts = {f.name: getattr(job, f.name) for f in dataclasses.fields(job)}
  del facts["out"]
  facts["mark"] = mark.tobytes()
  return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
