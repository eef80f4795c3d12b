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
from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

from vqjax.lab.training.distributed import await_verdict, is_joined
from vqjax.lab.training.run import EncodedText, disk_error, read_json
from vqjax.lab.training.step import TrainState, checksum


def _validation_loss(metrics: dict) -> float:
  return metrics["nats_per_token"]


BEST = {"best_fn": _validation_loss, "best_mode": "min"}
"""Options of Orbax that save metrics with a checkpoint and order checkpoints by them."""


class Restored(NamedTuple):
  """A training state, and the position of its data iterator."""

  state: TrainState
  position: Any


class Checkpoints:
  """Saves state and data position asynchronously; keeps the newest and the best.

  A checkpoint appears under its final name only when it is complete. A checksum of every array is
  saved with it and compared when it is restored, so that a run never trains on a damaged one.
  """

  def __init__(self, folder: pathlib.Path, keep: int):
    """Open `folder`/checkpoints.

    The `keep` newest checkpoints stay on disk, and the one of lowest validation loss.
    """
    self.folder = folder / "checkpoints"
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
    try:
      self._manager = ocp.CheckpointManager(
        self.folder.absolute(),
        options=options,
        item_handlers={
          "state": ocp.StandardCheckpointHandler(),
          "record": ocp.JsonCheckpointHandler(),
        },
      )
    except OSError as error:
      raise disk_error(error, self.folder) from error

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
    record = {"position": position, "checksum": np.asarray(checksum(state)).tolist()}
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
    with self._explained_errors():
      self._manager.save(int(state.step), args=items, metrics=metrics)

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
        return self._read(step, like)
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
        warnings.warn(f"{message}, and the one before is read", stacklevel=2)
        damaged.append(step)
    if damaged:
      raise ValueError(
        f"no checkpoint in {self.folder} is intact: {damaged} are moved to"
        f" {self.folder.parent / 'damaged'}. Run again to start over from step 0."
      )
    return None

  def _read(self, step: int, like: TrainState) -> Restored:
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    items = ocp.args.Composite(
      state=ocp.args.StandardRestore(abstract), record=ocp.args.JsonRestore()
    )
    saved = self._manager.restore(step, args=items)
    _check_sums(checksum(saved.state), saved.record["checksum"])
    return Restored(saved.state, saved.record["position"])

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
    target = aside = self.folder.parent / "damaged" / str(step)
    aside.parent.mkdir(exist_ok=True)
    number = 1
    while target.exists():
      target, number = aside.with_name(f"{step}.{number}"), number + 1
    with contextlib.suppress(FileNotFoundError):  # another process was first
      (self.folder / str(step)).rename(target)
    # The manager caches the list of steps. In several processes `reload` is a collective, which a
    # process that alone sees the damage must not enter.
    if not is_joined():
      self._manager.reload()
    return (
      f"checkpoint {step} in {self.folder} is damaged ({_reason(error)}); it is moved to {target}"
    )

  def wait(self) -> None:
    """Wait until everything is on disk; raise the errors of asynchronous writes."""
    with self._explained_errors():
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Finish saving and stop the background threads."""
    self._manager.close()

  @contextlib.contextmanager
  def _explained_errors(self):
    try:
      yield
    except (OSError, ValueError) as error:
      steps = [int(p.name) for p in self.folder.glob("*") if p.name.isdigit()]
      raise disk_error(error, self.folder, max(steps, default=None)) from error


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


def read_variables(
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
  with _reader(checkpoints) as manager:
    steps = sorted(manager.all_steps(), reverse=True)
    if best:
      steps = [step for step in steps if step == manager.best_step()]
    if at is not None:
      steps = [step for step in steps if step == at]
    if not steps:
      kind = "evaluated checkpoint" if best else "complete checkpoint"
      kind += "" if at is None else f" of step {at}"
      raise FileNotFoundError(
        f"`folder` must have one {kind}; got none in {checkpoints}. Train until it has one."
      )
    for step in steps:
      try:
        return _read_variables(manager, step), step
      except Exception as error:
        _raise_unless_damage(error)
        warnings.warn(
          f"checkpoint {step} in {checkpoints} is damaged ({_reason(error)})", stacklevel=2
        )
  raise ValueError(
    f"`folder` must have an intact checkpoint; got {checkpoints}, where {steps} are damaged. Give"
    " another run's folder."
  )


def saved_steps(folder: str | pathlib.Path) -> list[int]:
  """Return the steps of a run folder's checkpoints in ascending order."""
  checkpoints = pathlib.Path(folder).absolute() / "checkpoints"
  if not checkpoints.is_dir():
    return []
  with _reader(checkpoints) as manager:
    return sorted(manager.all_steps())


def _reader(checkpoints: pathlib.Path) -> ocp.CheckpointManager:
  # Read-only: another process may be saving into the folder.
  return ocp.CheckpointManager(
    checkpoints,
    options=ocp.CheckpointManagerOptions(create=False, read_only=True, **BEST),
    item_handlers={
      "state": ocp.PyTreeCheckpointHandler(),
      "record": ocp.JsonCheckpointHandler(),
    },
  )


def _read_variables(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
  saved = manager.item_metadata(step).state.tree
  wanted = {name: saved.get(name) or {} for name in ("params", "model_state")}
  # Not as `jax.Array`, whose saved sharding may name devices that this machine lacks.
  as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
  items = ocp.args.Composite(
    state=ocp.args.PyTreeRestore(item=wanted, restore_args=as_numpy, partial_restore=True),
    record=ocp.args.JsonRestore(),
  )
  restored = manager.restore(step, args=items)
  params, model_state = restored.state["params"], restored.state["model_state"]
  sums = checksum((params, model_state))
  # The checksums of a state are in the order of its fields: the step, params, model_state, ...
  _check_sums(sums, restored.record["checksum"][1 : 1 + len(sums)])
  return {"params": params, **model_state}


def check_tokenizer(folder: str | pathlib.Path, text: EncodedText) -> None:
  """Check that the run in a folder has the tokenizer of this text.

  Raises:
    FileNotFoundError: the folder is not a run folder.
    ValueError: the tokenizers differ, so that the ids of tokens differ.
  """
  config = read_json(pathlib.Path(folder) / "config.json")
  if config is None:
    raise FileNotFoundError(f"`folder` must have a config.json; got {folder}. Give a run folder.")
  here, there = text.identity["tokenizer"], config["data"]["tokenizer"]
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
    """Return the other run's variables; raise the errors of `read_variables`."""
    del model, variables
    check_tokenizer(self.folder, text)
    other, _ = read_variables(self.folder, self.best)
    return other


@dataclasses.dataclass(frozen=True)
class FromPart:
  """Initialises one part of a model, such as its encoder, from another run.

  Attributes:
    folder: the other run's folder.
    part: name of the part in both models.
    best: read its checkpoint of lowest validation loss instead of the newest.
  """

  folder: str
  part: str
  best: bool = False

  def __call__(
    self, text: EncodedText, model: nn.Module, variables: dict[str, Any]
  ) -> dict[str, Any]:
    """Return the fresh variables with the other run's part.

    Raises:
      FileNotFoundError: the folder has no checkpoint.
      ValueError: the tokenizers differ, or one of the models has no such part.
    """
    del model
    check_tokenizer(self.folder, text)
    other, step = read_variables(self.folder, self.best)
    for owner, tree in ((f"checkpoint {step} of {self.folder}", other), ("the model", variables)):
      if self.part not in tree["params"]:
        raise ValueError(
          f"`part` must be one of {', '.join(sorted(tree['params']))} in {owner}; got"
          f" {self.part!r}."
        )
    part = {name: {self.part: tree[self.part]} for name, tree in other.items() if self.part in tree}
    return {name: tree | part.get(name, {}) for name, tree in variables.items()}
