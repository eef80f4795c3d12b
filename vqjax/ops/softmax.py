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
from jaxtyping import Array, Float, Int


class Tile(NamedTuple):
  """How many tokens and how many vocabulary rows are scored at once."""

  tokens: int
  vocab: int


def default_tile(tokens: int, vocab: int) -> Tile:
  """The tile for N tokens and V rows: at most 1024 x 1280 scores (5 MiB in float32).

  Large enough that a matrix unit is busy, small enough to stay near a cache. Each axis is cut into
  equal parts (rounded up to a multiple of 8), so the last tile overlaps little.
  """
  return Tile(_even_part(tokens, 1024), _even_part(vocab, 1280))


def _even_part(size: int, limit: int) -> int:
  """The smallest multiple of 8 that covers `size` in ceil(size / limit) parts, at most `size`."""
  parts = max(1, math.ceil(size / limit))
  return max(1, min(size, 8 * math.ceil(size / parts / 8)))


def linear_log_prob(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  tokens: Int[Array, "*B"],
  bias: Float[Array, "V"] | None = None,
  *,
  tile: tuple[int, int] | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of `tokens` under softmax(hidden · weightᵀ + bias).

  Exact: no sampling and no approximation; sums accumulate in float32 for bfloat16 and float32
  inputs, and the result is float32. Neither the forward nor the backward pass holds an array of
  N·V elements. A bias of -inf removes its row from the distribution. A token outside [0, V) has
  no probability: its result is nan, so that a loss over it cannot pass unnoticed.

  Differentiable (reverse mode, first order) in `hidden`, `weight` and `bias`.

  Args:
    hidden: one vector for each token.
    weight: one row for each word of the vocabulary.
    tokens: indices into the vocabulary.
    bias: one score for each word, added to hidden · weightᵀ.
    tile: (tokens, vocabulary rows) scored at once; `default_tile` by default.

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
  fitted = Tile(min(wanted.tokens, n), min(wanted.vocab, v))
  log_prob_N = _log_prob(fitted, hidden_ND, weight, bias, tokens.reshape(-1))
  return log_prob_N.reshape(tokens.shape)


def linear_scores(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  bias: Float[Array, "V"] | None = None,
) -> Float[Array, "*B V"]:
  """hidden · weightᵀ + bias, accumulated and returned in float32."""
  axes = ((hidden.ndim - 1,), (1,)), ((), ())
  scores = lax.dot_general(hidden, weight, axes, preferred_element_type=jnp.float32)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_prob(tile, hidden_ND, weight_VD, bias_V, token_N):
  return _forward(tile, hidden_ND, weight_VD, bias_V, token_N)[0]


def _forward(tile, hidden_ND, weight_VD, bias_V, token_N):
  log_z_N = _log_normalizer(tile, hidden_ND, weight_VD, bias_V)
  log_prob_N = _token_scores(hidden_ND, weight_VD, bias_V, token_N) - log_z_N
  return log_prob_N, (hidden_ND, weight_VD, bias_V, token_N, log_z_N)


def _backward(tile, saved, cotangent_N):
  hidden_ND, weight_VD, bias_V, token_N, log_z_N = saved
  d_hidden_ND, d_weight_VD, d_bias_V = _gradients(
    tile, hidden_ND, weight_VD, bias_V, token_N, log_z_N, cotangent_N
  )
  return d_hidden_ND, d_weight_VD, None if bias_V is None else d_bias_V, None


_log_prob.defvjp(_forward, _backward)


def _token_scores(hidden_ND, weight_VD, bias_V, token_N):
  """hidden · weight[token] + bias[token]; nan where the token is not in the vocabulary."""
  vocab = weight_VD.shape[0]
  known_N = (token_N >= 0) & (token_N < vocab)
  row_N = jnp.clip(token_N, 0, vocab - 1)
  score_N = jnp.einsum("nd,nd->n", hidden_ND, weight_VD[row_N], preferred_element_type=jnp.float32)
  if bias_V is not None:
    score_N = score_N + bias_V[row_N].astype(jnp.float32)
  return jnp.where(known_N, score_N, jnp.nan)


class _Edge(NamedTuple):
  """Where a tile starts, and which of its rows no earlier tile has covered."""

  start: Array
  fresh: Array


def _edge(index, size, total):
  """Tile `index`; the last one is moved back to end at `total`, its overlap marked stale."""
  nominal = index * size
  start = jnp.minimum(nominal, total - size)
  return _Edge(start, start + jnp.arange(size) >= nominal)


def _rows(array, edge, size):
  return lax.dynamic_slice_in_dim(array, edge.start, size)


def _add_rows(array, edge, update):
  """Adds `update` to the tile's rows, in place inside a loop; stale rows of it must be zero."""
  current = lax.dynamic_slice_in_dim(array, edge.start, update.shape[0])
  return lax.dynamic_update_slice_in_dim(
    array, current + update.astype(array.dtype), edge.start, axis=0
  )


def _tile_scores(hidden_nD, weight_vD, bias_v, fresh_v):
  score_nv = linear_scores(hidden_nD, weight_vD, bias_v)
  # A stale column was scored by the tile before: zero would join the sum, -inf does not.
  return jnp.where(fresh_v, score_nv, -jnp.inf)


def _log_normalizer(tile, hidden_ND, weight_VD, bias_V):
  """log sum_v exp(score_v) for each token, by a running maximum and a running sum."""
  (n, _), v = hidden_ND.shape, weight_VD.shape[0]
  n_tiles, v_tiles = math.ceil(n / tile.tokens), math.ceil(v / tile.vocab)

  def vocab_step(carry, v_index):
    v_edge = _edge(v_index, tile.vocab, v)
    weight_vD = _rows(weight_VD, v_edge, tile.vocab)
    bias_v = None if bias_V is None else _rows(bias_V, v_edge, tile.vocab)

    def token_step(carry, n_index):
      max_N, sum_N = carry
      n_edge = _edge(n_index, tile.tokens, n)
      score_nv = _tile_scores(
        _rows(hidden_ND, n_edge, tile.tokens), weight_vD, bias_v, v_edge.fresh
      )
      old_max_n, old_sum_n = (_rows(x, n_edge, tile.tokens) for x in (max_N, sum_N))
      new_max_n = jnp.maximum(old_max_n, score_nv.max(axis=1))
      # With every score so far at -inf the maximum is no number to subtract.
      shift_n = jnp.where(jnp.isneginf(new_max_n), 0.0, new_max_n)
      new_sum_n = old_sum_n * jnp.exp(old_max_n - shift_n) + jnp.exp(
        score_nv - shift_n[:, None]
      ).sum(axis=1)
      keep = lambda new, old: jnp.where(n_edge.fresh, new, old)
      put = lambda array, new: lax.dynamic_update_slice_in_dim(array, new, n_edge.start, axis=0)
      return (put(max_N, keep(new_max_n, old_max_n)), put(sum_N, keep(new_sum_n, old_sum_n))), None

    return lax.scan(token_step, carry, jnp.arange(n_tiles))[0], None

  start = jnp.full((n,), -jnp.inf, jnp.float32), jnp.zeros((n,), jnp.float32)
  (max_N, sum_N), _ = lax.scan(vocab_step, start, jnp.arange(v_tiles))
  return max_N + jnp.log(sum_N)


def _gradients(tile, hidden_ND, weight_VD, bias_V, token_N, log_z_N, cotangent_N):
  """Cotangents of hidden, weight and bias: those of the scores are (onehot - p) · cotangent."""
  (n, d), v = hidden_ND.shape, weight_VD.shape[0]
  n_tiles, v_tiles = math.ceil(n / tile.tokens), math.ceil(v / tile.vocab)
  cotangent_N = cotangent_N.astype(jnp.float32)

  def vocab_step(carry, v_index):
    d_hidden_ND, d_weight_VD, d_bias_V = carry
    v_edge = _edge(v_index, tile.vocab, v)
    weight_vD = _rows(weight_VD, v_edge, tile.vocab)
    bias_v = None if bias_V is None else _rows(bias_V, v_edge, tile.vocab)
    column_v = v_edge.start + jnp.arange(tile.vocab)

    def token_step(carry, n_index):
      d_hidden_ND, d_weight_vD, d_bias_v = carry
      n_edge = _edge(n_index, tile.tokens, n)
      hidden_nD, token_n, log_z_n, cotangent_n = (
        _rows(x, n_edge, tile.tokens) for x in (hidden_ND, token_N, log_z_N, cotangent_N)
      )
      score_nv = _tile_scores(hidden_nD, weight_vD, bias_v, v_edge.fresh)
      prob_nv = jnp.exp(score_nv - log_z_n[:, None])
      onehot_nv = (token_n[:, None] == column_v) & v_edge.fresh
      scale_n = jnp.where(n_edge.fresh, cotangent_n, 0.0)
      d_score_nv = (onehot_nv - prob_nv) * scale_n[:, None]
      d_bias_v = d_bias_v + d_score_nv.sum(axis=0)
      d_score_nv = d_score_nv.astype(weight_VD.dtype)
      dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)
      d_weight_vD = d_weight_vD + dot(d_score_nv, hidden_nD, (((0,), (0,)), ((), ())))
      d_hidden_nD = dot(d_score_nv, weight_vD, (((1,), (0,)), ((), ())))
      return (_add_rows(d_hidden_ND, n_edge, d_hidden_nD), d_weight_vD, d_bias_v), None

    zero = jnp.zeros((tile.vocab, d), jnp.float32), jnp.zeros((tile.vocab,), jnp.float32)
    (d_hidden_ND, d_weight_vD, d_bias_v), _ = lax.scan(
      token_step, (d_hidden_ND, *zero), jnp.arange(n_tiles)
    )
    d_weight_VD = _add_rows(d_weight_VD, v_edge, d_weight_vD)
    return (d_hidden_ND, d_weight_VD, _add_rows(d_bias_V, v_edge, d_bias_v)), None

  bias_dtype = jnp.float32 if bias_V is None else bias_V.dtype
  start = (
    jnp.zeros((n, d), jnp.float32),
    jnp.zeros((v, d), weight_VD.dtype),
    jnp.zeros((v,), bias_dtype),
  )
  (d_hidden_ND, d_weight_VD, d_bias_V), _ = lax.scan(vocab_step, start, jnp.arange(v_tiles))
  return d_hidden_ND.astype(hidden_ND.dtype), d_weight_VD, d_bias_V
