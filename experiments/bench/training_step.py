"""A training step of an experiment, compiled as in a run, for benchmarks."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.measure import peak_bytes, temp_bytes
from vqjax.lab.config import Experiment
from vqjax.lab.training.program import Program
from vqjax.sharding import MeshShape, make_mesh


class TrainingStep:
  """A compiled training step on one device, on random numbers as data.

  Each call is a step that continues from the one before. Compilation needs shapes only: the arrays
  of the model exist from the first call on.

  Attributes:
    peak_bytes: arguments, results and temporaries of a step, by the compiler's account; the state
      is updated in place.
    temp_bytes: temporaries of a step.
    params: number of parameters, trained or not.
  """

  def __init__(self, experiment: Experiment):
    self._program = Program(experiment, make_mesh(MeshShape(), jax.devices()[:1]))
    state, self._shapes = self._program.abstract_state, self._program.abstract_batch
    self._step = self._program.step.lower(state, self._shapes).compile()
    self.peak_bytes, self.temp_bytes = peak_bytes(self._step), temp_bytes(self._step)
    self.params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    self._run = None

  def __call__(self) -> float:
    """Seconds of a step; the first call also initialises the model."""
    if self._run is None:
      self._run = self._program.init(jax.random.key(0)), self._batch()
    state, batch = self._run
    self._run = None  # the step donates the state, which must not be reused if the step fails
    jax.block_until_ready((state, batch))
    start = time.perf_counter()
    state, _ = jax.block_until_ready(self._step(state, batch))
    seconds = time.perf_counter() - start
    self._run = state, batch
    return seconds

  def end(self) -> None:
    """Free the arrays of the model; the next call initialises it again."""
    self._run = None

  def _batch(self) -> dict[str, Any]:
    """Random tokens below the vocabulary, images in [0, 1], and no restarted rows."""
    vocab = self._program.model.head.vocab
    leaves, tree = jax.tree.flatten(self._shapes)
    keys = jax.random.split(jax.random.key(2), len(leaves))

    def of(key, like):
      if jnp.issubdtype(like.dtype, jnp.integer):
        made = jax.random.randint(key, like.shape, 0, vocab, like.dtype)
      elif jnp.issubdtype(like.dtype, jnp.floating):
        made = jax.random.uniform(key, like.shape, like.dtype)
      else:
        made = jnp.zeros(like.shape, like.dtype)
      return jax.device_put(made, like.sharding)

    return tree.unflatten(map(of, keys, leaves))
