"""The run folder, and the text that a run trains on."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import socket
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import jax

from vqjax.lab.config import Experiment, config_hash, describe, difference, with_vocab
from vqjax.lab.data import TokenSplit, encode_split, fingerprint, fit_tokenizer
from vqjax.lab.data.source import SPLITS, Prepared
from vqjax.lab.run_files import read_config, read_result
from vqjax.lab.training.distributed import PATIENCE, from_main, is_main
from vqjax.lm import records

__all__ = ["EncodedText", "load_text"]


@dataclasses.dataclass
class _Lock:
  """Schema of the file `lock`, which names the process that holds it."""

  token: str
  host: str
  process: int
  since: str


START_AFRESH = "To start over, remove {} or give another folder with --run."
"""What to do with a run folder that cannot be resumed."""


@contextlib.contextmanager
def disk_errors(path: pathlib.Path) -> Iterator[None]:
  """Let errors of the system name this path and a remedy."""
  try:
    yield
  except OSError as error:
    raise records.disk_error(error, path) from error


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
  if absent := [name for name in ("data", "loader") if getattr(experiment, name) is None]:
    raise ValueError(
      f"`{absent[0]}` must be an object; got None. Give one of `vqjax.lab`, such as data.Text() and"
      " data.Windows()."
    )
  if (experiment.tokenizer is None) != isinstance(data, Prepared):
    raise ValueError(
      f"`tokenizer` must be None for prepared data and given for text; got {experiment.tokenizer}"
      f" for {type(data).__name__}. Change `tokenizer` or `data`."
    )
  tokenizer = None if experiment.tokenizer is None else fit_tokenizer(data, experiment.tokenizer)
  vocab = data.vocab if tokenizer is None else tokenizer.vocab
  resolved = with_vocab(experiment, vocab)
  read = data.split if tokenizer is None else lambda name: encode_split(data, tokenizer, name)
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
    "tokenizer": tokenizer and fingerprint(tokenizer),
    "vocab": vocab,
    "tokens": sizes,
    "generator": _generator(),
  }
  return EncodedText(resolved, splits, identity)


def _generator() -> str:
  """The random numbers that a key stands for, which two options of JAX choose."""
  name = jax.config.jax_default_prng_impl
  return name if jax.config.jax_threefry_partitionable else f"{name}, not partitionable"


class RunFolder:
  """A run folder: config, metrics, events, checkpoints and the result.

  Of several processes the first opens and writes it; the others check that they see the same.

  Attributes:
    path: the folder.
    owner: the experiment and its data, in one word.
  """

  def __init__(
    self,
    path: pathlib.Path,
    experiment: Experiment,
    data: dict,
    source: Mapping[str, Any] | None = None,
  ):
    """Open or make the folder for an experiment on data with this identity.

    Raises:
      ValueError: the folder belongs to another config or other data, or another process runs in
        it. Nothing is written.
      OSError: the folder cannot be written, or the processes do not share it.
    """
    # Bytes that are not UTF-8, which Orbax cannot write.
    if any(0xDC80 <= ord(letter) <= 0xDCFF for letter in str(path)):
      raise ValueError(
        f"the name of the run folder must be UTF-8; got {str(path)!a}. Give another folder with"
        " --run."
      )
    self.path = path
    self._lock = None
    mine = {"hash": config_hash(experiment), "config": describe(experiment), "data": data}
    if source is not None:
      mine["source"] = dict(source)
    # Checkpoints name their owner, so that they cannot change hands with a lost config.json.
    self.owner = f"{mine['hash']}-{records.checksum(json.dumps(data, sort_keys=True).encode())}"
    try:
      with disk_errors(path):
        token = from_main("run folder", lambda: self._open(mine))
      if not is_main():
        _wait_for_token(path / "lock", token)
    except BaseException:
      self.close()
      raise

  def _open(self, mine: dict) -> str:
    """Lock the folder; return the content of its lock file."""
    path = self.path
    try:
      theirs = read_config(path)
    except records.DamagedError as error:
      # Checkpoints name the config too, so that another one cannot go on in this folder.
      _warn_and_set_aside(error, path / "config.json")
      theirs = None
    if theirs is not None:
      _check_owner(path, mine, theirs)
    path.mkdir(parents=True, exist_ok=True)
    # Opened with "a": "w" would erase the content of a run that holds the lock.
    self._lock = (path / "lock").open("a")
    # The kernel releases the lock when the process ends, even when it is killed: a file that is
    # left behind is taken over.
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f"another process is running in {path}{_holder(path / 'lock')}. Wait for it, or give"
        " another folder with --run."
      ) from None
    if theirs is None:
      records.write(path / "config.json", mine)
    # A folder of the same path on another machine may exist; only the shared one has this token.
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    holder = _Lock(uuid.uuid4().hex, socket.gethostname(), os.getpid(), now)
    content = records.dumps(records.sealed(dataclasses.asdict(holder)))
    self._lock.truncate(0)
    self._lock.write(content)
    self._lock.flush()
    return content

  def check(self) -> None:
    """Check that the folder is still there, and this process its owner.

    Raises:
      OSError: it was removed or replaced.
    """
    if self._lock is not None:
      try:
        is_same = os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.path / "lock"))
      except OSError:
        is_same = False
      if not is_same:
        problem = "the run folder was removed or replaced. Run again to start over"
        raise OSError(errno.ENOENT, problem, str(self.path))

  def close(self) -> None:
    """Unlock the folder."""
    if self._lock is not None:
      self._lock.close()

  def result(self) -> dict | None:
    """Return the content of result.json, or None before the run has ended.

    A damaged file is moved aside with a warning: the run measures again what it held.
    """
    try:
      return read_result(self.path)
    except records.DamagedError as error:
      if not is_main():
        return None
      _warn_and_set_aside(error, self.path / "result.json")
      return None

  def write_result(self, result: dict) -> None:
    """Write result.json atomically; of several processes the first writes its own."""

    def write() -> str:
      with disk_errors(self.path):
        records.write(self.path / "result.json", result)
      return "written"

    from_main("result", write)


def _holder(lock: pathlib.Path) -> str:
  """The process that a lock file names, for a message."""
  try:
    holder = records.read(lock, _Lock)
  except (OSError, records.DamagedError):
    holder = None
  if holder is None:
    return ""
  return f": process {holder['process']} on {holder['host']}, since {holder['since']}"


def _warn_and_set_aside(error: Exception, path: pathlib.Path) -> None:
  target = records.set_aside(path, path.parent / "damaged")
  problem = str(error).partition(". ")[0]
  warnings.warn(f"{problem}; it is moved to {target}, and the run goes on", stacklevel=3)


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
  remedy = START_AFRESH.format(path)
  if theirs["hash"] != mine["hash"]:
    lines = "\n  ".join(difference(mine["config"], theirs["config"]))
    raise ValueError(f"{path} belongs to another config:\n  {lines}\n{remedy}")
  if theirs["data"] != mine["data"]:
    differing = [name for name in mine["data"] if mine["data"][name] != theirs["data"].get(name)]
    now_then = lambda name: f"{name}: {mine['data'][name]} now, {theirs['data'].get(name)} then"
    lines = "\n  ".join(map(now_then, differing))
    what = "text"
    if differing == ["generator"]:
      what = "generator of random numbers"
      remedy = f"Set jax_default_prng_impl and jax_threefry_partitionable as then. {remedy}"
    raise ValueError(f"the {what} of {path} has changed since the run began:\n  {lines}\n{remedy}")
