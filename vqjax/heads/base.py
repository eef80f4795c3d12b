"""What does every output head promise, and what does it get for that?

A head says how it scores a block of the vocabulary (`blocks`) and how likely a token is
(`log_prob`); exact sampling and top-k follow from the blocks, on one device or on many, and a head
with factors overrides them where it can do better.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Integer, PRNGKeyArray

from vqjax.ops import sampling, vocab_parallel
from vqjax.types import Size

row_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=-2)
"""Default initialiser of [rows, D] weights: normal with variance 1/D, so scores have variance 1."""


class Head(nn.Module):
  """A distribution over the vocabulary for each hidden vector, and the contract all heads pass.

  Log-probabilities are in nats and float32. A head is a Linen module with `setup` alone, so its
  methods can be called through `apply(..., method="log_prob")` or from a model's own methods.

  A head says which of its arrays go along the vocabulary (`_rows`) and how their rows score
  (`_blocks`); where the mesh in context has an axis `vocab_axis`, each of its devices holds and
  scans its own part of them, and the results are the same.

  Attributes:
    vocab: number of tokens, V.
    dim: width of the hidden vectors, D.
    vocab_axis: mesh axis over which the vocabulary is spread (`jax.set_mesh`, an automatic axis);
      None, or without a mesh: every device holds all of it.
  """

  vocab: int
  dim: int
  vocab_axis: str | None = dataclasses.field(default=None, kw_only=True)

  def __call__(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """The same as `logits`."""
    return self.logits(hidden)

  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Scores whose softmax is the distribution; the only method that builds an array [*B, V]."""
    raise TypeError(f"{type(self).__name__} does not score its vocabulary: define logits")

  def log_prob(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats; nan for a token outside [0, V).

    The loss of a language model is -mean(log_prob). Neither it nor its gradient holds [*B, V].
    """
    raise TypeError(f"{type(self).__name__} does not know its probabilities: define log_prob")

  def blocks(self, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The logits, a block of the vocabulary at a time."""
    return self._blocks(tuple(part.rows for part in self._rows()), hidden)

  def _rows(self) -> tuple[vocab_parallel.Sharded | vocab_parallel.Replicated, ...]:
    """The arrays that go along the vocabulary, with what fills them up, and those that do not."""
    raise TypeError(f"{type(self).__name__} does not come in blocks: define _rows")

  def _blocks(self, rows: tuple, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The logits of `rows`, which are those of `_rows` or one device's part of them."""
    raise TypeError(f"{type(self).__name__} does not come in blocks: define _blocks")

  def _over_vocabulary(self, body: Callable, *shared):
    """body(rows, *shared), where each device of `vocab_axis` has its part of the rows."""
    call = lambda rows, shared: body(rows, *shared)
    return vocab_parallel.over_vocabulary(self.vocab_axis, call, self._rows(), shared)

  def over_blocks(self, body: Callable, hidden: Float[Array, "*B D"], *shared: Any) -> Any:
    """body(blocks of `hidden`, *shared), where each device of `vocab_axis` has its own blocks.

    The body reduces over `blocks.axis`, so that it returns the same on all of these devices.
    """

    def run(arrays, shared):
      # Where an array is marked its gradient is summed: before an operand of it is narrowed.
      *rows, hidden = vocab_parallel.varying(arrays)
      return body(self._blocks(tuple(rows), hidden), *shared)

    rows = *self._rows(), vocab_parallel.Replicated(hidden)
    return vocab_parallel.over_vocabulary(self.vocab_axis, run, rows, shared)

  def aux(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> dict[str, Float[Array, ""]]:
    """Further terms of the training loss, by name."""
    del hidden, tokens
    return {}

  def loss_terms(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> tuple[Float[Array, "*B"], dict[str, Float[Array, ""]]]:
    """`log_prob` and `aux` together: a head that can compute both at once overrides this."""
    return self.log_prob(hidden, tokens), self.aux(hidden, tokens)

  def sample(
    self,
    hidden: Float[Array, "*B D"],
    key: PRNGKeyArray,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    allowed: Bool[ArrayLike, "..."] | None = None,
  ) -> Int[Array, "*B"]:
    """A token from the distribution, exactly; -1 in a row for which nothing is allowed.

    Args:
      hidden: one vector for each draw.
      key: source of randomness.
      temperature: divides the logits; 0 takes the arg max.
      top_k: keep only the k best tokens.
      top_p: keep only the smallest set of best tokens with this mass, after temperature and top_k.
      allowed: marks the tokens that may be drawn, [V] or [*B, V].

    Raises:
      ValueError: an option that no distribution has, or an `allowed` of another shape.
    """
    allowed = None if allowed is None else jnp.asarray(allowed)

    def body(rows, hidden, key, allowed):
      blocks = sampling.allow(self._blocks(rows, hidden), allowed, self.vocab)
      return sampling.sample(blocks, key, temperature, top_k, top_p)

    return self._over_vocabulary(body, hidden, key, allowed)

  def top_k(
    self, hidden: Float[Array, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
    """Log-probabilities and tokens of the k most likely tokens, best first, exactly."""
    if not 1 <= k <= self.vocab:
      raise ValueError(f"k {k} for a vocabulary of {self.vocab} tokens; give 1 to {self.vocab}")
    best = lambda rows, hidden: sampling.best(self._blocks(rows, hidden), k)
    scores, tokens, log_z = self._over_vocabulary(best, hidden)
    return scores - log_z[..., None], tokens

  def size(self) -> Size:
    """Parameters, bytes and operations for each token, from the fields alone."""
    raise TypeError(f"{type(self).__name__} does not know its size: define size")

  def logical_axes(self) -> dict:
    """Names of the axes of every variable, a pytree like the variables with tuples as leaves."""
    raise TypeError(f"{type(self).__name__} does not name its axes: define logical_axes")

  def _check_hidden(self, hidden) -> None:
    if hidden.shape[-1] != self.dim:
      raise ValueError(
        f"hidden {hidden.shape} meets a head of dim {self.dim}; give it dim={hidden.shape[-1]}"
      )


def bytes_of(count: int, dtype) -> int:
  """Bytes of `count` numbers of a dtype."""
  return count * jnp.dtype(dtype).itemsize
