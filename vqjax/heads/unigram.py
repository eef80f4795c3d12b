"""Token counts as initial biases and as a proposal of the sampled softmax."""

# Both are objects with counts that a head calls for an array [V]:
#
#   UnigramBias       log(count of the token / mean count of the tokens on its code)
#   UnigramProposal   log(count of the token / sum of all counts)
#
# A module compares and hashes its fields, which arrays cannot do: `_OfArrays` does it for them.

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from vqjax import assign
from vqjax.assign.checks import Given, checked_counts, table_of

__all__ = ["UnigramBias", "UnigramProposal"]


def _smoothed(counts: ArrayLike, vocab: int, smoothing: float) -> Float[np.ndarray, "{vocab}"]:
  """Each token's count + smoothing, float64 [V].

  Raises:
    ValueError: `counts` have another length, are negative, not integers or all zero, or `smoothing`
      is not positive.
  """
  if not 0 < smoothing < np.inf:
    raise ValueError(f"`smoothing` must be positive and finite; got {smoothing}. 1 is usual.")
  return checked_counts(counts, vocab) + float(smoothing)


class _OfArrays:
  """Base class of dataclasses with arrays, which are equal where their arrays are."""

  def _contents(self):
    fields = (getattr(self, field.name) for field in dataclasses.fields(self))
    return tuple(x if isinstance(x, float | int) else Given(x) for x in fields)

  def __eq__(self, other: object) -> bool:
    return type(other) is type(self) and self._contents() == other._contents()

  def __hash__(self) -> int:
    return hash(self._contents())


@dataclasses.dataclass(frozen=True, eq=False)
class UnigramBias(_OfArrays):
  """Initialiser of `CodebookHead`'s token bias: unigrams within each code.

    b_v = log(count_v + smoothing) - log(mean of count_u + smoothing over the tokens u on v's code)

  p(token | code) depends only on differences within a code. Subtracting the mean makes the mass of
  each code, the sum of exp(b_u), equal to the number of its tokens, as without a bias. So p(code)
  is that of the head without a bias, and a trained or converted codebook keeps its meaning.

  Attributes:
    counts: occurrences of each token in the training text, integers [V].
    assignment: the code of each token, integers [V]; equal to the head's.
    smoothing: added to each count.
  """

  counts: ArrayLike
  assignment: ArrayLike
  smoothing: float = 1.0

  def __call__(self, key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """The bias [V].

    Raises:
      ValueError: the counts or the assignment do not have `shape`.
    """
    del key
    (vocab,) = shape
    count_V = _smoothed(self.counts, vocab, self.smoothing)
    given = table_of(self.assignment)
    assign.check_shape(np.shape(given), vocab)
    # An initialiser does not know K. Codes above the last one that is used have no token.
    codes = int(np.max(given)) + 1
    code_V = assign.checked_assignment(given, vocab, codes)
    size_K = np.bincount(code_V, minlength=codes)
    # A code without a token has no mean, and none is read.
    mean_K = np.bincount(code_V, count_V, codes) / np.maximum(size_K, 1)
    return jnp.asarray(np.log(count_V / mean_K[code_V]), dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class UnigramProposal(_OfArrays):
  """Proposal of `SampledSoftmaxHead`: tokens are drawn by their frequency.

  Attributes:
    counts: occurrences of each token in the training text, integers [V].
    smoothing: added to each count.
  """

  counts: ArrayLike
  smoothing: float = 1.0

  def __call__(self, vocab: int) -> Float[Array, "{vocab}"]:
    """Log-probabilities [V]."""
    count_V = _smoothed(self.counts, vocab, self.smoothing)
    return jnp.asarray(np.log(count_V / count_V.sum()), jnp.float32)
