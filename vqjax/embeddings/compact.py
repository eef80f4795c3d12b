"""The compact embedding for inference: bit-packed codes and values."""

# What is kept of a layer, and how a vector is read from it:
#
#   data     V·M codes of `bits` bits each, one after another without gaps
#   values   [M or 1, K, C], the numbers that codes choose from
#   basis    [M C, D], by which concatenated vectors are multiplied, if there is one
#
#   token v  -->  codes v·M to v·M + M - 1  -->  M vectors of `values`, concatenated or averaged
#
# Product codes, scalar levels (D codes that share one table of numbers) and codes with vectors of
# full width are all of this form. `table_file` reads the same file without JAX.

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer
from safetensors.numpy import save

from vqjax import outputs
from vqjax.embeddings import table_file
from vqjax.ops import bit_packing, product
from vqjax.ops.vocabulary import check_arrays, in_vocabulary, value_of

__all__ = ["CompactEmbedding"]


def write_table(
  path: str | os.PathLike[str],
  codec: str,
  tensors: Mapping[str, np.ndarray],
  metadata: Mapping[str, Any],
  bias: Float[np.ndarray, "V"] | None = None,
) -> None:
  """Write a file of a small table, which `table_file` describes; whole or not at all."""
  # The library writes the memory of an array in another order as it lies.
  tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
  texts = {"format": table_file.FORMAT, "version": table_file.VERSION}
  texts |= {"codec": codec} | {name: str(value) for name, value in metadata.items()}
  if bias is not None:
    is_half = np.asarray(bias).dtype == np.float16
    tensors["bias"] = np.asarray(bias, np.float16 if is_half else np.float32)
    texts["bias"] = "true"
  # At once, because the old file may be mapped.
  with outputs.atomic_path(path) as partial:
    # The checksum covers the header, which is therefore written twice, with the same length.
    partial.write_bytes(save(tensors, metadata=texts | {"checksum": "0" * 8}))
    value = table_file.table_checksum(partial)
    partial.write_bytes(save(tensors, metadata=texts | {"checksum": value}))


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("data", "values", "bias", "basis"),
  meta_fields=("vocab", "dim", "codes", "subspaces", "additive", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class CompactEmbedding:
  """Codes at ceil(log2 K) bits each and the tables that they choose from.

  It is a pytree. Its vectors equal the evaluation forward of the embedding that made it, bit for
  bit.

  Attributes:
    data: uint8 [bytes], the bit-packed codes: V·M·ceil(log2 K)/8 bytes.
    values: float32 [M or 1, K, C], the tables.
    vocab: number of tokens, V.
    dim: width of the vectors, D.
    codes: number of values that a code chooses from, K.
    subspaces: number of codes of a token, M.
    additive: whether a vector is the mean of its values; otherwise their concatenation.
    dtype: name of the dtype to which the vectors are rounded.
    bias: float16 or float32 [V], the output bias that was trained with the table; None: there is
      none.
    basis: float16 or float32 [M C, D], by which concatenated vectors are multiplied; None: there is
      none.
  """

  # Untyped, because transformations put other objects into the leaves of a pytree.
  data: Any
  values: Any
  vocab: int
  dim: int
  codes: int
  subspaces: int
  additive: bool
  dtype: str = "float32"
  bias: Any = None
  basis: Any = None

  @property
  def bits(self) -> int:
    """Bits of a code."""
    return bit_packing.bits_for(self.codes)

  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token; nan for a token outside [0, V)."""
    check_arrays(tokens=tokens)
    known, token = in_vocabulary(value_of(tokens), self.vocab)
    data = jnp.asarray(self.data)
    if not jnp.issubdtype(data.dtype, jnp.integer):
      raise ValueError(
        f"`data` of a CompactEmbedding must be integers, the packed codes; got {data.dtype}."
        " Average and cast `values`, `bias` and `basis` alone, and keep `data`."
      )
    code = bit_packing.bit_unpacked_rows(data, token, self.subspaces, self.bits)
    values, basis = jnp.asarray(self.values), self.basis
    basis = None if basis is None else jnp.asarray(basis)
    vectors = product.compose(code.astype(jnp.int32), values, self.additive, basis)
    return jnp.where(known[..., None], vectors.astype(self.dtype), jnp.nan)

  def table(self) -> Float[Array, "V D"]:
    """The vectors of the whole vocabulary."""
    return self(jnp.arange(self.vocab))

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays: the length of the file without its header."""
    arrays = self.data, self.values, self.bias, self.basis
    return int(sum(x.nbytes for x in arrays if x is not None))

  def compression_ratio(self) -> float:
    """Bits of the float32 table over the bits of codes and values, and of a basis.

    32·V·d / (V·M·log2 K + 32·values), Section 3 of DPQ, where log2 K is not rounded up.
    """
    full = 32 * self.vocab * self.dim
    small = self.vocab * self.subspaces * float(np.log2(self.codes)) + 32 * self.values.size
    return full / (small + (0 if self.basis is None else 8 * self.basis.nbytes))

  def save(self, path: str | os.PathLike[str]) -> None:
    """Write a safetensors file that `load` and `table_file.open_table` read.

    It appears whole or not at all, with a checksum in its metadata.

    Raises:
      ValueError: `dtype` is not that of a compact file.
    """
    if self.dtype not in table_file.DTYPES:
      raise ValueError(
        f"`dtype` must be one of {', '.join(table_file.DTYPES)}; got {self.dtype!r}. Make the"
        " embedding with one of them."
      )
    tensors = {"values": np.asarray(self.values), "codes": np.asarray(self.data)}
    if self.basis is not None:
      tensors["basis"] = np.asarray(self.basis)
    write_table(path, "codes", tensors, self._metadata(), self.bias)

  def _metadata(self) -> dict[str, Any]:
    return {
      "V": self.vocab,
      "d": self.dim,
      "K": self.codes,
      "M": self.subspaces,
      "additive": str(self.additive).lower(),
      "dtype": self.dtype,
    }

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> "CompactEmbedding":
    """Load the embedding of a file, memory-mapped until it is used.

    Raises:
      ValueError: the file is truncated, has another format or version, or codes of K or above.
    """
    table = table_file.open_table(path)
    shape = table.vocab, table.subspaces
    # K need not be a power of two: then `bits` bits can also spell codes without a value.
    if not bit_packing.is_below(table.data, shape, table.bits, table.codes):
      raise ValueError(
        f"the codes of {path} must be below K={table.codes}; some are not. Save the file again."
      )
    names = [f.name for f in dataclasses.fields(cls)]
    return cls(**{name: getattr(table, name) for name in names})
