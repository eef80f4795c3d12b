"""The embedding of 8-bit integers, a few of which share a scale."""

# levels [V, D] int8, scale [V, D / group]; with group = 4:
#
#   level   | 17  -3  90 127 | -8  55   0   2 |      vector = level · the scale of its group
#   scale   |      0.01      |      0.003     |

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int, Int8

from vqjax.embeddings.base import Arrays, Embedding
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
  from a trained table, and they are never trained; the scales are parameters. A `DenseHead` that is
  tied to it composes a tile of rows where it is scored, so that no other table exists. A row of one
  scale alone would leave most numbers few levels where some columns are large.

  Attributes:
    group: adjoining numbers of a row that share a scale; it divides `dim`.
    levels_init: initialiser of the int8 levels [V, D].
    dtype: dtype of the returned vectors; None: float32.
  """

  group: int = 32
  levels_init: Initializer = _random_levels
  dtype: Dtype | None = None

  def declare(self) -> Declaration:
    """The levels [V, D] and the scales [V, D / group]."""
    shape, axes = (self.vocab, self.dim), ("vocab", "table_embed")
    # Uniform levels have a variance of 127² / 3: rows begin with a mean square length of 1.
    first = nn.initializers.constant((3 / self.dim) ** 0.5 / MOST)
    scales = (self.vocab, self.dim // self.group)
    return {
      "levels": Variable(shape, axes, self.levels_init, jnp.int8, "codes", pad_value=0),
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

  def _vectors(self, arrays: Arrays, token: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    level = self._lookup(arrays["levels"], token, jnp.float32)
    vectors = _scaled((level, self._lookup(arrays["scale"], token)), ())
    return vectors.astype(jnp.dtype(self.dtype or jnp.float32))

  def rows_of(self, arrays: Arrays) -> RowFactory:
    """The rows in float32, composed a tile at a time."""
    return RowFactory((arrays["levels"], arrays["scale"]), (), _scaled)


def _scaled(per_row, shared):
  del shared
  level_WD, scale_WG = per_row
  group = level_WD.shape[-1] // scale_WG.shape[-1]
  grouped_WGj = level_WD.reshape(*scale_WG.shape, group).astype(jnp.float32)
  return (grouped_WGj * scale_WG[..., None]).reshape(level_WD.shape)


def int8_levels(
  rows_RD: Float[np.ndarray, "R D"], group: int
) -> tuple[Int8[np.ndarray, "R D"], Float[np.ndarray, "R G"]]:
  """The nearest levels of rows, and their scales, by which a group's largest is 127."""
  grouped_RGj = np.asarray(rows_RD, np.float32).reshape(len(rows_RD), -1, group)
  scale_RG = np.abs(grouped_RGj).max(axis=-1) / np.float32(MOST)
  # A group of zeros has the levels 0 under any scale.
  level_RGj = np.rint(grouped_RGj / np.where(scale_RG > 0, scale_RG, 1)[..., None])
  return level_RGj.astype(np.int8).reshape(np.shape(rows_RD)), scale_RG
