"""The contract of embeddings, and what an embedding inherits."""

from __future__ import annotations

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from vqjax.layer import Layer
from vqjax.ops import vocab_parallel
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.ops.vocab_parallel import Sharded
from vqjax.types import Size


class Embedding(Layer):
  """A map from tokens to vectors: the contract that all embeddings pass.

  Attributes:
    vocab: number of tokens, V.
    dim: width of the vectors, D.
    vocab_axis: mesh axis over which the vocabulary is sharded (`jax.set_mesh`). None, or without
      a mesh: every device holds the whole vocabulary.
  """

  vocab: int
  dim: int
  vocab_axis: str | None = dataclasses.field(default=None, kw_only=True)

  @abc.abstractmethod
  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token; nan for a token outside [0, V)."""

  @abc.abstractmethod
  def table(self) -> Float[Array, "V D"]:
    """The vectors of the whole vocabulary."""

  def rows(self) -> RowFactory:
    """The vectors of the whole vocabulary, for a tied head.

    A subclass may return rows that are composed a tile at a time.
    """
    return as_row_factory(self.table())

  def aux(self, tokens: Integer[Array, "*B"]) -> dict[str, Float[Array, ""]]:
    """Further terms of the training loss, by name."""
    del tokens
    return {}

  def loss_terms(
    self, tokens: Integer[Array, "*B"], deterministic: bool = True
  ) -> tuple[Float[Array, "*B D"], dict[str, Float[Array, ""]]]:
    """The vectors and `aux`, computed as in training where `deterministic` is False."""
    del deterministic
    return self(tokens), self.aux(tokens)

  def inference_size(self) -> Size:
    """The size of what inference needs, which may be less than `size`."""
    return self.size()

  def _gather(self, name: str, token: Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Rows of a variable [V, ...], sharded or not, for tokens in [0, V)."""
    look_up = lambda rows, token: vocab_parallel.sharded_lookup(
      rows[0], token, self.vocab_axis, dtype
    )
    rows = (Sharded(self.array(name), 0),)
    return vocab_parallel.over_vocabulary(self.vocab_axis, look_up, rows, token)
