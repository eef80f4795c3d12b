"""The DPQ embedding, whose vectors are learned codes into a few small tables."""

# The ways of a query table [V, quantizer.dim] to vectors [V, D]:
#
#   lookup     queries of a batch's tokens, gathered, then quantised: in training with terms of the
#              loss and batch statistics, which know no other rows              (`_embedded`)
#   table      all queries quantised with the running statistics                (`_table`)
#   tied head  as the table, a tile at a time, with the quantiser's gradient    (`rows_of`)
#   compact    the codes alone, encoded a slice at a time and packed            (`_Codes`)

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from vqjax.assign.text import TextStats
from vqjax.embeddings.base import Arrays, Embedding
from vqjax.embeddings.compact import CompactEmbedding
from vqjax.ops import bit_packing, vocab_parallel
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.quantizers import Quantizer
from vqjax.types import Dtype, Size
from vqjax.variables import Declaration, Initializer, Variable, by_collection, row_init

__all__ = ["DPQEmbedding"]


def check_quantizer(quantizer: Any) -> None:
  """Raise TypeError unless it is a quantiser."""
  if not isinstance(quantizer, Quantizer):
    raise TypeError(
      f"`quantizer` must be a Quantizer; got {type(quantizer).__name__}. Give, for instance,"
      " SoftmaxQuantizer(codes, subspaces)."
    )


class DPQEmbedding(Embedding):
  """Quantised rows of a trained query table.

  Inference needs only codes and values. Only the rows of a batch's tokens are quantised, so the
  batch statistics count each token as often as it occurs. `compact` gives the form for inference.
  Source: Chen et al., Differentiable product quantization for end-to-end embedding compression,
  2020.

  Example:
    >>> import jax
    >>> from vqjax import DPQEmbedding, SoftmaxQuantizer
    >>> quantizer = SoftmaxQuantizer(codes=16, subspaces=4)
    >>> embedding = DPQEmbedding(vocab=1000, dim=8, quantizer=quantizer)
    >>> variables = embedding.init(jax.random.key(0), jax.numpy.arange(3))
    >>> compact = embedding.compact(variables)
    >>> print(compact(jax.numpy.arange(3)).shape, compact.nbytes)
    (3, 8) 2512

  Attributes:
    quantizer: a quantiser with results of width `dim`. Its own `dim` is the width of the query
      table; None: this embedding's `dim`.
    query_init: initialiser of the [V, quantizer.dim] query table.
    dtype: dtype of the returned vectors; None: `param_dtype`.
    param_dtype: dtype of the query table.
  """

  quantizer: Quantizer
  query_init: Initializer = row_init
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def __post_init__(self):
    check_quantizer(self.quantizer)
    object.__setattr__(self, "quantizer", self.quantizer.of_width(self.dim))
    super().__post_init__()

  def declare(self) -> Declaration:
    """The query table [V, quantizer.dim] and the quantiser."""
    shape, axes = (self.vocab, self.quantizer.dim), ("vocab", "table_embed")
    return {
      "query": Variable(shape, axes, self.query_init, self.param_dtype, pad_value=0),
      "quantizer": self.quantizer,
    }

  def check(self) -> None:
    if self.quantizer.width != self.dim:
      raise ValueError(
        f"`quantizer` must make vectors of width dim={self.dim}; got width {self.quantizer.width}."
        " Give it the value_dim of the embedding's dim, or leave its widths out."
      )

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """Queries that are contexts."""
    return {"query_init": text.contexts(self.quantizer.dim)}

  def flops_per_token(self) -> int:
    """The operations of the quantiser for one vector."""
    return self.quantizer.flops_per_token()

  def _embedded(self, tokens, train):
    known, token = in_vocabulary(tokens, self.vocab)
    look_up = lambda arrays, token: self._lookup(arrays["query"], token)
    query = vocab_parallel.over_vocabulary(self.vocab_axis, look_up, self.parts(), token)
    # In float32 whatever `param_dtype` is: the vectors are rounded once, to the dtype returned.
    quantized = self.quantizer.quantized(query.astype(jnp.float32), train, known)
    vectors = quantized.vectors.astype(self._out)
    return jnp.where(known[..., None], vectors, jnp.nan), quantized.terms

  @property
  def _out(self):
    return jnp.dtype(self.dtype or self.param_dtype)

  def codes_of(self, tokens: Integer[Array, "*B"]) -> Int[Array, "*B M"]:
    """The codes of tokens in [0, V)."""
    codes = lambda t: self.quantizer.encode(self.array("query")[t].astype(jnp.float32))
    return self._computed(codes, tokens, tokens)

  def _table(self) -> Float[Array, "V D"]:
    return self.quantizer(self.array("query").astype(jnp.float32)).astype(self.param_dtype)

  def rows_of(self, arrays: Arrays) -> RowFactory:
    """The vectors of the tokens, quantised a tile at a time.

    The quantiser uses its running statistics, to which these rows do not contribute.
    """
    # As variables of the quantiser, which tiles apply to their queries.
    own = by_collection(self.quantizer.declare(), arrays["quantizer"])
    return RowFactory(arrays["query"], own, _Quantized(self.quantizer))

  def values(self) -> Float[Array, "Q K C"]:
    """The values that the codes choose from."""
    return self.quantizer.values()

  def compact(self, variables: dict[str, Any]) -> CompactEmbedding:
    """The form for inference: bit-packed codes, and values."""
    values = np.asarray(self.apply(variables, method="values"), np.float32)
    bits = bit_packing.bits_for(self.quantizer.codes)
    return CompactEmbedding(
      data=bit_packing.bit_packed(_Codes(self, variables), bits),
      values=values,
      vocab=self.vocab,
      dim=self.dim,
      codes=self.quantizer.codes,
      subspaces=self.quantizer.subspaces,
      additive=self.quantizer.additive,
      dtype=self._out.name,
    )

  def inference_size(self) -> Size:
    """The size of `compact`: float32 values, and codes at ceil(log2 K) bits."""
    q = self.quantizer
    values = math.prod(q.value_shape)
    codes = bit_packing.bit_packed_bytes(self.vocab, q.subspaces, bit_packing.bits_for(q.codes))
    return Size(
      params=values,
      state_bytes=4 * values + codes,
      flops_per_token=q.subspaces * self.dim if q.additive else 0,
    )


class _Quantized:
  """(queries, the quantiser's variables) -> rows; equal and hashed by the quantiser."""

  def __init__(self, quantizer: Quantizer):
    # Unbound: a factory is compared in calls of which each has bound modules of its own.
    self.quantizer = quantizer.clone(parent=None)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Quantized) and self.quantizer == other.quantizer

  def __hash__(self) -> int:
    return hash(self.quantizer)

  def __call__(self, query, variables):
    # Without mutable collections: the rows of a head change no statistics.
    return self.quantizer.apply(variables, query)


class _Codes:
  """The codes of all tokens as an array whose slices are computed on access."""

  def __init__(self, embedding: DPQEmbedding, variables: dict[str, Any]):
    quantizer = embedding.quantizer.clone(parent=None)
    own = {name: tree["quantizer"] for name, tree in variables.items() if "quantizer" in tree}
    self.shape = embedding.vocab, quantizer.subspaces
    self._query, self._own = variables["params"]["query"], jax.tree.map(jnp.asarray, own)
    self._encode = jax.jit(lambda own, query: quantizer.apply(own, query, method="encode"))
    # 2^19 responses at once: 2 MiB of them.
    self._rows = max(1, 2**19 // (quantizer.subspaces * quantizer.codes))

  def __getitem__(self, rows: slice) -> np.ndarray:
    codes, stop = [], min(rows.stop, self.shape[0])
    for start in range(rows.start, stop, self._rows):
      query = np.asarray(self._query[start : min(start + self._rows, stop)], np.float32)
      # One shape for all calls, so that one program is compiled.
      padded = np.pad(query, ((0, self._rows - len(query)), (0, 0)))
      codes.append(np.asarray(self._encode(self._own, padded))[: len(query)])
    return np.concatenate(codes)
