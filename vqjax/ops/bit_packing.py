"""Tables of integers below K, packed at ceil(log2 K) bits a number.

The numbers of a table [V, M] are stored without gaps, row after row, low bit first: number i has
bits [i·b, (i + 1)·b) of the bytes, in the order of NumPy's `packbits(bitorder="little")`.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer, UInt8, UInt32

from vqjax.ops.vocab_parallel import own_promotion

__all__ = ["bit_packed", "bits_for"]

# Rows that are packed at a time; a multiple of 8, so that every block ends at a byte.
BLOCK = 2**10

_MOST_BITS = 32


def bits_for(codes: int) -> int:
  """Bits of a number in [0, codes): ceil(log2 codes), 0 for a single code.

  Raises:
    ValueError: `codes` is below 1 or above 2^32.
  """
  if not 1 <= codes <= 2**_MOST_BITS:
    raise ValueError(f"`codes` must be in [1, 2^{_MOST_BITS}]; got {codes}. 2 to 65536 is usual.")
  return (codes - 1).bit_length()


def bit_packed_bytes(rows: int, columns: int, bits: int) -> int:
  """Number of bytes of a packed table."""
  return -(-rows * columns * bits // 8)


@runtime_checkable
class RowSource(Protocol):
  """A table of integers: an array, or an object that computes slices of rows."""

  @property
  def shape(self) -> tuple[int, ...]:
    """Numbers of rows and columns."""

  def __getitem__(self, rows: slice) -> Integer[np.ndarray, "n M"]:
    """A slice of rows."""


def bit_packed(table: RowSource, bits: int) -> UInt8[np.ndarray, "bytes"]:
  """The bytes of a table at `bits` bits a number, packed block by block.

  Raises:
    ValueError: a number is negative or needs more than `bits` bits.
  """
  rows, columns = table.shape
  data = np.empty(bit_packed_bytes(rows, columns, bits), np.uint8)
  for first in range(0, rows, BLOCK):
    block = np.asarray(table[first : first + BLOCK])
    wrong = (block < 0) | (block.astype(np.uint64) >> np.uint64(bits) != 0)
    if wrong.any():
      row, column = np.argwhere(wrong)[0]
      raise ValueError(
        f"`table` must be in [0, 2^{bits}); got {block[row, column]} at [{first + row}, {column}]."
        " Give more bits, or correct the number."
      )
    bit = block[..., None].astype(np.uint32) >> np.arange(bits, dtype=np.uint32) & np.uint32(1)
    part = np.packbits(bit.astype(np.uint8).reshape(-1), bitorder="little")
    # Exact, since blocks end at bytes: a block is packed without the one before it.
    start = first * columns * bits // 8
    data[start : start + len(part)] = part
  return data


@own_promotion
def bit_unpacked_rows(
  data: UInt8[Array, "bytes"], row: Int[Array, "*B"], columns: int, bits: int
) -> UInt32[Array, "*B M"]:
  """Rows of a packed table; a `row` out of range gives some row.

  Raises:
    ValueError: the table has 2^31 bytes or more.
  """
  if data.size >= 2**31:
    raise ValueError(f"`data` must be below 2^31 bytes; got {data.size}. Split the table.")
  shape = row.shape
  if not bits * columns:
    return jnp.zeros((*shape, columns), jnp.uint32)
  row = row.reshape(-1).astype(jnp.int32)
  # The first bit of row v is v·(8q + r), which may exceed int32. Eight rows fill 8q + r bytes, so
  # that no product below is larger than the number of bytes, or than 64.
  whole, rest = divmod(columns * bits, 8)
  eights, left = row // 8, row % 8
  first_byte = row * whole + eights * rest + left * rest // 8
  shift = (left * rest % 8).astype(jnp.uint32)
  # Shifted by up to seven bits, a row ends one byte later.
  length = min(-(-(columns * bits + 7 * bool(rest)) // 8), data.size)
  first_byte = jnp.clip(first_byte, 0, data.size - 1)
  byte = _windows(data, first_byte, length).astype(jnp.uint32)
  return _numbers(byte, shift if rest else None, columns, bits).reshape(*shape, columns)


def _windows(data, start, length):
  """`length` bytes from each start on; arbitrary beyond the end."""
  index = start[:, None] + jnp.arange(length, dtype=jnp.int32)
  return data.at[index].get(mode="clip")


def _numbers(byte_NB, shift_N, columns, bits):
  """Numbers of each row, which begins `shift` bits into its first byte."""
  if shift_N is not None:
    after = jnp.pad(byte_NB[:, 1:], ((0, 0), (0, 1)))
    shift = shift_N[:, None]
    byte_NB = (byte_NB >> shift | after << (8 - shift)) & 0xFF
  # Now a number has the same bits in every row; they are spread over at most 5 bytes.
  first = np.arange(columns) * bits
  number = jnp.zeros((byte_NB.shape[0], columns), jnp.uint32)
  for step in range(math.ceil((bits + 7) / 8)):
    at = first // 8 + step
    part = byte_NB[:, np.minimum(at, byte_NB.shape[1] - 1)]
    # Position in the number of the byte's lowest bit, negative where the number begins inside it.
    up = 8 * step - first % 8
    moved = jnp.where(up < 0, part >> np.maximum(-up, 0), part << np.clip(up, 0, 31))
    number |= jnp.where((up < bits) & (up < 32), moved, 0).astype(jnp.uint32)
  return number & np.uint32(2**bits - 1)


def is_below(
  data: UInt8[np.ndarray, "bytes"], shape: tuple[int, int], bits: int, most: int
) -> bool:
  """Whether every number of a packed table is below `most`, block by block."""
  rows, columns = shape
  if most >= 2**bits:
    return True
  for first in range(0, rows, BLOCK):
    count = min(BLOCK, rows - first)
    start = first * columns * bits // 8
    stop = start + bit_packed_bytes(count, columns, bits)
    bit = np.unpackbits(
      np.asarray(data[start:stop]), count=count * columns * bits, bitorder="little"
    )
    weight = np.uint64(1) << np.arange(bits, dtype=np.uint64)
    if (bit.reshape(-1, bits) @ weight >= most).any():
      return False
  return True
