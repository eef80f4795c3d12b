"""The contract of embeddings, and what an embedding inherits.

The public methods are written once, here; an embedding is what its hooks compute: `declare`,
`flops_per_token`, the vectors of tokens (`_vectors`) and the rows of a tied head (`rows_of`). Hooks
are functions of `arrays`, which hold what `parts` names: the variables, or inside of a `shard_map`
over the vocabulary the device's rows.
"""

# The way of a call:
#
#   embedding(tokens), loss_terms(tokens)          public: checks, casts
#     _computed                                    explicit axes of the mesh made automatic
#       _embedded(tokens, train)                   nan for unknown tokens; may draw and write
#         over_vocabulary(vocab_axis, parts)       each device with its rows of the arrays
#           _vectors(arrays, token)                the hook, which finds rows by `_lookup`
#
# `rows_of` gives the same vectors to a tied head, as a factory that it composes a tile at a time,
# and to `table`, which composes all. An embedding that learns its codes overrides `_embedded`
# instead of `_vectors`: it has terms of the loss, and statistics to update.

from __future__ import annotations

import abc
from typing import Any, final

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Integer

from vqjax.layer import VocabularyLayer
from vqjax.ops import vocab_parallel
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.vocabulary import check_arrays, in_vocabulary, value_of
from vqjax.types import Size

__all__ = ["Embedding"]

# The arrays of a layer by name, as `Layer.parts` gives them.
Arrays = dict[str, Any]


class Embedding(VocabularyLayer):
  """A map from tokens to vectors: the contract that all embeddings pass."""

  @final
  def __call__(self, tokens: Integer[ArrayLike, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token; nan for a token outside [0, V)."""
    return self.loss_terms(tokens)[0]

  @final
  def loss_terms(
    self, tokens: Integer[ArrayLike, "*B"], deterministic: bool = True
  ) -> tuple[Float[Array, "*B D"], dict[str, Float[Array, ""]]]:
    """The vectors, and further terms of the training loss by name.

    They are computed as in training where `deterministic` is False.
    """
    check_arrays(tokens=tokens)
    tokens = value_of(tokens)
    return self._computed(lambda t: self._embedded(t, not deterministic), tokens, tokens)

  @final
  def table(self) -> Float[Array, "V D"]:
    """The vectors of the whole vocabulary."""
    return self._computed(self._table, None)

  def inference_size(self) -> Size:
    """The size of what inference needs, which may be less than `size`."""
    return self.size()

  # Hooks. `arrays` are those of `parts` on this device, `token` is int32 in [0, V).

  @abc.abstractmethod
  def rows_of(self, arrays: Arrays) -> RowFactory:
    """The vectors of the tokens that this device holds, for a tied head."""

  def _vectors(self, arrays: Arrays, token: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    """The vectors of tokens; required unless `_embedded` is overridden."""
    raise NotImplementedError

  def _embedded(
    self, tokens: Integer[Array, "*B"], train: bool
  ) -> tuple[Float[Array, "*B D"], dict[str, Float[Array, ""]]]:
    """The vectors of any tokens and the terms of the loss, outside of any `shard_map`."""
    del train
    # Unknown tokens are looked up as token 0, since a compiled program cannot raise.
    known, token = in_vocabulary(tokens, self.vocab)
    vectors = vocab_parallel.over_vocabulary(self.vocab_axis, self._vectors, self.parts(), token)
    return jnp.where(known[..., None], vectors, jnp.nan), {}

  def _table(self) -> Float[Array, "V D"]:
    # Whole arrays, as in the logits of a head: the partitioner leaves rows where they are.
    return vocab_parallel.over_vocabulary(None, self.rows_of, self.parts()).all()

  def _lookup(self, rows: Array, token: Array, dtype: Any = None) -> Array:
    """Rows of one of `arrays`, whichever device has them."""
    return vocab_parallel.sharded_lookup(rows, token, self.vocab_axis, dtype and jnp.dtype(dtype))
