"""What do all models share that write a text for another one, and how is the text found?"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from jaxtyping import Array, Float, Int, Integer

from vqjax.embeddings import Embedding
from vqjax.heads import Head
from vqjax.models.base import Terms, named, vocabulary_axes
from vqjax.ops import beam

Inputs = dict[str, Integer[Array, "B _"]]
"""{"source": what is translated, "target": the translation, one token late}; below 0: padding."""


class EncoderDecoder(nn.Module):
  """A token of the target given the source and those before: a body between embedding and head.

  A subclass has a field `context`, the most tokens of a sentence.

  Attributes:
    embedding: of the source, and of the target where that has none of its own.
    head: hidden vectors of width `dim` -> a distribution over the target's vocabulary.
    dim: model width, D.
    target_embedding: of the target; None: the same as of the source.
  """

  embedding: Embedding
  head: Head
  dim: int
  target_embedding: Embedding | None = dataclasses.field(default=None, kw_only=True)

  def hidden_and_terms(
    self, inputs: Inputs, deterministic: bool = True
  ) -> tuple[Float[Array, "B T D"], Terms]:
    """Final hidden vectors of the target, and the embeddings' terms of the loss."""
    raise TypeError(f"{type(self).__name__} has no body: define hidden_and_terms")

  def begin(self, source: Integer[Array, "B S"], beams: int) -> Any:
    """The state of a decoding of each source, `beams` times, one after another."""
    raise TypeError(f"{type(self).__name__} does not decode: define begin")

  def step(self, tokens: Integer[Array, "B"], state: Any) -> tuple[Float[Array, "B D"], Any]:
    """The hidden vector after one more token of each target, and the state; sentences first."""
    raise TypeError(f"{type(self).__name__} does not decode: define step")

  def own_axes(self) -> dict:
    """`logical_axes` of the variables that are neither the embeddings' nor the head's."""
    raise TypeError(f"{type(self).__name__} does not name its axes: define own_axes")

  @property
  def of_target(self) -> Embedding:
    """The embedding of the target."""
    return self.embedding if self.target_embedding is None else self.target_embedding

  def check_layers(self) -> None:
    """ValueError where embeddings, head and body do not fit one another."""
    for name in ("embedding", "head", "target_embedding"):
      part = getattr(self, name)
      if part is not None and part.dim != self.dim:
        raise ValueError(f"{name} has dim {part.dim} in a model of dim {self.dim}; give it that")

  def check_length(self, tokens: Integer[Array, "B _"]) -> None:
    """ValueError where a sentence is longer than the context."""
    if tokens.shape[1] > self.context:
      raise ValueError(
        f"sentences of {tokens.shape[1]} tokens in a model of context {self.context}; cut them, or"
        " give a longer context"
      )

  def log_prob(
    self, inputs: Inputs, targets: Int[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T"]:
    """Log-probability, in nats, of each target; nan for padding."""
    return self.head.log_prob(self.hidden_and_terms(inputs, deterministic)[0], targets)

  def loss_terms(
    self, inputs: Inputs, targets: Int[Array, "B T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B T"], Terms]:
    """`log_prob`, and the further loss terms as "embedding/NAME" and "head/NAME"."""
    hidden, terms = self.hidden_and_terms(inputs, deterministic)
    log_prob, of_head = self.head.loss_terms(hidden, targets)
    return log_prob, terms | named("head", of_head)

  def likeliest(
    self, tokens: Integer[Array, "B"], state: Any, count: int
  ) -> tuple[Float[Array, "B k"], Int[Array, "B k"], Any]:
    """Log-probabilities and tokens of the `count` likeliest that follow, best first."""
    hidden, state = self.step(tokens, state)
    return *self.head.top_k(hidden, count), state

  def logical_axes(self) -> dict:
    """Names of the axes of every variable, a pytree like the variables with tuples as leaves."""
    return vocabulary_axes(self, self.own_axes())


def mean_terms(source: Terms, target: Terms) -> Terms:
  """The embeddings' terms of the loss as "embedding/NAME": the mean of both sides."""
  names = source.keys() | target.keys()
  sides = lambda name: [side[name] for side in (source, target) if name in side]
  return named("embedding", {name: sum(sides(name)) / len(sides(name)) for name in sorted(names)})


def translate(
  model: EncoderDecoder,
  variables: Mapping[str, Any],
  source: Integer[Array, "B S"],
  eos: int,
  beams: int = 4,
  penalty: float = 0.6,
) -> beam.BeamResult:
  """The best translation that a beam search finds of each source: `ops.beam.beam_search`."""
  count = min(2 * beams, model.head.vocab)
  step = lambda tokens, state: model.apply(variables, tokens, state, count, method="likeliest")
  begun = model.apply(variables, source, beams, method="begin")
  size = {"rows": len(source), "beams": beams, "length": model.context}
  return beam.beam_search(step, begun, eos=eos, penalty=penalty, **size)
