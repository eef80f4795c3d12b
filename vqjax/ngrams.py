"""Layers whose table has a row for each n-gram of tokens, and the memory of a decoder around it."""

# tokens [*B, T]  --hash-->  rows [*B, T, H]  --table-->  vectors [*B, T, E], E = H * width
#                                                             |
#         hidden [*B, T, S * D] --norm, key, gate-->  value [*B, T, S, D]  --convolution--> + hidden

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Float, Int, Integer, Shaped

from vqjax.embeddings.base import Embedding
from vqjax.layer import Layer
from vqjax.ops.ngrams import NGramHash
from vqjax.ops.vocabulary import check_arrays, value_of
from vqjax.types import Dtype
from vqjax.variables import Declaration, Initializer, Variable

__all__ = ["MemoryCache", "NGramEmbedding", "NGramMemory"]


class NGramEmbedding(Layer):
  """The vectors of the n-grams that end at each token, one behind the other.

  The table is any embedding, with a row of the hash for a token. Its rows should begin at zero: an
  n-gram that the training text hardly has then adds nothing, where rows of the default length add
  noise, which is learned slowly, and which costs bits in rows that no text reads. Source: Cheng et
  al., Conditional memory via scalable lookup, 2026 (arXiv 2601.07372), Section 2.2.

  Example:
    >>> import jax
    >>> from flax.linen.initializers import zeros
    >>> from vqjax import DenseEmbedding
    >>> from vqjax.ngrams import NGramEmbedding
    >>> from vqjax.ops.ngrams import XorHash
    >>> of = XorHash.qwen4(vocab=1000, end=0, heads=2, least=5_000)
    >>> layer = NGramEmbedding(of, DenseEmbedding(of.rows, dim=8, weight_init=zeros))
    >>> tokens = jax.numpy.arange(6)[None]
    >>> variables = layer.init(jax.random.key(0), tokens)
    >>> layer.apply(variables, tokens).shape
    (1, 6, 32)

  Attributes:
    ngrams: the hash, such as `vqjax.ops.ngrams.XorHash`.
    table: an embedding of at least `ngrams.rows` rows. Its `vocab_axis` shards the rows: a lookup
      sends rows, never the table.
  """

  ngrams: NGramHash
  table: Embedding

  @property
  def dim(self) -> int:
    """Width of the result: of the vectors of all heads."""
    return self.ngrams.heads * self.table.dim

  def declare(self) -> Declaration:
    """The table."""
    return {"table": self.table}

  def check(self) -> None:
    if self.table.vocab < self.ngrams.rows:
      raise ValueError(
        f"`table` must have a row for each of the hash, {self.ngrams.rows}, as heads of"
        f" {self.ngrams.sizes} need; got {self.table.vocab}. Give"
        f" {type(self.table).__name__}({self.ngrams.rows}, {self.table.dim}, ...)."
      )

  def logical_axes(self) -> dict:
    """Names of the axes of every variable; the rows of the table are "ngrams"."""
    of_table = {"vocab": "ngrams"}
    rename = lambda names: tuple(of_table.get(name, name) for name in names)
    return jax.tree.map(rename, super().logical_axes(), is_leaf=lambda x: isinstance(x, tuple))

  def flops_per_token(self) -> int:
    """The operations of the rows that a token reads."""
    return self.ngrams.heads * self.table.flops_per_token()

  def __call__(
    self, tokens: Integer[ArrayLike, "*B T"], previous: Integer[ArrayLike, "*B P"] | None = None
  ) -> Float[Array, "*B T E"]:
    """The vectors of the n-grams that end at each token, [*B, T, dim].

    A vector is nan where a token of its n-gram is outside the vocabulary.

    Args:
      tokens: [*B, T].
      previous: the n - 1 tokens before, [*B, n - 1]; None: the text begins here.
    """
    return self.loss_terms(tokens, previous)[0]

  def loss_terms(
    self,
    tokens: Integer[ArrayLike, "*B T"],
    previous: Integer[ArrayLike, "*B P"] | None = None,
    deterministic: bool = True,
  ) -> tuple[Float[Array, "*B T E"], dict[str, Float[Array, ""]]]:
    """The vectors, and the terms of the training loss that the table has."""
    check_arrays(tokens=tokens)
    tokens = jnp.asarray(value_of(tokens))
    ids = self.ngrams(tokens, None if previous is None else jnp.asarray(value_of(previous)))
    vectors, terms = self.table.loss_terms(ids, deterministic)
    return vectors.reshape(*tokens.shape, self.dim), terms


class MemoryCache(NamedTuple):
  """What a memory needs of earlier tokens in decoding.

  Attributes:
    tokens: the last n - 1 tokens, [*B, n - 1].
    values: the normalised values of the last tokens, [*B, (kernel - 1) * n, S * D].
  """

  tokens: Int[Array, "*B P"]
  values: Float[Array, "*B L C"]


class NGramMemory(Layer):
  """What a decoder adds to its residual stream from a table of n-grams.

  It is value + silu(convolution(norm(value))), where value = sigmoid(r(key · query / √D)) W_v e,
  key = norm(W_k e), query = norm(hidden), and r(x) = sign(x) √max(|x|, 1e-6). The convolution is
  causal, one filter a channel, dilated by the length n of the longest n-gram.

  The result is that of `qwen4_exp` in transformers. Source: Cheng et al. 2026 (arXiv 2601.07372),
  Section 2.3. The convolution begins at zero, so that the layer begins without it.

  Attributes:
    lookup: the n-grams' vectors e.
    dim: width of a residual stream, D.
    streams: number of residual streams, S, each with a key of its own.
    kernel: number of taps of the convolution.
    epsilon: added to mean squares.
    offset: number that is added to the scales of the norms; 1 in `qwen4_exp`.
    value_init: initialiser of W_v, [E, D].
    param_dtype: dtype of the parameters.
    has_table: whether the table is a variable of the layer. Otherwise every call is given the
      vectors, such as rows of a `vqjax.tables.HostTable`.
  """

  lookup: NGramEmbedding
  dim: int
  streams: int = 1
  kernel: int = 4
  epsilon: float = 1e-6
  offset: float = 0.0
  value_init: Initializer = nn.initializers.normal(0.02)
  param_dtype: Dtype = jnp.float32
  has_table: bool = True

  def declare(self) -> Declaration:
    """The n-grams' table, projections, scales of the norms, and the filters."""
    width, channels = self.lookup.dim, self.streams * self.dim
    ones, zeros = nn.initializers.constant(1.0 - self.offset), nn.initializers.zeros
    of = lambda shape, axes, init: Variable(shape, axes, init, self.param_dtype)
    return {
      **({"lookup": self.lookup} if self.has_table else {}),
      "key": of((width, channels), ("mlp", "embed"), nn.initializers.lecun_normal()),
      "value": of((width, self.dim), ("mlp", "embed"), self.value_init),
      "key_scale": of((channels,), ("norm",), ones),
      "query_scale": of((channels,), ("norm",), ones),
      "convolved_scale": of((channels,), ("norm",), ones),
      "filters": of((self.kernel, channels), ("conv", "norm"), zeros),
    }

  def check(self) -> None:
    for name in ("streams", "kernel"):
      if getattr(self, name) < 1:
        raise ValueError(f"`{name}` must be at least 1; got {getattr(self, name)}. Leave it out.")

  def flops_per_token(self) -> int:
    """The operations of the table, of the projections, of the gate and of the convolution."""
    width, channels = self.lookup.dim, self.streams * self.dim
    products = 2 * width * (channels + self.dim)
    return self.lookup.flops_per_token() + products + channels * (2 * self.kernel + 4)

  def cache(self, *batch: int) -> MemoryCache:
    """The cache of texts that begin, for `step`."""
    before = self.lookup.ngrams.order - 1
    length = (self.kernel - 1) * (before + 1)
    return MemoryCache(
      jnp.full((*batch, before), self.lookup.ngrams.pad, jnp.int32),
      jnp.zeros((*batch, length, self.streams * self.dim), self.param_dtype),
    )

  def __call__(
    self,
    hidden: Float[ArrayLike, "*B T C"],
    tokens: Integer[ArrayLike, "*B T"],
    vectors: Float[ArrayLike, "*B T E"] | None = None,
  ) -> Float[Array, "*B T C"]:
    """What is added to the streams `hidden` [*B, T, S * D] of texts that begin here.

    `vectors` are as of `step`.
    """
    return self.step(hidden, tokens, self.cache(*jnp.shape(tokens)[:-1]), vectors)[0]

  def loss_terms(
    self,
    hidden: Float[ArrayLike, "*B T C"],
    tokens: Integer[ArrayLike, "*B T"],
    deterministic: bool = True,
  ) -> tuple[Float[Array, "*B T C"], dict[str, Float[Array, ""]]]:
    """What is added, as of `__call__`, and the terms of the training loss that the table has."""
    cache = self.cache(*jnp.shape(tokens)[:-1])
    added, _, terms = self._step(hidden, tokens, cache, None, None, deterministic)
    return added, terms

  def step(
    self,
    hidden: Float[ArrayLike, "*B T C"],
    tokens: Integer[ArrayLike, "*B T"],
    cache: MemoryCache,
    vectors: Float[ArrayLike, "*B T E"] | None = None,
    count: Int[ArrayLike, "*B"] | None = None,
  ) -> tuple[Float[Array, "*B T C"], MemoryCache]:
    """What is added to the streams of the next tokens, and the cache for those after them.

    Args:
      hidden: the streams [*B, T, S * D].
      tokens: [*B, T].
      cache: what the tokens before have left.
      vectors: the n-grams' vectors [*B, T, E] for a layer without a table; None: `lookup` reads
        them.
      count: number of tokens of each text, after which there is padding; None: all.

    Raises:
      ValueError: `hidden` or `vectors` have another shape than the tokens, the streams and the
        table, or the layer has a table and is given vectors, or has neither.
    """
    return self._step(hidden, tokens, cache, vectors, count, True)[:2]

  def _step(self, hidden, tokens, cache, vectors, count, deterministic):
    check_arrays(hidden=hidden, vectors=vectors)
    hidden, tokens = jnp.asarray(value_of(hidden)), jnp.asarray(value_of(tokens))
    channels = self.streams * self.dim
    if hidden.shape != (*tokens.shape, channels):
      raise ValueError(
        f"`hidden` must be {(*tokens.shape, channels)}, as the tokens and {self.streams} streams of"
        f" {self.dim}; got {hidden.shape}. Give the vectors of these tokens."
      )
    if (vectors is None) != self.has_table:
      what = "None" if vectors is None else "vectors"
      raise ValueError(
        f"`vectors` must be given where `has_table` is False, and only there; got {what} and"
        f" has_table={self.has_table}. Change one of them."
      )
    terms = {}
    if vectors is None:
      vectors, terms = self.lookup.loss_terms(tokens, cache.tokens, deterministic)
    vectors = jnp.asarray(value_of(vectors))
    if vectors.shape != (*tokens.shape, self.lookup.dim):
      raise ValueError(
        f"`vectors` must be {(*tokens.shape, self.lookup.dim)}, {self.lookup.ngrams.heads} rows of"
        f" {self.lookup.table.dim} for each token; got {vectors.shape}. Reshape the rows [*B, T, H,"
        " D] of the table."
      )
    # Results are sharded as the texts are.
    texts = hidden.sum(axis=-2)
    found = self._computed(self._extended, texts, hidden, tokens, vectors, cache, count)
    return *found, terms

  def _extended(self, hidden, tokens, vectors, cache, count):
    """What is added, and the cache after it."""
    added, values = self._added(hidden, vectors, cache.values)
    history = jnp.concatenate([cache.tokens, tokens.astype(jnp.int32)], axis=-1)[..., None]
    before = last_entries(history, self.lookup.ngrams.order - 1, count)[..., 0]
    kept = last_entries(values, cache.values.shape[-2], count).astype(cache.values.dtype)
    return added, MemoryCache(before, kept)

  def _added(self, hidden, vectors, before):
    parts = (*hidden.shape[:-1], self.streams, self.dim)
    vectors = vectors.astype(hidden.dtype)
    key = self._normed(vectors @ self._weight("key", hidden), "key_scale", parts)
    query = self._normed(hidden, "query_scale", parts)
    gate = (key * query).sum(-1, keepdims=True) * self.dim**-0.5
    gate = jnp.sign(gate) * jnp.sqrt(jnp.maximum(jnp.abs(gate), 1e-6))
    value = jax.nn.sigmoid(gate) * (vectors @ self._weight("value", hidden))[..., None, :]
    normed = self._normed(value, "convolved_scale", parts).reshape(hidden.shape)
    history = jnp.concatenate([before.astype(hidden.dtype), normed], axis=-2)
    length, dilation = hidden.shape[-2], self.lookup.ngrams.order
    filters = self._weight("filters", hidden)
    taps = (history[..., k * dilation : k * dilation + length, :] for k in range(self.kernel))
    convolved = sum(tap * filters[k] for k, tap in enumerate(taps))
    added = value.reshape(hidden.shape) + jax.nn.silu(convolved)
    return added.astype(hidden.dtype), history

  def _weight(self, name: str, like: Any) -> Array:
    return self.array(name).astype(like.dtype)

  def _normed(self, x, scale, parts):
    x = x.reshape(parts).astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
    scale = self.offset + self.array(scale).astype(jnp.float32)
    return x * scale.reshape(self.streams, self.dim)


def last_entries(
  history: Shaped[Array, "*B L C"], kept: int, count: Int[ArrayLike, "*B"] | None
) -> Shaped[Array, "*B K C"]:
  """The last `kept` entries before the padding of rows that begin with as many of a cache.

  Args:
    history: the entries of a cache, those of the next tokens, and then padding.
    kept: number of entries of the cache, K.
    count: number of tokens of each row before the padding; None: there is no padding.
  """
  if count is None:
    return history[..., history.shape[-2] - kept :, :]
  index = jnp.asarray(count)[..., None] + jnp.arange(kept)
  return jnp.take_along_axis(history, index[..., None], axis=-2)
