"""What has a run learned, for those who have its folder and not its model?"""

import pathlib
import warnings
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from vqjax.lab.training.checkpoint import BEST
from vqjax.lab.training.run import read_json
from vqjax.lab.training.state import checksum
from vqjax.lab.training.text import Text


def read_variables(
  folder: str | pathlib.Path, best: bool = False, at: int | None = None
) -> tuple[dict[str, Any], int]:
  """What `model.apply` takes, from the newest intact checkpoint of a run folder, and its step.

  Nested dicts of NumPy arrays: {"params": ..., further collections}. The folder is left as it is: a
  damaged checkpoint is passed over with a warning. `best` takes the one of lowest validation loss,
  `at` that of a step, one of `saved_steps`.

  Raises:
    FileNotFoundError: the folder has no checkpoint, or with `best` none that was evaluated, or none
      of that step.
    ValueError: none of the checkpoints is intact.
  """
  checkpoints = pathlib.Path(folder).absolute() / "checkpoints"
  if not checkpoints.is_dir():
    raise FileNotFoundError(f"{folder} has no checkpoints; give the folder of a run that saved one")
  with _manager(checkpoints) as manager:
    steps = sorted(manager.all_steps(), reverse=True)
    if best:
      steps = [step for step in (manager.best_step(),) if step is not None]
    if at is not None:
      steps = [step for step in steps if step == at]
    if not steps:
      kind = "evaluated checkpoint" if best else "complete checkpoint"
      kind += "" if at is None else f" of step {at}"
      raise FileNotFoundError(f"{checkpoints} has no {kind}; let the run go on until it has one")
    for step in steps:
      try:
        return _read(manager, step), step
      except (MemoryError, PermissionError):
        raise  # trouble of this machine, not of the checkpoint
      except Exception as error:  # whatever a damaged file makes the reader raise
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        warnings.warn(f"checkpoint {step} in {checkpoints} is damaged ({reason})", stacklevel=2)
  raise ValueError(f"no checkpoint of {checkpoints} is intact: {steps}; give another run's folder")


def saved_steps(folder: str | pathlib.Path) -> list[int]:
  """The steps of a run folder's checkpoints, rising."""
  checkpoints = pathlib.Path(folder).absolute() / "checkpoints"
  if not checkpoints.is_dir():
    return []
  with _manager(checkpoints) as manager:
    return sorted(manager.all_steps())


def check_tokenizer(folder: str | pathlib.Path, text: Text) -> None:
  """Nothing, where the run in the folder had the same tokenizer as this text.

  Raises:
    FileNotFoundError: the folder is not that of a run.
    ValueError: the tokenizer is another one, so that a token's number means another word.
  """
  config = read_json(pathlib.Path(folder) / "config.json")
  if config is None:
    raise FileNotFoundError(f"{folder} has no config.json; give the folder of a run")
  here, there = text.identity["tokenizer"], config["data"]["tokenizer"]
  if here != there:
    raise ValueError(
      f"the run in {folder} has another tokenizer: {there} there, {here} here; give this experiment"
      " its tokenizer and data, or start from another run"
    )


def _manager(checkpoints: pathlib.Path) -> ocp.CheckpointManager:
  return ocp.CheckpointManager(
    checkpoints,
    options=ocp.CheckpointManagerOptions(create=False, read_only=True, **BEST),
    item_handlers={
      "state": ocp.PyTreeCheckpointHandler(),
      "record": ocp.JsonCheckpointHandler(),
    },
  )


def _read(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
  saved = manager.item_metadata(step).state.tree
  wanted = {name: saved.get(name) or {} for name in ("params", "model_state")}
  plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
  items = ocp.args.Composite(
    state=ocp.args.PyTreeRestore(item=wanted, restore_args=plain, partial_restore=True),
    record=ocp.args.JsonRestore(),
  )
  found = manager.restore(step, args=items)
  # The checksums of a whole state begin with its step, its parameters and its model state.
  arrays = found.state["params"], found.state["model_state"]
  sums = np.asarray(checksum(arrays)).tolist()
  if sums != found.record["checksum"][1 : 1 + len(sums)]:
    raise ValueError("its arrays do not have the checksums that were saved with them")
  return {"params": found.state["params"], **found.state["model_state"]}
