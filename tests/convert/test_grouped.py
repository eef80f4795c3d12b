"""Does a grouped head made of dense rows predict as they do, with its tokens in their positions?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from vqjax import DenseHead, GroupedHead, UnsharedGroupedHead, convert
from vqjax.lab import conversion
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.training import fit, read_variables
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.run import load_text
from vqjax.sharding import MeshShape, make_mesh

V, D = 53, 5
SIZES = (20, 1, 9, 16, 7)


def known(dim=D, scale=1.0, counts=None):
  """Random rows, whose counts fall as one over the number of the token, shuffled."""
  rng = np.random.default_rng(0)
  counts = rng.permutation(1000 // np.arange(1, V + 1)) if counts is None else counts
  rows = scale * rng.normal(size=(V, dim)).astype(np.float32)
  return convert.TokenStats(np.arange(V), np.asarray(counts), rows, rows[:, :2])


def log_probs(head, variables, hidden):
  """Of all tokens, float64 [N, V]."""
  narrow = lambda x: jnp.asarray(x, jnp.float32 if x.dtype.kind == "f" else jnp.int32)
  return np.asarray(head.apply(jax.tree.map(narrow, variables), jnp.asarray(hidden)), np.float64)


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
  given, hidden = known(), np.random.default_rng(1).normal(size=(7, D)).astype(np.float32)
  variables = convert.ToGrouped(by=by)(given, head)
  log_prob = log_probs(head, variables, hidden)
  position = variables["codes"]["position"] if by else np.arange(V)
  group = np.repeat(np.arange(5), SIZES)[position]
  expected = within(reference.log_softmax(hidden @ given.output.T), group)
  np.testing.assert_allclose(within(log_prob, group), expected, atol=1e-5)


def test_a_shared_linear_of_width_one_keeps_it_too():
  """With one dimension all that is left of rows is a scale of one vector."""
  head = GroupedHead(V, 1, sizes=SIZES)
  given, hidden = known(1), np.linspace(-2, 2, 7, dtype=np.float32)[:, None]
  log_prob = log_probs(head, convert.ToGrouped()(given, head), hidden)
  group = np.repeat(np.arange(5), SIZES)
  expected = within(reference.log_softmax(hidden @ given.output.T), group)
  np.testing.assert_allclose(within(log_prob, group), expected, atol=1e-5)


@pytest.mark.parametrize("use_bias", [False, True])
def test_a_converted_head_is_nearer_to_the_rows_than_their_frequencies(use_bias):
  given = known()
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
def test_parameters_are_no_larger_than_rows_and_frequencies(kind, scale, counts):
  head = kind(V, D, groups=7, use_bias=scale > 0)
  found = convert.ToGrouped()(known(scale=scale, counts=counts), head)["params"]
  for leaf in found.values():
    assert np.abs(leaf).max() <= 100 * max(1.0, scale)


def test_more_frequent_tokens_have_the_smaller_error():
  given, head = known(), GroupedHead(V, D)
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
    given = known()
    order = convert.ByFrequency()(given, np.asarray(SIZES))
    assert sorted(order) == list(range(V))
    assert (np.diff(given.counts[order]) <= 0).all()

  def test_a_shuffled_order_is_a_permutation_of_its_own(self):
    orders = [convert.Shuffled(seed)(known(), np.asarray(SIZES)) for seed in (0, 1, 1)]
    assert all(sorted(order) == list(range(V)) for order in orders)
    assert (orders[0] != orders[1]).any()
    np.testing.assert_array_equal(*orders[1:])

  def test_clusters_of_the_groups_sizes_are_the_groups(self):
    cluster = np.random.default_rng(0).permutation(np.repeat(np.arange(5), SIZES[::-1]))
    fixed = convert.Fixed(lambda vocab, codes: cluster)
    given = known()
    groups = np.split(convert.ByClusters(fixed)(given, np.asarray(SIZES)), np.cumsum(SIZES)[:-1])
    for members in groups:
      assert len(set(cluster[members])) == 1
      assert (np.diff(given.counts[members]) <= 0).all()

  def test_only_the_rarest_of_a_cluster_that_is_too_large_lie_elsewhere(self):
    cluster = np.where(np.arange(V) < 30, 2, np.arange(V) % 5)
    given = known()
    order = convert.ByClusters(convert.Fixed(lambda vocab, codes: cluster))(
      given, np.asarray(SIZES)
    )
    assert sorted(order) == list(range(V))
    members = np.flatnonzero(cluster == 2)
    best = members[np.argsort(-given.counts[members], kind="stable")][:20]
    assert set(order[:20]) == set(best)


def begun(experiment):
  """(text, its experiment's model, the variables that its run begins with, the fresh ones)."""
  text = load_text(experiment)
  program = Program(text.experiment, make_mesh(MeshShape(data=1)))
  fresh = jax.device_get(program.init(keys(0)[0]).variables)
  model = text.experiment.model
  return text, model, experiment.init_from(text, model, fresh), fresh


def test_a_run_can_begin_with_groups_from_its_text_and_nothing_else_changes(dense):
  experiment, _ = dense
  head = GroupedHead(FROM_TOKENIZER, 16, order_init=convert.in_order)
  model = experiment.model.clone(head=head)
  start = conversion.Regrouped(convert.ByClusters(convert.ContextKMeans(width=4)))
  scratch = dataclasses.replace(experiment, model=model, init_from=start)
  _, _, variables, fresh = begun(scratch)
  codes = variables["codes"]["head"]
  order = codes["order"]
  assert order.dtype == codes["position"].dtype == np.int32
  assert sorted(order) == list(range(len(order)))
  assert (order != np.arange(len(order))).any()
  np.testing.assert_array_equal(codes["position"][order], np.arange(len(order)))
  jax.tree.map(np.testing.assert_array_equal, variables["params"], fresh["params"])


def test_a_conversion_beats_a_fresh_head_and_is_distilled_and_ships(dense, short, tmp_path):
  experiment, folder = dense
  head = GroupedHead(FROM_TOKENIZER, 16, use_bias=True, order_init=convert.in_order)
  target = convert.ToGrouped(by=convert.ByFrequency())
  made = conversion.converted(
    *(experiment, folder, head, target), name="grouped", distillation=1.0, train=short
  )
  text, model, variables, fresh = begun(made)
  tokens = jnp.arange(32).reshape(4, 8) * 7 % model.head.vocab

  @jax.jit
  def run(given):
    of = lambda part: {name: tree[part] for name, tree in given.items() if part in tree}
    logits = [getattr(model, part).apply(of(part), tokens) for part in ("student", "teacher")]
    return model.apply(given, tokens, tokens, method="loss_terms")[1]["distillation"], *logits

  def diverges(given):
    found, p, q = run(given)
    np.testing.assert_allclose(found, divergence(q, np.asarray(p, np.float64)), rtol=1e-4)
    return float(found)

  scratch = variables | {"params": _with_head(variables, fresh)}
  assert diverges(variables) < diverges(scratch) / 2

  assert fit(made, tmp_path / "run")["status"] == "finished"
  both, _ = read_variables(tmp_path / "run")
  alone = {name: tree["student"] for name, tree in variables.items()}
  ships = conversion.FromStudent(str(tmp_path / "run"))(text, model.student, alone)
  for collection in ("params", "codes"):
    jax.tree.map(np.testing.assert_array_equal, ships[collection], both[collection]["student"])
  np.testing.assert_array_equal(ships["codes"]["head"]["order"], alone["codes"]["head"]["order"])


def _with_head(variables, fresh):
  params = dict(variables["params"])
  return params | {"student": params["student"] | {"head": fresh["params"]["student"]["head"]}}


class TestBadInput:
  def test_a_head_without_groups_is_refused(self):
    with pytest.raises(TypeError, match="ToGrouped gives a GroupedHead its variables, not a Dense"):
      convert.ToGrouped()(known(), DenseHead(V, D))

  def test_an_order_for_a_head_that_keeps_none_is_refused(self, dense):
    with pytest.raises(ValueError, match="this GroupedHead does not; give it order_init"):
      convert.ToGrouped(by=convert.ByFrequency())(known(), GroupedHead(V, D))
    model = dense[0].model.clone(head=DenseHead(FROM_TOKENIZER, 16))
    start = conversion.Regrouped(convert.Shuffled())
    with pytest.raises(ValueError, match=r"Shuffled\(seed=0\) orders .* this DenseHead does not"):
      begun(dataclasses.replace(dense[0], model=model, init_from=start))

  def test_an_order_that_is_no_permutation_is_refused(self):
    head = GroupedHead(V, D, order_init=convert.in_order)
    twice = lambda known, sizes: np.arange(V) // 2
    with pytest.raises(ValueError, match="order has token 0 at positions 0 and 1, and"):
      convert.ToGrouped(by=twice)(known(), head)

  def test_a_cap_that_a_grouped_head_cannot_keep_is_refused(self, dense):
    model = dense[0].model.clone(head=DenseHead(FROM_TOKENIZER, 16, softcap=30.0))
    capped, head = dataclasses.replace(dense[0], model=model), GroupedHead(FROM_TOKENIZER, 16)
    with pytest.raises(ValueError, match=r"has softcap 30\.0, and a GroupedHead none"):
      conversion.converted(capped, dense[1], head, convert.ToGrouped(), name="x")
