"""The centroid quantiser (DPQ-VQ), whose codes are the nearest centroids."""

from __future__ import annotations

import dataclasses

from jax import lax
from jaxtyping import Array, Float

from vqjax.ops import product, quantize
from vqjax.quantizers.base import Quantizer, check_not_negative, largest
from vqjax.variables import Declaration

__all__ = ["CentroidQuantizer"]


class CentroidQuantizer(Quantizer):
  """The nearest centroid, with a straight-through gradient.

  The response of a centroid is -|vector - centroid|². Keys and values are one table, the centroids.
  A term of the loss, the mean squared difference of vectors and their centroids, pulls the
  centroids towards the vectors. Source: DPQ-VQ, Eq. 6 and 7, where it is a sum.

  Attributes:
    weight: coefficient of that term.
    commitment: coefficient of a term of the same value that pulls the vectors.
  """

  weight: float = dataclasses.field(default=1.0, kw_only=True)
  commitment: float = dataclasses.field(default=0.0, kw_only=True)

  def declare(self) -> Declaration:
    """The base's variables, and the centroids [M or 1, K, C]."""
    return super().declare() | {"centroids": self._table(self.dim)}

  def check(self) -> None:
    super().check()
    self._check_keys()
    check_not_negative(weight=self.weight, commitment=self.commitment)

  def values(self) -> Float[Array, "Q K C"]:
    """The centroids."""
    return self.array("centroids")

  def _comparison(self):
    keys = lax.stop_gradient(self.values())
    return lambda query: quantize.euclidean_response(query, keys)

  def _quantize(self, vectors, query, train, mask):
    # The choice has no gradient.
    codes = self._over_responses(largest, lax.stop_gradient(query), train, mask)
    row = product.compose(codes, self.values(), self.additive)
    distance = quantize.mean_distance(row, lax.stop_gradient(vectors), mask)
    terms = {"regularizer": self.weight * distance}
    if self.commitment:
      pull = quantize.mean_distance(lax.stop_gradient(row), vectors, mask)
      terms["commitment"] = self.commitment * pull
    return quantize.straight_through(row, vectors), codes, terms
