"""Norms, directions, neighbours and untrained rows of a table."""

import numpy as np
import pytest

from vqjax.tables import geometry


@pytest.fixture
def table(monkeypatch):
  monkeypatch.setattr(geometry, "TILE", 7)
  rng = np.random.default_rng(0)
  return (rng.normal(size=(50, 6)) * [5, 4, 3, 2, 1, 0.1] + 2).astype(np.float32)


def test_the_spectrum_is_that_of_the_covariance(table):
  found = geometry.spectrum(table)
  wide = table.astype(np.float64)
  expected = np.linalg.eigvalsh(np.cov(wide.T, bias=True))[::-1]
  np.testing.assert_allclose(found.eigenvalues, expected, rtol=1e-9)
  np.testing.assert_allclose(
    found.mean_share, np.square(wide.mean(0)).sum() / np.square(wide).sum(1).mean()
  )
  share = expected / expected.sum()
  assert found.participation == pytest.approx(1 / np.square(share).sum())
  assert found.entropy_dimension == pytest.approx(np.exp(-(share * np.log(share)).sum()))
  counts = [found.directions(part) for part in (0.5, 0.9, 1.0)]
  assert counts == [1 + int((np.cumsum(share) < part - 1e-12).sum()) for part in (0.5, 0.9, 1.0)]
  np.testing.assert_allclose(geometry.norms(table), np.linalg.norm(wide, axis=1))


def test_equal_directions_count_whole():
  table = np.concatenate((np.eye(8), -np.eye(8)))
  found = geometry.spectrum(table)
  assert found.participation == pytest.approx(8)
  assert found.entropy_dimension == pytest.approx(8)


def test_neighbours_have_the_largest_cosines_without_the_mean_row(table):
  tokens, cosines = geometry.nearest_rows(table, [3, 40], 5)
  rows = table.astype(np.float64) - table.astype(np.float64).mean(0)
  rows /= np.linalg.norm(rows, axis=1, keepdims=True)
  for row, token in enumerate((3, 40)):
    every = rows @ rows[token]
    every[token] = -2
    np.testing.assert_array_equal(tokens[row], np.argsort(-every)[:5])
    np.testing.assert_allclose(cosines[row], np.sort(every)[::-1][:5])


def test_rows_near_those_of_unused_tokens_are_found(table):
  rng = np.random.default_rng(1)
  alike = [4, 11, 12, 30, 47]
  table[alike] = 0.5 + 0.01 * rng.normal(size=(5, 6))
  distance, found = geometry.untrained(table, [4, 11, 12, 30])
  assert set(found) <= set(alike)
  assert len(found) >= 3
  assert sorted(np.argsort(distance)[:5]) == alike
  assert np.square(distance).mean() == pytest.approx(1)


def test_rows_for_inputs_that_no_text_reads_are_the_short_ones(table):
  rng = np.random.default_rng(1)
  # They begin with different directions, and no softmax brings them together.
  table[[4, 11, 30, 47]] = 0.01 * rng.normal(size=(4, 6))
  distance, found = geometry.untrained(table, [4, 11], is_output=False)
  length = np.linalg.norm(table.astype(np.float64), axis=1)
  np.testing.assert_allclose(distance, length / np.sqrt(np.square(length).mean()))
  assert set(found) <= {4, 11, 30, 47}
  assert found[0] == length.argmin()


def test_bad_input_is_named(table):
  with pytest.raises(ValueError, match="finite rows that differ"):
    geometry.spectrum(np.ones((9, 3)))
  with pytest.raises(ValueError, match=r"`tokens` must be tokens in \[0, vocab 50\)"):
    geometry.nearest_rows(table, [50], 3)
  with pytest.raises(ValueError, match=r"`k` must be in \[1, vocab - 1 = 49\]"):
    geometry.nearest_rows(table, [1], 50)
  with pytest.raises(ValueError, match="at least two tokens"):
    geometry.untrained(table, [7])
  with pytest.raises(ValueError, match=r"`table` must be rows \[V, D\]"):
    geometry.norms(table[0])
