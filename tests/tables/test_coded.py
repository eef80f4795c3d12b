"""Quantised tables err as much as their steps say, and bits are counted as entropies."""

import numpy as np
import pytest
import safetensors.numpy

import vqjax
from vqjax.tables import (
  Moments,
  coded_table,
  container,
  entropy_coder,
  ideal_bits,
  probabilities,
  transform,
)
from vqjax.tables.coded import BLOCK, Coordinates, Levels, dependent_levels, with_fewer_bits

V, D = 301, 7


def example(vocab=V, dim=D, seed=0):
  rng = np.random.default_rng(seed)
  hidden = rng.normal(size=(400, dim)) @ rng.normal(size=(dim, dim))
  counts = (5000 / np.arange(1, vocab + 1)).astype(int)
  counts[-1] = 0
  inputs = np.eye(dim) * 0.5
  moments = Moments(hidden.T @ hidden / 400, counts, 400, inputs)
  return rng.normal(size=(vocab, dim)).astype(np.float32) + 3, moments


def test_a_row_is_the_mean_and_its_levels_in_the_transformed_basis():
  table, moments = example()
  found = coded_table(table, moments, 0.3)
  step = np.float64(found.steps)[found.row_group]
  expected = np.float64(found.mean) + (step[:, None] * found.levels) @ np.float64(found.inverse)
  np.testing.assert_allclose(found.table(), expected, atol=1e-5)
  np.testing.assert_array_equal(found.rows(np.array([5, 300, 5])), found.table()[[5, 300, 5]])
  assert found.levels.dtype == np.int32
  assert found.row_group.dtype == np.uint8


def test_the_transform_makes_errors_cost_alike_and_columns_uncorrelated():
  table, moments = example()
  covariance = np.cov(table.T, bias=True).astype(np.float64)
  forward, inverse, variances, scale = transform(moments, covariance, 0.1)
  np.testing.assert_allclose(forward @ inverse.astype(np.float64), np.eye(D), atol=1e-9)
  metric = moments.hidden + moments.inputs
  metric += 0.1 * np.trace(metric) / D * np.eye(D)
  # |x T|² is scale² · xᵀ M x, up to the rounding of the inverse to float16.
  np.testing.assert_allclose(
    forward @ forward.T, scale**2 * metric, atol=2e-2 * np.abs(metric).max() * scale**2
  )
  in_basis = forward.T @ covariance @ forward
  np.testing.assert_allclose(np.diag(in_basis), variances, rtol=2e-2)
  off = in_basis - np.diag(np.diag(in_basis))
  assert np.abs(off).max() < 2e-2 * variances[0]
  assert (np.diff(variances) <= 0).all()


@pytest.mark.programs(48)
def test_a_basis_of_few_bits_leaves_less_error_at_equal_bytes(monkeypatch):
  rng = np.random.default_rng(3)
  mixed = rng.normal(size=(40, 40)) * np.linspace(0.2, 3, 40)
  table = (rng.normal(size=(900, 40)) @ mixed).astype(np.float32)
  hidden = rng.normal(size=(500, 40)) @ rng.normal(size=(40, 40)) * np.linspace(0.1, 2, 40)
  moments = Moments(hidden.T @ hidden / 500, 9000 // np.arange(1, 901), 500)
  p = probabilities(moments.counts)

  def cost():
    off = table - vqjax.compress(table, bytes=1 / 12, moments=moments).rows(np.arange(900))
    return (p * ((off @ moments.metric()) * off).sum(axis=1)).sum()

  rounded = cost()
  monkeypatch.setattr("vqjax.tables.coded.with_fewer_bits", lambda basis, *others: basis)
  assert rounded < 0.8 * cost()


@pytest.mark.parametrize(("rows", "least", "most"), [(200, 1, 6), (10**9, 10, 24)])
def test_a_basis_has_the_bits_that_pay_for_themselves(rows, least, most):
  _, moments = example(dim=150)
  basis = transform(moments, np.cov(np.random.default_rng(4).normal(size=(150, 400))), 0.1)
  covariance = np.linalg.inv(basis.forward.T) @ np.diag(basis.variances) @ basis.inverse
  found = with_fewer_bits(basis, moments.metric(), covariance, rows)
  entries = found.inverse.astype(np.float64)
  (bits, *_) = [k for k in range(25) if (entries * 2**k == np.rint(entries * 2**k)).all()]
  assert least <= bits <= most
  np.testing.assert_allclose(found.forward @ entries, np.eye(150), atol=1e-9)


def errors(found, table):
  """Errors of the coordinates in steps."""
  forward = np.linalg.inv(found.inverse.astype(np.float64))
  step = found.steps[found.row_group].astype(np.float64)[:, None]
  return (table.astype(np.float64) - found.mean) @ forward / step - found.levels


def test_levels_are_the_nearest_that_the_trellis_has():
  x = np.random.default_rng(1).normal(size=(7, 3)).astype(np.float32) * 3
  zeros = np.zeros((2, 1, 3), np.uint8)
  alike = container.Distributions(np.full((1, 256), 64, np.uint16), zeros, zeros[0])
  found = dependent_levels(x, np.zeros(7, np.uint8), alike)
  # Every path, of one stream: its columns are those of a row in turn.
  least = {0: 0.0}
  for value in x.ravel().tolist():
    reached = {}
    for state, cost in least.items():
      for index in range(-9, 10):
        level = 2 * index - (state % 2) * np.sign(index)
        after = int(container.NEXT_STATE[state, index % 2])
        reached[after] = min(reached.get(after, np.inf), cost + (value - level) ** 2)
    least = reached
  assert ((x - found) ** 2).sum() == pytest.approx(min(least.values()), rel=1e-5)
  entropy_coder.indices(found)  # raises where they are not those of the trellis


@pytest.mark.parametrize("step", [0.5, 1.0])
def test_errors_are_a_sixth_below_those_of_rounding_at_equal_bits(step):
  rng = np.random.default_rng(2)
  table = rng.normal(size=(6000, 8)).astype(np.float32)
  found = coded_table(table, Moments(np.eye(8), np.ones(6000), 1), step)
  bits = ideal_bits(found).sum()
  rounded = []
  for width in np.geomspace(0.2, 3, 60):
    levels = np.rint(table / width)
    p = np.unique(levels, return_counts=True)[1] / levels.size
    rounded.append((-(p * np.log2(p)).sum() * levels.size, ((table - levels * width) ** 2).mean()))
  of_rounding = np.interp(bits, *zip(*sorted(rounded)))
  assert ((found.table() - table) ** 2).mean() < 5 / 6 * of_rounding


def test_steps_follow_probability():
  table, moments = example()
  found = coded_table(table, moments, 0.5)
  assert 0.2 < (errors(found, table) ** 2).mean() < 0.5  # rounding to even integers: 1/3
  p = probabilities(moments.counts)
  ratio = found.steps[found.row_group] * np.sqrt(p)
  # Classes are a factor sqrt(2) apart, so that a step is within its fourth root of the rule.
  assert ratio.max() / ratio.min() <= np.sqrt(2) * (1 + 1e-6)
  apart = 2 * np.diff(np.log2(found.steps.astype(np.float64)))
  np.testing.assert_allclose(apart, np.round(apart), atol=1e-5)
  assert (apart > 0.5).all()


def test_bits_are_entropies_by_class_quantiser_and_column():
  table, moments = example()
  found = coded_table(table, moments, 1.0)
  bits = ideal_bits(found)
  assert bits.shape == (len(found.steps), D)
  index, quantizer = entropy_coder.indices(found.levels)
  for c in range(len(found.steps)):
    for j in range(D):
      expected = 0.0
      for q in (0, 1):
        own = index[(found.row_group == c) & (quantizer[:, j] == q), j]
        p = np.array([np.mean(own == x) for x in set(own.tolist())])
        expected -= (p * np.log2(p)).sum() * len(own)
      np.testing.assert_allclose(bits[c, j], expected, atol=1e-9)
  finer = ideal_bits(coded_table(table, moments, 0.25)).sum()
  assert finer > bits.sum()


@pytest.mark.parametrize(("vocab", "dim"), [(1, 4), (9, 1), (5, 5)])
def test_small_tables_and_equal_rows_are_kept(vocab, dim):
  table = np.broadcast_to(np.linspace(-1, 2, dim), (vocab, dim)).astype(np.float32)
  moments = Moments(np.zeros((dim, dim)), np.r_[1, np.zeros(vocab - 1)], 1)
  found = coded_table(table, moments, 0.1)
  np.testing.assert_allclose(found.table(), table, atol=1e-6)
  assert ideal_bits(found).sum() == 0


def test_blocks_do_not_change_the_result(monkeypatch):
  table, moments = example()
  whole = coded_table(table, moments, 0.4)
  monkeypatch.setattr("vqjax.tables.coded.BLOCK", container.RESTART)
  parts = coded_table(table, moments, 0.4)
  np.testing.assert_allclose(parts.steps, whole.steps, rtol=1e-6)
  assert (parts.levels == whole.levels).mean() > 0.99
  assert sum(len(block) for block in whole.blocks(100)) == V
  assert BLOCK > V


def test_moments_are_saved_and_read_again(tmp_path):
  _, moments = example()
  for given in (moments, Moments(moments.hidden, moments.counts, 3)):
    given.save(tmp_path / "moments")
    found = Moments.load(tmp_path / "moments")
    np.testing.assert_allclose(found.hidden, given.hidden, rtol=1e-6)
    np.testing.assert_array_equal(found.counts, given.counts)
    assert found.tokens == given.tokens
    assert (found.inputs is None) == (given.inputs is None)


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    ({"hidden": np.full((3, 3), np.nan)}, "`hidden` must be finite; got 9 entries of 9"),
    ({"hidden": np.ones((3, 2))}, r"`hidden` must be a square matrix .*\(3, 2\)"),
    ({"hidden": np.triu(np.ones((3, 3)))}, "`hidden` must be a second moment"),
    ({"inputs": np.eye(4)}, r"`inputs` must have the shape of `hidden`, \(3, 3\); got \(4, 4\)"),
    (
      {"counts": np.array([1, -2])},
      "`counts` must be finite and not negative; got -2.0 for token 1",
    ),
    ({"counts": np.zeros(4)}, "`counts` must not be all 0"),
    ({"counts": np.ones((2, 2))}, "`counts` must have a number for each token"),
    ({"tokens": 0}, "`tokens` must be an integer of at least 1; got 0"),
  ],
)
def test_impossible_moments_are_refused(changed, message, tmp_path):
  fields = {"hidden": np.eye(3), "counts": np.ones(4), "tokens": 2}
  with pytest.raises(ValueError, match=message):
    Moments(**fields | changed)
  stored = {
    name: np.atleast_1d(np.asarray(x, np.float64)) for name, x in (fields | changed).items()
  }
  safetensors.numpy.save_file(stored, tmp_path / "m")
  with pytest.raises(ValueError, match=f"{tmp_path / 'm'}: .*{message}"):
    Moments.load(tmp_path / "m")


def test_files_that_are_not_moments_are_refused(tmp_path):
  path = tmp_path / "moments"
  path.write_bytes(b"no safetensors")
  with pytest.raises(ValueError, match="moments must be a whole safetensors file"):
    Moments.load(path)
  safetensors.numpy.save_file({"hidden": np.eye(2)}, path)
  with pytest.raises(ValueError, match="lacks counts, tokens"):
    Moments.load(path)


def test_tables_that_do_not_fit_the_moments_are_refused():
  table, moments = example()
  for bad, message in [
    (table[:, :3], "must have the width of the table, 3; got 7"),
    (table[:9], "an entry for each of the 9 rows of the table; got 301"),
    (table[0], r"`table` must be an array \[V, D\]; got shape \(7,\)"),
  ]:
    with pytest.raises(ValueError, match=message):
      coded_table(bad, moments, 1.0)
  for step in (0, -1.0, np.nan):
    with pytest.raises(ValueError, match="`step` must be positive"):
      coded_table(table, moments, step)
  with pytest.raises(ValueError, match=r"`step` must give levels of at most 2\^30"):
    coded_table(table, moments, 1e-12)
  with pytest.raises(ValueError, match="`lam` must be positive"):
    coded_table(table, moments, 1.0, lam=0)
  for smoothing in (0, -1, np.nan):
    with pytest.raises(ValueError, match="`smoothing` must be positive and finite; got"):
      probabilities(np.array([1.0, 0.0]), smoothing)
  table[17, 2] = np.inf
  with pytest.raises(ValueError, match="`table` must be finite; row 17"):
    coded_table(table, moments, 1.0)


def test_bytes_are_known_from_some_rows(monkeypatch):
  monkeypatch.setattr("vqjax.tables.coded.SAMPLE", 2**11)
  monkeypatch.setattr("vqjax.tables.coded.OF_ROW_GROUP", 2**6)
  rng = np.random.default_rng(4)
  table = rng.normal(size=(20_011, 8)).astype(np.float32) * rng.gamma(2, size=(20_011, 1))
  made = Coordinates(table, Moments(np.eye(8), 5e4 / np.arange(1, len(table) + 1), 1))
  for step in (0.02, 0.2):
    parts = entropy_coder.encode_table(made.coded(step))
    # About as far as bits of 2,000 rows differ from those of others.
    assert made.size(step) == pytest.approx(sum(x.nbytes for x in parts.values()), rel=0.02)
  assert made.largest == pytest.approx(np.abs(made.coded(1.0).levels[:]).max(), abs=2)


def test_rows_that_sixteen_bits_cannot_hold_are_kept_whole():
  rng = np.random.default_rng(0)
  expected = rng.integers(-(2**15), 2**15, (50, 3)).astype(np.int32)
  expected[[0, 17, 49], 1] = 2**15, -(2**30), 2**30
  found = Levels((50, 3))
  for first in range(0, 50, 7):
    found[first : first + 7] = expected[first : first + 7]
  np.testing.assert_array_equal(np.asarray(found), expected)
  for rows in (slice(10, 20), np.array([49, 17, 17, 3]), expected[:, 1] > 0):
    np.testing.assert_array_equal(found[rows], expected[rows])
  assert found[:].dtype == np.int32
