"""An embedding composed by a small network from another embedding."""

# token  --inner-->  vector [E]  --first, tanh-->  [hidden]  --second-->  vector [D]
#
# The two layers are Linen's, and so are no functions of arrays: `parts` composes the whole table
# first, [V, D], of which a tied head gets the rows. A lookup composes its own tokens alone.

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from vqjax import variables
from vqjax.assign.text import TextStats
from vqjax.embeddings.base import Arrays, Embedding
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.ops.vocab_parallel import Sharded
from vqjax.types import Dtype, Size
from vqjax.variables import Declaration, Variable

__all__ = ["ComposedEmbedding"]


class ComposedEmbedding(Embedding):
  """W2 tanh(W1 · inner(token) + b1) + b2.

  With an `inner` of KD codes it is their composer. Source: Chen, Min and Sun, Learning K-way
  D-dimensional discrete codes for compact embedding representations, 2018, Section 3.2, without the
  recurrent variants.

  Attributes:
    inner: an embedding of the same vocabulary and any width.
    hidden: width of the hidden layer.
    dtype: dtype of the returned vectors; None: float32.
  """

  inner: Embedding
  hidden: int
  dtype: Dtype | None = None

  def declare(self) -> Declaration:
    """The inner embedding and the two layers."""
    return {"inner": self.inner} | self._layers()

  def _layers(self):
    # Not created from here, since they are no `Variable`s at the top: sizes and axes are read, and
    # `setup` makes the layers of Linen that own these variables.
    def layer(inputs, outputs, *axes):
      kernel, bias = nn.initializers.lecun_normal(), nn.initializers.zeros_init()
      return {
        "kernel": Variable((inputs, outputs), axes, kernel),
        "bias": Variable((outputs,), axes[1:], bias),
      }

    return {
      "first": layer(self.inner.dim, self.hidden, "embed", "mlp"),
      "second": layer(self.hidden, self.dim, "mlp", "embed"),
    }

  def check(self) -> None:
    if not isinstance(self.inner, Embedding) or self.inner.vocab != self.vocab:
      got = self.inner.vocab if isinstance(self.inner, Embedding) else type(self.inner).__name__
      raise ValueError(
        f"`inner` must be an embedding of vocab {self.vocab}; got {got}. Give both the same."
      )
    if self.hidden < 1:
      raise ValueError(f"`hidden` must be at least 1; got {self.hidden}. Give a width such as dim.")

  def setup(self):
    super().setup()
    self.first, self.second = nn.Dense(self.hidden), nn.Dense(self.dim)

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    begun = self.inner.started_from(text)
    return {"inner": None if begun is self.inner else begun}

  def flops_per_token(self) -> int:
    """The operations of the inner embedding and of the two layers."""
    return self.inner.flops_per_token() + self._layer_flops

  @property
  def _layer_flops(self):
    return 2 * self.hidden * (self.inner.dim + self.dim)

  def _embedded(self, tokens, train):
    vectors, terms = self.inner._embedded(tokens, train)
    return self._composed(vectors), terms

  def _composed(self, vectors):
    composed = self.second(jnp.tanh(self.first(vectors)))
    return composed.astype(jnp.dtype(self.dtype or jnp.float32))

  def parts(self) -> dict[str, Any]:
    """The composed table: the layers that compose it are not functions of arrays."""
    return {"table": Sharded(self._composed(self.inner._table()), 0)}

  def rows_of(self, arrays: Arrays) -> RowFactory:
    """The composed table, float32."""
    return as_row_factory(arrays["table"])

  def inference_size(self) -> Size:
    """The size of the inner embedding for inference, with the two layers."""
    inner = self.inner.inference_size()
    params, state_bytes = variables.count_and_bytes(self._layers())
    return Size(
      params=inner.params + params,
      state_bytes=inner.state_bytes + state_bytes,
      flops_per_token=inner.flops_per_token + self._layer_flops,
    )
