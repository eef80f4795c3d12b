"""How is a run saved, so that it goes on bitwise as if nothing had happened?"""

import contextlib
import errno
import pathlib
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

from vqjax.lab.training.distributed import await_verdict, is_joined
from vqjax.lab.training.state import TrainState, checksum

UNWRITABLE = frozenset(
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
"""Codes of errors that another folder would not have."""


FAILED_WRITES = ("Failed to write", "Failed writing", "Error writing")
"""What TensorStore says, without a code, of a write that failed."""


def _nats(metrics: dict) -> float:
  return metrics["nats_per_token"]


BEST = {"best_fn": _nats, "best_mode": "min"}
"""Options of Orbax: metrics are saved with a checkpoint, and the best one is known ever after."""


class Restored(NamedTuple):
  """A state, and where its data iterator stood."""

  state: TrainState
  position: Any


class Checkpoints:
  """Saves state and data position together, asynchronously; keeps the newest and the best.

  A checkpoint appears under its final name only when it is complete. With it goes a checksum of
  every array, which is compared when it is restored: a damaged one is never trained on.
  """

  def __init__(self, folder: pathlib.Path, keep: int):
    """Opens `folder`/checkpoints; `keep` newest stay, and the one of lowest validation loss."""
    self.folder = folder / "checkpoints"
    best = policy.BestN(
      get_metric_fn=_nats,
      reverse=True,
      n=1,
      keep_checkpoints_without_metrics=False,
    )
    options = ocp.CheckpointManagerOptions(
      preservation_policy=policy.AnyPreservationPolicy([policy.LatestN(keep), best]),
      cleanup_tmp_directories=True,
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
    """Starts to save; returns when the state may be donated to the next step.

    Args:
      state: what to save, under the number of its step.
      position: the data iterator's own state, JSON.
      metrics: of the validation split, with `nats_per_token`, if it was evaluated at this step.
    """
    record = {"position": position, "checksum": np.asarray(checksum(state)).tolist()}
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
    try:
      self._manager.save(int(state.step), args=items, metrics=metrics)
    except (OSError, ValueError) as error:
      raise disk_error(error, self.folder, self._last_good()) from error

  def restore(self, like: TrainState) -> Restored | None:
    """The newest checkpoint that is intact, or None where there is none.

    A damaged one is passed over with a warning, moved aside, and the one before is tried.

    Raises:
      ValueError: the checkpoint's arrays have other shapes or dtypes than the model's, or none of
        the checkpoints is intact.
    """
    damaged: list[int] = []
    for step in sorted(self._manager.all_steps(), reverse=True):
      self._check_shapes(step, like)
      try:
        return self._read(step, like)
      except (MemoryError, PermissionError):
        raise  # trouble of this machine, not of the checkpoint
      except Exception as error:  # whatever a damaged file makes the reader raise
        if "RESOURCE_EXHAUSTED" in str(error):
          raise
        await_verdict(error)
        message = self._set_aside(step, error)
        if is_joined():  # the others may have read their part of it, and wait
          raise ValueError(
            f"{message}; run the same command again to go on from the one before"
          ) from error
        warnings.warn(f"{message} and the one before is tried", stacklevel=2)
        damaged.append(step)
    if damaged:
      raise ValueError(
        f"no checkpoint of {self.folder} is intact: {damaged} are moved to"
        f" {self.folder.parent / 'damaged'}; run again to start over from step 0"
      )
    return None

  def _read(self, step: int, like: TrainState) -> Restored:
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    items = ocp.args.Composite(
      state=ocp.args.StandardRestore(abstract), record=ocp.args.JsonRestore()
    )
    found = self._manager.restore(step, args=items)
    if np.asarray(checksum(found.state)).tolist() != found.record["checksum"]:
      raise ValueError("its arrays do not have the checksums that were saved with them")
    return Restored(found.state, found.record["position"])

  def _check_shapes(self, step: int, like: TrainState) -> None:
    """Compares shapes by the checkpoint's metadata; one that cannot be read is left to `_read`."""
    try:
      saved = self._manager.item_metadata(step).state
      there = {_name(path): _kind(leaf) for path, leaf in _leaves(saved)}
    except Exception:  # unreadable metadata is damage, which reading the checkpoint reports
      return
    here = {_name(path): _kind(leaf) for path, leaf in _leaves(like)}
    differ = [
      f"  {name}: {there.get(name, 'absent')} saved, {here.get(name, 'absent')} in this model"
      for name in sorted(there.keys() | here.keys())
      if there.get(name) != here.get(name)
    ]
    if there and differ:
      lines = "\n".join(differ[:10])
      raise ValueError(
        f"checkpoint {step} in {self.folder} is of another model:\n{lines}\nrestore the config that"
        " wrote it, or give another run folder with --run"
      )

  def _set_aside(self, step: int, error: Exception) -> str:
    """Moves a checkpoint out of the way, and says so."""
    aside = self.folder.parent / "damaged" / str(step)
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    aside.parent.mkdir(exist_ok=True)
    target = aside
    number = 1
    while target.exists():
      target, number = aside.with_name(f"{step}.{number}"), number + 1
    with contextlib.suppress(FileNotFoundError):  # another process was first
      (self.folder / str(step)).rename(target)
    if not is_joined():  # a collective
      self._manager.reload()
    return f"checkpoint {step} in {self.folder} is damaged ({reason}); it is moved to {target}"

  def wait(self) -> None:
    """Returns when everything is on disk; raises what went wrong on the way there."""
    try:
      self._manager.wait_until_finished()
    except (OSError, ValueError) as error:
      raise disk_error(error, self.folder, self._last_good()) from error

  def close(self) -> None:
    """Finishes saving and stops the background threads."""
    self._manager.close()

  def _last_good(self) -> int | None:
    numbers = [int(p.name) for p in self.folder.glob("*") if p.name.isdigit()]
    return max(numbers, default=None)


def disk_error(
  error: Exception, folder: pathlib.Path, last_good: int | None = None
) -> OSError | Exception:
  """An OSError that says what to do about it; other errors come back as they are."""
  text = str(error)
  kept = "" if last_good is None else f" Checkpoint {last_good} is complete and kept."
  if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text:
    return OSError(
      errno.ENOSPC, f"the disk is full: free some space and run again to resume.{kept}", str(folder)
    )
  code = getattr(error, "errno", None)
  if code in UNWRITABLE:
    return OSError(code, f"cannot write ({text}); choose a folder with --run.{kept}", str(folder))
  if any(phrase in text for phrase in FAILED_WRITES):
    reason = text.splitlines()[-1][-200:]
    return OSError(
      errno.EIO,
      f"a checkpoint could not be written ({reason}); check the disk's space and the limit on file"
      f" sizes, then run again to resume.{kept}",
      str(folder),
    )
  return error


def _kind(leaf: Any) -> str:
  return f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _leaves(tree: Any) -> list:
  return jax.tree_util.tree_flatten_with_path(tree)[0]


def _name(path: tuple) -> str:
  """A path without the kind of its containers: saved tuples come back as lists and dicts."""
  parts = [getattr(k, "name", getattr(k, "key", getattr(k, "idx", k))) for k in path]
  return ".".join(str(part) for part in parts)
