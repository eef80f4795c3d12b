"""How is a function of all scores hidden · weightᵀ + bias computed tile by tile, and its gradient?

Tiles are two-dimensional. The vocabulary is the outer loop, so each tile of the weight is read once
and its gradient is written once; the tokens are the inner loop. What a function keeps of the scores
is [N]-sized and is merged from tile to tile (`fold`); its gradient needs the scores of each tile
once more (`gradients`), and says what the cotangent of a tile of scores is.

A ragged edge is never padded: the last tile starts early enough to fit, overlaps its neighbour,
and the overlap is masked, so that no operand is copied. Tokens come in parts, [P, N, ...], one for
each device they are spread over (`vocab_parallel.TokenShards`); P is 1 without a mesh.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from vqjax.ops import vocab_parallel
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.vocab_parallel import TokenShards, varying


class Tile(NamedTuple):
  """How many tokens and how many vocabulary rows are scored at once."""

  tokens: int
  vocab: int


def default_tile(tokens: int, vocab: int, platform: str = "cpu", devices: int = 1) -> Tile:
  """The tile for N tokens and V rows on one of some devices ("cpu", "gpu", "tpu", ...).

  At most 512 x 1280 scores on a CPU: 2.5 MiB in float32, near a cache, and large enough for its
  matrix products. Several CPU devices are parts of one processor, whose cache they share: 256 x 320
  each. Elsewhere at most 4096 x 8192 (128 MiB): beside such a product its launch takes no time.
  Each axis is cut into equal parts (rounded up to a multiple of 64), so the last tile overlaps
  little.
  """
  most = _most(platform, devices)
  return Tile(_even_part(tokens, most.tokens), _even_part(vocab, most.vocab))


def _most(platform: str, devices: int) -> Tile:
  if platform == "cpu":
    return Tile(512, 1280) if devices == 1 else Tile(256, 320)
  return Tile(4096, 8192)


def most_scores() -> int:
  """How many scores a device holds at once: those of a default tile."""
  most = _most(vocab_parallel.platform(), vocab_parallel.devices())
  return most.tokens * most.vocab


def _even_part(size: int, limit: int) -> int:
  """The smallest multiple of 64 that covers `size` in ceil(size / limit) parts, at most `size`."""
  count = max(1, math.ceil(size / limit))
  return max(1, min(size, 64 * math.ceil(size / count / 64)))


def cut_tile(tile: tuple[int, int] | None, tokens: int, vocab: int) -> Tile:
  """The tile that was asked for, or the default one, for so many tokens and rows on a device."""
  if tile is None:
    return default_tile(tokens, vocab, vocab_parallel.platform(), vocab_parallel.devices())
  whole = len(tile) == 2 and all(isinstance(side, int) for side in tile)
  if not whole or min(tile) < 1:
    problem = "has a side below 1" if whole else "is not two ints"
    raise ValueError(f"tile {tuple(tile)} {problem}; give (tokens, vocabulary rows)")
  return Tile(min(tile[0], tokens), min(tile[1], vocab))


class Cut(NamedTuple):
  """How a computation is cut; the same in its forward and its backward pass."""

  tile: Tile
  parts: TokenShards


class Scoring(NamedTuple):
  """How scores come from hidden and weight.

  Attributes:
    dtype: of the matrix products' operands, to which each tile is cast.
    softcap: c in c · tanh(score / c), or None.
    temperature: divides the scores, after the cap.
  """

  dtype: jnp.dtype
  softcap: float | None = None
  temperature: float = 1.0

  def finish(self, product: Array, bias: Array | None) -> Array:
    """Scores from hidden · weightᵀ; a bias of -inf removes a row under a cap too."""
    raw = product if bias is None else product + bias
    if self.softcap is not None:
      raw = self.softcap * jnp.tanh(raw / self.softcap)
      raw = raw if bias is None else jnp.where(jnp.isneginf(bias), -jnp.inf, raw)
    return raw if self.temperature == 1 else raw / self.temperature

  def pull_back(self, score: Array, d_score: Array) -> Array:
    """The cotangent of `raw`, from the finished scores and their cotangent."""
    if self.softcap is not None:
      slope = 1 - (score * (self.temperature / self.softcap)) ** 2
      # The slope of a removed row is not finite.
      d_score = d_score * jnp.where(jnp.isneginf(score), 0.0, slope)
    return d_score if self.temperature == 1 else d_score / self.temperature


class Linear(NamedTuple):
  """What is scored: hidden [P, N, D], weight [V, D] as `RowFactory`, bias [V] or None."""

  hidden: Array
  weight: RowFactory
  bias: Array | None


@jax.tree_util.register_static
class Static(NamedTuple):
  """Plain Python values among the arrays that a forward pass saves for the backward pass."""

  value: Any


def values(operands: Any) -> Any:
  """The arrays of a custom VJP's forward pass with symbolic zeros."""
  return jax.tree.map(lambda x: x.value, operands)


def perturbed(operands: Any) -> Any:
  """Which of them need a gradient: the same tree, of booleans."""
  return jax.tree.map(lambda x: x.perturbed, operands)


def wants(wish: Any) -> bool:
  """Whether anything of a tree of booleans, or None, is wanted."""
  return any(jax.tree.leaves(wish))


class Edge(NamedTuple):
  """Where a tile starts, and which of its places no earlier tile has covered."""

  start: Array
  fresh: Array


def edge(index: Array, size: int, total: int) -> Edge:
  """Tile `index`; the last one is moved back to end at `total`, its overlap marked stale."""
  nominal = index * size
  start = jnp.minimum(nominal, total - size)
  return Edge(start, start + jnp.arange(size, dtype=jnp.int32) >= nominal)


def _rows(array, start, size):
  return lax.dynamic_slice_in_dim(array, start, size)


def _tokens(tree, start, size):
  return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=1), tree)


def _product(a, b, contract, batch=((), ())):
  return lax.dot_general(a, b, (contract, batch), preferred_element_type=jnp.float32)


def _indices(count):
  return jnp.arange(count, dtype=jnp.int32)


def fold(
  cut: Cut,
  scorings: tuple[Scoring, ...],
  linears: tuple[Linear, ...],
  per_token: Any,
  carry: Any,
  merge: Callable[[Any, tuple[Array, ...], Int[Array, ""], Any], Any],
) -> Any:
  """What `merge` makes of every tile of scores, one after another.

  Args:
    cut: tiles and parts.
    scorings: how each of `linears` is scored.
    linears: one or more layers over the same vocabulary and the same tokens.
    per_token: a tree of [P, N, ...] arrays.
    carry: a tree of [P, N, ...] arrays: what is kept of the scores so far.
    merge: (carry [P, n, ...], scores [P, n, v] of each layer in float32, index of the first row,
      per_token [P, n, ...]) -> carry. A score of -inf belongs to no row.
  """
  tile, n, v = cut.tile, linears[0].hidden.shape[1], linears[0].weight.count
  n_tiles, v_tiles = math.ceil(n / tile.tokens), math.ceil(v / tile.vocab)
  carry = varying((carry, per_token, linears))[0]

  def vocab_step(carry, v_index):
    v_edge = edge(v_index, tile.vocab, v)
    rows = [_weight_and_bias(cut, s, x, v_edge.start) for s, x in zip(scorings, linears)]

    def token_step(carry, n_index):
      n_edge = edge(n_index, tile.tokens, n)
      scores = []
      for scoring, layer, (weight_vD, bias_v) in zip(scorings, linears, rows):
        hidden_PnD = _tokens(layer.hidden, n_edge.start, tile.tokens).astype(scoring.dtype)
        raw_Pnv = _product(hidden_PnD, weight_vD, ((2,), (1,)))
        score_Pnv = scoring.finish(raw_Pnv, bias_v)
        # A stale column was scored by the tile before: zero would join a sum, -inf does not.
        scores.append(jnp.where(v_edge.fresh, score_Pnv, -jnp.inf) if v % tile.vocab else score_Pnv)
      old, given = _tokens((carry, per_token), n_edge.start, tile.tokens)
      new = merge(old, tuple(scores), v_edge.start, given)

      def put(whole, new, old):
        fresh = n_edge.fresh.reshape(1, -1, *[1] * (new.ndim - 2))
        kept = jnp.where(fresh, new, old) if n % tile.tokens else new
        return lax.dynamic_update_slice_in_dim(whole, kept, n_edge.start, axis=1)

      return jax.tree.map(put, carry, new, old), None

    return lax.scan(token_step, carry, _indices(n_tiles))[0], None

  return lax.scan(vocab_step, carry, _indices(v_tiles))[0]


def _weight_and_bias(cut, scoring, layer, start):
  """A tile of rows, cast; where they are spread over automatic axes they are fetched here."""
  weight_vD = layer.weight.part(start, cut.tile.vocab).all().astype(scoring.dtype)
  if layer.bias is None:
    return cut.parts.whole(weight_vD), None
  return cut.parts.whole(weight_vD), _rows(layer.bias, start, cut.tile.vocab).astype(jnp.float32)


def gradients(
  cut: Cut,
  scorings: tuple[Scoring, ...],
  linears: tuple[Linear, ...],
  wanted: tuple[Linear, ...],
  per_token: Any,
  d_scores: Callable[[tuple[Array, ...], Array, Any], tuple[Array | None, ...]],
) -> tuple[Linear, ...]:
  """Cotangents of every layer's hidden, weight and bias; None for those not `wanted`.

  Scores are [v, P, n] here, so that both products run along the rows of what they read.

  Args:
    cut: tiles and parts, as in the forward pass.
    scorings: as in the forward pass.
    linears: as in the forward pass.
    wanted: a `Linear` of booleans for each layer: what is not wanted is not computed, and is None
      in the result.
    per_token: a tree of [P, N, ...] arrays.
    d_scores: (scores [v, P, n] of each layer, index of each row [v, 1, 1], per_token [P, n, ...])
      -> the cotangent [v, P, n] of each layer's scores; None for a layer of which nothing is
      wanted. A row that is removed by a bias of -inf must get 0.
  """
  tile, n, v = cut.tile, linears[0].hidden.shape[1], linears[0].weight.count
  n_tiles, v_tiles = math.ceil(n / tile.tokens), math.ceil(v / tile.vocab)
  layers = list(zip(scorings, wanted, linears))

  def vocab_step(carry, v_index):
    v_edge = edge(v_index, tile.vocab, v)
    rows = [_tile_rows(cut, scoring, layer, v_edge.start) for scoring, _, layer in layers]
    row_v11 = (v_edge.start + _indices(tile.vocab))[:, None, None]

    def token_step(carry, n_index):
      n_edge = edge(n_index, tile.tokens, n)
      given = _tokens(per_token, n_edge.start, tile.tokens)
      scored = [
        _scored(scoring, layer, part, n_edge.start, tile.tokens)
        for (scoring, _, layer), part in zip(layers, rows)
      ]
      cotangents = d_scores(tuple(score for _, score in scored), row_v11, given)
      stale = _Stale(
        None if n % tile.tokens == 0 else ~n_edge.fresh,
        None if v % tile.vocab == 0 else ~v_edge.fresh[:, None, None],
      )
      new = [
        _added(sums, wish, part, hidden, stale.zeroed(scoring.pull_back(score, d)), n_edge.start)
        if wants(wish)
        else sums
        for sums, (scoring, wish, _), part, (hidden, score), d in zip(
          carry, layers, rows, scored, cotangents
        )
      ]
      return new, None

    empty = [
      _empty_sums(tile, wish, layer)._replace(hidden=whole.hidden)
      for (_, wish, layer), whole in zip(layers, carry)
    ]
    start = varying((empty, linears, per_token))[0]
    sums, _ = lax.scan(token_step, start, _indices(n_tiles))
    return [
      _stored(whole, part, wish, layer, v_edge.start)
      for whole, part, (_, wish, layer) in zip(carry, sums, layers)
    ], None

  start = [_zero_gradients(cut, wish, layer) for _, wish, layer in layers]
  start = varying((start, linears, per_token))[0]
  found, _ = lax.scan(vocab_step, start, _indices(v_tiles))
  return tuple(
    layer._replace(
      hidden=None if layer.hidden is None else layer.hidden.astype(x.hidden.dtype),
      weight=x.weight.rounded(layer.weight),
    )
    for layer, x in zip(found, linears)
  )


class _TileRows(NamedTuple):
  """A tile of a layer's rows: [v, D], its transpose [D, v], and the bias [v, 1, 1]."""

  weight: Array
  transposed: Array
  bias: Array | None


def _tile_rows(cut, scoring, layer, start):
  weight_vD, bias_v = _weight_and_bias(cut, scoring, layer, start)
  # The barrier keeps the compiler from folding the transposition into the product.
  transposed = lax.optimization_barrier(weight_vD.T)
  return _TileRows(weight_vD, transposed, None if bias_v is None else bias_v[:, None, None])


def _scored(scoring, layer, rows, start, size):
  """A tile's hidden vectors [P, n, D], and their scores [v, P, n]."""
  hidden_PnD = _tokens(layer.hidden, start, size).astype(scoring.dtype)
  raw_vPn = _product(rows.weight, hidden_PnD, ((1,), (2,)))
  return hidden_PnD, scoring.finish(raw_vPn, rows.bias)


class _Stale(NamedTuple):
  """The tokens and the rows of a tile that an earlier one has covered; None: there are none."""

  tokens: Array | None
  rows: Array | None

  def zeroed(self, d_vPn: Array) -> Array:
    for stale in self:
      d_vPn = d_vPn if stale is None else jnp.where(stale, 0.0, d_vPn)
    return d_vPn


def _zero_gradients(cut, wish, layer):
  """[P, N, D] in float32, the rows' and [V] in their own dtype; None for what is not wanted."""
  return Linear(
    cut.parts.keep(jnp.zeros(layer.hidden.shape, jnp.float32)) if wish.hidden else None,
    layer.weight.zeros(wish.weight),
    jnp.zeros(layer.bias.shape, layer.bias.dtype) if wish.bias else None,
  )


def _empty_sums(tile, wish, layer):
  """What a tile of rows adds up: [P, v, D] and [v, P]."""
  p, _, d = layer.hidden.shape
  return Linear(
    None,
    jnp.zeros((p, tile.vocab, d), jnp.float32) if wants(wish.weight) else None,
    jnp.zeros((tile.vocab, p), jnp.float32) if wish.bias else None,
  )


def _added(sums, wish, rows, hidden_PnD, d_vPn, start):
  """The gradient of all hidden vectors and the sums of a tile of rows, with those of one tile."""
  d_hidden, d_weight, d_bias = sums
  if wish.bias:
    d_bias = d_bias + d_vPn.sum(axis=2)
  d_vPn = d_vPn.astype(hidden_PnD.dtype)
  if wants(wish.weight):
    # A sum for each part: one over the devices of all parts would be sent at every tile.
    d_weight = d_weight + _product(d_vPn, hidden_PnD, ((2,), (1,)), ((1,), (0,)))
  if wish.hidden:
    part_DPn = lax.optimization_barrier(_product(rows.transposed, d_vPn, ((1,), (0,))))
    old = lax.dynamic_slice_in_dim(d_hidden, start, d_vPn.shape[2], axis=1)
    new = old + jnp.moveaxis(part_DPn, 0, 2)
    d_hidden = lax.dynamic_update_slice_in_dim(d_hidden, new, start, axis=1)
  return Linear(d_hidden, d_weight, d_bias)


def _stored(whole, sums, wish, layer, start):
  """The gradients with those of a tile of rows added where it starts; its stale rows are zero."""
  weight, bias = whole.weight, whole.bias
  if wants(wish.weight):
    d_rows = sums.weight.sum(axis=0)
    weight = layer.weight.with_gradient_of(weight, wish.weight, start, d_rows)
  if wish.bias:
    update = sums.bias.sum(axis=1)
    new = _rows(bias, start, update.shape[0]) + update.astype(bias.dtype)
    bias = lax.dynamic_update_slice_in_dim(bias, new, start, axis=0)
  return Linear(sums.hidden, weight, bias)
