"""The hierarchical softmax head over a binary tree of the vocabulary."""

# Tokens stand at leaves, which are numbered from left to right; a path has the nodes above a leaf:
#
#   token v  --leaves-->  leaf j  --paths-->  nodes [L] from the root, then NO_NODE
#   leaf j   --tokens-->  token v
#
#   log_prob           the L nodes of one path a token, a level of all paths at a time
#   sample             from the root down, a node a level: L products a draw
#   logits, _scores    products with all nodes, then sums along the path of every leaf
#
# Node k lies between leaf k and leaf k + 1 (`ops.tree`), so that a device which holds rows of the
# weight holds the leaves of the same numbers.

from __future__ import annotations

import functools
from typing import Any

from jaxtyping import Array, Float

from vqjax.assign import trees
from vqjax.assign.checks import Given
from vqjax.assign.text import TextStats
from vqjax.heads.base import Arrays, Head
from vqjax.ops import sampling, vocab_parallel
from vqjax.ops import tree as tree_ops
from vqjax.ops.sampling import SamplingOptions
from vqjax.variables import Declaration, Initializer, Variable, integer_variable, row_init

__all__ = ["HierarchicalHead"]


class HierarchicalHead(Head):
  """p(token) = product of sigmoid(±hidden · node) over the nodes above its leaf.

  The head has as many parameters as a dense head, but a token's log-probability takes only the
  products on its path, log2 V in a balanced tree. Source: Morin and Bengio 2005; with the Huffman
  tree, Mikolov et al. 2013, Section 2.1.

  The tree is in the collection `codes`: `tokens`, the token of each leaf from left to right,
  `leaves`, its inverse, and `paths`, the inner nodes above each leaf. Row k of the weight belongs
  to the node between leaf k and leaf k + 1; the last row is unused.

  Attributes:
    tree: vocab -> `trees.BinaryTree`: `trees.balanced` or `trees.Huffman(counts)`.
    weight_init: initialiser of the [V, D] weight.
  """

  tree: trees.TreeInit = trees.balanced
  weight_init: Initializer = row_init

  def declare(self) -> Declaration:
    """The vectors of the nodes [V, D] and the tables of the tree, [V] and [V, levels]."""
    v, made = self.vocab, _tree(self.tree, self.vocab)
    weight_axes = "vocab", "table_embed"
    return {
      "weight": Variable(
        (v, self.dim), weight_axes, self.weight_init, self.param_dtype, pad_value=0
      ),
      "tokens": integer_variable((len(made.tokens),), ("vocab",), lambda: made.tokens, pad_value=0),
      # The inverse of a permutation is its argsort.
      "leaves": integer_variable((len(made.tokens),), ("vocab",), made.tokens.argsort, pad_value=0),
      "paths": integer_variable(
        made.paths.shape, ("vocab", "levels"), lambda: made.paths, pad_value=trees.NO_NODE
      ),
    }

  def check(self) -> None:
    made = self.tree if isinstance(self.tree, type | Given) else _tree(self.tree, self.vocab)
    if not isinstance(made, trees.BinaryTree):
      raise ValueError(
        f"`tree` must be a function that makes a BinaryTree; got {made!r}. Take trees.balanced or"
        " trees.Huffman(counts)."
      )
    leaves = len(made.tokens)
    if leaves != self.vocab:
      raise ValueError(
        f"`tree` must have vocab={self.vocab} leaves; got {leaves}. Take trees.balanced or"
        " trees.Huffman(counts)."
      )

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """Huffman's tree of the tokens' counts."""
    return {"tree": trees.Huffman(text.counts)}

  def flops_per_token(self) -> int:
    """The products of the longest path, which all tokens take."""
    return 2 * _tree(self.tree, self.vocab).paths.shape[1] * self.dim

  def _logits(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Log-probabilities of all tokens, which are normalised logits."""
    log_prob_BL = tree_ops.all_log_probs(hidden, arrays["weight"], arrays["paths"], self.dtype)
    # From the order of leaves to that of tokens: token v is read at its leaf.
    return log_prob_BL[..., arrays["leaves"]]

  def _log_prob(self, arrays, hidden, token, temperature, counted):
    # Dividing the scores of nodes would be another distribution than dividing log-probabilities.
    if temperature != 1:
      return super()._log_prob(arrays, hidden, token, temperature, counted)
    leaf = vocab_parallel.sharded_lookup(arrays["leaves"], token, self.vocab_axis)
    path = vocab_parallel.sharded_lookup(arrays["paths"], leaf, self.vocab_axis)
    return tree_ops.leaf_log_prob(hidden, arrays["weight"], path, leaf, self.dtype, self.vocab_axis)

  def _scores(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    return tree_ops.leaf_blocks(
      hidden,
      arrays["weight"],
      arrays["paths"],
      arrays["tokens"],
      self.vocab,
      self.dtype,
      self.vocab_axis,
    )

  def _sample(self, arrays, hidden, key, options, allowed):
    """A token; at temperature 1 without filters from the root down."""
    if options != SamplingOptions() or allowed is not None:
      return super()._sample(arrays, hidden, key, options, allowed)
    leaf = tree_ops.draw_leaves(
      key, hidden, arrays["weight"], arrays["paths"], self.dtype, self.vocab_axis
    )
    return vocab_parallel.sharded_lookup(arrays["tokens"], leaf, self.vocab_axis)


@functools.lru_cache(maxsize=4)
def _tree(init: trees.TreeInit, vocab: int) -> trees.BinaryTree:
  # The shape of `paths` depends on the tree, and a declaration is read at each trace.
  return init(vocab)
