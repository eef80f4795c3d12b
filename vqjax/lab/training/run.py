"""What is in a run's folder, and whose is it?"""

import fcntl
import json
import os
import pathlib
import time
import uuid

from vqjax.lab.config import Experiment, config_hash, describe, difference
from vqjax.lab.training.checkpoint import disk_error
from vqjax.lab.training.distributed import PATIENCE, from_main, is_main


class RunFolder:
  """config.json, metrics.jsonl, events/, checkpoints/ and, in the end, result.json.

  Of several processes the first opens and writes it; the others make sure that they see the same.

  Attributes:
    path: the folder.
  """

  def __init__(self, path: pathlib.Path, experiment: Experiment, data: dict):
    """Opens the folder for an experiment on data (fingerprint, vocabulary), or makes it.

    Raises:
      ValueError: the folder belongs to another config or to other data, or another run is going on
        in it; nothing is written.
      OSError: the folder cannot be written, or is not shared by all processes; the message names
        the remedy.
    """
    self.path = path
    self._lock = None
    token = from_main("run folder", lambda: self._open(experiment, data))
    if not is_main():
      _find(path / "lock", token)

  def _open(self, experiment: Experiment, data: dict) -> str:
    """Takes the folder, and leaves a token in it for the others to find."""
    path = self.path
    mine = {"hash": config_hash(experiment), "config": describe(experiment), "data": data}
    theirs = read_json(path / "config.json")
    if theirs is not None:
      _check_owner(path, mine, theirs)
    try:
      path.mkdir(parents=True, exist_ok=True)
      self._lock = (path / "lock").open("a")
      if theirs is None:
        write_json(path / "config.json", mine)
    except OSError as error:
      raise disk_error(error, path) from error
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise ValueError(
        f"another process is running in {path}; wait for it, or give another folder with --run"
      ) from None
    token = uuid.uuid4().hex
    try:
      self._lock.truncate(0)
      self._lock.write(token)
      self._lock.flush()
    except OSError as error:
      raise disk_error(error, path) from error
    return token

  def close(self) -> None:
    """Lets another process run in the folder."""
    if self._lock is not None:
      self._lock.close()

  def result(self) -> dict | None:
    """What the run ended with, or None while it has not."""
    return read_json(self.path / "result.json")

  def write_result(self, result: dict) -> None:
    """Writes the result, whole or not at all; of several processes the first writes its own."""
    from_main("result", lambda: self._write_result(result))

  def _write_result(self, result: dict) -> str:
    try:
      write_json(self.path / "result.json", result)
    except OSError as error:
      raise disk_error(error, self.path) from error
    return "written"


def _find(path: pathlib.Path, token: str) -> None:
  """Returns when the file holds the token; a network's disk may take its time to show it."""
  deadline = time.monotonic() + PATIENCE / 6
  while not path.exists() or path.read_text() != token:
    if time.monotonic() > deadline:
      raise FileNotFoundError(
        f"the run folder {path.parent.absolute()} is not the one that process 0 has opened; give"
        " one with --run that all processes share"
      )
    time.sleep(0.1)


def _check_owner(path: pathlib.Path, mine: dict, theirs: dict) -> None:
  remedy = "give another folder with --run, or remove this one to start over"
  if theirs["hash"] != mine["hash"]:
    lines = "\n  ".join(difference(mine["config"], theirs["config"]))
    raise ValueError(f"{path} belongs to another config:\n  {lines}\n{remedy}")
  if theirs["data"] != mine["data"]:
    changed = [
      f"{name}: {mine['data'].get(name)} now, {theirs['data'].get(name)} then"
      for name in mine["data"]
      if mine["data"][name] != theirs["data"].get(name)
    ]
    lines = "\n  ".join(changed)
    raise ValueError(f"the text of {path} has changed since the run began:\n  {lines}\n{remedy}")


def read_json(path: pathlib.Path) -> dict | None:
  """The file's object, or None where there is no file."""
  if not path.exists():
    return None
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except json.JSONDecodeError as error:
    raise ValueError(f"{path} is not JSON ({error}); remove it to go on without it") from error


def write_json(path: pathlib.Path, value: dict) -> None:
  """Writes to a neighbour first, so that the file is never half there."""
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
  os.replace(temporary, path)
