"""Functions of the scores hidden · weightᵀ + bias, tile by tile, with gradients.

`on_each_device` gives each device its own rows, and its tokens in shards; `fold` and `gradients`
are the two loops over the tiles there. `vqjax.ops.statistics`, `distillation`, `sparse_targets` and
`forward_mode` are what they compute: each has a body that calls `fold`, and a rule for `gradients`.
"""

# What the two loops do, with tiles of n tokens by v rows:
#
#   fold                                         gradients
#   for each tile of rows:    weight [v, D]      for each tile of rows:   weight [v, D]
#     for each tile of tokens: hidden [n, D]       for each tile of tokens: hidden [n, D]
#       scores = hidden · weightᵀ    [n, v]          scores, once more         [v, n]
#       carry[tokens] = merge(carry, scores)         d_scores = rule(scores)   [v, n]
#                                                    d_hidden[tokens] += d_scoresᵀ · weight
#                                                    sum over tokens  += d_scores · hidden
#                                                  d_weight[rows] = the sum, which is now complete
#
# Rows are the outer loop, so that a tile of the weight is read once and its gradient written once;
# [N]-sized statistics are small enough to be read for every tile of rows.
#
# Operands are never padded, which would copy them: the last tile starts early enough to fit.
#
#   rows     |----v----|----v----|----v----|        the last tile overlaps its neighbour:
#                                     |----v----|   its rows that were met before are masked,
#   tokens   |--n--|--n--|--n--|                    and of its tokens, whose statistics both
#                           |--n--|                 tiles have, those of the first are returned
#
# Tokens are [P, N, ...], one shard for each device that they are spread over (`TokenShards`), so
# that a tile takes n tokens of every shard and no device waits for another's; P is 1 on one device.
#
# Tokens that a mask leaves out are moved behind the others, and the loops over tiles of tokens end
# with the last one that counts: `Linear.counted` is their number.
#
# Raw scores of the first rows may be kept for the gradient (`kept_scores`), where memory is cheaper
# than their product: both loops then begin behind these rows.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from vqjax.ops import device, precision, symbolic, vocab_parallel
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.ops.scores import ScoreOptions
from vqjax.ops.vocab_parallel import Replicated, Sharded, TokenShards, varying
from vqjax.ops.vocabulary import check_arrays, check_given, check_one_each, check_vectors
from vqjax.types import Dtype

__all__ = ["default_tile"]


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
  return cut_tile(None, tokens, vocab, device.of(platform, devices=devices))


def most_scores() -> int:
  """Number of float32 scores that other loops than those over tiles compute at once."""
  limits = device.current()
  return min(limits.tokens * limits.vocab, 2**25)


def cut_tile(
  tile: tuple[int, int] | None,
  tokens: int,
  vocab: int,
  limits: device.Device | None = None,
  masked: bool = False,
) -> Tile:
  """The given tile, or the default one, cut to the tokens and rows of one device.

  Where tokens are `masked`, there are tiles enough to leave out about as much as the mask does.
  """
  if tile is not None:
    return Tile(min(tile[0], tokens), min(tile[1], vocab))
  limits = limits or device.current()
  most = limits.tokens
  if masked:
    most = min(most, max(_LEAST_TOKENS, math.ceil(tokens / 16)))
  side = part(tokens, most)
  return Tile(side, part(vocab, min(limits.vocab, limits.scores // side)))


# Tokens of a tile below which the products become slower.
_LEAST_TOKENS = 256


def part(size: int, limit: int) -> int:
  """A multiple of 64 that divides `size`, or covers it in ceil(size / limit) parts."""
  least = max(1, math.ceil(size / limit))
  for count in range(least, 2 * least):
    if size % (64 * count) == 0:
      return size // count
  return max(1, min(size, 64 * math.ceil(size / least / 64)))


class Cut(NamedTuple):
  """Tile and token shards of a computation, equal in its two passes."""

  tile: Tile
  shards: TokenShards


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
  """Operands of scores, and the options that they are computed by.

  Attributes:
    hidden: vectors of the tokens, [*B, D]; in the loops [P, N, D].
    weight: the rows [V, D], of all devices or of this one.
    bias: [V], or None.
    options: with the dtype of the products' operands.
    counted: number of tokens that count, the first ones of each shard; None: all.
  """

  # Untyped, because transformations put other objects into the leaves of a pytree.
  hidden: Any
  weight: Any
  bias: Any
  options: ScoreOptions = dataclasses.field(metadata={"static": True})
  counted: Any = None

  @classmethod
  def of(
    cls,
    hidden: Array,
    weight: Any,
    bias: Array | None,
    options: ScoreOptions,
    tokens: Array | None = None,
    prefix: str = "",
  ) -> "Linear":
    """A layer of operands that fit together, and fit the tokens.

    `prefix` begins the names of the arguments in messages, such as "teacher_".

    Raises:
      ValueError: the shapes do not fit together, or the vocabulary is empty.
      TypeError: an operand is not an array.
    """
    check_arrays(**{prefix + "hidden": hidden, prefix + "bias": bias})
    check_vectors(hidden, f"{prefix}hidden")
    if not isinstance(weight, RowFactory):
      check_given(**{prefix + "weight": weight})
    weight = as_row_factory(weight)
    rows = jax.eval_shape(RowFactory.all, weight)
    shape = rows.shape
    if len(shape) != 2 or shape[1] != hidden.shape[-1]:
      raise ValueError(
        f"`{prefix}weight` must be [V, {hidden.shape[-1]}] for `{prefix}hidden` {hidden.shape}; got"
        f" {shape}. Use `columns(kernel)` for a kernel [D, V]."
      )
    if shape[0] == 0:
      raise ValueError(
        f"`{prefix}weight` must have at least 1 row; got {shape}. A softmax needs a vocabulary."
      )
    check_vectors(rows, f"{prefix}weight")
    if bias is not None and bias.shape != shape[:1]:
      raise ValueError(
        f"`{prefix}bias` must be [{shape[0]}] for `{prefix}weight` {shape}; got {bias.shape}. Give"
        " one number for each row."
      )
    if tokens is not None:
      check_one_each(hidden, tokens)
    return cls(hidden, weight, bias, options.resolved(hidden, rows))

  @property
  def vocab(self) -> int:
    """Number of rows on all devices."""
    return vocab_parallel.rows_in_all(self.options.vocab_axis, self.weight.count)


def on_each_device(
  layers: tuple[Linear, ...],
  tokens: Array | None,
  body: Callable[[Cut, tuple[Linear, ...], Array | None], Any],
  kept: Array | None = None,
  per_token: Array | None = None,
) -> Any:
  """`body(cut, layers, rows)` of all tokens, by each device of the vocabulary's axis.

  Args:
    layers: one or more layers over the same vocabulary and tokens, with hidden [*B, D]. The body
      gets hidden [P, ceil(N / P), D], and weight and bias of this device's rows. Tile and axis are
      those of the first one's options.
    tokens: tokens [*B] or [*B, k], or None. The body gets them as indices into this device's rows,
      outside of them for tokens of other devices, [P, ceil(N / P)] or with k.
    body: returns a tree of arrays [P, ceil(N / P), ...], or numbers [] of all tokens, which are
      equal on all devices.
    kept: False for tokens [*B] whose results may be anything, and whose scores are left out as far
      as the tiles allow; None: all count.
    per_token: numbers [*B] that the body gets as a further argument, [P, ceil(N / P)]; or None.

  Returns:
    The results of the body as [*B, ...] or [].
  """
  hidden, options = layers[0].hidden, layers[0].options
  if symbolic.is_symbolic(hidden):
    of_chunk = lambda layers, *given: on_each_device(layers, given[0], body, *given[1:])
    return symbolic.by_chunks(of_chunk, hidden, layers, tokens, kept, per_token)
  batch, axis = hidden.shape[:-1], options.vocab_axis
  n = math.prod(batch)

  def local(rows, hiddens, tokens, kept, per_token):
    inside, shards = vocab_parallel.inside(axis), vocab_parallel.token_shards(axis)
    order, size = None, max(1, -(-n // shards.count))
    if kept is not None and cut_tile(options.tile, size, 1, masked=True).tokens < size:
      order = _Order.of(shards.split(kept.reshape(n)))
    given = rows, hiddens, tokens
    rows, hiddens, tokens = varying(given, inside)

    def split(x):
      parts = shards.split(x.reshape(n, *x.shape[len(batch) :]))
      return parts if order is None else order.sorted(parts)

    # On a mesh the arrays are this device's rows; without one they are those of `layers`.
    here = []
    for layer, hidden, (per_row, bias, shared) in zip(layers, hiddens, rows):
      weight = dataclasses.replace(layer.weight, per_row=per_row, shared=shared)
      of_device = {"hidden": split(hidden), "weight": weight, "bias": bias}
      counted = None if order is None else order.count
      here.append(dataclasses.replace(layer, **of_device, counted=counted))
    count = here[0].weight.count
    if tokens is not None:
      tokens = split(tokens) - vocab_parallel.first_row(inside, count)
    tile = cut_tile(options.tile, here[0].hidden.shape[1], count, masked=order is not None)
    further = () if per_token is None else (split(per_token),)
    with precision.using(options.precision):
      results = body(Cut(tile, shards), tuple(here), tokens, *further)

    def joined(x):
      x = x if order is None else order.restored(x)
      return shards.join(x, n).reshape(*batch, *x.shape[2:])

    return jax.tree.map(lambda x: joined(x) if x.ndim else x, results)

  rows, hiddens = [], []
  for layer in layers:
    weight = layer.weight
    # Rows that pad V to a multiple of the devices get the bias of a removed row.
    bias = vocab_parallel.bias_of_padding(layer.bias, weight.count, axis)
    whole = Sharded(weight.per_row, 0, weight.axis), Sharded(bias, -jnp.inf)
    rows.append((*whole, Replicated(weight.shared)))
    hiddens.append(layer.hidden)
  return vocab_parallel.over_vocabulary(axis, local, rows, hiddens, tokens, kept, per_token)


class _Order(NamedTuple):
  """The tokens of each shard, those that count before the others.

  Attributes:
    before: index of the token at each place, [P, N].
    place: place of each token, [P, N].
    count: largest number of tokens that count in a shard.
  """

  before: Array
  place: Array
  count: Array

  @classmethod
  def of(cls, kept_PN: Array) -> "_Order":
    place_of = lambda kept: jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1
    count_P = kept_PN.sum(axis=1, dtype=jnp.int32)
    place_PN = jnp.where(kept_PN, place_of(kept_PN), count_P[:, None] + place_of(~kept_PN))
    index_N = jnp.arange(kept_PN.shape[1], dtype=jnp.int32)
    invert = jax.vmap(lambda place: jnp.zeros_like(place).at[place].set(index_N))
    return cls(before=invert(place_PN), place=place_PN, count=count_P.max())

  def sorted(self, x: Array) -> Array:
    """An array [P, N, ...] with the tokens that count first."""
    return _moved(x, *varying((self.before, self.place, x))[:2])

  def restored(self, x: Array) -> Array:
    """The inverse of `sorted`."""
    return _moved(x, *varying((self.place, self.before, x))[:2])


# The gradient of a permutation is a gather too, where JAX knows but a scatter.
@jax.custom_vjp
def _moved(x, index_PN, inverse_PN):
  """x[index] of each shard."""
  del inverse_PN
  return jax.vmap(lambda one, index: one[index])(x, index_PN)


_moved.defvjp(
  lambda x, index, inverse: (_moved(x, index, inverse), (index, inverse)),
  lambda saved, cotangent: (_moved(cotangent, saved[1], saved[0]), None, None),
)


def edge(index: Array, size: int, total: int) -> tuple[Array, Array]:
  """Start of tile `index`, the last one moved back to end at `total`, and its new entries.

  The second marks the entries that no earlier tile has covered.
  """
  nominal = index * size
  start = jnp.minimum(nominal, total - size)
  return start, start + jnp.arange(size, dtype=jnp.int32) >= nominal


class TokenTiles(NamedTuple):
  """Division of [P, N, ...] arrays into tiles of tokens; the last may overlap its neighbour."""

  shards: TokenShards
  size: int
  total: int

  @property
  def count(self) -> int:
    """Number of tiles."""
    return math.ceil(self.total / self.size)

  def split(self, tree: Any) -> Any:
    """[P, N, ...] -> [tiles, P, n, ...]; a copy, for arrays that have few numbers a token."""

    def split(x):
      whole = x[:, : self.total // self.size * self.size]
      tiles = whole.reshape(x.shape[0], -1, self.size, *x.shape[2:])
      if self.total % self.size:
        tiles = jnp.concatenate([tiles, x[:, None, self.total - self.size :]], axis=1)
      return self.shards.keep(jnp.moveaxis(tiles, 1, 0), axis=1)

    return jax.tree.map(split, tree)

  def join(self, tree: Any) -> Any:
    """[tiles, P, n, ...] -> [P, N, ...], the inverse of `split`."""
    return jax.tree.map(lambda x: self.flat(jnp.moveaxis(x, 0, 1)), tree)

  def flat(self, x: Array) -> Array:
    """[P, tiles, n, ...] -> [P, N, ...], each token from the first tile that has it."""
    if self.total % self.size == 0:
      return x.reshape(x.shape[0], self.total, *x.shape[3:])
    whole = x[:, :-1].reshape(x.shape[0], -1, *x.shape[3:])
    return jnp.concatenate([whole, x[:, -1, self.size - self.total % self.size :]], axis=1)

  def at(self, x: Array, index: Array) -> Array:
    """Tile [P, n, ...] of an array [P, N, ...] that is not copied."""
    if self.total % self.size:
      start, _ = edge(index, self.size, self.total)
      return lax.dynamic_slice_in_dim(x, start, self.size, axis=1)
    # An index of whole tiles tells the compiler what a start does not: that slices are aligned.
    tiles = x.reshape(x.shape[0], self.count, self.size, *x.shape[2:])
    return lax.dynamic_index_in_dim(tiles, index, axis=1, keepdims=False)

  def upto(self, counted: Array | None) -> Array | np.int32:
    """Number of tiles that have the first `counted` tokens."""
    return np.int32(self.count) if counted is None else -(-counted // self.size)


def taken(tree: Any, index: Array) -> Any:
  """The entry `index` of the first axis of each array; it must be inside."""
  return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def replaced(tree: Any, index: Array, new: Any) -> Any:
  """The arrays with another entry `index` of the first axis; it must be inside."""
  # Not `at[...].set`, a scatter, into which compilers fuse less.
  put = lambda x, part: lax.dynamic_update_index_in_dim(x, part, index, 0)
  return jax.tree.map(put, tree, new)


def product(a: Array, b: Array, contract: Any, batch: Any = ((), ())) -> Array:
  """Matrix product of tiles, in float32 whatever the operands are."""
  return lax.dot_general(a, b, (contract, batch), preferred_element_type=jnp.float32)


def raw_scores(a: Array, b: Array, contract: Any) -> Array:
  """Product of vectors and rows: as `product`, but bfloat16 where the device rounds scores."""
  dtype = _score_dtype(a.dtype)
  return lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=dtype)


def rounded_scores(raw: Array, operands: Dtype) -> Array:
  """float32 scores, rounded as those of `raw_scores` from operands of a dtype."""
  return raw.astype(_score_dtype(jnp.dtype(operands))).astype(jnp.float32)


def _score_dtype(operands):
  return jnp.bfloat16 if device.current().rounds and operands == jnp.bfloat16 else jnp.float32


def score_bytes(operands: Dtype) -> int:
  """Bytes of a raw score, for operands of a dtype."""
  return jnp.dtype(_score_dtype(jnp.dtype(operands))).itemsize


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
  layers: tuple[Linear, ...],
  per_token: Any,
  carry: Any,
  merge: Callable[[Any, tuple[Array, ...], Int[Array, ""], Any], Any],
  shortcut: Shortcut | None = None,
  skip: int = 0,
) -> Any:
  """The carry after `merge` has added every tile of scores to it, one after another.

  Args:
    cut: tile and token shards.
    layers: one or more layers over the same vocabulary and the same tokens.
    per_token: a tree of [P, N, ...] arrays.
    carry: a tree of [P, N, ...] arrays: statistics of no scores.
    merge: (carry [P, n, ...], scores [P, n, v] of each layer in float32, index of the first row,
      per_token [P, n, ...]) -> carry. It must leave out scores of -inf, which belong to no row.
    shortcut: a merge to try first, or None.
    skip: number of tiles of rows that the carry has already.
  """
  n, v = layers[0].hidden.shape[1], layers[0].weight.count
  tokens, height = TokenTiles(cut.shards, cut.tile.tokens, n), cut.tile.vocab
  count = math.ceil(v / height)
  if skip == count:
    return carry
  # The carry of a loop inside of a `shard_map` must vary over an axis from the start or never.
  carry = varying((carry, per_token, layers))[0]
  carry, given = tokens.split((carry, per_token))
  # Each tile of tokens has a carry of its own, so that an overlap is merged in both.
  last = tokens.upto(layers[0].counted)

  def vocab_step(carry, v_index):
    start, fresh_v = edge(v_index, height, v)
    rows = [_weight_and_bias(cut, layer, start) for layer in layers]

    def add_rows(merge, carry):
      def token_step(n_index, carry):
        old, seen = taken((carry, given), n_index)
        scores = []
        for layer, (weight_vD, bias_v) in zip(layers, rows):
          hidden_PnD = tokens.at(layer.hidden, n_index).astype(layer.options.dtype)
          raw_Pnv = raw_scores(hidden_PnD, weight_vD, ((2,), (1,)))
          score_Pnv = layer.options.finish(raw_Pnv.astype(jnp.float32), bias_v)
          # The tile before has scored the overlap: -inf leaves a sum of exp as it is, 0 would not.
          scores.append(jnp.where(fresh_v, score_Pnv, -jnp.inf) if v % height else score_Pnv)
        # One merge for all layers, so that a distillation loss sees both scores of a tile at once.
        new = merge(old, tuple(scores), start, seen)
        return replaced(carry, n_index, new)

      return lax.fori_loop(np.int32(0), last, token_step, carry)

    if shortcut is None:
      return add_rows(merge, carry), None
    new = add_rows(shortcut.merge, carry)
    failed = shortcut.failed(carry, new)
    return lax.cond(failed, lambda: add_rows(merge, carry), lambda: new), None

  index = jnp.arange(skip, count, dtype=jnp.int32)
  return tokens.join(lax.scan(vocab_step, carry, index)[0])


def kept_scores(
  cut: Cut, layer: Linear, count: int, carry: Any, merge: Callable[[Any, Array, Array, int], Any]
) -> tuple[Any, Array]:
  """The carry after the first `count` tiles of rows, and their raw scores.

  The scores are [count, P, N, v]; on a CPU [count, v, P, N], as its products read and write them.

  Args:
    cut: tile and token shards; all tokens meet a tile of rows at once.
    layer: the operands.
    count: number of tiles.
    carry: a tree of [P, N, ...] arrays.
    merge: (carry, scores of a tile, index of the first row, axis of the rows) -> carry.
  """
  v, height = layer.weight.count, cut.tile.vocab
  hidden_PND = layer.hidden.astype(layer.options.dtype)

  def vocab_step(carry, v_index):
    start, fresh_v = edge(v_index, height, v)
    part = tile_rows(cut, layer, start)
    if _reads_rows():
      raw = raw_scores(part.weight, hidden_PND, ((1,), (2,)))
    else:
      raw = raw_scores(hidden_PND, part.weight, ((2,), (1,)))
    axis, bias = -1, None if part.bias is None else part.bias[:, 0, 0]
    if _reads_rows():
      axis, bias, fresh_v = 0, part.bias, fresh_v[:, None, None]
    score = layer.options.finish(raw.astype(jnp.float32), bias)
    if v % height:
      score = jnp.where(fresh_v, score, -jnp.inf)
    return merge(carry, score, start, axis), raw

  carry = varying((carry, layer))[0]
  return lax.scan(vocab_step, carry, jnp.arange(count, dtype=jnp.int32))


def first_scores(cut: Cut, layer: Linear) -> Array:
  """Scores [P, N, r] of the first few rows."""
  few = cut._replace(tile=Tile(cut.tile.tokens, min(cut.tile.vocab, 16)))
  weight_rD, bias_r = _weight_and_bias(few, layer, jnp.int32(0))
  raw = product(layer.hidden.astype(layer.options.dtype), weight_rD, ((2,), (1,)))
  return layer.options.finish(raw, bias_r)


def _weight_and_bias(cut, layer, start):
  """A tile of rows [v, D], cast and replicated, and its bias [v]."""
  # Cast by the tile: a model of bfloat16 products never has a second copy of its float32 weight.
  weight_vD = layer.weight.part(start, cut.tile.vocab).all().astype(layer.options.dtype)
  if layer.bias is None:
    return cut.shards.whole(weight_vD), None
  bias_v = lax.dynamic_slice_in_dim(layer.bias, start, cut.tile.vocab)
  return cut.shards.whole(weight_vD), bias_v.astype(jnp.float32)


def gradients(
  cut: Cut,
  layers: tuple[Linear, ...],
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
    layers: as in the forward pass.
    per_token: a tree of [P, N, ...] arrays.
    d_scores: (scores [v, P, n] of each layer, index of each row [v, 1, 1], per_token [P, n, ...])
      -> the cotangent [v, P, n] of each layer's scores. A row that is removed by a bias of -inf
      must get 0.
    kept: raw scores of the first tiles of rows of each layer, from `kept_scores`, which are not
      computed again; or None.
  """
  n, v = layers[0].hidden.shape[1], layers[0].weight.count
  height, per_token = cut.tile.vocab, varying((per_token, layers))[0]
  nothing = [
    Linear(
      hidden=cut.shards.keep(jnp.zeros(layer.hidden.shape, jnp.float32)),
      weight=layer.weight.zero_gradient(height),
      bias=None if layer.bias is None else jnp.zeros_like(layer.bias),
      options=layer.options,
    )
    for layer in layers
  ]
  totals = varying((nothing, layers, per_token))[0]
  first = 0 if kept is None else len(kept[0])
  if first:
    whole = TokenTiles(cut.shards, n, n)
    totals = _of_rows(cut, whole, layers, per_token, d_scores, totals, (0, first), kept)
  rest = first, math.ceil(v / height)
  if first < rest[1]:
    tokens = TokenTiles(cut.shards, cut.tile.tokens, n)
    totals = _of_rows(cut, tokens, layers, per_token, d_scores, totals, rest, None)
  return tuple(
    dataclasses.replace(
      total,
      hidden=total.hidden.astype(layer.hidden.dtype),
      weight=layer.weight.rounded(total.weight),
    )
    for total, layer in zip(totals, layers)
  )


def _of_rows(cut, tokens, layers, per_token, d_scores, totals, rows, kept):
  """The totals with the gradients of the tiles of rows `rows`, a range."""
  n, v, height = tokens.total, layers[0].weight.count, cut.tile.vocab
  given = tokens.split(per_token)
  last = tokens.upto(layers[0].counted)

  def vocab_step(carry, tile):
    v_index, kept = tile
    start, fresh_v = edge(v_index, height, v)
    rows = [tile_rows(cut, layer, start) for layer in layers]
    row_v11 = (start + jnp.arange(height, dtype=jnp.int32))[:, None, None]

    def token_step(n_index, sums):
      hiddens = [tokens.at(x.hidden, n_index).astype(x.options.dtype) for x in layers]
      if kept is None:
        raws = [raw_scores(x.weight, y, ((1,), (2,))) for x, y in zip(rows, hiddens)]
      else:
        raws = [raw if _reads_rows() else jnp.moveaxis(raw, -1, 0) for raw in kept]
      scores = [
        layer.options.finish(raw_vPn.astype(jnp.float32), part.bias)
        for layer, part, raw_vPn in zip(layers, rows, raws)
      ]
      seen = taken(given, n_index)
      cotangents = d_scores(tuple(scores), row_v11, seen)
      new = []
      for i, d_vPn in enumerate(cotangents):
        d_vPn = layers[i].options.pull_back(scores[i], d_vPn)
        if n % tokens.size:
          _, fresh_n = edge(n_index, tokens.size, n)
          d_vPn = jnp.where(fresh_n, d_vPn, 0.0)
        if v % height:
          d_vPn = jnp.where(fresh_v[:, None, None], d_vPn, 0.0)
        new.append(_add_tile(sums[i], rows[i], hiddens[i], d_vPn, n_index))
      return new

    # The gradient of a tile of rows is complete after its inner loop, so that it is written once.
    zeros = [
      _Sums(
        hidden=gradient.hidden,
        weight=jnp.zeros((layer.hidden.shape[0], height, layer.hidden.shape[2]), jnp.float32),
        bias=None
        if layer.bias is None
        else jnp.zeros((height, layer.hidden.shape[0]), jnp.float32),
      )
      for gradient, layer in zip(carry, layers)
    ]
    zeros = varying((zeros, layers, per_token))[0]
    sums = lax.fori_loop(np.int32(0), last, token_step, zeros)
    stored = zip(carry, sums, layers)
    return [_store_rows(gradient, part, layer, start) for gradient, part, layer in stored], None

  # hidden meets every tile of rows: its gradient is summed in float32 and rounded at the end. It
  # has an axis of tiles, since an update of a whole tile fuses into the product that it adds.
  move = lambda change: [dataclasses.replace(x, hidden=change(x.hidden)) for x in totals]
  totals = move(lambda x: jnp.moveaxis(tokens.split(x), 0, 1))
  tiles = jnp.arange(*rows, dtype=jnp.int32), kept
  totals, _ = lax.scan(vocab_step, totals, tiles)
  return move(tokens.flat)


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


def tile_rows(cut: Cut, layer: Linear, start: Array) -> TileRows:
  """Rows from `start` on, and for a CPU their transpose, once for all tiles of tokens."""
  weight_vD, bias_v = _weight_and_bias(cut, layer, start)
  transposed = None
  if _reads_rows():
    # Without the barrier XLA folds the transposition into each product, which would then read the
    # weight across its rows.
    transposed = lax.optimization_barrier(weight_vD.T)
    if layer.weight.axis == 1:
      # Columns are one already, and XLA has no product of bfloat16 into which one is folded.
      weight_vD = lax.optimization_barrier(weight_vD)
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
  d_rows = sums.weight.sum(axis=0)
  if layer.weight.axis == 1 and _reads_rows():
    # The transposition would be folded into the product, as in `tile_rows`.
    d_rows = lax.optimization_barrier(d_rows)
  weight = layer.weight.add_gradient(gradient.weight, start, d_rows)
  bias = gradient.bias
  if bias is not None:
    update = sums.bias.sum(axis=1)
    old = lax.dynamic_slice_in_dim(bias, start, update.shape[0])
    bias = lax.dynamic_update_slice_in_dim(bias, old + update.astype(bias.dtype), start, axis=0)
  return Linear(sums.hidden, weight, bias, layer.options)
