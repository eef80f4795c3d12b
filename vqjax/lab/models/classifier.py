"""What does a classifier of texts look like whose embedding is a field?"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, Integer

from vqjax.embeddings import Embedding


class TextClassifier(nn.Module):
  """The mean of a text's vectors, then a hidden layer: mean - norm - ReLU - layer - norm - ReLU.

  Tokens below 0 are padding. Batch normalisation is that of the whole batch, on a mesh too. Source:
  the text classification of Chen et al., Differentiable product quantization, 2020, Appendix C.

  Attributes:
    embedding: tokens -> vectors of width `dim`.
    classes: number of classes, C.
    dim: width of everything, D.
    context: most tokens of a text.
    momentum: of the running statistics.
    epsilon: is added to the variances.
  """

  embedding: Embedding
  classes: int
  dim: int
  context: int = 256
  momentum: float = 0.99
  epsilon: float = 1e-3

  def setup(self):
    if self.embedding.dim != self.dim:
      raise ValueError(
        f"embedding has dim {self.embedding.dim} in a model of dim {self.dim}; give it that"
      )
    if self.classes < 2:
      raise ValueError(f"classes {self.classes} leave no choice; give at least 2")
    norm = lambda: nn.BatchNorm(momentum=self.momentum, epsilon=self.epsilon)
    self.mean_norm, self.hidden_norm = norm(), norm()
    self.hidden_layer = nn.Dense(self.dim)
    self.output = nn.Dense(self.classes)

  def __call__(
    self, tokens: Integer[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B C"]:
    """Scores of the classes: their softmax is the distribution."""
    return self._scores(tokens, deterministic)[0]

  def _scores(self, tokens, deterministic):
    real_BT = tokens >= 0
    vectors_BTD, terms = self.embedding.loss_terms(tokens, deterministic)
    # Padding is nan there: what is outside of the vocabulary.
    kept_BTD = jnp.where(real_BT[..., None], vectors_BTD, 0.0)
    count_B1 = jnp.maximum(real_BT.sum(axis=1, keepdims=True), 1)
    x_BD = kept_BTD.sum(axis=1) / count_B1
    x_BD = nn.relu(self.mean_norm(x_BD, use_running_average=deterministic))
    x_BD = self.hidden_layer(x_BD)
    x_BD = nn.relu(self.hidden_norm(x_BD, use_running_average=deterministic))
    return self.output(x_BD), {f"embedding/{name}": term for name, term in terms.items()}

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
    """Whether the likeliest class is the text's."""
    return {"accuracy": self(tokens).argmax(axis=-1) == targets}
