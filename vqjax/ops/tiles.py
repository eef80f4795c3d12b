"""Functions of the scores hidden · weightᵀ + bias, tile by tile, with gradients.

Tiles are two-dimensional. The vocabulary is the outer loop, so that each tile of the weight is read
once and its gradient is written once; the tokens are the inner loop. A function keeps [N]-sized
statistics of the scores, which are merged from tile to tile (`fold`). Its gradient computes the
scores of each tile once more, from a rule for the cotangent of a tile of scores (`gradients`).

Operands are never padded, which would copy them: the last tile starts early enough to fit, and
overlaps its neighbour. Overlapping rows are masked; overlapping tokens have statistics in both
tiles, and those of the first are returned. Tokens are [P, N, ...], one shard for each device that
they are spread over (`vocab_parallel.TokenShards`); P is 1 without a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from vqjax.ops import device, vocab_parallel
from vqjax.ops.output_functions import OutputFunction
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.vocab_parallel import TokenShards, varying


class Tile(NamedTuple):
  """Number of tokens and of vocabulary rows that are scored at once."""

  tokens: int
  vocab: int


def default_tile(tokens: int, vocab: int, platform: str = "cpu", devices: int = 1) -> Tile:
  """The default tile for N tokens and V rows on one of `devices` devices.

  `platform` is "cpu", "gpu", "tpu", ...; the largest tile of each is in `vqjax.ops.device`. Each
  axis is cut into equal parts whose size is a multiple of 64. Where no such size divides the axis,
  the parts are rounded up, so that the last tile overlaps little.
  """
  return _default_tile(device.of(platform, devices=devices), tokens, vocab)


def _default_tile(limits, tokens, vocab):
  return Tile(_part(tokens, limits.tokens), _part(vocab, limits.vocab))


def most_scores() -> int:
  """Number of scores in the largest default tile of the device in use."""
  limits = device.current()
  return limits.tokens * limits.vocab


def are_kept(scores: int) -> bool:
  """Whether so many scores are kept for the gradient, instead of computed once more."""
  return 4 * scores <= device.current().kept


def _part(size, limit):
  """A multiple of 64 that divides `size`, or covers it in ceil(size / limit) parts."""
  least = max(1, math.ceil(size / limit))
  for count in range(least, 2 * least):
    if size % (64 * count) == 0:
      return size // count
  return max(1, min(size, 64 * math.ceil(size / least / 64)))


def cut_tile(tile: tuple[int, int] | None, tokens: int, vocab: int) -> Tile:
  """The given tile, or the default one, cut to the tokens and rows of one device.

  Raises:
    ValueError: `tile` is not two ints of at least 1.
  """
  if tile is None:
    return _default_tile(device.current(), tokens, vocab)
  sides = tile if isinstance(tile, (tuple, list)) else ()
  if len(sides) != 2 or not all(isinstance(side, int) and side >= 1 for side in sides):
    raise ValueError(
      f"`tile` must be (tokens, vocabulary rows), two ints of at least 1; got {tile}. Use"
      " None for the default."
    )
  return Tile(min(tile[0], tokens), min(tile[1], vocab))


class Cut(NamedTuple):
  """Tile and token shards of a computation, equal in its two passes."""

  tile: Tile
  shards: TokenShards


class Scoring(NamedTuple):
  """Computation of scores from hidden and weight.

  Attributes:
    dtype: dtype of the matrix products' operands, to which each tile is cast.
    output: function of each score, such as a cap, or None.
    temperature: divides the scores, after the function.
  """

  dtype: jnp.dtype
  output: OutputFunction | None = None
  temperature: float = 1.0

  def finish(self, product: Array, bias: Array | None) -> Array:
    """Scores from hidden · weightᵀ; a bias of -inf removes its row under a function too."""
    raw = product if bias is None else product + bias
    if self.output is not None and bias is None:
      raw = self.output(raw)
    elif self.output is not None:
      # A cap would turn the -inf of a removed row into -c, and other functions have no slope there.
      removed = jnp.isneginf(bias)
      raw = jnp.where(removed, -jnp.inf, self.output(jnp.where(removed, 0.0, raw)))
    return raw if self.temperature == 1 else raw / self.temperature

  def pull_back(self, score: Array, d_score: Array) -> Array:
    """The cotangent of hidden · weightᵀ + bias, from that of the finished scores."""
    if self.output is not None:
      # The score of a removed row is -inf, where a slope would meet a cotangent of 0 as nan.
      finite = jnp.where(jnp.isneginf(score), 0.0, score)
      d_score = d_score * self.output.slope(finite * self.temperature)
    return d_score if self.temperature == 1 else d_score / self.temperature


class Linear(NamedTuple):
  """Operands: hidden [P, N, D], weight [V, D] as `RowFactory`, bias [V] or None."""

  hidden: Array
  weight: RowFactory
  bias: Array | None


class Edge(NamedTuple):
  """Start of a tile, and which of its entries no earlier tile has covered."""

  start: Array
  fresh: Array


def edge(index: Array, size: int, total: int) -> Edge:
  """Tile `index`; the last one is moved back to end at `total`."""
  nominal = index * size
  start = jnp.minimum(nominal, total - size)
  return Edge(start, start + jnp.arange(size, dtype=jnp.int32) >= nominal)


class TokenTiles(NamedTuple):
  """Division of [P, N, ...] arrays into tiles of tokens; the last may overlap its neighbour."""

  shards: TokenShards
  size: int
  total: int

  @property
  def count(self) -> int:
    """Number of tiles."""
    return math.ceil(self.total / self.size)

  @property
  def ragged(self) -> bool:
    """Whether the last tile overlaps its neighbour."""
    return self.total % self.size != 0

  def split(self, tree: Any) -> Any:
    """[P, N, ...] -> [tiles, P, n, ...]; a copy, for arrays that have few numbers a token."""

    def split(x):
      whole = x[:, : self.total // self.size * self.size]
      tiles = whole.reshape(x.shape[0], -1, self.size, *x.shape[2:])
      if self.ragged:
        tiles = jnp.concatenate([tiles, x[:, None, self.total - self.size :]], axis=1)
      return self.shards.keep(jnp.moveaxis(tiles, 1, 0), axis=1)

    return jax.tree.map(split, tree)

  def join(self, tree: Any) -> Any:
    """[tiles, P, n, ...] -> [P, N, ...], the inverse of `split`."""
    return jax.tree.map(lambda x: self.flat(jnp.moveaxis(x, 0, 1)), tree)

  def flat(self, x: Array) -> Array:
    """[P, tiles, n, ...] -> [P, N, ...], each token from the first tile that has it."""
    if not self.ragged:
      return x.reshape(x.shape[0], self.total, *x.shape[3:])
    whole = x[:, :-1].reshape(x.shape[0], -1, *x.shape[3:])
    return jnp.concatenate([whole, x[:, -1, self.size - self.total % self.size :]], axis=1)

  def at(self, x: Array, index: Array) -> Array:
    """Tile [P, n, ...] of an array [P, N, ...] that is not copied."""
    if self.ragged:
      start = edge(index, self.size, self.total).start
      return lax.dynamic_slice_in_dim(x, start, self.size, axis=1)
    # An index of whole tiles tells the compiler what a start does not: that slices are aligned.
    tiles = x.reshape(x.shape[0], self.count, self.size, *x.shape[2:])
    return lax.dynamic_index_in_dim(tiles, index, axis=1, keepdims=False)


def product(a: Array, b: Array, contract: Any, batch: Any = ((), ())) -> Array:
  """Matrix product of tiles, in float32 whatever the operands are."""
  return lax.dot_general(a, b, (contract, batch), preferred_element_type=jnp.float32)


class Shortcut(NamedTuple):
  """A faster merge that fails for some scores.

  Attributes:
    merge: as the exact merge, which is run again for a tile of rows where this one fails.
    failed: (carry before, carry after all tokens have met a tile of rows) -> bool [].
  """

  merge: Callable[[Any, tuple[Array, ...], Int[Array, ""], Any], Any]
  failed: Callable[[Any, Any], Array]


def fold(
  cut: Cut,
  scorings: tuple[Scoring, ...],
  linears: tuple[Linear, ...],
  per_token: Any,
  carry: Any,
  merge: Callable[[Any, tuple[Array, ...], Int[Array, ""], Any], Any],
  shortcut: Shortcut | None = None,
) -> Any:
  """The carry after `merge` has added every tile of scores to it, one after another.

  Args:
    cut: tile and token shards.
    scorings: how each of `linears` is scored.
    linears: one or more layers over the same vocabulary and the same tokens.
    per_token: a tree of [P, N, ...] arrays.
    carry: a tree of [P, N, ...] arrays: statistics of no scores.
    merge: (carry [P, n, ...], scores [P, n, v] of each layer in float32, index of the first row,
      per_token [P, n, ...]) -> carry. It must leave out scores of -inf, which belong to no row.
    shortcut: a merge to try first, or None.
  """
  n, v = linears[0].hidden.shape[1], linears[0].weight.count
  tokens, height = TokenTiles(cut.shards, cut.tile.tokens, n), cut.tile.vocab
  # The carry of a loop inside of a `shard_map` must vary over an axis from the start or never.
  carry = varying((carry, per_token, linears))[0]
  carry, given = tokens.split((carry, per_token))
  index = jnp.arange(tokens.count, dtype=jnp.int32)

  # Rows outside, tokens inside: [N]-sized statistics are small enough to be read for every tile of
  # rows, the weight is not.
  def vocab_step(carry, v_index):
    v_edge = edge(v_index, height, v)
    rows = [_weight_and_bias(cut, s, x, v_edge.start) for s, x in zip(scorings, linears)]

    def add_rows(merge, carry):
      def token_step(_, tile):
        n_index, old, given = tile
        scores = []
        for scoring, layer, (weight_vD, bias_v) in zip(scorings, linears, rows):
          hidden_PnD = tokens.at(layer.hidden, n_index).astype(scoring.dtype)
          score_Pnv = scoring.finish(product(hidden_PnD, weight_vD, ((2,), (1,))), bias_v)
          # The tile before has scored the overlap: -inf leaves a sum of exp as it is, 0 would not.
          scores.append(jnp.where(v_edge.fresh, score_Pnv, -jnp.inf) if v % height else score_Pnv)
        # One merge for all layers, so that a distillation loss sees both scores of a tile at once.
        return None, merge(old, tuple(scores), v_edge.start, given)

      # Each tile of tokens has a carry of its own, so that an overlap is merged in both.
      return lax.scan(token_step, None, (index, carry, given))[1]

    if shortcut is None:
      return add_rows(merge, carry), None
    new = add_rows(shortcut.merge, carry)
    failed = shortcut.failed(carry, new)
    return lax.cond(failed, lambda: add_rows(merge, carry), lambda: new), None

  count = math.ceil(v / height)
  return tokens.join(lax.scan(vocab_step, carry, jnp.arange(count, dtype=jnp.int32))[0])


def all_scores(cut: Cut, scoring: Scoring, layer: Linear) -> Array:
  """All scores [V, P, N], where they are few enough to be kept (`are_kept`)."""
  part = tile_rows(_whole(cut, layer), scoring, layer, jnp.int32(0))
  raw = product(part.weight, layer.hidden.astype(scoring.dtype), ((1,), (2,)))
  return scoring.finish(raw, part.bias)


def _whole(cut, layer):
  return cut._replace(tile=Tile(layer.hidden.shape[1], layer.weight.count))


def first_scores(cut: Cut, scoring: Scoring, layer: Linear) -> Array:
  """Scores [P, N, r] of the first few rows."""
  few = cut._replace(tile=Tile(cut.tile.tokens, min(cut.tile.vocab, 16)))
  weight_rD, bias_r = _weight_and_bias(few, scoring, layer, jnp.int32(0))
  raw = product(layer.hidden.astype(scoring.dtype), weight_rD, ((2,), (1,)))
  return scoring.finish(raw, bias_r)


def _weight_and_bias(cut, scoring, layer, start):
  """A tile of rows [v, D], cast and replicated, and its bias [v]."""
  weight_vD = layer.weight.part(start, cut.tile.vocab).all().astype(scoring.dtype)
  if layer.bias is None:
    return cut.shards.whole(weight_vD), None
  bias_v = lax.dynamic_slice_in_dim(layer.bias, start, cut.tile.vocab)
  return cut.shards.whole(weight_vD), bias_v.astype(jnp.float32)


def gradients(
  cut: Cut,
  scorings: tuple[Scoring, ...],
  linears: tuple[Linear, ...],
  per_token: Any,
  d_scores: Callable[[tuple[Array, ...], Array, Any], tuple[Array, ...]],
  kept: tuple[Array, ...] | None = None,
) -> tuple[Linear, ...]:
  """Cotangents of every layer's hidden, weight (floating-point arrays) and bias.

  Scores are [v, P, n] here, so that both products read their operands along rows. Unused
  gradients are computed too, as far as JAX knows: XLA removes them, with their products and
  buffers, from the loops of a compiled program.

  Args:
    cut: tile and token shards, as in the forward pass.
    scorings: as in the forward pass.
    linears: as in the forward pass.
    per_token: a tree of [P, N, ...] arrays.
    d_scores: (scores [v, P, n] of each layer, index of each row [v, 1, 1], per_token [P, n, ...])
      -> the cotangent [v, P, n] of each layer's scores. A row that is removed by a bias of -inf
      must get 0.
    kept: all scores [V, P, N] of each layer, which are not computed again, or None.
  """
  cut = cut if kept is None else _whole(cut, linears[0])
  n, v = linears[0].hidden.shape[1], linears[0].weight.count
  tokens, height = TokenTiles(cut.shards, cut.tile.tokens, n), cut.tile.vocab
  given = tokens.split(varying((per_token, linears))[0])
  index = jnp.arange(tokens.count, dtype=jnp.int32)

  def vocab_step(carry, v_index):
    v_edge = edge(v_index, height, v)
    rows = [tile_rows(cut, s, x, v_edge.start) for s, x in zip(scorings, linears)]
    row_v11 = (v_edge.start + jnp.arange(height, dtype=jnp.int32))[:, None, None]

    def token_step(sums, tile):
      n_index, given = tile
      hiddens = [tokens.at(x.hidden, n_index).astype(s.dtype) for s, x in zip(scorings, linears)]
      scores = kept or [
        scoring.finish(product(part.weight, hidden_PnD, ((1,), (2,))), part.bias)
        for scoring, part, hidden_PnD in zip(scorings, rows, hiddens)
      ]
      cotangents = d_scores(tuple(scores), row_v11, given)
      new = []
      for i, d_vPn in enumerate(cotangents):
        d_vPn = scorings[i].pull_back(scores[i], d_vPn)
        if tokens.ragged:
          d_vPn = jnp.where(edge(n_index, tokens.size, n).fresh, d_vPn, 0.0)
        if v % height:
          d_vPn = jnp.where(v_edge.fresh[:, None, None], d_vPn, 0.0)
        new.append(_add_tile(sums[i], rows[i], hiddens[i], d_vPn, n_index))
      return new, None

    # The gradient of a tile of rows is complete after its inner loop, so that it is written once.
    start = [
      _Sums(
        hidden=gradient.hidden,
        weight=jnp.zeros((layer.hidden.shape[0], height, layer.hidden.shape[2]), jnp.float32),
        bias=None
        if layer.bias is None
        else jnp.zeros((height, layer.hidden.shape[0]), jnp.float32),
      )
      for gradient, layer in zip(carry, linears)
    ]
    start = varying((start, linears, per_token))[0]
    sums, _ = lax.scan(token_step, start, (index, given))
    return [
      _store_rows(gradient, part, layer, v_edge.start)
      for gradient, part, layer in zip(carry, sums, linears)
    ], None

  # hidden meets every tile of rows: its gradient is summed in float32 and rounded at the end. It
  # has an axis of tiles, since an update of a whole tile fuses into the product that it adds.
  shape = lambda x: (x.shape[0], tokens.count, tokens.size, x.shape[2])
  start = [
    Linear(
      hidden=cut.shards.keep(jnp.zeros(shape(layer.hidden), jnp.float32)),
      weight=layer.weight.zero_gradient(height),
      bias=None if layer.bias is None else jnp.zeros_like(layer.bias),
    )
    for layer in linears
  ]
  start = varying((start, linears, per_token))[0]
  count = math.ceil(v / height)
  totals, _ = lax.scan(vocab_step, start, jnp.arange(count, dtype=jnp.int32))
  return tuple(
    total._replace(
      hidden=tokens.flat(total.hidden.astype(layer.hidden.dtype)),
      weight=layer.weight.rounded(total.weight),
    )
    for total, layer in zip(totals, linears)
  )


class TileRows(NamedTuple):
  """A tile of a layer's rows: [v, D], its transpose [D, v] or None, and the bias [v, 1, 1]."""

  weight: Array
  transposed: Array | None
  bias: Array | None

  def d_hidden(self, d_vPn: Array) -> Array:
    """Contribution of a tile of cotangents to that of hidden, as `d_hidden_shape` says."""
    if self.transposed is None:
      return product(d_vPn, self.weight, ((0,), (0,)))
    return product(self.transposed, d_vPn, ((1,), (0,)))


def tile_rows(cut: Cut, scoring: Scoring, layer: Linear, start: Array) -> TileRows:
  """Rows from `start` on, and for a CPU their transpose, once for all tiles of tokens."""
  weight_vD, bias_v = _weight_and_bias(cut, scoring, layer, start)
  transposed = None
  if _reads_rows():
    # Without the barrier XLA folds the transposition into each product, which would then read the
    # weight across its rows.
    transposed = lax.optimization_barrier(weight_vD.T)
  return TileRows(weight_vD, transposed, None if bias_v is None else bias_v[:, None, None])


def _reads_rows():
  """Whether products are fast only where both operands are read along their rows."""
  return vocab_parallel.platform() == "cpu"


def d_hidden_shape(shape: tuple[int, int, int]) -> tuple[int, int, int]:
  """Shape of `TileRows.d_hidden` for hidden [P, n, D]: [D, P, n] on a CPU."""
  shards, tokens, dim = shape
  return (dim, shards, tokens) if _reads_rows() else shape


def d_hidden_of_tokens(d_hidden: Array) -> Array:
  """The cotangent of hidden as [P, n, D]."""
  return jnp.moveaxis(d_hidden, 0, 2) if _reads_rows() else d_hidden


class _Sums(NamedTuple):
  """Gradients while the tokens meet one tile of rows, float32.

  Attributes:
    hidden: [P, tiles, n, D], over all tiles of rows.
    weight: [P, v, D], of the tile's rows.
    bias: [v, P], of the tile's rows, or None.
  """

  hidden: Array
  weight: Array
  bias: Array | None


def _add_tile(sums, rows, hidden_PnD, d_vPn, index):
  """The sums with the contributions of one tile of tokens."""
  d_hidden, d_weight, d_bias = sums
  if d_bias is not None:
    # Before the cast below: a sum of bfloat16 numbers over many tokens would stop growing.
    d_bias = d_bias + d_vPn.sum(axis=2)
  d_vPn = d_vPn.astype(hidden_PnD.dtype)
  # Shards stay apart: a sum over them would be an all-reduce at every tile.
  d_weight = d_weight + product(d_vPn, hidden_PnD, ((2,), (1,)), ((1,), (0,)))
  part = rows.d_hidden(d_vPn)
  if _reads_rows():
    # The barrier keeps XLA from fusing the transposition into the product, as in `tile_rows`.
    part = lax.optimization_barrier(part)
  part_PnD = d_hidden_of_tokens(part)
  new = lax.dynamic_index_in_dim(d_hidden, index, axis=1, keepdims=False) + part_PnD
  d_hidden = lax.dynamic_update_index_in_dim(d_hidden, new, index, axis=1)
  return _Sums(d_hidden, d_weight, d_bias)


def _store_rows(gradient, sums, layer, start):
  """The gradient of a layer with the sums of a tile of rows added."""
  weight = layer.weight.add_gradient(gradient.weight, start, sums.weight.sum(axis=0))
  bias = gradient.bias
  if bias is not None:
    update = sums.bias.sum(axis=1)
    old = lax.dynamic_slice_in_dim(bias, start, update.shape[0])
    bias = lax.dynamic_update_slice_in_dim(bias, old + update.astype(bias.dtype), start, axis=0)
  return Linear(sums.hidden, weight, bias)
