"""What does every embedding promise?"""

import dataclasses

from flax import linen as nn
from jaxtyping import Array, Float, Integer

from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.types import Size


class Embedding(nn.Module):
  """A map from tokens to vectors, and the contract that all embeddings pass.

  Attributes:
    vocab: number of tokens, V.
    dim: width of the vectors, D.
    vocab_axis: mesh axis over which the vocabulary is spread (`jax.set_mesh`, an automatic axis);
      None, or without a mesh: every device holds all of it.
  """

  vocab: int
  dim: int
  vocab_axis: str | None = dataclasses.field(default=None, kw_only=True)

  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token; nan for a token outside [0, V)."""
    raise TypeError(f"{type(self).__name__} does not say how to embed: define __call__")

  def table(self) -> Float[Array, "V D"]:
    """The vectors of the whole vocabulary: what a tied head scores against."""
    raise TypeError(f"{type(self).__name__} has no table: define table")

  def rows(self) -> RowFactory:
    """`table`, of which a head may compose a tile at a time."""
    return as_row_factory(self.table())

  def aux(self, tokens: Integer[Array, "*B"]) -> dict[str, Float[Array, ""]]:
    """Further terms of the training loss, by name."""
    del tokens
    return {}

  def loss_terms(
    self, tokens: Integer[Array, "*B"], deterministic: bool = True
  ) -> tuple[Float[Array, "*B D"], dict[str, Float[Array, ""]]]:
    """The vectors and `aux`, as training computes them where `deterministic` is False."""
    del deterministic
    return self(tokens), self.aux(tokens)

  def size(self) -> Size:
    """Parameters, bytes and operations for each token, from the fields alone."""
    raise TypeError(f"{type(self).__name__} does not know its size: define size")

  def shipped(self) -> Size:
    """`size` of what is kept after training: less where training needs more than a look-up does."""
    return self.size()

  def logical_axes(self) -> dict:
    """Names of the axes of every variable, a pytree like the variables with tuples as leaves."""
    raise TypeError(f"{type(self).__name__} does not name its axes: define logical_axes")
