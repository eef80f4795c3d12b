"""Grouped heads decode exactly without scoring every group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.contract_on_meshes import perturbed
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
  return perturbed(jax.jit(head.init)(jax.random.key(0), jnp.zeros((1, DIM))))


def run(head, variables, *args, method, **options):
  """`head.apply`, compiled, since its operations take longer one by one."""
  call = lambda variables, *args: head.apply(variables, *args, **options, method=method)
  return jax.jit(call)(variables, *args)


def peaked(rows=1):
  """Long hidden vectors, for which few groups have most of the probability."""
  return 6 * jax.random.normal(jax.random.key(1), (rows, DIM))


@pytest.mark.slow
def test_the_best_of_a_peaked_distribution_are_those_of_all_groups(head, variables):
  hidden = peaked()
  log_probs, tokens, visited = run(head, variables, hidden, k=5, method="top_k_visited")
  everything = lambda module, hidden: Head.top_k(module, hidden, 5)
  expected, names = run(head, variables, hidden, method=everything)
  np.testing.assert_array_equal(tokens, names)
  np.testing.assert_allclose(log_probs, expected, atol=1e-5)
  log_group = run(head, variables, hidden, method="log_group")
  np.testing.assert_array_equal(visited, (log_group >= log_probs[:, -1:]).sum(-1))
  assert visited.max() < head.groups_and_slots()[0] / 2
  of_best = head.apply(variables, tokens[:, :1], method="group_of")
  assert (jnp.exp(jnp.take_along_axis(log_group, of_best, -1)) >= jnp.exp(log_probs[:, :1])).all()


@pytest.mark.slow
def test_how_many_groups_a_draw_scored_is_reported(head, variables):
  groups, _ = head.groups_and_slots()
  draw = lambda **options: run(
    head, variables, peaked(), jax.random.key(0), **options, method="sample_visited"
  )[1]
  assert (draw() == 1).all()
  assert (draw(temperature=0.5) == groups).all()
  assert (draw(allowed=jnp.arange(VOCAB) > 3, top_k=2) == groups).all()
  for few in ({"temperature": 0}, {"top_k": 3, "temperature": 2.0}, {"top_p": 0.5}):
    assert (draw(**few) < groups / 2).all()


@pytest.mark.slow
def test_a_nucleus_of_more_groups_than_the_search_scores_is_drawn_from_exactly(monkeypatch):
  monkeypatch.setattr(group_search, "MOST", 4)
  monkeypatch.setattr(group_search, "WIDTH", 2)
  head = HEADS["shared"]
  variables = perturbed(jax.jit(head.init)(jax.random.key(0), jnp.zeros((1, DIM))))
  # The first rows are flat, the others peaked: some rows need the fallback.
  row = peaked(2) * jnp.array([[0.02], [1.0]])
  hidden = jnp.repeat(row, 1000, axis=0)
  tokens, visited = run(
    head, variables, hidden, jax.random.key(5), top_p=0.7, method="sample_visited"
  )
  assert (visited[:1000] == head.groups_and_slots()[0]).all()
  assert (visited[1000:] <= 4).all()
  exact = np.exp(reference.log_softmax(run(head, variables, row, method="logits")))
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
  variables = jax.eval_shape(head.init, jax.random.key(0), jnp.zeros((1, DIM)))
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
    assert reference.largest_value(draw, variables, hidden, allowed) < rows * vocab / 4


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("shape", [(), (0,), (2, 1)])
def test_any_leading_shape_is_decoded(head, variables, shape):
  hidden = jnp.ones((*shape, DIM))
  allowed = jnp.ones((*shape, VOCAB), bool)

  def everything(hidden, key):
    call = lambda *args, **options: head.apply(variables, hidden, *args, **options)
    options = {}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 0.5, "allowed": allowed}
    draws = [call(key, **some, method="sample_visited") for some in options]
    return call(3, method="top_k_visited"), draws

  (log_probs, tokens, visited), draws = jax.jit(everything)(hidden, jax.random.key(0))
  assert log_probs.shape == tokens.shape == (*shape, 3)
  assert visited.shape == shape
  assert all(x.shape == shape and x.dtype == jnp.int32 for x in jax.tree.leaves(draws))


@pytest.mark.slow
def test_a_batch_by_vmap_is_that_batch(head, variables):
  hidden = peaked(3)
  best = lambda hidden: head.apply(variables, hidden, 4, method="top_k")
  for found, expected in zip(jax.jit(jax.vmap(best))(hidden), jax.jit(best)(hidden)):
    np.testing.assert_allclose(found, expected, atol=1e-5)
  nucleus = lambda h: head.apply(variables, h, jax.random.key(0), top_p=0.3, method="sample")
  drawn = jax.jit(jax.vmap(nucleus))(hidden)
  assert ((drawn >= 0) & (drawn < VOCAB)).all()


def test_rows_with_their_own_groups_are_scored_in_chunks():
  head = UnsharedGroupedHead(1030, 512, sizes=(1024, 6))
  variables = jax.jit(head.init)(jax.random.key(0), jnp.zeros((1, 512)))
  hidden = jax.random.normal(jax.random.key(1), (9, 512))
  allowed = jnp.arange(1030) == jnp.array([5] * 4 + [1027] * 5)[:, None]
  drawn = run(head, variables, hidden, jax.random.key(0), allowed=allowed, method="sample")
  assert drawn.tolist() == [5] * 4 + [1027] * 5
