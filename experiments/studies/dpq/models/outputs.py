"""What models share behind their bodies: a head, or scores of classes."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, Integer

from vqjax.lm.models.base import Terms, named


class HeadModel(nn.Module, metaclass=abc.ABCMeta):
  """A model with a field `head`, a distribution over the vocabulary at every position."""

  @abc.abstractmethod
  def hidden_and_terms(
    self, inputs: Any, deterministic: bool = True
  ) -> tuple[Float[Array, "B T D"], Terms]:
    """The head's hidden vectors, and the embedding's terms of the loss as "embedding/NAME"."""

  def log_prob(
    self, inputs: Any, targets: Int[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T"]:
    """Log-probability, in nats, of each target; nan for a negative target."""
    return self.head.log_prob(self.hidden_and_terms(inputs, deterministic)[0], targets)

  def loss_terms(
    self, inputs: Any, targets: Int[Array, "B T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B T"], Terms]:
    """`log_prob`, and the further loss terms as "embedding/NAME" and "head/NAME"."""
    hidden, terms = self.hidden_and_terms(inputs, deterministic)
    log_prob, head_terms = self.head.loss_terms(hidden, targets)
    return log_prob, terms | named("head", head_terms)


class ClassModel(nn.Module, metaclass=abc.ABCMeta):
  """A model of the class of each row of tokens, whose first axis is B."""

  @abc.abstractmethod
  def scores(
    self, tokens: Integer[Array, "B ..."], deterministic: bool = True
  ) -> tuple[Float[Array, "B C"], Terms]:
    """Scores, whose softmax is the distribution, and the embedding's terms of the loss."""

  def log_prob(
    self, tokens: Integer[Array, "B ..."], targets: Int[Array, "B"], deterministic: bool = True
  ) -> Float[Array, "B"]:
    """Log-probability, in nats, of each row's class; that of class 0 for a negative target."""
    return self.loss_terms(tokens, targets, deterministic)[0]

  def loss_terms(
    self, tokens: Integer[Array, "B ..."], targets: Int[Array, "B"], deterministic: bool = True
  ) -> tuple[Float[Array, "B"], Terms]:
    """`log_prob`, and the embedding's terms of the loss as "embedding/NAME"."""
    scores, terms = self.scores(tokens, deterministic)
    log_prob = jax.nn.log_softmax(scores, axis=-1)
    chosen = jnp.take_along_axis(log_prob, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
    return chosen, named("embedding", terms)

  def hits(
    self, tokens: Integer[Array, "B ..."], targets: Int[Array, "B"]
  ) -> dict[str, Bool[Array, "B"]]:
    """Whether the most likely class is that of the row."""
    return {"accuracy": self.scores(tokens)[0].argmax(axis=-1) == targets}
