"""Tests of packed integers: round trips, exact sizes, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract import strict_modes
from vqjax.ops import bit_packing


@pytest.mark.parametrize(
  ("codes", "bits"),
  [(1, 0), (2, 1), (3, 2), (8, 3), (256, 8), (257, 9), (2**16 + 1, 17), (2**32, 32)],
)
def test_bits_are_the_logarithm_rounded_up(codes, bits):
  assert bit_packing.bits_for(codes) == bits


@pytest.mark.parametrize("codes", [0, -3, 2**32 + 1])
def test_what_no_integer_of_32_bits_counts_is_refused(codes):
  with pytest.raises(ValueError, match=rf"`codes` must be in \[1, 2\^32\]; got {codes}"):
    bit_packing.bits_for(codes)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("columns", [1, 25])
@pytest.mark.parametrize("codes", [2, 31, 257, 2**32])
def test_rows_come_back_in_any_order_and_shape(codes, columns):
  bits, rows = bit_packing.bits_for(codes), 203
  table = np.random.default_rng(0).integers(0, codes, (rows, columns))
  table[0], table[-1] = 0, codes - 1
  data = bit_packing.bit_packed(table, bits)
  assert data.nbytes == -(-rows * columns * bits // 8)
  # Little-endian bits, one after another: an independent reading.
  stream = np.unpackbits(data, bitorder="little")[: rows * columns * bits]
  weight = 1 << np.arange(bits, dtype=np.uint64)
  np.testing.assert_array_equal(stream.reshape(rows, columns, bits) @ weight, table)
  wanted = np.random.default_rng(1).integers(0, rows, (4, 9))
  unpack = jax.jit(lambda data, row: bit_packing.bit_unpacked_rows(data, row, columns, bits))
  with strict_modes():
    np.testing.assert_array_equal(unpack(data, wanted), table[wanted])


def test_more_rows_than_a_block_are_one_table(monkeypatch):
  monkeypatch.setattr(bit_packing, "BLOCK", 16)
  table = np.random.default_rng(0).integers(0, 7, (101, 5))
  data = bit_packing.bit_packed(table, 3)
  unpack = jax.jit(lambda data, row: bit_packing.bit_unpacked_rows(data, row, 5, 3))
  np.testing.assert_array_equal(unpack(data, np.arange(101)), table)
  assert bit_packing.is_below(data, (101, 5), 3, 7)
  table[97, 2] = 7
  assert not bit_packing.is_below(bit_packing.bit_packed(table, 3), (101, 5), 3, 7)


def test_one_code_needs_no_bits():
  data = bit_packing.bit_packed(np.zeros((9, 4), int), 0)
  assert data.size == 0
  found = jax.jit(lambda data: bit_packing.bit_unpacked_rows(data, jnp.arange(9), 4, 0))(data)
  np.testing.assert_array_equal(found, np.zeros((9, 4)))


@pytest.mark.parametrize("wrong", [8, -1])
def test_a_number_that_does_not_fit_is_named(wrong):
  table = np.zeros((5, 3), int)
  table[3, 1] = wrong
  with pytest.raises(ValueError, match=rf"`table` must be in \[0, 2\^3\); got {wrong} at \[3, 1\]"):
    bit_packing.bit_packed(table, 3)


def test_a_look_up_reads_its_rows_alone():
  data = jax.ShapeDtypeStruct((bit_packing.bit_packed_bytes(267_735, 96, 8),), jnp.uint8)
  row = jax.ShapeDtypeStruct((64,), jnp.int32)
  unpack = jax.jit(lambda data, row: bit_packing.bit_unpacked_rows(data, row, 96, 8))
  memory = unpack.lower(data, row).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 64 * 96 * 16


def test_the_last_row_of_a_long_table_is_its_own():
  """Its first bit is beyond 2^31, and so is its number times the bits of a row."""
  data = np.zeros(bit_packing.bit_packed_bytes(310_000_000, 1, 7), np.uint8)
  row = 309_999_998
  first = 7 * row
  data[first // 8 : first // 8 + 2] = np.packbits(
    np.r_[np.zeros(first % 8), np.ones(7), np.zeros(9 - first % 8)].astype(np.uint8),
    bitorder="little",
  )
  unpack = jax.jit(lambda data, row: bit_packing.bit_unpacked_rows(data, row, 1, 7))
  np.testing.assert_array_equal(unpack(data, np.array([row, row - 1])), [[127], [0]])
