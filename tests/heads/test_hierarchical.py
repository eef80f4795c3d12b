"""The hierarchical head keeps the contract with any tree."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract_of_representatives import RepresentativeContract
from tests.jitted import random_variables, results
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


def test_a_vocabulary_of_one_token_is_certain():
  def everything(variables):
    own, hidden = HierarchicalHead(1, 4).bind(variables), jnp.ones((3, 4))
    log_prob = own.log_prob(hidden, jnp.zeros((3,), jnp.int32))
    return log_prob, own.top_k(hidden, 1)[0], own.sample(hidden, jax.random.key(0))

  for found in results(everything, random_variables(HierarchicalHead(1, 4))):
    np.testing.assert_array_equal(found, 0)


def test_only_the_nodes_on_the_path_of_a_token_get_a_gradient():
  head = HierarchicalHead(37, 8, trees.Huffman(zipf(37)))
  hidden = np.random.default_rng(0).standard_normal((1, 8), np.float32)
  variables, tokens = random_variables(head), np.array([11])
  loss = lambda v: head.apply(v, hidden, tokens, method="log_prob").sum()
  gradient = results(jax.grad(loss, allow_int=True), variables)["params"]["weight"]
  path = variables["codes"]["paths"][variables["codes"]["leaves"][11]]
  assert set(np.flatnonzero(gradient.any(axis=1))) == set(path) - {trees.NO_NODE}


def test_a_tree_of_another_vocabulary_is_refused():
  with pytest.raises(ValueError, match=r"counts.*9"):
    HierarchicalHead(10, 4, trees.Huffman(np.ones(9, int))).size()


def test_heads_of_equal_counts_are_equal():
  head = lambda *counts: HierarchicalHead(3, 4, trees.Huffman(np.array(counts)))
  assert head(1, 2, 3) == head(1, 2, 3)
  assert hash(head(1, 2, 3)) == hash(head(1, 2, 3))
  assert head(1, 2, 3) != head(1, 2, 4)
