"""Grouped heads made of dense rows predict as the rows do; orders are what they say."""

import jax
import numpy as np
import pytest

from tests import jitted, reference
from vqjax import DenseHead, GroupedHead, UnsharedGroupedHead, convert

V, D = 53, 5
SIZES = (20, 1, 9, 16, 7)


def stats(dim=D, scale=1.0, counts=None):
  """Random rows, and counts that follow Zipf's law in a random order."""
  rng = np.random.default_rng(0)
  counts = rng.permutation(1000 // np.arange(1, V + 1)) if counts is None else counts
  rows = scale * rng.normal(size=(V, dim)).astype(np.float32)
  return convert.TokenStats(np.arange(V), np.asarray(counts), rows, rows[:, :2])


def log_probs(head, variables, hidden):
  """Log-probabilities of all tokens, float64 [N, V]."""
  narrow = lambda x: x.astype(np.float32 if x.dtype.kind == "f" else np.int32)
  return np.asarray(jitted.apply(head, jax.tree.map(narrow, variables), hidden), np.float64)


def within(log_prob, group):
  """log p(token | its group) from log p(token), [N, V]."""
  members = [group == g for g in range(group.max() + 1)]
  mass = np.stack([np.logaddexp.reduce(log_prob[:, m], axis=-1) for m in members], axis=-1)
  return log_prob - mass[:, group]


def divergence(logits, log_prob):
  log_q = reference.log_softmax(logits)
  return (np.exp(log_q) * (log_q - log_prob)).sum(-1).mean()


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("by", [None, convert.Shuffled(3)])
def test_a_linear_for_each_group_keeps_the_distribution_inside_the_groups(use_bias, by):
  order_init = convert.in_order if by else None
  head = UnsharedGroupedHead(V, D, sizes=SIZES, use_bias=use_bias, order_init=order_init)
  given, hidden = stats(), np.random.default_rng(1).normal(size=(7, D)).astype(np.float32)
  bias = np.random.default_rng(2).normal(size=V) if use_bias else None
  given = given._replace(bias=bias)
  variables = convert.ToGrouped(by=by)(given, head)
  log_prob = log_probs(head, variables, hidden)
  position = variables["codes"]["position"] if by else np.arange(V)
  group = np.repeat(np.arange(5), SIZES)[position]
  logits = hidden @ given.output.T + (0 if bias is None else bias)
  expected = within(reference.log_softmax(logits), group)
  np.testing.assert_allclose(within(log_prob, group), expected, atol=1e-5)


def test_a_shared_linear_of_width_one_keeps_the_distribution_inside_the_groups():
  """In one dimension the remainder of a row is always a scale of one vector."""
  head = GroupedHead(V, 1, sizes=SIZES)
  given, hidden = stats(1), np.linspace(-2, 2, 7, dtype=np.float32)[:, None]
  log_prob = log_probs(head, convert.ToGrouped()(given, head), hidden)
  group = np.repeat(np.arange(5), SIZES)
  expected = within(reference.log_softmax(hidden @ given.output.T), group)
  np.testing.assert_allclose(within(log_prob, group), expected, atol=1e-5)


@pytest.mark.parametrize("use_bias", [False, True])
def test_a_converted_head_is_nearer_to_the_rows_than_their_frequencies(use_bias):
  given = stats()
  # Rows whose scores at a mean hidden vector are the log-frequencies, as those of a trained head.
  middle = np.full(D, 2.0)
  missing = np.log(given.counts + 1.0) - given.output @ middle
  rows = given.output + missing[:, None] * middle / (middle @ middle)
  hidden = (middle + np.random.default_rng(1).normal(size=(200, D))).astype(np.float32)
  head = GroupedHead(V, D, use_bias=use_bias)
  variables = convert.ToGrouped()(given._replace(output=rows), head)
  log_prob = log_probs(head, variables, hidden)
  unigram = reference.log_softmax(np.log(given.counts + 1.0))
  logits = hidden @ rows.T
  assert divergence(logits, log_prob) < divergence(logits, unigram)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e6])
@pytest.mark.parametrize("counts", [np.zeros(V, int), np.eye(V, dtype=int)[3] * 10**9])
@pytest.mark.parametrize("kind", [GroupedHead, UnsharedGroupedHead])
def test_parameters_are_bounded_by_rows_and_frequencies(kind, scale, counts):
  head = kind(V, D, groups=7, use_bias=scale > 0)
  found = convert.ToGrouped()(stats(scale=scale, counts=counts), head)["params"]
  for leaf in found.values():
    assert np.abs(leaf).max() <= 100 * max(1.0, scale)


def test_more_frequent_tokens_have_the_smaller_error():
  given, head = stats(), GroupedHead(V, D)
  weighted, even = (convert.ToGrouped(power=power)(given, head)["params"] for power in (1.0, 0.0))
  group = np.searchsorted(head.starts, np.arange(V), side="right") - 1
  slot = np.arange(V) - head.starts[group]

  def error(p):
    made = p["scale"][group, slot][:, None] * p["slot_weight"][slot]
    rest = given.output - made
    members = [group == g for g in range(group.max() + 1)]
    mean = lambda m: np.average(rest[m], axis=0, weights=given.counts[m])
    rest = rest - np.stack([mean(m) for m in members])[group]
    return (given.counts * (rest**2).sum(-1)).sum()

  assert error(weighted) < error(even)


class TestOrders:
  def test_by_frequency(self):
    given = stats()
    order = convert.ByFrequency()(given, np.asarray(SIZES))
    assert sorted(order) == list(range(V))
    assert (np.diff(given.counts[order]) <= 0).all()

  def test_a_shuffled_order_is_a_permutation_of_its_own(self):
    orders = [convert.Shuffled(seed)(stats(), np.asarray(SIZES)) for seed in (0, 1, 1)]
    assert all(sorted(order) == list(range(V)) for order in orders)
    assert (orders[0] != orders[1]).any()
    np.testing.assert_array_equal(*orders[1:])

  def test_clusters_of_the_groups_sizes_are_the_groups(self):
    cluster = np.random.default_rng(0).permutation(np.repeat(np.arange(5), SIZES[::-1]))
    fixed = convert.Fixed(lambda vocab, codes: cluster)
    given = stats()
    groups = np.split(convert.ByClusters(fixed)(given, np.asarray(SIZES)), np.cumsum(SIZES)[:-1])
    for members in groups:
      assert len(set(cluster[members])) == 1
      assert (np.diff(given.counts[members]) <= 0).all()

  def test_only_the_rarest_tokens_of_too_large_a_cluster_are_in_other_groups(self):
    cluster = np.where(np.arange(V) < 30, 2, np.arange(V) % 5)
    given = stats()
    order = convert.ByClusters(convert.Fixed(lambda vocab, codes: cluster))(
      given, np.asarray(SIZES)
    )
    assert sorted(order) == list(range(V))
    members = np.flatnonzero(cluster == 2)
    best = members[np.argsort(-given.counts[members], kind="stable")][:20]
    assert set(order[:20]) == set(best)


class TestBadInput:
  def test_a_head_without_groups_is_refused(self):
    with pytest.raises(ValueError, match="must be a GroupedHead for ToGrouped; got a DenseHead"):
      convert.ToGrouped()(stats(), DenseHead(V, D))

  def test_an_order_for_a_head_without_one_is_refused(self):
    with pytest.raises(ValueError, match=r"by ByFrequency\(\); got a GroupedHead without one"):
      convert.ToGrouped(by=convert.ByFrequency())(stats(), GroupedHead(V, D))
