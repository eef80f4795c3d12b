"""A classifier of texts whose embedding is a field."""

import jax.numpy as jnp
from flax import linen as nn

from experiments.studies.dpq.models.outputs import ClassModel
from vqjax.embeddings import Embedding
from vqjax.lm.models.base import check_dim


class TextClassifier(ClassModel):
  """Mean pooling, batch norm, ReLU, a dense layer, batch norm, ReLU, and a dense layer.

  Tokens [B, T] below 0 are padding; the scores are [B, C]. Batch norm is over the whole batch, also
  on a mesh. Source: the text classification of Chen et al., Differentiable product quantization,
  2020, Appendix C.

  Attributes:
    embedding: tokens -> vectors of width `dim`.
    classes: number of classes, C.
    dim: width of the embedding and of the hidden layer, D.
    context: largest number of tokens in a text.
    momentum: momentum of the running statistics.
  """

  embedding: Embedding
  classes: int
  dim: int
  context: int = 256
  momentum: float = 0.99

  def setup(self):
    check_dim("embedding", self.embedding, self.dim)
    if self.classes < 2:
      raise ValueError(f"`classes` must be at least 2; got {self.classes}. Give their number.")
    norm = lambda: nn.BatchNorm(momentum=self.momentum, epsilon=1e-3)
    self.mean_norm, self.hidden_norm = norm(), norm()
    self.hidden_layer = nn.Dense(self.dim)
    self.output = nn.Dense(self.classes)

  def scores(self, tokens, deterministic=True):
    real_BT = tokens >= 0
    vectors_BTD, terms = self.embedding.loss_terms(tokens, deterministic)
    # The vector of padding, a token outside the vocabulary, is nan.
    kept_BTD = jnp.where(real_BT[..., None], vectors_BTD, 0.0)
    x_BD = kept_BTD.sum(axis=1) / jnp.maximum(real_BT.sum(axis=1, keepdims=True), 1)
    x_BD = nn.relu(self.mean_norm(x_BD, use_running_average=deterministic))
    x_BD = self.hidden_layer(x_BD)
    x_BD = nn.relu(self.hidden_norm(x_BD, use_running_average=deterministic))
    return self.output(x_BD), terms
