"""How likely is each token under softmax(hidden · weightᵀ + bias), without the [N, V] logits?

The log-probability of N tokens is computed in two-dimensional tiles of tokens and vocabulary. The
vocabulary is the outer loop, so each tile of the weight is read once and its gradient is written
once; the tokens are the inner loop. Only [N]-sized statistics survive from tile to tile. The
backward pass recomputes the scores of each tile from the saved normaliser: 8NDV floating-point
operations in all, against 6NDV when the logits are kept.

A ragged edge is never padded: the last tile starts early enough to fit, overlaps its neighbour,
and the overlap is masked, so that neither operand is copied.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype


class Tile(NamedTuple):
  """How many tokens and how many vocabulary rows are scored at once."""

  tokens: int
  vocab: int


def default_tile(tokens: int, vocab: int) -> Tile:
  """The tile for N tokens and V rows: at most 512 x 1280 scores (2.5 MiB in float32).

  Large enough that a matrix unit is busy, small enough to stay near a cache. Each axis is cut into
  equal parts (rounded up to a multiple of 64), so the last tile overlaps little.
  """
  return Tile(_even_part(tokens, 512), _even_part(vocab, 1280))


def _even_part(size: int, limit: int) -> int:
  """The smallest multiple of 64 that covers `size` in ceil(size / limit) parts, at most `size`."""
  parts = max(1, math.ceil(size / limit))
  return max(1, min(size, 64 * math.ceil(size / parts / 64)))


def linear_log_prob(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  tokens: Integer[Array, "*B"],
  bias: Float[Array, "V"] | None = None,
  *,
  tile: tuple[int, int] | None = None,
  dtype: Dtype | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of `tokens` under softmax(hidden · weightᵀ + bias).

  Exact: no sampling and no approximation; sums accumulate in float32 for bfloat16 and float32
  inputs, and the result is float32, never above 0. Neither the forward nor the backward pass holds
  an array of N·V elements. A bias of -inf removes its row from the distribution. A token outside
  [0, V) has no probability: its result is nan, so that a loss over it cannot pass unnoticed.

  Differentiable in reverse mode in `hidden`, `weight` and `bias`; forward mode is an error, as for
  every function with a custom VJP. Sharded arrays must be of a mesh with automatic axes.

  Args:
    hidden: one vector for each token.
    weight: one row for each word of the vocabulary.
    tokens: indices into the vocabulary.
    bias: one score for each word, added to hidden · weightᵀ.
    tile: (tokens, vocabulary rows) scored at once; `default_tile` by default.
    dtype: dtype of the matrix products' operands, to which each tile is cast: float32 parameters
      in a bfloat16 model are never copied, and get gradients that were never rounded. By default
      that of hidden and weight together.

  Raises:
    ValueError: shapes that do not fit together, an empty vocabulary, or a tile below 1.
  """
  _check_shapes(hidden, weight, tokens, bias)
  hidden_ND = hidden.reshape(-1, hidden.shape[-1])
  n, v = hidden_ND.shape[0], weight.shape[0]
  if n == 0:
    return jnp.zeros(tokens.shape, jnp.float32)
  wanted = default_tile(n, v) if tile is None else Tile(*tile)
  if min(wanted) < 1:
    raise ValueError(f"tile {tuple(wanted)} has a side below 1; give (tokens, vocabulary rows)")
  tile = Tile(min(wanted.tokens, n), min(wanted.vocab, v))
  plan = _Plan(tile, jnp.dtype(dtype or jnp.promote_types(hidden.dtype, weight.dtype)))
  known_N, token_N = in_vocabulary(tokens.reshape(-1), v)
  log_prob_N = _log_prob(plan, hidden_ND, weight, bias, token_N)
  return jnp.where(known_N, log_prob_N, jnp.nan).reshape(tokens.shape)


def linear_scores(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  bias: Float[Array, "V"] | None = None,
  dtype: Dtype | None = None,
) -> Float[Array, "*B V"]:
  """hidden · weightᵀ + bias, accumulated and returned in float32.

  `dtype` is that of the product's operands; by default that of hidden and weight together.
  """
  dtype = dtype or jnp.promote_types(hidden.dtype, weight.dtype)
  axes = ((hidden.ndim - 1,), (1,)), ((), ())
  scores = lax.dot_general(
    hidden.astype(dtype), weight.astype(dtype), axes, preferred_element_type=jnp.float32
  )
  return scores if bias is None else scores + bias.astype(jnp.float32)


def _check_shapes(hidden, weight, tokens, bias):
  if hidden.shape[:-1] != tokens.shape:
    raise ValueError(
      f"hidden {hidden.shape} and tokens {tokens.shape} disagree: hidden needs the shape of tokens"
      " and one more axis"
    )
  if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
    raise ValueError(
      f"weight {weight.shape} does not fit hidden {hidden.shape}: it is [V, D], one row for each"
      " word; transpose a [D, V] kernel"
    )
  if weight.shape[0] == 0:
    raise ValueError("weight has no rows: a softmax needs a vocabulary of at least 1")
  if bias is not None and bias.shape != weight.shape[:1]:
    raise ValueError(f"bias {bias.shape} does not fit weight {weight.shape}: it is [V]")


class _Plan(NamedTuple):
  """How a computation is cut, and the dtype of its matrix products' operands."""

  tile: Tile
  dtype: jnp.dtype


class _Normalizer(NamedTuple):
  """log Z in two parts: added up, they would lose the small one under a large common offset."""

  top_N: Array
  log_sum_N: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_prob(plan, hidden_ND, weight_VD, bias_V, token_N):
  return _forward(plan, hidden_ND, weight_VD, bias_V, token_N)[0]


def _forward(plan, hidden_ND, weight_VD, bias_V, token_N):
  score_N, z = _scores_and_normalizer(plan, hidden_ND, weight_VD, bias_V, token_N)
  return (score_N - z.top_N) - z.log_sum_N, (hidden_ND, weight_VD, bias_V, token_N, z)


def _backward(plan, saved, cotangent_N):
  hidden_ND, weight_VD, bias_V, token_N, z = saved
  d_hidden_ND, d_weight_VD, d_bias_V = _gradients(
    plan, hidden_ND, weight_VD, bias_V, token_N, z, cotangent_N
  )
  return d_hidden_ND, d_weight_VD, d_bias_V, None


_log_prob.defvjp(_forward, _backward)


class _Edge(NamedTuple):
  """Where a tile starts, and which of its rows no earlier tile has covered."""

  start: Array
  fresh: Array


def _edge(index, size, total):
  """Tile `index`; the last one is moved back to end at `total`, its overlap marked stale."""
  nominal = index * size
  start = jnp.minimum(nominal, total - size)
  return _Edge(start, start + jnp.arange(size, dtype=jnp.int32) >= nominal)


def _rows(array, edge, size):
  return lax.dynamic_slice_in_dim(array, edge.start, size)


def _add(array, edge, update, axis=0):
  """Adds `update` to the tile's part, in place inside a loop; stale parts of it must be zero."""
  current = lax.dynamic_slice_in_dim(array, edge.start, update.shape[axis], axis)
  update = current + update.astype(array.dtype)
  return lax.dynamic_update_slice_in_dim(array, update, edge.start, axis)


def _product(a, b):
  return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _scores_and_normalizer(plan, hidden_ND, weight_VD, bias_V, token_N):
  """Each token's own score, and log sum_v exp(score_v) by a running maximum and a running sum."""
  tile, (n, _), v = plan.tile, hidden_ND.shape, weight_VD.shape[0]
  n_tiles, v_tiles = math.ceil(n / tile.tokens), math.ceil(v / tile.vocab)

  def vocab_step(carry, v_index):
    v_edge = _edge(v_index, tile.vocab, v)
    weight_vD = _rows(weight_VD, v_edge, tile.vocab)
    bias_v = None if bias_V is None else _rows(bias_V, v_edge, tile.vocab)

    def token_step(carry, n_index):
      n_edge = _edge(n_index, tile.tokens, n)
      hidden_nD = _rows(hidden_ND, n_edge, tile.tokens)
      score_nv = linear_scores(hidden_nD, weight_vD, bias_v, plan.dtype)
      if v % tile.vocab:
        # A stale column was scored by the tile before: zero would join the sum, -inf does not.
        score_nv = jnp.where(v_edge.fresh, score_nv, -jnp.inf)
      old = [_rows(x, n_edge, tile.tokens) for x in carry]
      place_n = _rows(token_N, n_edge, tile.tokens) - v_edge.start
      new = _merged(*old, score_nv, place_n)
      kept = [jnp.where(n_edge.fresh, a, b) for a, b in zip(new, old)]
      put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=n_edge.start, axis=0)
      return tuple(put(x, part) for x, part in zip(carry, kept)), None

    return lax.scan(token_step, carry, jnp.arange(n_tiles, dtype=jnp.int32))[0], None

  least_N = jnp.full((n,), -jnp.inf, jnp.float32)
  start = least_N, least_N, jnp.zeros((n,), jnp.float32)
  (own_N, top_N, sum_N), _ = lax.scan(vocab_step, start, jnp.arange(v_tiles, dtype=jnp.int32))
  return own_N, _Normalizer(top_N, jnp.log(sum_N))


def _merged(own_n, top_n, sum_n, score_nv, place_n):
  """The token's score, the running maximum and the running sum, with a tile's scores added."""
  new_top_n = jnp.maximum(top_n, score_nv.max(axis=1))
  # With every score so far at -inf the maximum is no number to subtract.
  shift_n = jnp.where(jnp.isneginf(new_top_n), 0.0, new_top_n)
  tile_sum_n = jnp.exp(score_nv - shift_n[:, None]).sum(axis=1)
  # The score of the tile itself, not of a product of its own: another rounding of the same score
  # would make probabilities above 1.
  width = score_nv.shape[1]
  found_n = jnp.take_along_axis(score_nv, jnp.clip(place_n, 0, width - 1)[:, None], axis=1)[:, 0]
  here_n = (place_n >= 0) & (place_n < width)
  # A stale column says -inf, which must not replace what its own tile has said.
  own_n = jnp.where(here_n, jnp.maximum(own_n, found_n), own_n)
  return own_n, new_top_n, sum_n * jnp.exp(top_n - shift_n) + tile_sum_n


def _gradients(plan, hidden_ND, weight_VD, bias_V, token_N, z, cotangent_N):
  """Cotangents of hidden, weight and bias: those of the scores are (onehot - p) · cotangent.

  Scores are [v, n] here, so that both products run along the rows of what they read: that of
  hidden is kept as [D, N], and only the tile of the weight is transposed, once.
  """
  tile, (n, d), v = plan.tile, hidden_ND.shape, weight_VD.shape[0]
  n_tiles, v_tiles = math.ceil(n / tile.tokens), math.ceil(v / tile.vocab)
  per_token = (hidden_ND, token_N, z.top_N, z.log_sum_N, cotangent_N.astype(jnp.float32))

  def vocab_step(carry, v_index):
    d_hidden_DN, d_weight_VD, d_bias_V = carry
    v_edge = _edge(v_index, tile.vocab, v)
    weight_vD = _rows(weight_VD, v_edge, tile.vocab).astype(plan.dtype)
    # The barrier keeps the compiler from folding the transposition into the product.
    weight_Dv = lax.optimization_barrier(weight_vD.T)
    bias_v = None if bias_V is None else _rows(bias_V, v_edge, tile.vocab)
    column_v = v_edge.start + jnp.arange(tile.vocab, dtype=jnp.int32)

    def token_step(carry, n_index):
      d_hidden_DN, d_weight_vD, d_bias_v = carry
      n_edge = _edge(n_index, tile.tokens, n)
      hidden_nD, token_n, top_n, log_sum_n, cotangent_n = (
        _rows(x, n_edge, tile.tokens) for x in per_token
      )
      hidden_nD = hidden_nD.astype(plan.dtype)
      score_vn = linear_scores(weight_vD, hidden_nD)
      if bias_v is not None:
        score_vn = score_vn + bias_v.astype(jnp.float32)[:, None]
      prob_vn = jnp.exp((score_vn - top_n) - log_sum_n)
      scale_n = jnp.where(n_edge.fresh, cotangent_n, 0.0)
      d_score_vn = ((column_v[:, None] == token_n) - prob_vn) * scale_n
      if v % tile.vocab:
        d_score_vn = jnp.where(v_edge.fresh[:, None], d_score_vn, 0.0)
      if bias_v is not None:
        d_bias_v = d_bias_v + d_score_vn.sum(axis=1)
      d_score_vn = d_score_vn.astype(plan.dtype)
      d_weight_vD = d_weight_vD + _product(d_score_vn, hidden_nD)
      d_hidden_DN = _add(d_hidden_DN, n_edge, _product(weight_Dv, d_score_vn), axis=1)
      return (d_hidden_DN, d_weight_vD, d_bias_v), None

    no_bias = None if bias_V is None else jnp.zeros((tile.vocab,), jnp.float32)
    start = d_hidden_DN, jnp.zeros((tile.vocab, d), jnp.float32), no_bias
    (d_hidden_DN, d_weight_vD, d_bias_v), _ = lax.scan(
      token_step, start, jnp.arange(n_tiles, dtype=jnp.int32)
    )
    if bias_V is not None:
      d_bias_V = _add(d_bias_V, v_edge, d_bias_v)
    return (d_hidden_DN, _add(d_weight_VD, v_edge, d_weight_vD), d_bias_V), None

  start = (
    jnp.zeros((d, n), jnp.float32),
    jnp.zeros((v, d), weight_VD.dtype),
    None if bias_V is None else jnp.zeros((v,), bias_V.dtype),
  )
  (d_hidden_DN, d_weight_VD, d_bias_V), _ = lax.scan(
    vocab_step, start, jnp.arange(v_tiles, dtype=jnp.int32)
  )
  return d_hidden_DN.T.astype(hidden_ND.dtype), d_weight_VD, d_bias_V
