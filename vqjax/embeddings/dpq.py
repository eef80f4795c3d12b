"""What does an embedding look like whose vectors are codes into a few small tables?"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int, Integer

from vqjax.embeddings.base import Embedding
from vqjax.embeddings.compact import CompactEmbedding
from vqjax.ops import packing, vocab_parallel
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.quantizers import Quantized, Quantizer
from vqjax.types import Dtype, Size


class DPQEmbedding(Embedding):
  """A free vector for each token, quantised: the query table is trained, codes and values ship.

  Only the rows of the tokens at hand are quantised, so that batch statistics are those of a batch's
  tokens, each as often as it occurs. `compact` gives what ships. Source: Chen et al.,
  Differentiable product quantization for end-to-end embedding compression, 2020.

  Attributes:
    quantizer: of width `dim` in its result; its own `dim` is the width of the query table, and this
      embedding's where it has none.
    query_init: initialiser of the [V, quantizer.dim] query table.
    dtype: dtype of the vectors handed out; None: that of the parameters.
    param_dtype: dtype of the query table.
  """

  quantizer: Quantizer
  query_init: nn.initializers.Initializer = nn.initializers.normal(0.1)
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def __post_init__(self):
    object.__setattr__(self, "quantizer", self.quantizer.of_width(self.dim))
    super().__post_init__()

  def setup(self):
    if self.vocab < 1:
      raise ValueError(f"vocab {self.vocab} holds no token; give at least 1")
    if self.quantizer.width != self.dim:
      raise ValueError(
        f"the quantizer makes vectors of width {self.quantizer.width} in an embedding of dim"
        f" {self.dim}; give both the same"
      )
    shape = self.vocab, self.quantizer.dim
    self.query = self.param("query", self.query_init, shape, self.param_dtype)

  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token's codes; nan for a token outside [0, V)."""
    return self._quantized(tokens, train=False)[0]

  def loss_terms(
    self, tokens: Integer[Array, "*B"], deterministic: bool = True
  ) -> tuple[Float[Array, "*B D"], dict[str, Float[Array, ""]]]:
    """The vectors, and the quantiser's terms of the loss."""
    vectors, found = self._quantized(tokens, train=not deterministic)
    return vectors, found.terms

  def aux(self, tokens: Integer[Array, "*B"]) -> dict[str, Float[Array, ""]]:
    """The quantiser's terms of the loss, outside training."""
    return self._quantized(tokens, train=False)[1].terms

  def _quantized(self, tokens, train: bool) -> tuple[Array, Quantized]:
    known, token = in_vocabulary(tokens, self.vocab)
    look_up = lambda rows, token: vocab_parallel.sharded_lookup(
      rows[0], token, self.vocab_axis, self.query.dtype
    )
    rows = (vocab_parallel.Sharded(self.query, 0),)
    query = vocab_parallel.over_vocabulary(self.vocab_axis, look_up, rows, token)
    # In float32, however the table is kept: what ships is rounded once, to what is handed out.
    found = self.quantizer.quantized(query.astype(jnp.float32), train, known)
    vectors = found.vectors.astype(self._out)
    return jnp.where(known[..., None], vectors, jnp.nan), found

  @property
  def _out(self):
    return jnp.dtype(self.dtype or self.param_dtype)

  def codes_of(self, tokens: Integer[Array, "*B"]) -> Int[Array, "*B M"]:
    """The codes of tokens in [0, V)."""
    return self.quantizer.encode(jnp.asarray(self.query)[tokens].astype(jnp.float32))

  def table(self) -> Float[Array, "V D"]:
    """The vectors of the whole vocabulary, in `param_dtype`."""
    return self.quantizer(jnp.asarray(self.query, jnp.float32)).astype(self.param_dtype)

  def rows(self) -> RowFactory:
    """`table`, quantised a tile at a time: what a head scores with that shares these codes.

    With the running statistics, which the rows of a whole vocabulary have no part in.
    """
    self.quantizer.values()  # its variables are made when it is first used
    return RowFactory(self.query, dict(self.quantizer.variables), _Quantized(self.quantizer))

  def values(self) -> Float[Array, "Q K C"]:
    """What the codes choose from."""
    return self.quantizer.values()

  def compact(self, variables: dict[str, Any]) -> CompactEmbedding:
    """What ships: packed codes, and the values. Codes are made and packed a block at a time."""
    values = np.asarray(self.apply(variables, method="values"), np.float32)
    bits = packing.bits_for(self.quantizer.codes)
    return CompactEmbedding(
      data=packing.packed(_Codes(self, variables), bits),
      values=values,
      vocab=self.vocab,
      dim=self.dim,
      codes=self.quantizer.codes,
      subspaces=self.quantizer.subspaces,
      additive=self.quantizer.additive,
      dtype=self._out.name,
    )

  def size(self) -> Size:
    """Query table and quantiser, as trained; a look-up compares each vector with all keys."""
    shapes = jax.eval_shape(
      lambda: self.clone(parent=None).init(jax.random.key(0), jnp.zeros((1,), jnp.int32))
    )
    leaves = jax.tree.leaves
    params = sum(x.size for x in leaves(shapes["params"]))
    state = sum(x.size * x.dtype.itemsize for x in leaves(shapes))
    return Size(params, state, self.quantizer.operations())

  def shipped(self) -> Size:
    """`compact`'s: values, and codes at ceil(log2 K) bits; an additive look-up adds M vectors."""
    q = self.quantizer
    values = math.prod(q.value_shape)
    codes = packing.packed_bytes(self.vocab, q.subspaces, packing.bits_for(q.codes))
    return Size(values, 4 * values + codes, q.subspaces * self.dim if q.additive else 0)

  def logical_axes(self) -> dict:
    """Axes of the query table, and the quantiser's."""
    inner = self.quantizer.logical_axes()
    axes = {name: {"quantizer": tree} for name, tree in inner.items()}
    axes["params"] = axes.get("params", {}) | {"query": ("vocab", "table_embed")}
    return axes


class _Quantized:
  """RowFactory of a query table, quantised with given variables: equal where the quantisers are."""

  def __init__(self, quantizer: Quantizer):
    self.quantizer = quantizer.clone(parent=None)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Quantized) and self.quantizer == other.quantizer

  def __hash__(self) -> int:
    return hash(self.quantizer)

  def __call__(self, query, variables):
    return self.quantizer.apply(variables, query)


class _Codes:
  """The codes of all tokens, made for some of them at a time."""

  def __init__(self, embedding: DPQEmbedding, variables: dict[str, Any]):
    quantizer = embedding.quantizer.clone(parent=None)
    own = {name: tree["quantizer"] for name, tree in variables.items() if "quantizer" in tree}
    self.shape = embedding.vocab, quantizer.subspaces
    self._query, self._own = variables["params"]["query"], jax.tree.map(jnp.asarray, own)
    self._encode = jax.jit(lambda own, query: quantizer.apply(own, query, method="encode"))

    self._rows = max(1, RESPONSES // (quantizer.subspaces * quantizer.codes))

  def __getitem__(self, rows: slice) -> np.ndarray:
    stop = min(rows.stop, self.shape[0])
    return np.concatenate([self._some(at, stop) for at in range(rows.start, stop, self._rows)])

  def _some(self, start: int, stop: int) -> np.ndarray:
    """Of a few rows; one shape for all, and what is beyond the last row is cut off."""
    query = np.asarray(self._query[start : min(start + self._rows, stop)], np.float32)
    padded = np.pad(query, ((0, self._rows - len(query)), (0, 0)))
    return np.asarray(self._encode(self._own, padded))[: len(query)]


RESPONSES = 2**19
"""Responses that are computed at once when a whole table is encoded: 2 MiB of them."""
