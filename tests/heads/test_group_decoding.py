"""Grouped heads decode exactly without scoring every group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.jitted import abstract_variables, random_variables, run
from vqjax import GroupedHead, UnsharedGroupedHead
from vqjax.heads.base import Head
from vqjax.ops import group_search, sampling

VOCAB, DIM = 307, 8


def shuffled(key, shape, dtype):
  """A random order of the tokens."""
  return jax.random.permutation(key, shape[0]).astype(dtype)


HEADS = {
  "shared": GroupedHead(VOCAB, DIM),
  "unshared": UnsharedGroupedHead(VOCAB, DIM, order_init=shuffled),
}


@pytest.fixture(params=HEADS)
def head(request):
  return HEADS[request.param]


@pytest.fixture
def variables(head):
  return random_variables(head)


def peaked(rows=1):
  """Long hidden vectors, for which few groups have most of the probability."""
  return 6 * np.random.default_rng(1).standard_normal((rows, DIM), np.float32)


@pytest.mark.fast_cases(1)
def test_the_best_of_a_peaked_distribution_are_those_of_all_groups(head, variables):
  def everything(own, hidden):
    found = own.top_k_visited(hidden, k=5)
    group_of_best = own.group_of(found[1][:, :1])
    return found, Head.top_k(own, hidden, 5), own.log_group(hidden), group_of_best

  (log_probs, tokens, visited), expected, log_group, of_best = run(
    head, variables, everything, peaked()
  )
  np.testing.assert_array_equal(tokens, expected[1])
  np.testing.assert_allclose(log_probs, expected[0], atol=1e-5)
  np.testing.assert_array_equal(visited, (log_group >= log_probs[:, -1:]).sum(-1))
  assert visited.max() < head.groups_and_slots()[0] / 2
  assert (np.take_along_axis(log_group, of_best, -1) >= log_probs[:, :1]).all()


@pytest.mark.slow
def test_how_many_groups_a_draw_scored_is_reported(head, variables):
  groups, _ = head.groups_and_slots()

  def everything(own, hidden):
    draw = lambda **options: own.sample_visited(hidden, jax.random.key(0), **options)[1]
    some = draw(temperature=0.5), draw(allowed=jnp.arange(VOCAB) > 3, top_k=2)
    few = {"temperature": 0}, {"top_k": 3, "temperature": 2.0}, {"top_p": 0.5}
    return draw(), some, [draw(**options) for options in few]

  one, some, few = run(head, variables, everything, peaked())
  assert (one == 1).all()
  assert (np.array(some) == groups).all()
  assert (np.array(few) < groups / 2).all()


@pytest.mark.slow
def test_a_nucleus_of_more_groups_than_the_search_scores_is_drawn_from_exactly(monkeypatch):
  monkeypatch.setattr(group_search, "MOST", 4)
  monkeypatch.setattr(group_search, "WIDTH", 2)
  head = HEADS["shared"]
  variables = random_variables(head)
  # The first rows are flat, the others peaked: some rows need the fallback.
  row = peaked(2) * np.float32([[0.02], [4.0]])

  def program(own, row):
    hidden = jnp.repeat(row, 1000, axis=0)
    return own.sample_visited(hidden, jax.random.key(5), top_p=0.7), own.logits(row)

  (tokens, visited), logits = run(head, variables, program, row)
  assert (visited[:1000] == head.groups_and_slots()[0]).all()
  assert (visited[1000:] <= 4).all()
  exact = np.exp(reference.log_softmax(logits))
  for i in range(2):
    order = np.argsort(-exact[i])
    size = 1 + np.searchsorted(np.cumsum(exact[i][order]), 0.7)
    kept = np.zeros(VOCAB)
    kept[order[:size]] = exact[i][order[:size]] / exact[i][order[:size]].sum()
    share = np.bincount(tokens[1000 * i : 1000 * i + 1000], minlength=VOCAB) / 1000
    assert share[kept == 0].sum() == 0
    # Four standard deviations of the mass of any set of tokens in 1000 draws.
    assert abs(share[order[: size // 2]].sum() - kept[order[: size // 2]].sum()) < 0.064


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"masked": True}, {"masked_rows": True}])
def test_draws_by_group_make_no_value_of_batch_times_vocabulary(options):
  head, rows, vocab = GroupedHead(4099, DIM), 1031, 4099
  given = {name: options[name] for name in options if name == "temperature"}
  shape = {"masked": (vocab,), "masked_rows": (rows, vocab)}.get(next(iter(options)))
  allowed = None if shape is None else jax.ShapeDtypeStruct(shape, bool)

  def draw(variables, hidden, allowed):
    return head.apply(
      variables, hidden, jax.random.key(0), allowed=allowed, **given, method="sample"
    )

  hidden = jax.ShapeDtypeStruct((rows, DIM), jnp.float32)
  # Blocks of 4 Mi scores would be the whole vocabulary here.
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sampling, "block_width", lambda rows, vocab: 256)
    largest = reference.largest_value(draw, abstract_variables(head), hidden, allowed)
  assert largest < rows * vocab / 4


@pytest.mark.fast_cases(1)
def test_any_leading_shape_is_decoded(head, variables):
  shapes = (), (0,), (2, 1)

  def everything(own):
    found = []
    for shape in shapes:
      hidden, allowed = jnp.ones((*shape, DIM)), jnp.ones((*shape, VOCAB), bool)
      options = {}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 0.5, "allowed": allowed}
      draws = [own.sample_visited(hidden, jax.random.key(0), **some) for some in options]
      found.append((own.top_k_visited(hidden, 3), draws))
    return found

  for shape, ((log_probs, tokens, visited), draws) in zip(shapes, run(head, variables, everything)):
    assert log_probs.shape == tokens.shape == (*shape, 3)
    assert visited.shape == shape
    assert all(x.shape == shape and x.dtype == jnp.int32 for x in jax.tree.leaves(draws))


@pytest.mark.slow
def test_a_batch_by_vmap_is_that_batch(head, variables):
  def program(own, hidden):
    best = lambda hidden: own.top_k(hidden, 4)
    nucleus = lambda h: own.sample(h, jax.random.key(0), top_p=0.3)
    return jax.vmap(best)(hidden), best(hidden), jax.vmap(nucleus)(hidden)

  found, expected, drawn = run(head, variables, program, peaked(3))
  for one, other in zip(found, expected):
    np.testing.assert_allclose(one, other, atol=1e-5)
  assert ((drawn >= 0) & (drawn < VOCAB)).all()


def test_rows_with_their_own_groups_are_scored_in_chunks():
  head = UnsharedGroupedHead(1030, 512, sizes=(1024, 6))
  hidden = np.random.default_rng(1).standard_normal((9, 512), np.float32)

  def draw(own, hidden):
    allowed = jnp.arange(1030) == jnp.array([5] * 4 + [1027] * 5)[:, None]
    return own.sample(hidden, jax.random.key(0), allowed=allowed)

  drawn = run(head, random_variables(head), draw, hidden)
  assert drawn.tolist() == [5] * 4 + [1027] * 5
