"""How is a vector replaced by M of K codes each, and what gradient passes?

A vector [D] is cut into M parts of C = D/M numbers, each of which is answered by a part of a table
[M, K, C]; a table [1, K, C] is shared by all parts. Or it is not cut (additive): a vector [1, D] is
answered by M parts of D numbers each, whose mean stands for it. Source: Chen et al., Differentiable
product quantization for end-to-end embedding compression, 2020, Eq. 1-7; the letters M and K are
its D and K.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from vqjax.ops import product, tiles, vocab_parallel

Response = Callable[[Array, Array], Array]
"""(query [*B, M or 1, C], keys [M or 1, K, C]) -> [*B, M, K] float32: the larger, the nearer."""


def dot_response(
  query: Float[Array, "*B P C"], keys: Float[Array, "Q K C"]
) -> Float[Array, "*B M K"]:
  """Inner products: Eq. 3. One of P and Q may be 1, the other is M."""
  query, keys = query.astype(jnp.float32), keys.astype(jnp.float32)
  if keys.shape[0] == 1:
    return jnp.einsum("...mc,kc->...mk", query, keys[0])
  if query.shape[-2] == 1:
    return jnp.einsum("...c,mkc->...mk", query[..., 0, :], keys)
  return jnp.einsum("...mc,mkc->...mk", query, keys)


def euclidean_response(
  query: Float[Array, "*B P C"], keys: Float[Array, "Q K C"]
) -> Float[Array, "*B M K"]:
  """Minus the squared distances: Eq. 6. In float32, where those of half precision overflow."""
  query, keys = query.astype(jnp.float32), keys.astype(jnp.float32)
  squares = (query**2).sum(axis=-1)[..., None] + (keys**2).sum(axis=-1)
  return 2 * dot_response(query, keys) - squares


def cosine_response(
  query: Float[Array, "*B P C"], keys: Float[Array, "Q K C"]
) -> Float[Array, "*B M K"]:
  """Cosines; 0 for a vector of zeros."""
  return dot_response(_unit(query.astype(jnp.float32)), _unit(keys.astype(jnp.float32)))


def _unit(x):
  square = (x**2).sum(axis=-1, keepdims=True)
  # Two `where`: the gradient of the root at zero is infinite, and infinite times zero is nan.
  positive = square > 0
  return jnp.where(positive, x * lax.rsqrt(jnp.where(positive, square, 1.0)), 0.0)


def in_chunks(function: Callable[[Any], Any], tokens: Any, scores: int) -> Any:
  """function of the arrays [N, ...] of a tree, for a few tokens at a time; results [N, ...] too.

  Where all tokens have too many scores for one tile, what `function` holds is computed again in the
  backward pass, and so never held for more than a chunk. Each device of a mesh cuts its own tokens.

  Args:
    function: treats every token alone.
    tokens: its argument.
    scores: how many numbers it holds of a token.
  """
  total = jax.tree.leaves(tokens)[0].shape[0]
  layout = vocab_parallel.token_shards(None)
  own = -(-total // layout.count)
  count = _chunks(own, scores)
  if count == 1:
    return function(tokens)
  size = -(-own // count)
  filled = layout.count * count * size - total

  def cut(x):
    x = jnp.pad(x, [(0, filled)] + [(0, 0)] * (x.ndim - 1))
    x = x.reshape(layout.count, count, size, *x.shape[1:])
    return layout.keep(jnp.moveaxis(x, 1, 0).reshape(count, -1, *x.shape[3:]), axis=1)

  def join(x):
    x = x.reshape(count, layout.count, size, *x.shape[2:])
    return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[3:])[:total]

  found = lax.map(jax.checkpoint(function), jax.tree.map(cut, tokens))
  return jax.tree.map(join, found)


def _chunks(tokens: int, scores: int) -> int:
  """As few as hold at most a tile of scores each; a divisor of the tokens where one is near."""
  least = max(1, min(tokens, -(-tokens * scores // tiles.most_scores())))
  return next((count for count in range(least, 2 * least) if tokens % count == 0), least)


def moments_of(
  respond: Callable[[Array], Array],
  query: Float[Array, "N *P"],
  mask: Bool[Array, "N"] | None,
  scores: int,
) -> tuple[Float[Array, "K"], Float[Array, "K"]]:
  """Mean and variance of each code's responses [N, M, K], over the mask's tokens and all parts.

  Zero both where the mask has no token. A few tokens at a time: `in_chunks`.
  """
  weight = jnp.ones(len(query)) if mask is None else mask.astype(jnp.float32)
  if not len(query):
    nothing = jnp.zeros(jax.eval_shape(respond, query).shape[-1:])
    return nothing, nothing
  # About the responses of one token: sums of squares lose no digits to a mean far from zero.
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


def weighted(
  weights: Float[Array, "*B M K"], values: Float[Array, "Q K C"], additive: bool = False
) -> Float[Array, "*B D"]:
  """`product.compose`, where every code counts by its weight: one-hot weights choose."""
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
  """DPQ-SX: the value of the best code, with the gradient of a softmax: Eq. 4 and 5.

  The vector is exactly that of the code. Its gradient in the responses is that of
  softmax(response / temperature) · values, in the values that of the one-hot code. With a
  `forward_temperature` above 0 the vector is the softmax's own at that temperature, and the values
  have its gradient.
  """
  code = jnp.argmax(response, axis=-1).astype(jnp.int32)
  soft = jax.nn.softmax(response / temperature, axis=-1)
  if forward_temperature == 0.0:
    return product.joined(_hard(soft, values, code), additive), code
  forward = jax.nn.softmax(response / forward_temperature, axis=-1)
  return weighted(soft + lax.stop_gradient(forward - soft), values, additive), code


@jax.custom_vjp
def _hard(soft, values, code):
  del soft
  return product.chosen_parts(code, values)


def _hard_forward(soft, values, code):
  return product.chosen_parts(code, values), (soft, values, code)


def _hard_backward(kept, d_parts):
  soft, values, code = kept
  # A one-hot product, not a scatter: responses of this size are there already.
  one_hot = jax.nn.one_hot(code, values.shape[1], dtype=d_parts.dtype)
  if values.shape[0] == 1:
    d_soft = jnp.einsum("...mc,kc->...mk", d_parts, values[0])
    d_values = jnp.einsum("...mk,...mc->kc", one_hot, d_parts)[None]
  else:
    d_soft = jnp.einsum("...mc,mkc->...mk", d_parts, values)
    d_values = jnp.einsum("...mk,...mc->mkc", one_hot, d_parts)
  return d_soft.astype(soft.dtype), d_values.astype(values.dtype), None


_hard.defvjp(_hard_forward, _hard_backward)


def straight_through(
  row: Float[Array, "*B D"], query: Float[Array, "*B D"]
) -> Float[Array, "*B D"]:
  """DPQ-VQ: exactly the row, with the gradient of the query: Eq. 7. The row itself has none."""
  return lax.stop_gradient(row) + (query - lax.stop_gradient(query)).astype(row.dtype)


def rotated(row: Float[Array, "*B D"], query: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
  """Exactly the row, with the gradient of the rotation and scaling that takes the query to it.

  Of a product code the parts [*B, M, C] are rows and queries of their own.
  Both are constants in the gradient. A vector of zeros passes none. Source: Fifty et al.,
  Restructuring vector quantization with the rotation trick, 2024, Eq. 4.
  """
  query32, row32 = query.astype(jnp.float32), lax.stop_gradient(row).astype(jnp.float32)
  fixed = lax.stop_gradient(query32)
  q, e = _unit(fixed), _unit(row32)
  between = _unit(q + e)
  norms = [jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (row32, fixed)]
  scale = jnp.where(norms[1] > 0, norms[0] / jnp.where(norms[1] > 0, norms[1], 1.0), 0.0)
  along = lambda x, axis: (x * axis).sum(axis=-1, keepdims=True)
  turned = query32 - 2 * along(query32, between) * between + 2 * along(query32, q) * e
  moved = scale * turned
  return lax.stop_gradient(row) + (moved - lax.stop_gradient(moved)).astype(row.dtype)


def mean_distance(
  row: Float[Array, "*B D"], query: Float[Array, "*B D"], mask: Bool[Array, "*B"] | None = None
) -> Float[Array, ""]:
  """Mean of the squared differences over the tokens of the mask and their D numbers."""
  count = row.size if mask is None else jnp.maximum(mask.sum() * row.shape[-1], 1)
  return _summed_squares(row, query, mask) / count


def summed_distance(
  row: Float[Array, "*B D"], query: Float[Array, "*B D"], mask: Bool[Array, "*B"] | None = None
) -> Float[Array, ""]:
  """Sum of the squared differences over the tokens of the mask and their D numbers."""
  return _summed_squares(row, query, mask)


def _summed_squares(row, query, mask):
  square = (row.astype(jnp.float32) - query.astype(jnp.float32)) ** 2
  return (square if mask is None else jnp.where(mask[..., None], square, 0.0)).sum()


def noise(
  key: PRNGKeyArray, index: Int[Array, "N"], shape: tuple[int, int]
) -> Float[Array, "N M K"]:
  """Gumbel noise of tokens by their indices: that of a token does not depend on the others."""
  return jax.vmap(lambda one: jax.random.gumbel(jax.random.fold_in(key, one), shape))(index)


def code_counts(
  codes: Int[Array, "*B M"], count: int, mask: Bool[Array, "*B"] | None = None
) -> Float[Array, "M K"]:
  """How many tokens of the mask have each code, in each subspace."""
  flat = codes.reshape(-1, codes.shape[-1])
  weight = jnp.ones(flat.shape[0]) if mask is None else mask.reshape(-1).astype(jnp.float32)
  counts = lambda column: jnp.zeros(count).at[column].add(weight)
  return jax.vmap(counts, in_axes=1)(flat)


def code_perplexity(counts: Float[Array, "*M K"]) -> Float[Array, "*M"]:
  """exp of the entropy of the codes: K where all are used alike, 1 where one is; 0 without any."""
  total = counts.sum(axis=-1, keepdims=True)
  share = counts / jnp.maximum(total, 1)
  entropy = -jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1.0)), 0.0).sum(-1)
  return jnp.where(total[..., 0] > 0, jnp.exp(entropy), 0.0)


def gathered_sums(
  codes: Int[Array, "*B M"],
  query: Float[Array, "*B P C"],
  tables: int,
  count: int,
  mask: Bool[Array, "*B"] | None = None,
) -> tuple[Float[Array, "Q K"], Float[Array, "Q K C"]]:
  """Tokens on each code of each of `tables` tables, 1 or M, and the sum of their queries."""
  one_hot = jax.nn.one_hot(codes, count, dtype=jnp.float32)
  if mask is not None:
    one_hot = jnp.where(mask[..., None, None], one_hot, 0.0)
    query = jnp.where(mask[..., None, None], query, 0.0)
  one_hot = one_hot.reshape(-1, *one_hot.shape[-2:])
  query = query.astype(jnp.float32).reshape(-1, *query.shape[-2:])
  query = jnp.broadcast_to(query, (*one_hot.shape[:2], query.shape[-1]))
  if tables == 1:
    counts, sums = one_hot.sum(axis=(0, 1)), jnp.einsum("nmk,nmc->kc", one_hot, query)
    return counts[None], sums[None]
  return one_hot.sum(axis=0), jnp.einsum("nmk,nmc->mkc", one_hot, query)


def averaged(
  count: Float[Array, "Q K"], total: Float[Array, "Q K C"], epsilon: float
) -> Float[Array, "Q K C"]:
  """Centroids from running counts and sums, the counts smoothed by Laplace's rule.

  Source: van den Oord et al., Neural discrete representation learning, 2017, Appendix A.1.
  """
  tokens = count.sum(axis=-1, keepdims=True)
  codes = count.shape[-1]
  smooth = (count + epsilon) / (tokens + codes * epsilon) * tokens
  return total / jnp.maximum(smooth, 1e-12)[..., None]


def drawn_queries(
  key: PRNGKeyArray,
  query: Float[Array, "*B P C"],
  shape: tuple[int, int],
  mask: Bool[Array, "*B"] | None = None,
) -> Float[Array, "Q K C"]:
  """A query of a random token of the mask for each code of each table; equal ones may come up."""
  flat = query.reshape(-1, *query.shape[-2:])
  weight = jnp.ones(flat.shape[0]) if mask is None else mask.reshape(-1).astype(jnp.float32)
  row = jax.random.categorical(key, jnp.log(weight), shape=shape)
  # Of a shared table, any part will do; there is one for each code.
  part = jnp.arange(shape[0])[:, None] if shape[0] > 1 else jnp.arange(shape[1])[None]
  return flat[row, part % flat.shape[1]]
