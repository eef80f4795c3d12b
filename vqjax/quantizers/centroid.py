"""The centroid quantiser (DPQ-VQ), whose codes are the nearest centroids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from vqjax.ops import product, quantize
from vqjax.quantizers.base import TABLE_AXES, check_not_negative, largest, running
from vqjax.quantizers.revival import KeyedQuantizer
from vqjax.variables import Declaration, Variable

__all__ = ["CentroidQuantizer", "MovingAverage"]


@dataclasses.dataclass(frozen=True)
class MovingAverage:
  """Centroids as moving averages of the vectors that choose them.

  Attributes:
    decay: decay of the running counts and sums in each step.
    epsilon: added to each count (Laplace smoothing).

  Raises:
    ValueError: a number is outside its range.
  """

  decay: float = 0.99
  epsilon: float = 1e-5

  def __post_init__(self):
    if not 0 <= self.decay < 1:
      raise ValueError(f"`decay` must be in [0, 1); got {self.decay}. 0.99 is usual.")
    if self.epsilon < 0:
      raise ValueError(f"`epsilon` must not be negative; got {self.epsilon}. 1e-5 is usual.")


class CentroidQuantizer(KeyedQuantizer):
  """The nearest centroid, with a straight-through gradient.

  The response of a centroid is -|vector - centroid|². Keys and values are one table, the centroids.
  Source: DPQ-VQ, Eq. 6 and 7.

  Attributes:
    gradient: `ops.quantize.straight_through` or `rotated`.
    regularizer: pulls the centroids towards the vectors that chose them:
      `ops.quantize.mean_distance`, or `summed_distance` as the paper writes it.
    weight: coefficient of the regulariser.
    commitment: coefficient of that distance as a pull of the vectors towards the centroids.
    moving_average: moves the centroids instead of a gradient; None: the gradient moves them.
  """

  gradient: Callable = dataclasses.field(default=quantize.straight_through, kw_only=True)
  regularizer: Callable = dataclasses.field(default=quantize.mean_distance, kw_only=True)
  weight: float = dataclasses.field(default=1.0, kw_only=True)
  commitment: float = dataclasses.field(default=0.0, kw_only=True)
  moving_average: MovingAverage | None = dataclasses.field(default=None, kw_only=True)

  def declare(self) -> Declaration:
    """The base's variables, and the centroids or their running sums and counts."""
    if self.moving_average is None:
      return super().declare() | {"centroids": self._table(self.dim)}
    ones = lambda key, shape, dtype: jnp.ones(shape, dtype)
    shape, axes = self._table_shape(self.dim)[:2], TABLE_AXES[:2]
    return super().declare() | {
      "total": self._table(self.dim, jnp.float32, collection="centroids"),
      "count": Variable(shape, axes, ones, collection="centroids", random=False),
    }

  def check(self) -> None:
    """Check the coefficients of the loss terms."""
    super().check()
    check_not_negative(weight=self.weight, commitment=self.commitment)

  def keys(self) -> Float[Array, "Q K C"]:
    """The centroids."""
    if self.moving_average is None:
      return super().keys()
    return quantize.averaged(self.array("count"), self.array("total"), self.moving_average.epsilon)

  def values(self) -> Float[Array, "Q K C"]:
    """The centroids."""
    return self.keys()

  def _comparison(self):
    keys = lax.stop_gradient(self.keys())
    return lambda query: quantize.euclidean_response(query, keys)

  def _quantize(self, vectors, query, train, mask):
    # The choice has no gradient.
    codes = self._over_responses(largest, lax.stop_gradient(query), train, mask)
    row = product.compose(codes, self.values(), self.additive)
    terms = {}
    if self.moving_average is None:
      terms["regularizer"] = self.weight * self.regularizer(row, lax.stop_gradient(vectors), mask)
    if self.commitment:
      pull = self.regularizer(lax.stop_gradient(row), vectors, mask)
      terms["commitment"] = self.commitment * pull
    # The row with the gradient of the vectors, each part by itself.
    passed = self.gradient(self._queries(row), self._queries(vectors)).reshape(row.shape)
    return passed, codes, terms

  def _update_state(self, query, codes, mask):
    if self.moving_average is not None and self.is_mutable_collection("centroids"):
      count, total, decay = self.array("count"), self.array("total"), self.moving_average.decay
      counts, sums = quantize.gathered_sums(codes, query, count.shape[0], self.codes, mask)
      self.put_variable("centroids", "count", running(count, counts, decay, mask))
      self.put_variable("centroids", "total", running(total, sums, decay, mask))
    super()._update_state(query, codes, mask)

  @property
  def _keys_are_parameters(self):
    return self.moving_average is None

  def _own_keys(self):
    return self.array("centroids")

  def _revive(self, dead, fresh):
    if self.moving_average is None:
      super()._revive(dead, fresh)
    elif self.is_mutable_collection("centroids"):
      total = jnp.where(dead[..., None], fresh, self.array("total"))
      self.put_variable("centroids", "total", total)
      self.put_variable("centroids", "count", jnp.where(dead, 1.0, self.array("count")))
