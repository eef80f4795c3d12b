"""Differentiable quantisation of vectors by M codes of K values each.

A vector [D] is split into M parts of C = D/M numbers, each of which is replaced by a vector of its
table in [M, K, C]; a table [1, K, C] is shared by all parts. In additive quantisation the vector is
not split: a query [1, D] is replaced by the mean of M vectors of D numbers. Source: Chen et al.,
Differentiable product quantization for end-to-end embedding compression, 2020, Eq. 1-7; M and K
here are D and K there.
"""

# The parts of a quantiser, in the order in which a layer calls them:
#
#   response   query [*B, M, C] by keys [M, K, C]  ->  [*B, M, K]    `dot_`, `euclidean_response`
#   code       arg max of it                       ->  [*B, M]
#   vector     value of the code, forward; a softmax of the responses, or the query, backward
#
# Responses are float32 whatever the dtype of a layer is: in half precision near keys would tie.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from vqjax.ops import product, tiles, vocab_parallel

__all__ = ["code_counts", "code_perplexity"]


def dot_response(
  query: Float[Array, "*B P C"], keys: Float[Array, "Q K C"]
) -> Float[Array, "*B M K"]:
  """Inner products of queries and keys (Eq. 3); P and Q are M or 1."""
  query, keys = query.astype(jnp.float32), keys.astype(jnp.float32)
  if keys.shape[0] == 1:
    return jnp.einsum("...mc,kc->...mk", query, keys[0])
  if query.shape[-2] == 1:
    return jnp.einsum("...c,mkc->...mk", query[..., 0, :], keys)
  return jnp.einsum("...mc,mkc->...mk", query, keys)


def euclidean_response(
  query: Float[Array, "*B P C"], keys: Float[Array, "Q K C"]
) -> Float[Array, "*B M K"]:
  """Negative squared distances of queries and keys (Eq. 6)."""
  # Squares of half-precision numbers overflow.
  query, keys = query.astype(jnp.float32), keys.astype(jnp.float32)
  squares = (query**2).sum(axis=-1)[..., None] + (keys**2).sum(axis=-1)
  return 2 * dot_response(query, keys) - squares


def in_chunks(function: Callable[[Any], Any], tokens: Any, scores: int) -> Any:
  """`function(tokens)` of trees [N, ...], applied to chunks of the tokens.

  If the scores of all tokens exceed one tile, the intermediate values of `function` are computed
  again in the backward pass, and exist for one chunk at a time. Each device of a mesh splits its
  own tokens.

  Args:
    function: treats every token independently.
    tokens: its argument.
    scores: number of intermediate values of `function` for one token.
  """
  total = jax.tree.leaves(tokens)[0].shape[0]
  if jax.export.is_symbolic_dim(total):
    return function(tokens)  # an exported program, whose number of tokens is a symbol
  layout = vocab_parallel.token_shards(None)
  own = -(-total // layout.count)
  count = _chunks(own, scores)
  if count == 1:
    return function(tokens)
  size = -(-own // count)
  padding = layout.count * count * size - total

  def cut(x):
    x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
    x = x.reshape(layout.count, count, size, *x.shape[1:])
    # Chunks are the outer axis, so that each chunk has tokens of every device.
    return layout.keep(jnp.moveaxis(x, 1, 0).reshape(count, -1, *x.shape[3:]), axis=1)

  def join(x):
    x = x.reshape(count, layout.count, size, *x.shape[2:])
    return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[3:])[:total]

  return jax.tree.map(join, lax.map(jax.checkpoint(function), jax.tree.map(cut, tokens)))


def _chunks(tokens: int, scores: int) -> int:
  """Number of chunks: the fewest of a tile each, or a near divisor of the tokens."""
  # A divisor needs no padding, which would copy the tokens.
  least = max(1, min(tokens, -(-tokens * scores // tiles.most_scores())))
  return next((count for count in range(least, 2 * least) if tokens % count == 0), least)


def response_moments(
  respond: Callable[[Array], Array],
  query: Float[Array, "N *P"],
  mask: Bool[Array, "N"] | None,
  scores: int,
) -> tuple[Float[Array, "K"], Float[Array, "K"]]:
  """Mean and variance of each code's responses [N, M, K] over tokens and parts.

  Both are 0 if the mask has no token. Responses are computed `in_chunks`.
  """
  # Not by `len`, which a symbol as the number of tokens does not have.
  weight = jnp.ones(query.shape[:1]) if mask is None else mask.astype(jnp.float32)
  if query.shape[0] == 0:
    zero = jnp.zeros(jax.eval_shape(respond, query).shape[-1:])
    return zero, zero
  # Relative to the responses of one token: E[x²] - E[x]² would cancel if the mean were far from 0.
  first = query[jnp.argmax(weight)][None]
  center = lax.stop_gradient(respond(first)).mean(axis=(0, 1))

  def sums(part):
    some, weight = part
    apart = respond(some) - center
    weighed = weight[:, None, None] * apart
    return weighed.mean(axis=1), (weighed * apart).mean(axis=1)

  total, squares = (x.sum(axis=0) for x in in_chunks(sums, (query, weight), scores))
  count = jnp.maximum(weight.sum(), 1.0)
  mean = total / count
  return jnp.where(weight.any(), center + mean, 0.0), squares / count - mean**2


def _weighted(
  weights: Float[Array, "*B M K"], values: Float[Array, "Q K C"], additive: bool = False
) -> Float[Array, "*B D"]:
  """Weighted sums of all codes' values; `product.compose` for one-hot weights."""
  if values.shape[0] == 1:
    parts = jnp.einsum("...mk,kc->...mc", weights, values[0])
  else:
    parts = jnp.einsum("...mk,mkc->...mc", weights, values)
  return product.joined(parts, additive)


def softmax_quantized(
  response: Float[Array, "*B M K"],
  values: Float[Array, "Q K C"],
  temperature: Float[Array, ""] | float = 1.0,
  forward_temperature: float = 0.0,
  additive: bool = False,
) -> tuple[Float[Array, "*B D"], Int[Array, "*B M"]]:
  """DPQ-SX: value and index of the best code, with the gradient of a softmax.

  The vector equals the value of the code exactly (Eq. 4 and 5). Its gradient in the responses is
  that of softmax(response / temperature) · values, and in the values that of the one-hot code. With
  a `forward_temperature` above 0 the vector is softmax(response / forward_temperature) · values,
  and the values have its gradient.
  """
  code = jnp.argmax(response, axis=-1).astype(jnp.int32)
  soft = jax.nn.softmax(response / temperature, axis=-1)
  if forward_temperature == 0.0:
    return product.joined(_hard(soft, values, code), additive), code
  forward = jax.nn.softmax(response / forward_temperature, axis=-1)
  return _weighted(soft + lax.stop_gradient(forward - soft), values, additive), code


@jax.custom_vjp
def _hard(soft, values, code):
  del soft
  return product.chosen_parts(code, values)


def _hard_forward(soft, values, code):
  return product.chosen_parts(code, values), (soft, values, code)


def _hard_backward(saved, d_parts):
  soft, values, code = saved
  # A one-hot product, which is faster than a scatter; the responses are of its size anyway.
  one_hot = jax.nn.one_hot(code, values.shape[1], dtype=d_parts.dtype)
  if values.shape[0] == 1:
    d_soft = jnp.einsum("...mc,kc->...mk", d_parts, values[0])
    d_values = jnp.einsum("...mk,...mc->kc", one_hot, d_parts)[None]
  else:
    d_soft = jnp.einsum("...mc,mkc->...mk", d_parts, values)
    d_values = jnp.einsum("...mk,...mc->mkc", one_hot, d_parts)
  return d_soft.astype(soft.dtype), d_values.astype(values.dtype), None


_hard.defvjp(*map(vocab_parallel.own_promotion, (_hard_forward, _hard_backward)))


def straight_through(
  row: Float[Array, "*B D"], query: Float[Array, "*B D"]
) -> Float[Array, "*B D"]:
  """DPQ-VQ: the row, with the straight-through gradient of the query (Eq. 7)."""
  # Not query + stop_gradient(row - query), whose value would be a rounding off the row.
  return lax.stop_gradient(row) + (query - lax.stop_gradient(query)).astype(row.dtype)


def mean_distance(
  row: Float[Array, "*B D"], query: Float[Array, "*B D"], mask: Bool[Array, "*B"] | None = None
) -> Float[Array, ""]:
  """Mean of the squared differences over the mask's tokens and their D numbers."""
  square = (row.astype(jnp.float32) - query.astype(jnp.float32)) ** 2
  if mask is None:
    return square.sum() / row.size
  count = jnp.maximum(mask.sum() * row.shape[-1], 1)
  return jnp.where(mask[..., None], square, 0.0).sum() / count


def noise(
  key: PRNGKeyArray, index: Int[Array, "N"], shape: tuple[int, int]
) -> Float[Array, "N M K"]:
  """Gumbel noise of tokens from their indices, independent of other tokens."""
  return jax.vmap(lambda one: jax.random.gumbel(jax.random.fold_in(key, one), shape))(index)


def code_counts(
  codes: Int[Array, "*B M"], count: int, mask: Bool[Array, "*B"] | None = None
) -> Float[Array, "M K"]:
  """Number of the mask's tokens that have each code, in each subspace."""
  flat = codes.reshape(-1, codes.shape[-1])
  weight = jnp.ones(flat.shape[0]) if mask is None else mask.reshape(-1).astype(jnp.float32)
  counts = lambda column: jnp.zeros(count).at[column].add(weight)
  return jax.vmap(counts, in_axes=1)(flat)


def code_perplexity(counts: Float[Array, "*M K"]) -> Float[Array, "*M"]:
  """exp of the entropy of the codes: K for uniform counts, 0 for no counts."""
  total = counts.sum(axis=-1, keepdims=True)
  share = counts / jnp.maximum(total, 1)
  entropy = -jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1.0)), 0.0).sum(-1)
  return jnp.where(total[..., 0] > 0, jnp.exp(entropy), 0.0)
