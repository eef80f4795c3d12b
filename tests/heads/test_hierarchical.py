"""The hierarchical head keeps the contract with any tree."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract_of_representatives import RepresentativeContract
from vqjax import HierarchicalHead
from vqjax.assign import trees


def zipf(vocab):
  """Unordered counts of a vocabulary; some are zero."""
  counts = (1e6 / np.arange(1, vocab + 1)).astype(int) * (np.arange(vocab) % 10 > 0)
  return np.random.default_rng(0).permutation(counts)


def uneven(vocab):
  """A tree in which some leaves are much deeper than the others."""
  chain = 2 ** np.arange(20)
  return trees.Huffman(np.concatenate([np.full(vocab - 20, 2**22), chain]))(vocab)


class TestHierarchicalHead(RepresentativeContract):
  cases: ClassVar = {
    "huffman": lambda v, d: HierarchicalHead(v, d, trees.Huffman(zipf(v))),
    "balanced": HierarchicalHead,
    "uneven": lambda v, d: HierarchicalHead(v, d, uneven),
  }
  mesh_cases: ClassVar = ("huffman",)

  def reference_logits(self, head, variables, hidden):
    """Recursion from the root; the number of a node separates its leaves."""
    weight = variables["params"]["weight"]
    tokens, paths = (variables["codes"][name] for name in ("tokens", "paths"))
    log_prob = np.empty((*hidden.shape[:-1], head.vocab))

    def descend(leaves, level, so_far):
      if len(leaves) == 1:
        log_prob[..., tokens[leaves[0]]] = so_far
        return
      (node,) = set(paths[leaves, level])
      score = hidden @ weight[node]
      descend(leaves[leaves <= node], level + 1, so_far - np.logaddexp(0, -score))
      descend(leaves[leaves > node], level + 1, so_far - np.logaddexp(0, score))

    descend(np.arange(head.vocab), 0, np.zeros(hidden.shape[:-1]))
    return log_prob


@pytest.mark.slow
def test_a_vocabulary_of_one_token_is_certain():
  head = HierarchicalHead(1, 4)
  hidden = jnp.ones((3, 4))
  variables = head.init(jax.random.key(0), hidden)
  tokens = jnp.zeros((3,), jnp.int32)
  np.testing.assert_array_equal(head.apply(variables, hidden, tokens, method="log_prob"), 0)
  np.testing.assert_array_equal(head.apply(variables, hidden, 1, method="top_k")[0], 0)
  draws = head.apply(variables, hidden, jax.random.key(0), method="sample")
  np.testing.assert_array_equal(draws, 0)


@pytest.mark.slow
def test_only_the_nodes_on_the_path_of_a_token_get_a_gradient():
  head = HierarchicalHead(37, 8, trees.Huffman(zipf(37)))
  hidden, tokens = jax.random.normal(jax.random.key(0), (1, 8)), jnp.array([11])
  variables = head.init(jax.random.key(1), hidden)
  loss = lambda v: head.apply(v, hidden, tokens, method="log_prob").sum()
  gradient = jax.grad(loss, allow_int=True)(variables)["params"]["weight"]
  path = variables["codes"]["paths"][variables["codes"]["leaves"][11]]
  assert set(np.flatnonzero(gradient.any(axis=1))) == set(np.asarray(path)) - {trees.NO_NODE}


def test_a_tree_of_another_vocabulary_is_refused():
  with pytest.raises(ValueError, match=r"counts.*9"):
    HierarchicalHead(10, 4, trees.Huffman(np.ones(9, int))).size()
  variables = HierarchicalHead(9, 4).init(jax.random.key(0), jnp.ones((1, 4)))
  weight = {"weight": jnp.ones((10, 4))}
  with pytest.raises(ValueError, match=r"`tokens` .*\(10,\).*\(9,\)"):
    HierarchicalHead(10, 4).apply(variables | {"params": weight}, jnp.ones((1, 4)))


def test_heads_of_equal_counts_are_equal():
  head = lambda *counts: HierarchicalHead(3, 4, trees.Huffman(np.array(counts)))
  assert head(1, 2, 3) == head(1, 2, 3)
  assert hash(head(1, 2, 3)) == hash(head(1, 2, 3))
  assert head(1, 2, 3) != head(1, 2, 4)
