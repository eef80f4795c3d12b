"""Functions of a score that a softmax is taken of, elementwise and rising.

The gradient of a tile needs the slope from the finished score: the raw one is not kept.
"""

from __future__ import annotations

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class OutputFunction(abc.ABC):
  """A rising function of each score, with its slope as a function of its result."""

  @abc.abstractmethod
  def __call__(self, score: Float[Array, "..."]) -> Float[Array, "..."]:
    """The scores that the softmax is taken of."""

  @abc.abstractmethod
  def slope(self, result: Float[Array, "..."]) -> Float[Array, "..."]:
    """The derivative where the function has the value `result`."""


@dataclasses.dataclass(frozen=True)
class Softcap(OutputFunction):
  """c · tanh(score / c).

  Attributes:
    cap: largest absolute result, c.
  """

  cap: float | int

  def __call__(self, score: Float[Array, "..."]) -> Float[Array, "..."]:
    """The capped scores."""
    return self.cap * jnp.tanh(score / self.cap)

  def slope(self, result: Float[Array, "..."]) -> Float[Array, "..."]:
    """d tanh(x) = 1 - tanh(x)², and result / c is that tanh."""
    return 1 - (result * (1 / self.cap)) ** 2


@dataclasses.dataclass(frozen=True)
class SigSoftmax(OutputFunction):
  """log(exp(score) · sigmoid(score)), whose softmax is the sigsoftmax.

  It is not linear, so that the log-probabilities of many contexts may have a rank above D + 1, and
  it adds neither parameters nor products.

  Source: Kanai et al., Sigsoftmax: reanalysis of the softmax bottleneck, Eq. 12.

  Example:
    >>> import jax
    >>> from vqjax.nnx import DenseHead
    >>> from vqjax import SigSoftmax
    >>> from flax import nnx
    >>> head = DenseHead(1000, 8, output=SigSoftmax(), rngs=nnx.Rngs(0))
    >>> hidden = jax.random.normal(jax.random.key(0), (4, 8))
    >>> print(head.log_prob(hidden, jax.numpy.arange(4)).shape)
    (4,)
  """

  def __call__(self, score: Float[Array, "..."]) -> Float[Array, "..."]:
    """score + log sigmoid(score)."""
    return score + jax.nn.log_sigmoid(score)

  def slope(self, result: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 + sigmoid(-score).

    With y = exp(result), exp(score) is the positive root of x² - y·x - y, (y + sqrt(y² + 4y)) / 2,
    whose logarithm is result / 2 + asinh(sqrt(y) / 2).
    """
    # Above 60 the slope is 1 in float32, and sqrt(y) would overflow further up.
    root = jnp.exp(jnp.minimum(result, 60.0) / 2)
    return 1 + jax.nn.sigmoid(-(result / 2 + jnp.arcsinh(root / 2)))


def capped(softcap: float | int | None) -> Softcap | None:
  """The function of a softcap; None for None."""
  return None if softcap is None else Softcap(softcap)
