"""The hierarchical softmax head over a binary tree of the vocabulary."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Integer, PRNGKeyArray

from vqjax.assign import trees
from vqjax.heads.base import Head
from vqjax.ops import sampling, vocab_parallel
from vqjax.ops import tree as tree_ops
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype
from vqjax.variables import Declaration, Initializer, Variable, row_init, table


class HierarchicalHead(Head):
  """p(token) = product of sigmoid(±hidden · node) over the nodes above its leaf.

  The head has as many parameters as a dense head, but a token's log-probability takes only the
  products on its path, log2 V in a balanced tree. Source: Morin and Bengio 2005; with the Huffman
  tree, Mikolov et al. 2013, Section 2.1.

  The tree is in the collection `codes`: `tokens`, the token of each leaf from left to right,
  `leaves`, its inverse, and `paths`, the inner nodes above each leaf. Row k of the weight belongs
  to the node between leaf k and leaf k + 1; the last row is unused.

  Attributes:
    tree: vocab -> `trees.Tree`: `trees.balanced` or `trees.Huffman(counts)`.
    weight_init: initialiser of the [V, D] weight.
    dtype: dtype of the products' operands; None: the promoted dtype of hidden and weight.
    param_dtype: dtype of the parameters.
  """

  tree: trees.TreeInit = trees.balanced
  weight_init: Initializer = row_init
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def declare(self) -> Declaration:
    """The vectors of the nodes [V, D] and the tables of the tree, [V] and [V, levels]."""
    v, made = self.vocab, _tree(self.tree, self.vocab)
    weight_axes = "vocab", "table_embed"
    return {
      "weight": Variable(
        (v, self.dim), weight_axes, self.weight_init, self.param_dtype, pad_value=0
      ),
      "tokens": table((len(made.tokens),), ("vocab",), lambda: made.tokens, pad_value=0),
      "leaves": table((len(made.tokens),), ("vocab",), made.tokens.argsort, pad_value=0),
      "paths": table(
        made.paths.shape, ("vocab", "levels"), lambda: made.paths, pad_value=trees.NO_NODE
      ),
    }

  def check(self) -> None:
    """Check that the tree has a leaf for each token."""
    leaves = len(_tree(self.tree, self.vocab).tokens)
    if leaves != self.vocab:
      raise ValueError(
        f"`tree` must have vocab={self.vocab} leaves; got {leaves}. Take trees.balanced or"
        " trees.Huffman(counts)."
      )

  def flops_per_token(self) -> int:
    """The products of the longest path, which all tokens take."""
    return 2 * _tree(self.tree, self.vocab).paths.shape[1] * self.dim

  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Log-probabilities of all tokens, which are normalised logits."""
    self._check_hidden(hidden)
    log_prob_BL = tree_ops.all_log_probs(
      hidden, self.array("weight"), self.array("paths"), self.dtype
    )
    return log_prob_BL[..., self.array("leaves")]

  def log_prob(
    self,
    hidden: Float[Array, "*B D"],
    tokens: Integer[Array, "*B"],
    temperature: float | int = 1.0,
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats; nan for a token outside [0, V)."""
    if temperature != 1:
      return self._log_prob_at(hidden, tokens, temperature)
    self._check_hidden(hidden)
    known, token = in_vocabulary(tokens, self.vocab)

    def body(rows, hidden, token):
      leaf = vocab_parallel.sharded_lookup(rows["leaves"], token, self.vocab_axis)
      path = vocab_parallel.sharded_lookup(rows["paths"], leaf, self.vocab_axis)
      return tree_ops.leaf_log_prob(hidden, rows["weight"], path, leaf, self.dtype, self.vocab_axis)

    return jnp.where(known, self._over_vocabulary(body, hidden, token), jnp.nan)

  def _blocks(self, rows: dict, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    self._check_hidden(hidden)
    return tree_ops.leaf_blocks(
      hidden,
      rows["weight"],
      rows["paths"],
      rows["tokens"],
      self.vocab,
      self.dtype,
      self.vocab_axis,
    )

  def sample(
    self,
    hidden: Float[Array, "*B D"],
    key: PRNGKeyArray,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    allowed: Bool[ArrayLike, "..."] | None = None,
  ) -> Int[Array, "*B"]:
    """Draw a token; at temperature 1 without filters from the root down.

    The arguments are those of `Head.sample`.
    """
    if temperature != 1 or not (top_k is None and top_p is None and allowed is None):
      return super().sample(hidden, key, temperature, top_k, top_p, allowed)
    self._check_hidden(hidden)

    def body(rows, hidden, key):
      leaf = tree_ops.draw_leaves(
        key, hidden, rows["weight"], rows["paths"], self.dtype, self.vocab_axis
      )
      return vocab_parallel.sharded_lookup(rows["tokens"], leaf, self.vocab_axis)

    return self._over_vocabulary(body, hidden, key)


@functools.lru_cache(maxsize=4)
def _tree(init: trees.TreeInit, vocab: int) -> trees.Tree:
  # The shape of `paths` depends on the tree, and a declaration is read at each trace.
  return init(vocab)
