"""The embedding of 8-bit integers, a few of which share a scale."""

# levels [V, D] int8, scale [V, D / group]; with group = 4:
#
#   level   | 17  -3  90 127 | -8  55   0   2 |      vector = level · the scale of its group
#   scale   |      0.01      |      0.003     |
#
# JAX has no gradients of integers. Where levels are trained, the gradient of the rows is that of
# `tangent`, zeros [V, D] that `row_updates.value_and_grad` puts beside the levels: rows have the
# value of the levels and the derivative of the tangent. No program reads the zeros.

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int, Int8

from vqjax.embeddings.base import Arrays, Embedding
from vqjax.ops import vocab_parallel
from vqjax.ops.row_factory import RowFactory
from vqjax.types import Dtype
from vqjax.variables import Declaration, Initializer, Variable

__all__ = ["Int8Embedding"]

# Largest level; -128 is not used, so that a row and its negative are equally good.
MOST = 127


def _random_levels(key: Array, shape: tuple[int, ...], dtype: Dtype = jnp.int8) -> Array:
  """Default levels: uniform in [-127, 127]."""
  # Drawn as int32, whose end 128 int8 does not have.
  return jax.random.randint(key, shape, -MOST, MOST + 1, jnp.int32).astype(dtype)


class Int8Embedding(Embedding):
  """A level of 8 bits for each number, times a scale of `group` adjoining numbers.

  The levels are the variable `levels` of the collection `codes`: `vqjax.convert.to_int8` makes them
  from a trained table, and only the scales are trained. A `DenseHead` that is tied to it composes a
  tile of rows where it is scored, so that no other table exists. A row of one scale alone would
  leave most numbers few levels where some columns are large.

  With `trained` the table is trained in a byte a number from the first step: levels and scales are
  parameters, which `vqjax.row_updates.rowwise` changes and rounds stochastically. Gradients are
  those of `vqjax.row_updates.value_and_grad`; `vqjax train` needs
  `Train(optimizer=training.RowwiseTables())`. Such a table is trained in Linen only.

  Attributes:
    group: adjoining numbers of a row that share a scale; it divides `dim`.
    trained: train the levels.
    levels_init: initialiser of the int8 levels [V, D].
    dtype: dtype of the returned vectors; None: float32.
  """

  group: int = 32
  trained: bool = dataclasses.field(default=False, kw_only=True)
  levels_init: Initializer = _random_levels
  dtype: Dtype | None = None

  def declare(self) -> Declaration:
    """The levels [V, D] and the scales [V, D / group]."""
    shape, axes = (self.vocab, self.dim), ("vocab", "table_embed")
    kind = "params" if self.trained else "codes"
    # Uniform levels have a variance of 127² / 3: rows begin with a mean square length of 1.
    first = nn.initializers.constant((3 / self.dim) ** 0.5 / MOST)
    scales = (self.vocab, self.dim // self.group)
    return {
      "levels": Variable(shape, axes, self.levels_init, jnp.int8, kind, pad_value=0),
      "scale": Variable(scales, axes, first, pad_value=0),
    }

  def check(self) -> None:
    if self.group < 1 or self.dim % self.group:
      raise ValueError(
        f"`group` must divide dim {self.dim}; got {self.group}. 32 is usual, and {self.dim} gives a"
        " row one scale."
      )

  def flops_per_token(self) -> int:
    """A product for each number."""
    return self.dim

  def parts(self) -> dict[str, Any]:
    """The variables, and the tangent of levels whose gradient is taken."""
    found = super().parts()
    if self.trained and self.has_variable("params", "tangent"):
      tangent = self.get_variable("params", "tangent")
      found["tangent"] = vocab_parallel.Sharded(vocab_parallel.automatic(tangent), 0)
    return found

  def _vectors(self, arrays: Arrays, token: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    level = self._lookup(arrays["levels"], token, jnp.float32)
    vectors = _scaled((level, self._lookup(arrays["scale"], token)), ())
    if "tangent" in arrays:
      vectors = _with_tangent(vectors, self._lookup(arrays["tangent"], token))
    return vectors.astype(jnp.dtype(self.dtype or jnp.float32))

  def rows_of(self, arrays: Arrays) -> RowFactory:
    """The rows in float32, composed a tile at a time."""
    stored = arrays["levels"], arrays["scale"]
    if "tangent" in arrays:
      return RowFactory((*stored, arrays["tangent"]), (), _scaled_with_tangent)
    return RowFactory(stored, (), _scaled)


def _scaled(per_row, shared):
  del shared
  level_WD, scale_WG = per_row
  group = level_WD.shape[-1] // scale_WG.shape[-1]
  grouped_WGj = level_WD.reshape(*scale_WG.shape, group).astype(jnp.float32)
  return (grouped_WGj * scale_WG[..., None]).reshape(level_WD.shape)


@jax.custom_vjp
def _with_tangent(rows, tangent):
  """The rows, whose derivative is the tangent's."""
  del tangent
  return rows


_with_tangent.defvjp(
  lambda rows, tangent: (_with_tangent(rows, tangent), None),
  lambda _, cotangent: (jnp.zeros_like(cotangent), cotangent),
)


def _scaled_with_tangent(per_row, shared):
  *stored, tangent_WD = per_row
  return _with_tangent(_scaled(stored, shared), tangent_WD)


def int8_levels(
  rows_RD: Float[np.ndarray, "R D"], group: int
) -> tuple[Int8[np.ndarray, "R D"], Float[np.ndarray, "R G"]]:
  """The nearest levels of rows, and their scales, by which a group's largest is 127."""
  grouped_RGj = np.asarray(rows_RD, np.float32).reshape(len(rows_RD), -1, group)
  scale_RG = np.abs(grouped_RGj).max(axis=-1) / np.float32(MOST)
  # A group of zeros has the levels 0 under any scale.
  level_RGj = np.rint(grouped_RGj / np.where(scale_RG > 0, scale_RG, 1)[..., None])
  return level_RGj.astype(np.int8).reshape(np.shape(rows_RD)), scale_RG
