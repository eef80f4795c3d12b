"""Rivals take the bytes that they say, and err less for what they are made for."""

import types

import numpy as np
import pytest

from experiments.studies.comparison.rivals import Additive, Feedback, LowRankInt8, UniformBlocks
from vqjax.tables import Moments

V, D = 3000, 24


@pytest.fixture(scope="module")
def table():
  rng = np.random.default_rng(0)
  basis = rng.normal(size=(D, D)) * 0.8 ** np.arange(D)
  hidden = rng.normal(size=(D, D)) * 0.7 ** np.arange(D)[:, None]
  counts = np.floor(1e5 / np.arange(1, V + 1) ** 1.1)
  weight = (rng.normal(size=(V, D)) @ basis.T).astype(np.float32)
  moments = Moments(hidden.T @ hidden, counts, 1000)
  return types.SimpleNamespace(weight=weight, moments=moments, size=4 * V * D // 8)


def cost(table, rows):
  """What the errors cost, over what rows of 0 would."""
  metric, p = table.moments.metric(), table.moments.counts / table.moments.counts.sum()
  of = lambda x: p @ np.einsum("vd,de,ve->v", x, metric, x)
  return of(rows - table.weight) / of(table.weight)


def test_integers_err_by_less_than_half_a_step_of_four_bits(table):
  costs = [cost(table, UniformBlocks("of", bits, 8).rows(table)[0]) for bits in (2, 3, 4)]
  assert costs[0] > costs[1] > costs[2]
  rows, used = UniformBlocks("of", 4, 8).rows(table)
  assert used == V * D / 2 + 2 * V * D / 8
  largest = np.abs(table.weight.reshape(V, -1, 8)).max(axis=2, keepdims=True)
  error = np.abs(rows - table.weight).reshape(V, -1, 8)
  # The best scale may cut the largest number; the mean error is below that of rounding.
  assert error.mean() < (largest / 7 / 2).mean()


def test_feedback_errs_less_in_the_metric_than_rounding(table, monkeypatch):
  rows, used = Feedback("of").rows(table)
  assert used <= table.size - 2 * V
  plain = lambda rows, upper: np.round(rows)
  monkeypatch.setattr("experiments.studies.comparison.rivals._with_feedback", plain)
  assert cost(table, rows) < 0.9 * cost(table, Feedback("of").rows(table)[0])


@pytest.mark.parametrize("method", [LowRankInt8("of"), Additive("of", codes=16, rounds=6, beam=4)])
def test_rows_are_near_the_table_within_their_bytes(table, method):
  rows, used = method.rows(table)
  assert used <= table.size
  assert rows.shape == (V, D)
  assert cost(table, rows) < 0.35


def test_settings_name_the_method_and_its_sizes():
  found = UniformBlocks("of", 3, 32, label="blocks").settings()
  assert found == {"method": "UniformBlocks", "divisor": 16, "bits": 3, "block": 32}
