"""What does an embedding look like when it ships: packed codes, values, and nothing else?"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer
from safetensors.numpy import save_file

from vqjax.embeddings import compact_file
from vqjax.ops import packing, product
from vqjax.ops.vocabulary import in_vocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompactEmbedding:
  """Codes at ceil(log2 K) bits each and the tables that they choose from: a pytree, jittable.

  Its vectors are those of the evaluation forward of the `DPQEmbedding` that made it, bit for bit.

  Attributes:
    data: uint8 [bytes]: the packed codes, V·M·ceil(log2 K)/8 bytes.
    values: float32 [M or 1, K, C]: the tables.
    vocab: V.
    dim: d.
    codes: K.
    subspaces: M.
    additive: whether the mean of the chosen values is the vector, or they side by side.
    dtype: name of the dtype of the vectors, to which they are rounded.
  """

  # No types of arrays: transformations put other things into a pytree's places.
  data: Any
  values: Any
  vocab: int = dataclasses.field(metadata={"static": True})
  dim: int = dataclasses.field(metadata={"static": True})
  codes: int = dataclasses.field(metadata={"static": True})
  subspaces: int = dataclasses.field(metadata={"static": True})
  additive: bool = dataclasses.field(metadata={"static": True})
  dtype: str = dataclasses.field(default="float32", metadata={"static": True})

  @property
  def bits(self) -> int:
    """Bits of a code."""
    return packing.bits_for(self.codes)

  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token; nan for a token outside [0, V)."""
    known, token = in_vocabulary(jnp.asarray(tokens), self.vocab)
    code = packing.unpacked_rows(jnp.asarray(self.data), token, self.subspaces, self.bits)
    vectors = product.compose(code.astype(jnp.int32), jnp.asarray(self.values), self.additive)
    return jnp.where(known[..., None], vectors.astype(self.dtype), jnp.nan)

  @property
  def nbytes(self) -> int:
    """Bytes of codes and values: those of the file, without its header."""
    return int(self.data.nbytes + self.values.nbytes)

  def compression_ratio(self) -> float:
    """Bits of the float32 table over those of codes and values: Section 3 of the paper.

    32·V·d / (V·M·log2 K + 32·values), with log2 K as it is, where the file has whole bits.
    """
    full = 32 * self.vocab * self.dim
    return full / (self.vocab * self.subspaces * float(np.log2(self.codes)) + 32 * self.values.size)

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes one safetensors file; `load` and `compact_file.open_compact` read it."""
    tensors = {"values": np.asarray(self.values), "codes": np.asarray(self.data)}
    save_file(tensors, path, metadata=self._metadata())

  def _metadata(self) -> dict[str, str]:
    counts: dict[str, Any] = {
      "V": self.vocab,
      "d": self.dim,
      "K": self.codes,
      "M": self.subspaces,
      "additive": str(self.additive).lower(),
      "dtype": self.dtype,
    }
    own = {"format": compact_file.FORMAT, "version": compact_file.VERSION}
    return own | {name: str(value) for name, value in counts.items()}

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> "CompactEmbedding":
    """The embedding of a file, memory-mapped until it is used.

    Raises:
      ValueError: the file is truncated, of another format or version, or has codes of K or above.
    """
    table = compact_file.open_compact(path)
    shape = table.vocab, table.subspaces
    if not packing.is_below(table.data, shape, table.bits, table.codes):
      raise ValueError(f"{path} has codes of {table.codes} or above; it is damaged: save it anew")
    names = [f.name for f in dataclasses.fields(cls)]
    return cls(**{name: getattr(table, name) for name in names})
