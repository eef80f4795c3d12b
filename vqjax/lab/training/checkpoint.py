"""Checkpoints: saved while a run trains, resumed bitwise, and read by other runs."""

import contextlib
import dataclasses
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import linen as nn
from orbax.checkpoint import handlers
from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

from vqjax.lab.run_files import read_config, read_metrics
from vqjax.lab.training.distributed import await_verdict, from_main, is_joined, is_main
from vqjax.lab.training.run_folder import (
  START_AFRESH,
  EncodedText,
  disk_errors,
)
from vqjax.lab.training.step import TrainState, state_checksums
from vqjax.lm import records

__all__ = ["FromRun", "read_run_variables", "saved_steps"]


def _validation_loss(metrics: dict) -> float:
  return metrics["nats_per_token"]


BEST = {"best_fn": _validation_loss, "best_mode": "min"}
"""Options of Orbax that save metrics with a checkpoint and order checkpoints by them."""


@dataclasses.dataclass
class _Record:
  """Schema of what a checkpoint has beside the state.

  Attributes:
    owner: the run that saved it, `RunFolder.owner`.
    position: the position of the data iterator and of the logs.
    arrays: a checksum of each array of the state.
    metrics: scores of the validation split, which Orbax keeps in a file of its own.
  """

  owner: str
  position: dict[str, Any]
  arrays: list[int]
  metrics: dict[str, float] | None


@dataclasses.dataclass
class _Metrics:
  """Schema of Orbax's file of metrics."""

  nats_per_token: float


@dataclasses.dataclass
class _Progress:
  """Schema of `progress.json`, which outlives lost checkpoints.

  Attributes:
    checkpoint: step of the newest complete checkpoint.
  """

  checkpoint: int


class Restored(NamedTuple):
  """A training state, and the position of its data iterator."""

  state: TrainState
  position: Any


class Checkpoints:
  """Saves state and data position asynchronously; keeps the newest and the best.

  A checkpoint appears under its final name only when it is complete. Checksums of every array, of
  the data position and of the metrics are saved with it and compared when it is read, so that a run
  never goes on from a damaged one.
  """

  def __init__(
    self, folder: pathlib.Path, keep: int, owner: str = "", complete_by: int | None = None
  ):
    """Open `folder`/checkpoints; move checkpoints with a damaged record aside.

    Args:
      folder: the run folder.
      keep: number of newest checkpoints that stay on disk, beside that of lowest validation loss.
      owner: the run that the checkpoints are of.
      complete_by: the step until which the first checkpoint is complete: later rows of the metrics
        tell that one was, where the folder has none.

    Raises:
      ValueError: there were checkpoints, and all are lost; or they are of another run than `owner`.
      OSError: the folder cannot be read or written.
    """
    self.folder, self.owner, self._complete_by = folder / "checkpoints", owner, complete_by
    self._saving = self._progress = None
    # Before Orbax reads the metrics of all of them. The other processes wait.
    with disk_errors(self.folder):
      from_main("checkpoints", self._inspect)
    best = policy.BestN(
      get_metric_fn=_validation_loss,
      reverse=True,  # Orbax keeps the last of the sorted checkpoints: the least loss
      n=1,
      keep_checkpoints_without_metrics=False,  # else every save without an evaluation stays
    )
    options = ocp.CheckpointManagerOptions(
      preservation_policy=policy.AnyPreservationPolicy([policy.LatestN(keep), best]),
      cleanup_tmp_directories=True,  # of a run that was killed while it saved
      **BEST,
    )
    with disk_errors(self.folder):
      self._manager = ocp.CheckpointManager(
        self.folder.absolute(),
        options=options,
        handler_registry=_handlers(
          state=(ocp.StandardCheckpointHandler(), ocp.args.StandardSave, ocp.args.StandardRestore),
          record=(ocp.JsonCheckpointHandler(), ocp.args.JsonSave, ocp.args.JsonRestore),
        ),
      )

  def _inspect(self) -> str:
    """Compare the records with what is there, and move those that are damaged aside."""
    run, progress = self.folder.parent, None
    try:
      progress = records.read(run / "progress.json", _Progress)
    except records.DamagedError as error:
      target = records.set_aside(run / "progress.json", run / "damaged")
      warnings.warn(f"{_reason(error)}; it is moved to {target}, and the run goes on", stacklevel=4)
    before = _steps(self.folder)
    for step in before:
      try:
        record = _read_record(self.folder / str(step))
      except (records.DamagedError, FileNotFoundError, NotADirectoryError) as error:
        warnings.warn(f"{self._set_aside(step, error)}, and the run goes on", stacklevel=4)
        continue
      if self.owner and record["owner"] != self.owner:
        raise ValueError(
          f"checkpoint {step} in {self.folder} is of another config or other data, and"
          f" {run / 'config.json'} was lost. Restore it. {START_AFRESH.format(run)}"
        )
    steps = _steps(self.folder)
    if before and not steps:
      raise self._none_intact(before)
    newest = self._progress = progress and progress["checkpoint"]
    if not before and (newest or self._had_one()):
      which = f"checkpoint {newest}" if newest else "the first checkpoint"
      raise ValueError(
        f"{self.folder} must hold {which}, which was complete; got none. Restore it."
        f" {START_AFRESH.format(run)}"
      )
    if newest and newest > before[-1]:
      warnings.warn(
        f"checkpoint {newest} in {self.folder} is missing; the run goes on from {steps[-1]}",
        stacklevel=4,
      )
    return "inspected"

  def _had_one(self) -> bool:
    """Whether the metrics go on after the step until which the first checkpoint was complete."""
    rows = read_metrics(self.folder.parent).rows
    return self._complete_by is not None and any(row["step"] > self._complete_by for row in rows)

  def _none_intact(self, steps: list[int]) -> ValueError:
    run = self.folder.parent
    return ValueError(
      f"no checkpoint in {self.folder} is intact: {sorted(steps)} are moved to {run / 'damaged'}."
      f" Restore one. {START_AFRESH.format(run)}"
    )

  def _write_progress(self, step: int) -> None:
    """Remember the newest complete checkpoint."""
    if is_main():
      records.write(self.folder.parent / "progress.json", {"checkpoint": step})

  @property
  def latest(self) -> int | None:
    """Step of the newest complete checkpoint."""
    return self._manager.latest_step()

  def save(self, state: TrainState, position: Any, metrics: dict | None = None) -> None:
    """Start to save; return when the state may be donated to the next step.

    Args:
      state: the state, saved under the number of its step.
      position: the state of the data iterator, JSON.
      metrics: scores of the validation split, with `nats_per_token`; None without an evaluation.
    """
    # Reading the checksum on the host waits for the step that makes `state`.
    arrays = np.asarray(state_checksums(state)).tolist()
    record = _Record(self.owner, position, arrays, metrics)
    record = records.sealed(dataclasses.asdict(record))
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
    self.wait()
    with self._explained_errors():
      self._manager.save(int(state.step), args=items, metrics=metrics)
    self._saving = int(state.step)

  def restore(self, like: TrainState) -> Restored | None:
    """Return the newest intact checkpoint, or None in a folder without any.

    A damaged one is moved aside with a warning, and the one before it is read.

    Raises:
      ValueError: the arrays and `like` differ in shapes or dtypes, or no checkpoint is intact.
    """
    damaged: list[int] = []
    for step in sorted(self._manager.all_steps(), reverse=True):
      # Before the read: the arrays of another model must not pass for a damaged checkpoint.
      self._check_shapes(step, like)
      try:
        restored = self._read(step, like)
      except Exception as error:
        # Damage shows as errors of many classes: of TensorStore, JSON, Orbax and the checksums.
        _raise_unless_damage(error)
        await_verdict(error)
        message = self._set_aside(step, error)
        # The other processes may have read their part of it already, and wait for this one.
        if is_joined():
          raise ValueError(
            f"{message}. Run the same command again to resume from the one before."
          ) from error
        # The manager caches the list of steps.
        self._manager.reload()
        warnings.warn(f"{message}, and the one before is read", stacklevel=2)
        damaged.append(step)
        continue
      if self._progress != step:
        with self._explained_errors():
          self._write_progress(step)
      return restored
    if damaged:
      raise self._none_intact(damaged)
    return None

  def _read(self, step: int, like: TrainState) -> Restored:
    record = _read_record(self.folder / str(step))
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
    saved = self._manager.restore(step, args=items)
    _check_sums(state_checksums(saved.state), record["arrays"])
    if int(saved.state.step) != step:
      raise ValueError(f"it holds step {int(saved.state.step)}")
    return Restored(saved.state, record["position"])

  def _check_shapes(self, step: int, like: TrainState) -> None:
    """Compare shapes and dtypes with the checkpoint's metadata."""
    try:
      saved = shapes_by_name(self._manager.item_metadata(step).state)
    except Exception:  # `_read` reports the damage
      return
    lines = differences(saved, shapes_by_name(like), "saved")
    if saved and lines:
      raise ValueError(
        f"checkpoint {step} in {self.folder} is of another model:\n{lines}\nRestore the config that"
        " wrote it, or give another run folder with --run."
      )

  def _set_aside(self, step: int, error: Exception) -> str:
    """Move a checkpoint to the folder `damaged`, and return a message that says so."""
    target = self.folder.parent / "damaged" / str(step)
    with contextlib.suppress(FileNotFoundError):  # another process was first
      target = records.set_aside(self.folder / str(step), target.parent)
    return (
      f"checkpoint {step} in {self.folder} is damaged ({_reason(error)}); it is moved to {target}"
    )

  def wait(self) -> None:
    """Wait until everything is on disk; raise the errors of asynchronous writes."""
    with self._explained_errors():
      self._manager.wait_until_finished()
      # Not in Orbax's callback, which comes before the checkpoint has its final name: a run that is
      # killed between the two would miss a checkpoint that never was.
      if self._saving is not None:
        self._write_progress(self._saving)
        self._saving = None

  def close(self) -> None:
    """Finish saving and stop the background threads; raise the errors of asynchronous writes."""
    self.wait()
    with self._explained_errors():
      self._manager.close()

  @contextlib.contextmanager
  def _explained_errors(self):
    try:
      yield
    except (OSError, ValueError) as error:
      last = max(_steps(self.folder), default=None)
      raise records.disk_error(error, self.folder, last) from error


def _steps(checkpoints: pathlib.Path) -> list[int]:
  """The steps of the complete checkpoints in a folder, in ascending order."""
  if not checkpoints.is_dir():
    return []
  return sorted(int(p.name) for p in checkpoints.iterdir() if p.name.isdecimal() and p.is_dir())


def _read_record(checkpoint: pathlib.Path) -> dict[str, Any]:
  """Return the intact record of a checkpoint, a dict with the fields of `_Record`.

  Raises:
    DamagedError: the record is damaged, or Orbax's file has other metrics.
  """
  path = checkpoint / "record" / "metadata"
  record = records.read(path, _Record)
  if record is None:
    raise records.DamagedError(f"{path} is missing. Restore it.")
  path = checkpoint / "metrics" / "metrics"
  # Orbax gives the file no checksum.
  metrics = records.read(path, _Metrics, seal=False)
  if metrics != record["metrics"]:
    raise records.DamagedError(f"{path} must hold {record['metrics']}; got {metrics}. Restore it.")
  return record


def _raise_unless_damage(error: Exception) -> None:
  """Raise the errors that come from this machine and not from a damaged file."""
  # jax has no class for a device without memory: the text of the error is all that tells it.
  machine = isinstance(error, (MemoryError, PermissionError))
  if machine or "RESOURCE_EXHAUSTED" in str(error):
    raise error


def _reason(error: Exception) -> str:
  return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _check_sums(sums: jax.Array, saved: list[int]) -> None:
  if np.asarray(sums).tolist() != saved:
    raise ValueError("its arrays do not have the checksums that were saved with them")


def shapes_by_name(tree: Any) -> dict[str, str]:
  """Return dotted name -> "dtype[shape]" of every array."""
  # Orbax returns tuples as lists and NamedTuples as dicts.
  part = lambda key: str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))))
  return {
    ".".join(map(part, path)): f"{jnp.dtype(x.dtype).name}{list(x.shape)}"
    for path, x in jax.tree.leaves_with_path(tree)
  }


def differences(given: dict[str, str], wanted: dict[str, str], verb: str) -> str:
  """Return up to ten lines with the differences of two `shapes_by_name`."""
  lines = [
    f"  {name}: {given.get(name, 'absent')} {verb}, {wanted.get(name, 'absent')} in this model"
    for name in sorted(given.keys() | wanted.keys())
    if given.get(name) != wanted.get(name)
  ]
  return "\n".join(lines[:10])


def read_run_variables(
  folder: str | pathlib.Path, best: bool = False, at: int | None = None
) -> tuple[dict[str, Any], int]:
  """Return the variables and step of the newest intact checkpoint of a run folder.

  The model is not needed, and the folder is not changed: a damaged checkpoint is skipped with a
  warning.

  Args:
    folder: a run folder.
    best: read the checkpoint of lowest validation loss instead of the newest.
    at: read the checkpoint of this step, one of `saved_steps`.

  Returns:
    {"params": ..., further collections} as nested dicts of NumPy arrays; and the step.

  Raises:
    FileNotFoundError: the folder has no such checkpoint.
    ValueError: no checkpoint is intact.
  """
  checkpoints = pathlib.Path(folder).absolute() / "checkpoints"
  if not checkpoints.is_dir():
    raise FileNotFoundError(
      f"`folder` must be a run folder with checkpoints; got {folder}. Give the folder of a run that"
      " saved one."
    )
  found: dict[int, dict[str, Any]] = {}
  damaged: list[int] = []

  def report(step: int, error: Exception) -> None:
    _raise_unless_damage(error)
    damaged.append(step)
    warnings.warn(f"checkpoint {step} in {checkpoints} is damaged ({_reason(error)})", stacklevel=3)

  steps = _steps(checkpoints)
  for step in reversed(steps if at is None else [step for step in steps if step == at]):
    try:
      found[step] = _read_record(checkpoints / str(step))
    except Exception as error:
      report(step, error)
  if best:
    loss = {step: _validation_loss(r["metrics"]) for step, r in found.items() if r["metrics"]}
    found = {step: found[step] for step in sorted(loss, key=loss.get)[:1]}
  if not found and not damaged:
    kind = "evaluated checkpoint" if best else "complete checkpoint"
    kind += "" if at is None else f" of step {at}"
    raise FileNotFoundError(
      f"`folder` must have one {kind}; got none in {checkpoints}. Train until it has one."
    )
  with _reader(checkpoints) as manager:
    for step, record in found.items():
      try:
        return _read_variables(manager, step, record), step
      except Exception as error:
        report(step, error)
  raise ValueError(
    f"`folder` must have an intact checkpoint; got {checkpoints}, where {sorted(damaged)} are"
    " damaged. Give another run's folder."
  )


def saved_steps(folder: str | pathlib.Path) -> list[int]:
  """Return the steps of a run folder's checkpoints in ascending order."""
  return _steps(pathlib.Path(folder) / "checkpoints")


def _handlers(**items: tuple[Any, ...]) -> handlers.DefaultCheckpointHandlerRegistry:
  """Orbax's handler of each item, with the classes of arguments that it takes."""
  registry = handlers.DefaultCheckpointHandlerRegistry()
  for name, (handler, *arguments) in items.items():
    for kind in arguments:
      registry.add(name, kind, handler)
  return registry


def _reader(checkpoints: pathlib.Path) -> ocp.CheckpointManager:
  # Read-only: another process may be saving into the folder.
  return ocp.CheckpointManager(
    checkpoints,
    options=ocp.CheckpointManagerOptions(create=False, read_only=True),
    handler_registry=_handlers(
      state=(ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeSave, ocp.args.PyTreeRestore)
    ),
  )


def _read_variables(
  manager: ocp.CheckpointManager, step: int, record: dict[str, Any]
) -> dict[str, Any]:
  saved = manager.item_metadata(step).state.tree
  wanted = {name: saved.get(name) or {} for name in ("params", "model_state")}
  # Not as `jax.Array`, whose saved sharding may name devices that this machine lacks.
  as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
  state = ocp.args.PyTreeRestore(item=wanted, restore_args=as_numpy, partial_restore=True)
  restored = manager.restore(step, args=ocp.args.Composite(state=state)).state
  params, model_state = restored["params"], restored["model_state"]
  sums = state_checksums((params, model_state))
  # The checksums of a state are in the order of its fields: the step, params, model_state, ...
  _check_sums(sums, record["arrays"][1 : 1 + len(sums)])
  return {"params": params, **model_state}


def check_tokenizer(folder: str | pathlib.Path, text: EncodedText) -> None:
  """Check that the run in a folder has the tokenizer of this text.

  Raises:
    FileNotFoundError: the folder is not a run folder.
    ValueError: the tokenizers differ, so that the ids of tokens differ.
  """
  config = read_config(folder)
  if config is None:
    raise FileNotFoundError(f"`folder` must have a config.json; got {folder}. Give a run folder.")
  here, there = text.identity["tokenizer"], config["data"].get("tokenizer")
  if here != there:
    raise ValueError(
      f"`tokenizer` must be that of the run in {folder}, {there}; got {here}. Give this experiment"
      " the tokenizer and the data of the run, or start from another run."
    )


Start = Callable[[EncodedText, nn.Module, dict[str, Any]], dict[str, Any]]
"""Type of `Experiment.init_from`: (text, model, fresh variables) -> initial variables.

The result has the structure, shapes and dtypes of the fresh variables. Each of several processes
calls the function and must get the same numbers; a resumed run does not call it.
"""


@dataclasses.dataclass(frozen=True)
class FromRun:
  """Initialises a run with the variables of another run of the same model.

  Attributes:
    folder: the other run's folder.
    best: read its checkpoint of lowest validation loss instead of the newest.
  """

  folder: str
  best: bool = False

  def __call__(
    self, text: EncodedText, model: nn.Module, variables: dict[str, Any]
  ) -> dict[str, Any]:
    """Return the other run's variables; raise the errors of `read_run_variables`."""
    del model, variables
    check_tokenizer(self.folder, text)
    other, _ = read_run_variables(self.folder, self.best)
    return other
