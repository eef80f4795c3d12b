"""Where do a run's metrics go, so that a resumed run's file has each row exactly once?"""

import json
import os
import pathlib

from tensorboardX import SummaryWriter

from vqjax.lab.training.checkpoint import disk_error


class MetricsLog:
  """Rows of JSON in `metrics.jsonl`, and the same numbers as TensorBoard events.

  A row is {"step": n, name: value, ...}; an evaluation's values are under the name of its split.
  """

  def __init__(self, folder: pathlib.Path, step: int):
    """Opens the log of `folder` for a run that goes on after `step`; later rows are cut off."""
    self.path = folder / "metrics.jsonl"
    _keep_until(self.path, step)
    self._file = self.path.open("a", encoding="utf-8")
    self._events = SummaryWriter(str(folder / "events"), purge_step=step + 1)

  def write(self, row: dict) -> None:
    """Appends a row; it is on its way to the disk when this returns."""
    try:
      self._file.write(json.dumps(row, allow_nan=False) + "\n")
      self._file.flush()
    except OSError as error:
      raise disk_error(error, self.path) from error
    step = row["step"]
    for name, value in row.items():
      values = value if isinstance(value, dict) else {"train": value}
      for inner, number in values.items():
        tag = f"{name}/{inner}" if isinstance(value, dict) else f"train/{name}"
        if name != "step":
          self._events.add_scalar(tag, number, step)

  def close(self) -> None:
    """Writes out what is buffered."""
    self._file.close()
    self._events.close()


def _keep_until(path: pathlib.Path, step: int) -> None:
  """Drops rows after `step`, and a last line that a killed run left unfinished."""
  if not path.exists():
    return
  kept = []
  for line in path.read_text(encoding="utf-8").splitlines():
    try:
      row = json.loads(line)
    except json.JSONDecodeError:
      continue
    if row["step"] <= step:
      kept.append(line + "\n")
  temporary = path.with_suffix(".tmp")
  temporary.write_text("".join(kept), encoding="utf-8")
  os.replace(temporary, path)
