"""What does a head look like that chooses a token by going down a binary tree?"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Integer, PRNGKeyArray

from vqjax.assign import trees
from vqjax.heads.base import Head, bytes_of, row_init
from vqjax.ops import sampling, vocab_parallel
from vqjax.ops import tree as tree_ops
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype, Size


class HierarchicalHead(Head):
  """p(token) = product over its path of sigmoid(±hidden · the node's vector).

  As many parameters as a dense head's, but a token's log-probability takes only the products on
  its path, log2 V of them in a balanced tree. Source: Morin and Bengio 2005; with the Huffman tree,
  Mikolov et al. 2013, Section 2.1.

  The tree is in the collection `codes`: `tokens`, the token of each leaf from left to right,
  `leaves`, its inverse, and `paths`, the inner nodes above each leaf. Row k of the weight is of the
  node between leaf k and leaf k + 1; the last row is of none and stays as it is.

  Attributes:
    tree: vocab -> `trees.Tree`: `trees.balanced` or `trees.Huffman(counts)`.
    weight_init: initialiser of the [V, D] weight.
    dtype: dtype of the products' operands; None: that of hidden and weight together.
    param_dtype: dtype of the parameters.
  """

  tree: trees.TreeInit = trees.balanced
  weight_init: nn.initializers.Initializer = row_init
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def setup(self):
    shape = self.vocab, self.dim
    self.weight = self.param("weight", self.weight_init, shape, self.param_dtype)
    made = self.tree(self.vocab) if not self.has_variable("codes", "paths") else None
    new = lambda name, make: self.variable("codes", name, lambda: jnp.asarray(make(), jnp.int32))
    self.tokens = new("tokens", lambda: made.tokens)
    self.leaves = new("leaves", lambda: made.tokens.argsort())
    self.paths = new("paths", lambda: made.paths)
    self._check_tables()

  def _check_tables(self):
    tables = self.tokens.value.shape, self.leaves.value.shape, self.paths.value.shape[:1]
    if any(shape != (self.vocab,) for shape in tables):
      raise ValueError(
        f"vocab {self.vocab} has a tree of {tables[0][0]} leaves; build it with trees.balanced or"
        " trees.Huffman(counts)"
      )

  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Log-probabilities of all tokens, which are logits that need no normaliser."""
    self._check_hidden(hidden)
    paths, leaves = jnp.asarray(self.paths.value), jnp.asarray(self.leaves.value)
    return tree_ops.all_log_probs(hidden, self.weight, paths, self.dtype)[..., leaves]

  def log_prob(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats, from their paths; nan for a token outside [0, V)."""
    self._check_hidden(hidden)
    known, token = in_vocabulary(tokens, self.vocab)

    def body(rows, hidden, token):
      weight, paths, _, leaves = rows
      leaf = vocab_parallel.sharded_lookup(leaves, token, self.vocab_axis)
      path = vocab_parallel.sharded_lookup(paths, leaf, self.vocab_axis)
      return tree_ops.leaf_log_prob(hidden, weight, path, leaf, self.dtype, self.vocab_axis)

    return jnp.where(known, self._over_vocabulary(body, hidden, token), jnp.nan)

  def _rows(self) -> tuple[vocab_parallel.Sharded, ...]:
    # Inside `nn.scan` the variables may be the NumPy arrays they were made from.
    paths, tokens, leaves = (jnp.asarray(x.value) for x in (self.paths, self.tokens, self.leaves))
    return (
      vocab_parallel.Sharded(self.weight, 0),
      vocab_parallel.Sharded(paths, trees.NO_NODE),
      vocab_parallel.Sharded(tokens, 0),
      vocab_parallel.Sharded(leaves, 0),
    )

  def _blocks(self, rows: tuple, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    self._check_hidden(hidden)
    weight, paths, tokens, _ = rows
    return tree_ops.leaf_blocks(
      hidden, weight, paths, tokens, self.vocab, self.dtype, self.vocab_axis
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
    """As `Head.sample`; at temperature 1 without filters it walks down the tree."""
    if temperature != 1 or not (top_k is None and top_p is None and allowed is None):
      return super().sample(hidden, key, temperature, top_k, top_p, allowed)
    self._check_hidden(hidden)

    def body(rows, hidden, key):
      weight, paths, tokens, _ = rows
      leaf = tree_ops.draw_leaves(key, hidden, weight, paths, self.dtype, self.vocab_axis)
      return vocab_parallel.sharded_lookup(tokens, leaf, self.vocab_axis)

    return self._over_vocabulary(body, hidden, key)

  def size(self) -> Size:
    """V·D parameters, and four bytes for each entry of the tree's tables.

    Operations are those of the longest path, which all tokens take.
    """
    vocab, levels = self.tree(self.vocab).paths.shape
    params = vocab * self.dim
    state = bytes_of(params, self.param_dtype) + bytes_of(vocab * (levels + 2), jnp.int32)
    return Size(params, state, 2 * levels * self.dim)

  def logical_axes(self) -> dict:
    """Axes of the weight and of the tree's tables."""
    tables = {"tokens": ("vocab",), "leaves": ("vocab",), "paths": ("vocab", "levels")}
    return {"params": {"weight": ("vocab", "table_embed")}, "codes": tables}
