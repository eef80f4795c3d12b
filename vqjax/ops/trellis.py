"""Fixed-rate trellis codes: whole bits for each number, without an entropy coder.

This is the bitshift trellis of QTIP, whose bits packed tables have. Entropy-coded files have a
dependent quantiser instead, that of `vqjax.tables.container`.

A row is a string of bits. Its number j spends `width` j of them, and its value is read from a
window of the last `STATE_BITS` bits of the string so far: neighbouring numbers share bits, so that
each has 4096 values to choose from, whatever its width. Windows are read independently of each
other. Of numbers with a normal distribution, two bits leave 8.0 % of the variance, where the best
four levels leave 11.8 % and no code leaves less than 6.3 %. A search for the best bits takes
milliseconds a row on a CPU.

A number of `level_values` has levels of its own instead, whose bits are those of the nearest one:
microseconds a row, at 1.2 to 1.7 times the error.

Source: Tseng et al., QTIP, 2024, Section 3, with a permutation of quantiles as the code; Marcellin
and Fischer, Trellis coded quantization, 1990. Levels: Panter and Dite, Quantization distortion in
pulse-count modulation with nonuniform spacing of levels, 1951.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, UInt16

from vqjax.ops import vocab_parallel

__all__ = []

# Bits of the window that a value is read from.
STATE_BITS = 12

STATES = 2**STATE_BITS

# Largest width: beyond it a window has too little choice to be better than equal levels.
MOST_BITS = 8

# Bits of an element of the stream.
UNIT = 16


@functools.lru_cache(maxsize=1)
def values() -> np.ndarray:
  """The value of each state: quantiles of the normal distribution in an irregular order.

  float32 [4096], computed in float64 by NumPy: all programs and machines have the same bits.
  """
  state = np.arange(STATES)
  # Bijections of 12 bits: products with odd numbers, and shifts that later ones add to.
  for factor in (3_077, 1_009, 2_221):
    state = (state * factor + 3_512) % STATES
    state ^= state >> 6
  inverse = statistics.NormalDist().inv_cdf
  quantile = np.array([inverse((rank + 0.5) / STATES) for rank in range(STATES)], np.float32)
  return quantile[state]


@functools.lru_cache(maxsize=1)
def level_values() -> np.ndarray:
  """The value of each code of each width, at 2^width + code, rising; 0 for the width 0.

  float32 [512]. They are quantiles of the normal distribution; times a scale, they leave at most
  3 % more of its variance than the best levels do.
  """
  inverse = statistics.NormalDist().inv_cdf
  value = [0.0]
  for width in range(MOST_BITS + 1):
    value += [inverse((code + 0.5) / 2**width) for code in range(2**width)]
  return np.array(value, np.float32)


def nearest_levels(x_ND: np.ndarray, width_D: np.ndarray) -> np.ndarray:
  """The places in `level_values` of the nearest levels of each number, int32 [N, D]."""
  place_ND = np.ones(x_ND.shape, np.int32)
  for width in set(width_D.tolist()) - {0}:
    value, of_width = level_values()[2**width : 2 ** (width + 1)], width_D == width
    found = np.searchsorted((value[1:] + value[:-1]) / 2, x_ND[:, of_width])
    place_ND[:, of_width] = 2**width + found
  return place_ND


def ends(width_CD: Integer[Array, "C D"]) -> Integer[Array, "C D"]:
  """The bit of a row after that of each of its numbers; wide numbers come first.

  A number of width 0 has no bits, and no end that matters.
  """
  order = jnp.argsort(-width_CD, axis=-1, stable=True)
  end = jnp.cumsum(jnp.take_along_axis(width_CD, order, axis=-1), axis=-1)
  back = jnp.argsort(order, axis=-1)
  return jnp.take_along_axis(end, back, axis=-1)


def states(
  stream: UInt16[Array, "units"],
  unit_N: Integer[Array, "N"],
  end_ND: Integer[Array, "N D"],
  bits_ND: Integer[Array, "N D"] | None = None,
) -> Integer[Array, "N D"]:
  """The windows of rows that begin at `unit_N` of the stream, each ending at bit `end_ND`.

  The stream begins with an element that belongs to no row, since a window may begin before its row;
  the bits before the row count as 0, and so do those before the last `bits_ND` ones.
  """
  begin = end_ND - STATE_BITS
  at = unit_N[:, None] + (begin >> 4)
  pair = [stream[at + i].astype(jnp.uint32) for i in range(2)]
  shift = (2 * UNIT - STATE_BITS) - (begin & UNIT - 1)
  window = ((pair[0] << UNIT | pair[1]) >> shift.astype(jnp.uint32)).astype(jnp.int32)
  bits_ND = jnp.minimum(end_ND, STATE_BITS) if bits_ND is None else bits_ND
  return window & (1 << bits_ND) - 1


@jax.jit
def best_states(
  x_ND: Float[Array, "N D"], weight_D: Float[Array, "D"], width_D: Integer[Array, "D"]
) -> Integer[Array, "N D"]:
  """The states with the least sum of weight · (x - value)², by Viterbi's algorithm.

  Args:
    x_ND: rows of numbers of about unit variance, in the order of their bits.
    weight_D: what squared errors of each number cost.
    width_D: bits of each number, at most `MOST_BITS`; the state stays where it is 0.
  """
  value = jnp.asarray(values())

  def step_of(width):
    before = 2 ** (STATE_BITS - width)

    def step(cost_NS, x_N, weight):
      # State s' = (s << width | bits) mod STATES: predecessors differ in their oldest bits.
      cost = cost_NS.reshape(-1, 2**width, before)
      oldest = jnp.zeros((cost.shape[0], STATES), jnp.uint8)
      oldest = oldest.at[:, :before].set(cost.argmin(axis=1).astype(jnp.uint8))
      reached = jnp.repeat(cost.min(axis=1), 2**width, axis=-1)
      error = (x_N[:, None] - value) ** 2 if width else 0.0
      return reached + weight * error, oldest

    return step

  steps = [step_of(width) for width in range(MOST_BITS + 1)]

  def forward(cost_NS, column):
    x_N, weight, width = column
    cost_NS, oldest = lax.switch(width, steps, cost_NS, x_N, weight)
    return cost_NS, oldest

  start_NS = jnp.full((x_ND.shape[0], STATES), jnp.inf).at[:, 0].set(0.0)
  cost_NS, oldest_DNS = lax.scan(forward, start_NS, (x_ND.T, weight_D, width_D))

  def backward(state_N, column):
    oldest_NS, width = column
    rest = state_N >> width
    oldest = jnp.take_along_axis(oldest_NS, rest[:, None], axis=1)[:, 0].astype(jnp.int32)
    return rest | oldest << (STATE_BITS - width), state_N

  last = cost_NS.argmin(axis=-1).astype(jnp.int32)
  return lax.scan(backward, last, (oldest_DNS, width_D), reverse=True)[1].T


def stream_units(state_ND: np.ndarray, width_D: np.ndarray) -> np.ndarray:
  """Rows of states, in the order of their bits, as elements of the stream, [N, units]."""
  count, width_D = len(state_ND), width_D.astype(int)
  bits = np.zeros((count, int(-(-width_D.sum() // UNIT) * UNIT)), np.uint8)
  at = 0
  for state_N, width in zip(state_ND.T, width_D):
    for i in range(width):
      bits[:, at + i] = state_N >> (width - 1 - i) & 1
    at += width
  pairs = np.packbits(bits, axis=1).reshape(count, -1, 2).astype(np.uint16)
  return pairs[..., 0] << 8 | pairs[..., 1]


def row_starts(
  rank_N: Integer[Array, "N"], size_C: Integer[Array, "C"], width_CD: Integer[Array, "C D"]
) -> tuple[Integer[Array, "N"], Integer[Array, "N"]]:
  """The first element of the stream of rows with the given ranks, and their row groups."""
  units_C = -(-width_CD.astype(jnp.int32).sum(axis=-1) // UNIT)
  last_C, end_C = jnp.cumsum(size_C), 1 + jnp.cumsum(size_C * units_C)
  # Not `searchsorted`: JAX 0.10 cannot trace it inside of a `shard_map`.
  group_N = (last_C <= rank_N[..., None]).sum(axis=-1, dtype=jnp.int32)
  group_N = jnp.minimum(group_N, len(size_C) - 1)
  return end_C[group_N] - (last_C[group_N] - rank_N) * units_C[group_N], group_N


def _trellis_values(stream, unit_N, end_ND, width_ND):
  del width_ND
  return jnp.asarray(values())[states(stream, unit_N, end_ND)]


def _level_values(stream, unit_N, end_ND, width_ND):
  code_ND = states(stream, unit_N, end_ND, width_ND)
  return jnp.asarray(level_values())[(1 << width_ND) + code_ND]


class Code(NamedTuple):
  """How bits are read as numbers.

  Attributes:
    values: (stream, first elements [N], ends [N, D], widths [N, D]) -> values [N, D].
  """

  values: Callable[..., Float[Array, "N D"]]

  def coordinates(
    self, per_row: tuple[Integer[Array, "N"], Integer[Array, "N"]], shared: dict[str, Array]
  ) -> Float[Array, "N D"]:
    """Rows center + scale · values, from their first elements and row groups.

    `shared` has the stream, and the width, the scale and the centre of each number of each row
    group.
    """
    unit_N, group_N = per_row
    # The partitioner fails where the width of an array is sharded whose rows are gathered here.
    shared = {name: vocab_parallel.token_shards(None).whole(x) for name, x in shared.items()}
    width_CD = shared["width"].astype(jnp.int32)
    value_ND = self.values(shared["stream"], unit_N, ends(width_CD)[group_N], width_CD[group_N])
    scale_CD, center_CD = (shared[name].astype(jnp.float32) for name in ("scale", "center"))
    # Without bits the window is that of neighbours.
    scale_CD = jnp.where(width_CD > 0, scale_CD, 0.0)
    return center_CD[group_N] + scale_CD[group_N] * value_ND

  def rows(
    self, per_row: tuple[Integer[Array, "N"], Integer[Array, "N"]], shared: dict[str, Array]
  ) -> Float[Array, "N D"]:
    """`coordinates` in the model's basis."""
    return self.coordinates(per_row, shared) @ shared["inverse"].astype(jnp.float32)


TRELLIS = Code(_trellis_values)
LEVELS = Code(_level_values)
