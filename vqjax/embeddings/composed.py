"""What does an embedding look like whose vectors a small network makes of another's?"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Integer

from vqjax.embeddings.base import Embedding
from vqjax.types import Dtype, Size


class ComposedEmbedding(Embedding):
  """W2 tanh(W1 · inner(token) + b1) + b2: the composer of KD codes, where `inner` is of such codes.

  Source: Chen, Min and Sun, Learning K-way D-dimensional discrete codes for compact embedding
  representations, 2018, with the layers of its Section 3.2 that are no recurrent network.

  Attributes:
    inner: of any width; its vocabulary is this one's.
    hidden: width of the hidden layer.
    dtype: dtype of the vectors handed out; None: float32.
  """

  inner: Embedding
  hidden: int
  dtype: Dtype | None = None

  def setup(self):
    if self.inner.vocab != self.vocab:
      raise ValueError(
        f"inner has {self.inner.vocab} tokens in an embedding of {self.vocab}; give both the same"
      )
    if self.hidden < 1:
      raise ValueError(f"hidden {self.hidden} numbers make no layer; give at least 1")
    self.first, self.second = nn.Dense(self.hidden), nn.Dense(self.dim)

  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The composed vector of each token; nan for a token outside [0, V)."""
    return self._composed(self.inner(tokens))

  def _composed(self, vectors):
    found = self.second(jnp.tanh(self.first(vectors)))
    return found.astype(jnp.dtype(self.dtype or jnp.float32))

  def loss_terms(
    self, tokens: Integer[Array, "*B"], deterministic: bool = True
  ) -> tuple[Float[Array, "*B D"], dict[str, Float[Array, ""]]]:
    """The vectors, and the terms of the inner embedding."""
    vectors, terms = self.inner.loss_terms(tokens, deterministic)
    return self._composed(vectors), terms

  def aux(self, tokens: Integer[Array, "*B"]) -> dict[str, Float[Array, ""]]:
    """The terms of the inner embedding."""
    return self.inner.aux(tokens)

  def table(self) -> Float[Array, "V D"]:
    """The vectors of the whole vocabulary, float32."""
    return self._composed(self.inner.table())

  def size(self) -> Size:
    """The inner embedding's, and two layers."""
    return self._with_layers(self.inner.size())

  def shipped(self) -> Size:
    """Likewise of what ships of the inner embedding."""
    return self._with_layers(self.inner.shipped())

  def _with_layers(self, inner: Size) -> Size:
    width = self.inner.dim
    own = self.hidden * (width + 1) + self.dim * (self.hidden + 1)
    work = 2 * self.hidden * (width + self.dim)
    return Size(inner.params + own, inner.state_bytes + 4 * own, inner.flops_per_token + work)

  def logical_axes(self) -> dict:
    """The inner embedding's, and those of the two layers."""
    axes = {name: {"inner": tree} for name, tree in self.inner.logical_axes().items()}
    layer = lambda *names: {"kernel": names, "bias": names[1:]}
    own = {"first": layer("embed", "mlp"), "second": layer("mlp", "embed")}
    axes["params"] = axes.get("params", {}) | own
    return axes
