"""The base class of language models: an embedding, a body and a head."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int, Integer

from vqjax.embeddings import Embedding
from vqjax.heads import Head
from vqjax.ops.vocab_parallel import own_promotion

__all__ = [
  "NORM_AXES",
  "ROWS",
  "LanguageModel",
  "Terms",
  "check_dim",
  "check_dropout",
  "check_heads",
  "named",
  "stacked_axes",
  "vocabulary_axes",
]

Terms = dict[str, Float[Array, ""]]
"""Terms of the training loss by name."""

ROWS = ("batch", None, None)
"""Logical axes of activations [B, T, D]: each device holds its rows of the batch in full."""

NORM_AXES = {"scale": ("norm",), "bias": ("norm",)}
"""Logical axes of a LayerNorm's parameters; "norm" is a width that is replicated."""


def stacked_axes(axes: dict) -> dict:
  """Logical axes of parameters that a layer scan stacks along a new first axis."""
  is_names = lambda node: isinstance(node, tuple)
  return jax.tree.map(lambda names: ("layers", *names), axes, is_leaf=is_names)


def check_heads(dim: int, heads: int) -> None:
  """Raise ValueError unless the attention heads divide the model width."""
  if heads < 1 or dim < 1 or dim % heads:
    raise ValueError(f"`heads` must divide dim {dim}; got {heads}. Change one of the two.")


def check_dim(name: str, layer: Embedding | Head | None, dim: int) -> None:
  """Raise ValueError unless the field `name` of a model has the model width."""
  if layer is not None and layer.dim != dim:
    raise ValueError(
      f"`{name}` must have the model's dim {dim}; got {layer.dim}. Give both the same width."
    )


def check_dropout(dropout: float) -> None:
  """Raise ValueError unless `dropout` is a probability below 1."""
  if not 0 <= dropout < 1:
    raise ValueError(f"`dropout` must be in [0, 1); got {dropout}. 0.1 is usual.")


class LanguageModel(nn.Module, metaclass=abc.ABCMeta):
  """A next-token model; subclasses define the body between embedding and head.

  A subclass has a field `context`, the largest number of tokens in a row.

  Attributes:
    embedding: tokens -> vectors of width `dim`.
    head: hidden vectors of width `dim` -> a distribution over the vocabulary.
    dim: model width, D, which the parts share.
  """

  embedding: Embedding
  head: Head
  dim: int

  @abc.abstractmethod
  def body(self, vectors: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
    """Final hidden vectors; each depends on the vectors up to its own position."""

  @abc.abstractmethod
  def own_axes(self) -> dict:
    """Logical axes of the variables of the body."""

  def check_layers(self) -> None:
    """Raise ValueError unless embedding, head and body agree in width and vocabulary."""
    check_dim("embedding", self.embedding, self.dim)
    check_dim("head", self.head, self.dim)
    if self.embedding.vocab != self.head.vocab:
      raise ValueError(
        f"`head` must have the embedding's vocab {self.embedding.vocab}; got {self.head.vocab}."
        " Give both the same vocabulary."
      )

  def __call__(
    self, tokens: Integer[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T V"]:
    """Logits of the next token at every position, for inspection."""
    return self.head.logits(self.hidden(tokens, deterministic))

  def hidden(
    self, tokens: Integer[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T D"]:
    """Final hidden vectors; each depends on the tokens up to its own position."""
    return self.hidden_and_terms(tokens, deterministic)[0]

  @own_promotion
  def hidden_and_terms(
    self, tokens: Integer[Array, "B T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B T D"], Terms]:
    """`hidden`, and terms of the loss as "embedding/NAME" and "memories_0/NAME"."""
    vectors, terms = self.embedding.loss_terms(tokens, deterministic)
    # A negative token is padding, for which embeddings return nan.
    vectors = jnp.where(tokens[..., None] < 0, 0, vectors)
    hidden, own = self.body_of_tokens(tokens, vectors, deterministic)
    return hidden, named("embedding", terms) | own

  def body_of_tokens(
    self, tokens: Int[Array, "B T"], vectors: Float[Array, "B T D"], deterministic: bool
  ) -> tuple[Float[Array, "B T D"], Terms]:
    """`body`, for a subclass whose body reads the tokens too, and its terms of the loss."""
    del tokens
    return self.body(vectors, deterministic), {}

  def log_prob(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T"]:
    """Log-probability, in nats, of each target as the token that follows."""
    return self.head.log_prob(self.hidden(tokens, deterministic), targets)

  def loss_terms(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B T"], Terms]:
    """`log_prob`, and the further loss terms as "head/NAME" and of `hidden_and_terms`."""
    hidden, embedding_terms = self.hidden_and_terms(tokens, deterministic)
    log_prob, head_terms = self.head_terms(hidden, targets)
    return log_prob, embedding_terms | head_terms

  def head_terms(
    self, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
  ) -> tuple[Float[Array, "B T"], Terms]:
    """`log_prob` from final hidden states, and the head's loss terms."""
    log_prob, terms = self.head.loss_terms(hidden, targets)
    return log_prob, named("head", terms)

  def logical_axes(self) -> dict:
    """Names of the axes of every variable; tuples are the leaves."""
    return vocabulary_axes(self, self.own_axes())


def vocabulary_axes(model: nn.Module, axes: dict) -> dict:
  """`axes` with those of the model's embeddings and head.

  A layer that the head shares, such as a tied embedding, has its variables under the name of the
  field in which it comes first.
  """
  names = [name for name in ("embedding", "head") if getattr(model, name, None)]
  axes = {collection: dict(tree) for collection, tree in axes.items()}
  for name in names:
    layer = getattr(model, name)
    others = [getattr(model, other) for other in names if other != name]
    shared = [n for n, part in vars(layer).items() if any(part is other for other in others)]
    for collection, tree in layer.logical_axes().items():
      if own := {key: value for key, value in tree.items() if key not in shared}:
        axes.setdefault(collection, {})[name] = own
  return axes


def named(part: str, terms: Terms) -> Terms:
  """The terms with names "PART/NAME"."""
  return {f"{part}/{name}": term for name, term in terms.items()}
