"""A classifier of texts whose embedding is a field."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, Integer

from vqjax.embeddings import Embedding
from vqjax.lm.models.base import check_dim, named


class TextClassifier(nn.Module):
  """Mean pooling, batch norm, ReLU, a dense layer, batch norm, ReLU, and a head.

  Tokens below 0 are padding. Batch norm is over the whole batch, also on a mesh. Source: the text
  classification of Chen et al., Differentiable product quantization, 2020, Appendix C.

  Attributes:
    embedding: tokens -> vectors of width `dim`.
    classes: number of classes, C.
    dim: width of the embedding and of the hidden layer, D.
    context: largest number of tokens in a text.
    momentum: momentum of the running statistics.
    epsilon: constant that is added to the variances.
  """

  embedding: Embedding
  classes: int
  dim: int
  context: int = 256
  momentum: float = 0.99
  epsilon: float = 1e-3

  def setup(self):
    check_dim("embedding", self.embedding, self.dim)
    if self.classes < 2:
      raise ValueError(f"`classes` must be at least 2; got {self.classes}. Give their number.")
    norm = lambda: nn.BatchNorm(momentum=self.momentum, epsilon=self.epsilon)
    self.mean_norm, self.hidden_norm = norm(), norm()
    self.hidden_layer = nn.Dense(self.dim)
    self.output = nn.Dense(self.classes)

  def __call__(
    self, tokens: Integer[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B C"]:
    """Scores of the classes, whose softmax is the distribution."""
    return self._scores(tokens, deterministic)[0]

  def _scores(self, tokens, deterministic):
    real_BT = tokens >= 0
    vectors_BTD, terms = self.embedding.loss_terms(tokens, deterministic)
    # The vector of padding, a token outside the vocabulary, is nan.
    kept_BTD = jnp.where(real_BT[..., None], vectors_BTD, 0.0)
    count_B1 = jnp.maximum(real_BT.sum(axis=1, keepdims=True), 1)
    x_BD = kept_BTD.sum(axis=1) / count_B1
    x_BD = nn.relu(self.mean_norm(x_BD, use_running_average=deterministic))
    x_BD = self.hidden_layer(x_BD)
    x_BD = nn.relu(self.hidden_norm(x_BD, use_running_average=deterministic))
    return self.output(x_BD), named("embedding", terms)

  def log_prob(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B"], deterministic: bool = True
  ) -> Float[Array, "B"]:
    """Log-probability, in nats, of each text's class."""
    return self._of(self(tokens, deterministic), targets)

  def loss_terms(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B"], deterministic: bool = True
  ) -> tuple[Float[Array, "B"], dict[str, Float[Array, ""]]]:
    """`log_prob`, and the embedding's terms of the loss as "embedding/NAME"."""
    scores, terms = self._scores(tokens, deterministic)
    return self._of(scores, targets), terms

  def _of(self, scores, targets):
    log_prob = jax.nn.log_softmax(scores, axis=-1)
    return jnp.take_along_axis(log_prob, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]

  def hits(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B"]
  ) -> dict[str, Bool[Array, "B"]]:
    """Whether the most likely class is that of the text."""
    return {"accuracy": self(tokens).argmax(axis=-1) == targets}
