"""What do all language models share: an embedding, a body, a head?"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int, Integer

from vqjax.embeddings import Embedding
from vqjax.heads import Head

Terms = dict[str, Float[Array, ""]]

ROWS = ("batch", None, None)
"""Each device keeps the rows of its part of the batch, whole."""


def check_heads(dim: int, heads: int) -> None:
  """ValueError where the heads of an attention do not share its width evenly."""
  if heads < 1 or dim < 1 or dim % heads:
    raise ValueError(f"heads {heads} do not divide dim {dim}; change one of the two")


class LanguageModel(nn.Module):
  """A model of the next token; what is between embedding and head is `body`.

  A subclass has a field `context`, the tokens of a row.

  Attributes:
    embedding: tokens -> vectors of width `dim`.
    head: hidden vectors of width `dim` -> a distribution over the vocabulary.
    dim: model width, D.
  """

  embedding: Embedding
  head: Head
  dim: int

  def body(self, vectors: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
    """Final hidden vectors, each of which has seen the vectors up to its own."""
    raise TypeError(f"{type(self).__name__} has no body: define body")

  def own_axes(self) -> dict:
    """`logical_axes` of the variables that are neither the embedding's nor the head's."""
    raise TypeError(f"{type(self).__name__} does not name its axes: define own_axes")

  def check_layers(self) -> None:
    """ValueError where embedding, head and body do not fit one another."""
    for name, layer in (("embedding", self.embedding), ("head", self.head)):
      if layer.dim != self.dim:
        raise ValueError(f"{name} has dim {layer.dim} in a model of dim {self.dim}; give it that")
    if self.embedding.vocab != self.head.vocab:
      raise ValueError(
        f"the embedding has {self.embedding.vocab} tokens and the head {self.head.vocab};"
        " give both the same vocab"
      )

  def __call__(
    self, tokens: Integer[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T V"]:
    """Logits of the next token at every position: for inspection, not for training."""
    return self.head.logits(self.hidden(tokens, deterministic))

  def hidden(
    self, tokens: Integer[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T D"]:
    """Final hidden vectors, each of which has seen the tokens up to its own."""
    return self.hidden_and_terms(tokens, deterministic)[0]

  def hidden_and_terms(
    self, tokens: Integer[Array, "B T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B T D"], Terms]:
    """`hidden`, and the embedding's terms of the loss as "embedding/NAME"."""
    vectors, terms = self.embedding.loss_terms(tokens, deterministic)
    # A negative token is none, and its vector no number.
    vectors = jnp.where(tokens[..., None] < 0, 0, vectors)
    return self.body(vectors, deterministic), named("embedding", terms)

  def log_prob(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T"]:
    """Log-probability, in nats, of each target as the token that follows."""
    return self.head.log_prob(self.hidden(tokens, deterministic), targets)

  def loss_terms(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B T"], Terms]:
    """`log_prob`, and the further loss terms as "embedding/NAME" and "head/NAME"."""
    hidden, of_embedding = self.hidden_and_terms(tokens, deterministic)
    log_prob, of_head = self.head_terms(hidden, targets)
    return log_prob, of_embedding | of_head

  def head_terms(
    self, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
  ) -> tuple[Float[Array, "B T"], Terms]:
    """`log_prob` of hidden vectors that are there already, and the head's terms as "head/NAME"."""
    log_prob, terms = self.head.loss_terms(hidden, targets)
    return log_prob, named("head", terms)

  def logical_axes(self) -> dict:
    """Names of the axes of every variable, a pytree like the variables with tuples as leaves."""
    return vocabulary_axes(self, self.own_axes())


def vocabulary_axes(model: nn.Module, axes: dict) -> dict:
  """Axes of a model's variables with those of its embeddings and of its head.

  A part that the head shares, such as a tied embedding, has its variables where it was first.
  """
  names = [name for name in ("embedding", "target_embedding", "head") if getattr(model, name, None)]
  found = {collection: dict(tree) for collection, tree in axes.items()}
  for name in names:
    layer = getattr(model, name)
    others = [getattr(model, other) for other in names if other != name]
    shared = [n for n, part in vars(layer).items() if any(part is other for other in others)]
    for collection, tree in layer.logical_axes().items():
      kept = {key: value for key, value in tree.items() if key not in shared}
      if kept:
        found.setdefault(collection, {})[name] = kept
  return found


def named(part: str, terms: Terms) -> Terms:
  """The terms as "PART/NAME"."""
  return {f"{part}/{name}": term for name, term in terms.items()}
