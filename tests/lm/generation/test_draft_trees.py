"""Draft trees: their shapes, the best of them, and passes of a decoder over them."""

import functools
import itertools

import jax
import numpy as np
import pytest

from tests.lm.generation.test_speculation import CONTEXT, PROMPTS, V, target
from vqjax.lm.generation import DraftTree, unstacked
from vqjax.lm.generation.decoding import padded
from vqjax.lm.generation.kv_cache import extend, prefill

TREE = DraftTree([(0, 0, 0), (0, 1), (1, 0), (2,), (0, 2)])
PATHS = ((), (0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 0), (0, 0, 0))


def test_every_beginning_of_a_path_is_a_node():
  assert TREE.nodes == PATHS
  assert (TREE.size, TREE.depth, TREE.width) == (8, 3, 3)
  assert TREE.parents.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 4]
  # The way to (0, 1), then the node whose number is the step.
  assert TREE.ways[5].tolist() == [0, 1, 5, 3]
  assert DraftTree.chain(2).nodes == ((), (0,), (0, 0))


def test_the_best_tree_is_that_of_brute_force():
  ranks = np.random.default_rng(0).integers(-1, 2, (70, 3))

  def accepted(nodes):
    beginnings = lambda row: itertools.accumulate(((rank,) for rank in row), lambda a, b: a + b)
    return sum(sum(path in nodes for path in beginnings(row)) for row in ranks.tolist())

  every = [path for k in (1, 2, 3) for path in itertools.product((0, 1), repeat=k)]
  trees = [set(nodes) for nodes in itertools.combinations(every, 5)]
  best = max(accepted(t) for t in trees if all(not p[:-1] or p[:-1] in t for p in t))
  found = DraftTree.best(ranks, 5)
  assert found.size == 5
  np.testing.assert_allclose(found.tokens_per_pass(ranks), 1 + best / len(ranks))


@pytest.mark.parametrize(
  ("make", "parts"),
  [
    (lambda: DraftTree([]), ["paths", "[]"]),
    (lambda: DraftTree([()]), ["paths", "at least one rank"]),
    (lambda: DraftTree([(0, -1)]), ["paths", "(0, -1)"]),
    (lambda: DraftTree([(0, 1), (1,), [0, 1]]), ["different", "(0, 1) 2 times"]),
    (lambda: DraftTree.best(np.array([[-1, 0]]), 3), ["ranks", "1 rows"]),
    (lambda: DraftTree([(True,)]), ["paths", "(True,)"]),
    (lambda: DraftTree.best(np.array([[0]]), 0), ["size", "0"]),
  ],
)
def test_a_wrong_tree_is_refused(make, parts):
  with pytest.raises(ValueError, match="must") as error:
    make()
  assert all(part in str(error.value) for part in parts)


STEPS = np.array([3, 0, 5, 2], np.int32)
"""Tokens of each row that are generated before the tree: not equally many."""


@functools.lru_cache
def before(size):
  """Model, variables, and the caches of the prompts and of `STEPS` tokens more of each row."""
  model, stacked = target()
  variables = unstacked(stacked)
  tokens_BT, length_B = padded(PROMPTS, model.context)
  generated = np.random.default_rng(1).integers(0, V, (len(PROMPTS), 5)).astype(np.int32)
  given = model, variables, tokens_BT, length_B
  rings = jax.jit(prefill, static_argnums=(0, 4, 5))(*given, CONTEXT, size)[1]
  # Of the five tokens of each row, those beyond `STEPS` count as rejected.
  rings = extended(model, variables, rings, generated, length_B, np.zeros_like(STEPS))[1]
  known = [[*p, *g[:s]] for p, g, s in zip(PROMPTS, generated.tolist(), STEPS)]
  return model, variables, rings, length_B, known


extended = jax.jit(extend, static_argnames=("model", "tree"))


def test_a_node_has_the_hidden_vector_of_a_text_that_ends_with_its_path():
  model, variables, rings, length_B, known = before(TREE.size)
  tokens_BN = np.random.default_rng(2).integers(0, V, (len(PROMPTS), len(PATHS))).astype(np.int32)
  hidden_BND, _ = extended(model, variables, rings, tokens_BN, length_B, STEPS, tree=TREE)
  ways = [[PATHS.index(path[:k]) for k in range(len(path) + 1)] for path in PATHS]
  texts = [[*row, *of[way].tolist()] for row, of in zip(known, tokens_BN) for way in ways]
  padded_NT, length_N = padded(texts, model.context)
  full_NTD = jax.jit(functools.partial(model.apply, method="hidden"))(target()[1], padded_NT)
  last_ND = np.asarray(full_NTD)[np.arange(len(texts)), length_N - 1]
  # float32 sums over keys in another order.
  np.testing.assert_allclose(hidden_BND, last_ND.reshape(hidden_BND.shape), atol=2e-5)


def test_a_path_and_its_cache_are_those_of_plain_tokens():
  model, variables, rings, length_B, _ = before(TREE.size)
  tokens_BN = np.random.default_rng(3).integers(0, V, (len(PROMPTS), len(PATHS))).astype(np.int32)
  given = model, variables, rings
  _, after = extended(*given, tokens_BN, length_B, STEPS, tree=TREE)
  node_B = np.array([8, 5, 7, 8])
  way_BT, depth_B = TREE.ways[node_B], TREE.depths[node_B]
  path_BT = np.take_along_axis(tokens_BN, way_BT, axis=1)
  hidden_BTD, plain = extended(*given, path_BT, length_B, STEPS)
  along = jax.jit(lambda rings, *ways: [ring.along(*ways) for ring in rings])
  for ring, other in zip(*jax.device_get((along(after, STEPS, way_BT), plain))):
    for moved, own in zip(ring[:2], other[:2]):
      for row, (step, depth) in enumerate(zip(STEPS, depth_B)):
        slots = (step + np.arange(depth + 1)) % own.shape[1]
        np.testing.assert_allclose(moved[row, slots], own[row, slots], atol=2e-5)
  chain = DraftTree.chain(TREE.depth)
  chain_BTD, chained = extended(*given, path_BT, length_B, STEPS, tree=chain)
  np.testing.assert_allclose(chain_BTD, hidden_BTD, atol=2e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), chained, plain)


def test_a_cache_without_slots_for_all_nodes_is_refused():
  model, variables, rings, length_B, _ = before(TREE.size)
  wide = DraftTree([(rank,) for rank in range(20)])
  tokens_BN = np.zeros((len(PROMPTS), 21), np.int32)
  with pytest.raises(ValueError, match=r"`rings` must have slots for the 21 nodes.*rejected=20"):
    extended(model, variables, rings, tokens_BN, length_B, STEPS, tree=wide)
