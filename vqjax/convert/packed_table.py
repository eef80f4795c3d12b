"""Trained tables as strings of bits, which a `PackedHead` scores where they lie."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt8, UInt16

from vqjax.assign.multiple import code_dtype
from vqjax.embeddings import PackedEmbedding
from vqjax.heads import PackedHead

__all__ = ["PackedTable"]

READ = 2**12
"""Rows that are unpacked at a time."""


@dataclasses.dataclass(frozen=True)
class PackedTable:
  """A table as strings of bits: row = (center[group] + scale[group] · values) @ inverse.

  Attributes:
    stream: bits of all rows in the order of their ranks, after an element that belongs to none.
    rank: place of each row, [V]; row groups of falling probability follow each other.
    size: rows of each row group, by rank, [C].
    width: bits of each coordinate of each row group, [C, D].
    scale: factor of the values, [C, D], float16.
    center: mean coordinates of the rows, [C, D], float16.
    inverse: map from coordinates to rows, [D, D], float16.
    is_trellis: the bits are those of a trellis; False: of levels.
  """

  stream: UInt16[np.ndarray, "units"]
  rank: Int[np.ndarray, "V"]
  size: Int[np.ndarray, "C"]
  width: UInt8[np.ndarray, "C D"]
  scale: Float[np.ndarray, "C D"]
  center: Float[np.ndarray, "C D"]
  inverse: Float[np.ndarray, "D D"]
  is_trellis: bool = True

  @property
  def shape(self) -> tuple[int, int]:
    """Shape of the table, (V, D)."""
    return len(self.rank), len(self.inverse)

  @property
  def is_ranked(self) -> bool:
    """Whether the tokens are in another order than that of falling probability."""
    return bool((self.rank != np.arange(len(self.rank))).any())

  def embedding(self, **fields: Any) -> tuple[PackedEmbedding, dict]:
    """The embedding with these rows and its variables; `fields` are further ones, as `dtype`."""
    return PackedEmbedding(*self.shape, **self._fields | fields), self._variables()

  def head(
    self, bias: Float[np.ndarray, "V"] | None = None, **fields: Any
  ) -> tuple[PackedHead, dict]:
    """The head that scores these rows and its variables."""
    variables = self._variables()
    if bias is not None:
      variables["params"]["bias"] = np.asarray(bias, np.float32)
    fields = self._fields | {"use_bias": bias is not None} | fields
    return PackedHead(*self.shape, **fields), variables

  @property
  def _fields(self):
    fields = {"row_groups": len(self.size), "units": len(self.stream)}
    return fields | {"is_ranked": self.is_ranked, "is_trellis": self.is_trellis}

  def _variables(self):
    params = {name: getattr(self, name) for name in ("scale", "center", "inverse")}
    codes = {"stream": self.stream, "size": self.size.astype(np.int32), "width": self.width}
    if self.is_ranked:
      codes["rank"] = self.rank.astype(code_dtype(len(self.rank)))
    return {
      "params": {name: value.astype(np.float32) for name, value in params.items()},
      "codes": codes,
    }

  def parts(self) -> dict[str, np.ndarray]:
    """The arrays by the names of their fields, as they are stored; `from_parts` reads them."""
    fields = {name: np.asarray(value) for name, value in vars(self).items()}
    fields["rank"] = self.rank.astype(code_dtype(len(self.rank)))
    fields["size"] = self.size.astype(np.int32)
    return fields | {"is_trellis": np.array([self.is_trellis], np.uint8)}

  @classmethod
  def from_parts(cls, parts: Mapping[str, np.ndarray]) -> "PackedTable":
    """The table of arrays that `parts` returned.

    Raises:
      ValueError: an array is missing, or two of them do not fit together.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    if set(parts) != set(names):
      raise ValueError(
        f"a packed table must have the parts {', '.join(names)}; got {', '.join(sorted(parts))}."
        " Write it again."
      )
    parts = {name: np.asarray(part) for name, part in parts.items()}
    made = cls(**parts | {"is_trellis": bool(parts["is_trellis"].all())})
    units = -(-made.width.astype(np.int64).sum(axis=1) // 16)
    fitting = made.scale.shape == made.center.shape == made.width.shape
    fitting &= made.width.shape == (len(made.size), len(made.inverse))
    fitting &= made.size.sum() == len(made.rank) > made.rank.max()
    if not fitting or 1 + (made.size * units).sum() > len(made.stream):
      raise ValueError(
        f"the parts of a packed table must be those of one; got widths {made.width.shape} for"
        f" {len(made.rank)} rows and {len(made.stream)} units. Write it again."
      )
    return made

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays, as they are stored."""
    return sum(part.nbytes for part in self.parts().values())

  def rows(self, first: int = 0, last: int | None = None) -> Float[np.ndarray, "R D"]:
    """Rows `first` to `last` of the table, float32."""
    return self.rows_of(np.arange(first, len(self.rank) if last is None else last))

  def rows_of(self, ids: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n D"]:
    """The rows of the given tokens, float32."""
    layer, variables = self.embedding()
    # Once, and not for each block of rows.
    variables = jax.tree.map(jnp.asarray, variables)
    found = np.empty((len(ids), len(self.inverse)), np.float32)
    for start in range(0, len(ids), READ):
      # The last rows are filled up, so that they need no program of their own.
      some = np.pad(ids[start : start + READ], (0, max(0, start + READ - len(ids))))
      rows = _read(layer, variables, some)
      found[start : start + READ] = rows[: min(READ, len(ids) - start)]
    return found

  def table(self) -> Float[np.ndarray, "V D"]:
    """All rows, as one float32 array."""
    return self.rows()


@functools.partial(jax.jit, static_argnames="layer")
def _read(layer, variables, tokens):
  return layer.apply(variables, jnp.asarray(tokens))
