"""The run folder, its JSON files, and the text that a run trains on."""

import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import time
import uuid
from collections.abc import Sized

from vqjax.lab.config import Experiment, config_hash, describe, difference, with_vocab
from vqjax.lab.data import TokenSplit, encode_split, fit_encoder
from vqjax.lab.data.source import SPLITS, Prepared
from vqjax.lab.training.distributed import PATIENCE, from_main, is_main

NO_PERMISSION = frozenset(
  {
    errno.EACCES,
    errno.EROFS,
    errno.EPERM,
    errno.EFBIG,
    errno.EDQUOT,
    errno.ENOTDIR,
    errno.EEXIST,
  }
)
"""Errors of a folder that another folder may not have."""

FAILED_WRITES = ("Failed to write", "Failed writing", "Error writing")
"""Texts of TensorStore's errors for a failed write, which carry no error number."""


@dataclasses.dataclass(frozen=True)
class EncodedText:
  """The encoded text of an experiment.

  Attributes:
    experiment: the experiment with the vocabulary of its modules filled in from the tokenizer.
    splits: "train", "valid" and "test" -> tokens, or what the loader reads in their place.
    identity: fingerprints and sizes, which must not change before a run is resumed.
  """

  experiment: Experiment
  splits: dict[str, TokenSplit | Sized]
  identity: dict


def load_text(experiment: Experiment) -> EncodedText:
  """Return the splits of an experiment, and fill in the vocabulary.

  Fits the tokenizer and encodes the text; both are cached by content. Data of the kind `Prepared`
  have splits of their own and no tokenizer.

  Raises:
    ValueError: the vocabularies of the model and the tokenizer differ, or a split is empty.
  """
  data = experiment.data
  if (experiment.tokenizer is None) != isinstance(data, Prepared):
    raise ValueError(
      f"`tokenizer` must be None for prepared data and given for text; got {experiment.tokenizer}"
      f" for {type(data).__name__}. Change `tokenizer` or `data`."
    )
  encoder = None if experiment.tokenizer is None else fit_encoder(data, experiment.tokenizer)
  vocab = data.vocab if encoder is None else encoder.vocab
  resolved = with_vocab(experiment, vocab)
  read = data.split if encoder is None else lambda name: encode_split(data, encoder, name)
  splits = {name: read(name) for name in SPLITS}
  sizes = {name: len(getattr(split, "tokens", split)) for name, split in splits.items()}
  empty = [name for name, size in sizes.items() if not size]
  if empty:
    raise ValueError(
      f"`data` must have text for every split; got none for {', '.join(empty)} from {data}. Add"
      " text or choose other data."
    )
  identity = {
    "text": data.fingerprint(),
    "tokenizer": encoder and encoder.fingerprint(),
    "vocab": vocab,
    "tokens": sizes,
  }
  return EncodedText(resolved, splits, identity)


class RunFolder:
  """A run folder: config, metrics, events, checkpoints and the result.

  Of several processes the first opens and writes it; the others check that they see the same.

  Attributes:
    path: the folder.
  """

  def __init__(self, path: pathlib.Path, experiment: Experiment, data: dict):
    """Open or make the folder for an experiment on data with this identity.

    Raises:
      ValueError: the folder belongs to another config or other data, or another process runs in
        it. Nothing is written.
      OSError: the folder cannot be written, or the processes do not share it.
    """
    self.path = path
    self._lock = None
    token = from_main("run folder", lambda: self._open(experiment, data))
    if not is_main():
      _wait_for_token(path / "lock", token)

  def _open(self, experiment: Experiment, data: dict) -> str:
    """Lock the folder; return the token in its lock file."""
    path = self.path
    mine = {"hash": config_hash(experiment), "config": describe(experiment), "data": data}
    theirs = read_json(path / "config.json")
    if theirs is not None:
      _check_owner(path, mine, theirs)
    try:
      path.mkdir(parents=True, exist_ok=True)
      # Opened with "a": "w" would erase the token of a run that holds the lock.
      self._lock = (path / "lock").open("a")
      if theirs is None:
        write_json(path / "config.json", mine)
    except OSError as error:
      raise disk_error(error, path) from error
    # The kernel releases the lock when the process ends, even when it is killed.
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise ValueError(
        f"another process is running in {path}. Wait for it, or give another folder with --run."
      ) from None
    # A folder of the same path on another machine may exist; only the shared one has this token.
    token = uuid.uuid4().hex
    try:
      self._lock.truncate(0)
      self._lock.write(token)
      self._lock.flush()
    except OSError as error:
      raise disk_error(error, path) from error
    return token

  def close(self) -> None:
    """Unlock the folder."""
    if self._lock is not None:
      self._lock.close()

  def result(self) -> dict | None:
    """Return the content of result.json, or None before the run has ended."""
    return read_json(self.path / "result.json")

  def write_result(self, result: dict) -> None:
    """Write result.json atomically; of several processes the first writes its own."""

    def write() -> str:
      try:
        write_json(self.path / "result.json", result)
      except OSError as error:
        raise disk_error(error, self.path) from error
      return "written"

    from_main("result", write)


def _wait_for_token(path: pathlib.Path, token: str) -> None:
  """Wait until the file holds the token: a network file system may show it late."""
  deadline = time.monotonic() + PATIENCE / 6
  while not path.exists() or path.read_text() != token:
    if time.monotonic() > deadline:
      raise FileNotFoundError(
        f"the run folder {path.parent.absolute()} is not the one that process 0 has opened. Give"
        " a folder with --run that all processes share."
      )
    time.sleep(0.1)


def _check_owner(path: pathlib.Path, mine: dict, theirs: dict) -> None:
  remedy = "Give another folder with --run, or remove this one to start over."
  if theirs["hash"] != mine["hash"]:
    lines = "\n  ".join(difference(mine["config"], theirs["config"]))
    raise ValueError(f"{path} belongs to another config:\n  {lines}\n{remedy}")
  if theirs["data"] != mine["data"]:
    lines = "\n  ".join(
      f"{name}: {mine['data'].get(name)} now, {theirs['data'].get(name)} then"
      for name in mine["data"]
      if mine["data"][name] != theirs["data"].get(name)
    )
    raise ValueError(f"the text of {path} has changed since the run began:\n  {lines}\n{remedy}")


def read_json(path: pathlib.Path) -> dict | None:
  """Return the object in a file, or None if the file does not exist."""
  if not path.exists():
    return None
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except json.JSONDecodeError as error:
    raise ValueError(
      f"{path} must hold JSON; got {error}. Remove it to go on without it."
    ) from error


def write_json(path: pathlib.Path, value: dict) -> None:
  """Write an object to a file atomically."""
  write_whole(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_whole(path: str | os.PathLike, text: str) -> None:
  """Write a text file atomically: a reader sees the old text or the new one."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  # In the same folder, because a rename is atomic only within one file system.
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  temporary.write_text(text, encoding="utf-8")
  temporary.replace(path)


def disk_error(error: Exception, folder: pathlib.Path, last_good: int | None = None) -> Exception:
  """Return an OSError with the remedy for a full disk; other errors unchanged.

  `last_good` is the step of the newest complete checkpoint.
  """
  text, code = str(error), getattr(error, "errno", None)
  if code == errno.ENOSPC or "No space left" in text:
    code, message = errno.ENOSPC, "the disk is full. Free some space and run again to resume."
  elif code in NO_PERMISSION:
    message = f"cannot write ({text}). Choose a folder with --run."
  elif any(phrase in text for phrase in FAILED_WRITES):
    code = errno.EIO
    message = (
      f"a checkpoint could not be written ({text.splitlines()[-1][-200:]}). Check the disk's space"
      " and the limit on file sizes, then run again to resume."
    )
  else:
    return error
  kept = "" if last_good is None else f" Checkpoint {last_good} is complete and kept."
  return OSError(code, message + kept, str(folder))
