"""How are codes learned as the nearest of some centroids (DPQ-VQ)?"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from vqjax.ops import product, quantize
from vqjax.quantizers.base import TABLE_AXES, check_amounts, largest, running
from vqjax.quantizers.revival import KeyedQuantizer


@dataclasses.dataclass(frozen=True)
class MovingAverage:
  """Centroids follow the mean of the vectors that chose them; no gradient trains them.

  Attributes:
    decay: of the running counts and sums, a step.
    epsilon: is added to each count (Laplace).

  Raises:
    ValueError: a number outside its range.
  """

  decay: float = 0.99
  epsilon: float = 1e-5

  def __post_init__(self):
    if not 0 <= self.decay < 1:
      raise ValueError(f"decay {self.decay} is outside [0, 1); 0.99 is usual")
    if self.epsilon < 0:
      raise ValueError(f"epsilon {self.epsilon} is negative; 1e-5 is usual")


class CentroidQuantizer(KeyedQuantizer):
  """The centroid of largest response, -|vector - centroid|², with the gradient of the vector.

  Keys and values are one table, the centroids. DPQ-VQ, Eq. 6 and 7.

  Attributes:
    gradient: `ops.quantize.straight_through` or `rotated`.
    regularizer: pulls the centroids to the vectors that chose them: `ops.quantize.mean_distance`,
      or `summed_distance` as the paper writes it.
    weight: coefficient of the regulariser.
    commitment: coefficient of the same distance as a pull of the vectors to the centroids.
    moving_average: how the centroids move instead of by a gradient; None: by the gradient.
  """

  gradient: Callable = dataclasses.field(default=quantize.straight_through, kw_only=True)
  regularizer: Callable = dataclasses.field(default=quantize.mean_distance, kw_only=True)
  weight: float = dataclasses.field(default=1.0, kw_only=True)
  commitment: float = dataclasses.field(default=0.0, kw_only=True)
  moving_average: MovingAverage | None = dataclasses.field(default=None, kw_only=True)

  def setup(self):
    super().setup()
    shape = self._table_shape(self.dim)
    if self.moving_average is None:
      self.table = self.param("centroids", self.table_init, shape, self.param_dtype)
      return
    start = lambda: self.table_init(self.make_rng("params"), shape, jnp.float32)
    self.total = self.variable("centroids", "total", start)
    self.count = self.variable("centroids", "count", lambda: jnp.ones(shape[:2]))

  def keys(self) -> Float[Array, "Q K C"]:
    """The centroids."""
    if self.moving_average is None:
      return super().keys()
    count, total = jnp.asarray(self.count.value), jnp.asarray(self.total.value)
    return quantize.averaged(count, total, self.moving_average.epsilon)

  def values(self) -> Float[Array, "Q K C"]:
    """The centroids."""
    return self.keys()

  def _comparison(self):
    keys = lax.stop_gradient(self.keys())
    return lambda query: quantize.euclidean_response(query, keys)

  def _answer(self, vectors, query, train, mask):
    # No gradient passes through the choice.
    codes = self._over_responses(largest, lax.stop_gradient(query), train, mask)
    row = product.compose(codes, self.values(), self.additive)
    terms = {}
    if self.moving_average is None:
      terms["regularizer"] = self.weight * self.regularizer(row, lax.stop_gradient(vectors), mask)
    if self.commitment:
      pull = self.regularizer(lax.stop_gradient(row), vectors, mask)
      terms["commitment"] = self.commitment * pull
    return self._passed(row, vectors), codes, terms

  def _passed(self, row, vectors):
    """The row with the gradient of the vectors, each part by itself."""
    return self.gradient(self._parts(row), self._parts(vectors)).reshape(row.shape)

  def _check(self):
    super()._check()
    check_amounts(weight=self.weight, commitment=self.commitment)

  def _learn(self, query, codes, mask):
    if self.moving_average is not None and self.is_mutable_collection("centroids"):
      self._move(query, codes, mask)
    super()._learn(query, codes, mask)

  def _move(self, query, codes, mask):
    decay, tables = self.moving_average.decay, self.count.value.shape[0]
    found, sums = quantize.gathered_sums(codes, query, tables, self.codes, mask)
    self.count.value = running(self.count.value, found, decay, mask)
    self.total.value = running(self.total.value, sums, decay, mask)

  @property
  def _keys_are_parameters(self):
    return self.moving_average is None

  def _own_keys(self):
    return self.table

  def _revive(self, dead, fresh):
    if self.moving_average is None:
      super()._revive(dead, fresh)
    elif self.is_mutable_collection("centroids"):
      self.total.value = jnp.where(dead[..., None], fresh, self.total.value)
      self.count.value = jnp.where(dead, 1.0, self.count.value)

  def _tables(self):
    return ("centroids",) if self.moving_average is None else ()

  def logical_axes(self) -> dict:
    """Axes of the centroids, and of their running counts and sums."""
    axes = super().logical_axes()
    if self.moving_average is not None:
      axes["centroids"] = {"total": TABLE_AXES, "count": TABLE_AXES[:2]}
    return axes
