"""Fits on vectors of a frozen model: vectors are kept on the disk once, and descent is resumed."""

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from vqjax.lab import records

EVERY = 60.0
"""Seconds after which what was done is kept."""


def kept_array(
  path: pathlib.Path,
  shape: tuple[int, ...],
  windows: int,
  write: Callable[[np.ndarray, int], None],
  progress: Callable[[float], None],
) -> np.ndarray:
  """A float32 array in a file, which goes on with the first window that was not kept.

  Args:
    path: the file, with the ending .npy; beside it is a record of the windows that are kept.
    shape: the shape of the array.
    windows: number of windows of text.
    write: write(array, number) fills in the vectors of a window.
    progress: is called with the part that is done.
  """
  record, done = path.with_suffix(".json"), 0
  if record.exists() and path.exists():
    done = records.read(record, _Done)["windows"]
  mode = "r+" if done else "w+"
  kept = np.lib.format.open_memmap(path, mode=mode, dtype=np.float32, shape=shape)
  saved = time.monotonic()
  for number in range(done, windows):
    write(kept, number)
    progress((number + 1) / windows)
    if time.monotonic() - saved > EVERY or number + 1 == windows:
      kept.flush()
      records.write(record, {"windows": number + 1})
      saved = time.monotonic()
  return kept


@dataclasses.dataclass
class _Done:
  windows: int


def descend(
  path: pathlib.Path,
  trained: Any,
  optimizer: optax.GradientTransformation,
  gradient: Callable[[Any, int], tuple[float, Any]],
  steps: int,
  progress: Callable[[float], None],
  say: Callable[[str], None],
) -> Any:
  """What is trained, after all steps; an interrupted call goes on with its last kept step.

  Args:
    path: the file of the kept state, with the ending .npz.
    trained: a tree of arrays to begin with.
    optimizer: the optimiser.
    gradient: gradient(trained, step) is the loss of a step in nats, and the gradient.
    steps: number of steps.
    progress: is called with the part that is done.
    say: prints a line.
  """
  state, first = (trained, optimizer.init(trained)), 0
  structure = jax.tree.structure(state)
  if path.exists():
    with np.load(path) as file:
      leaves = [file[f"arr_{number}"] for number in range(structure.num_leaves)]
      state, first = jax.tree.unflatten(structure, leaves), int(file["step"])
    say(f"going on with step {first} of {steps}")

  @jax.jit
  def update(state, found):
    trained, own = state
    change, own = optimizer.update(found, own, trained)
    return optax.apply_updates(trained, change), own

  saved = time.monotonic()
  for step in range(first, steps):
    loss, found = gradient(state[0], step)
    state = update(state, found)
    progress((step + 1) / steps)
    if step % 10 == 0 or step + 1 == steps:
      say(f"step {step + 1}: {loss:.4f} nats")
    if time.monotonic() - saved > EVERY:
      saved = time.monotonic()
      with records.atomic_file(path) as out:
        np.savez(out, *map(np.asarray, jax.tree.leaves(state)), step=step + 1)
  return state[0]
