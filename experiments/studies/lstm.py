"""The LSTM language model of two studies, and its initialiser."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from vqjax.lm.models.base import ROWS, LanguageModel, check_dropout
from vqjax.sharding import constrain
from vqjax.types import Dtype


@dataclasses.dataclass(frozen=True)
class SymmetricUniform:
  """Initialiser: uniform in [-scale, scale).

  Source: Zaremba et al., Recurrent neural network regularization, 2014.

  Attributes:
    scale: half the width of the interval.
  """

  scale: float

  def __call__(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """A random array of this shape."""
    return jax.random.uniform(key, shape, dtype, -self.scale, self.scale)


class LSTM(LanguageModel):
  """The LSTM language model of Zaremba et al., with one width throughout.

  The final state of each row of a batch is the collection `carry`. If the caller makes it mutable,
  the next call continues from it, so that the rows of batches of contiguous streams
  (`data.Streams`) are one long text each. Gradients stop at the beginning of a call. Source:
  Zaremba et al., Recurrent neural network regularization, 2014.

  Attributes:
    layers: number of LSTM layers.
    context: number of tokens in a row, through which gradients flow.
    dropout: probability of zeroing an entry of the embedding's vectors and of each layer's output;
      the recurrent connections have no dropout.
    weight_init: initialiser of the kernels and biases.
    dtype: dtype of the computation; parameters and the carry are float32.
  """

  layers: int = 2
  context: int = 20
  dropout: float = 0.0
  weight_init: nn.initializers.Initializer = nn.initializers.normal(0.1)
  dtype: Dtype = jnp.float32

  def setup(self):
    for name in ("layers", "context"):
      if getattr(self, name) < 1:
        raise ValueError(f"`{name}` must be at least 1; got {getattr(self, name)}. Raise it.")
    check_dropout(self.dropout)
    self.check_layers()
    square = self.layers, self.dim, 4 * self.dim
    self.kernel_in = self.param("kernel_in", self.weight_init, square, jnp.float32)
    self.kernel_back = self.param("kernel_back", self.weight_init, square, jnp.float32)
    shape = self.layers, 4 * self.dim
    self.bias = self.param("bias", self.weight_init, shape, jnp.float32)
    self.drop = nn.Dropout(self.dropout)

  def body(self, vectors: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
    """The output of the last layer; the state continues from the carry if given."""
    x_BTD = self.drop(vectors.astype(self.dtype), deterministic)
    start_BLSD = self._initial_state(vectors.shape[0])
    end = []
    for layer in range(self.layers):
      x_BTD, end_BSD = self._layer(layer, x_BTD, start_BLSD[:, layer])
      x_BTD = constrain(self.drop(x_BTD, deterministic), ROWS)
      end.append(end_BSD)
    if self.is_mutable_collection("carry"):
      end_BLSD = jnp.stack(end, axis=1)
      # `init` runs on a placeholder, which is not a text to continue from.
      end_BLSD = jnp.zeros_like(end_BLSD) if self.is_initializing() else end_BLSD
      self.put_variable("carry", "state", lax.stop_gradient(end_BLSD))
    return x_BTD

  def _layer(self, layer, x_BTD, start_BSD):
    """One layer over all times; S is 2, the cell and its output."""
    kernel = self.kernel_back[layer].astype(self.dtype)
    # The product with the inputs is computed for all times at once, outside of the scan.
    gates_BTG = x_BTD @ self.kernel_in[layer].astype(self.dtype) + self.bias[layer]

    def step(carry, gates_BG):
      cell_BD, out_BD = carry
      gates_BG = gates_BG + out_BD.astype(self.dtype) @ kernel
      enter, new, forget, leave = jnp.split(gates_BG.astype(jnp.float32), 4, axis=-1)
      cell_BD = jax.nn.sigmoid(forget) * cell_BD + jax.nn.sigmoid(enter) * jnp.tanh(new)
      out_BD = jax.nn.sigmoid(leave) * jnp.tanh(cell_BD)
      return (cell_BD, out_BD), out_BD

    start = start_BSD[:, 0], start_BSD[:, 1]
    (cell_BD, out_BD), out_TBD = lax.scan(step, start, jnp.moveaxis(gates_BTG, 1, 0))
    return jnp.moveaxis(out_TBD, 0, 1).astype(self.dtype), jnp.stack([cell_BD, out_BD], axis=1)

  def _initial_state(self, rows: int) -> Float[Array, "B L 2 D"]:
    shape = rows, self.layers, 2, self.dim
    if not self.has_variable("carry", "state"):
      return jnp.zeros(shape)
    state = self.get_variable("carry", "state")
    if state.shape != shape:
      raise ValueError(
        f"`tokens` must have {state.shape[0]} rows, as the carry; got {rows}. Give batches of one"
        " size, or leave out the collection `carry`."
      )
    return lax.stop_gradient(state)

  def own_axes(self) -> dict:
    """Logical axes of the kernels, the biases and the carry."""
    kernel = "layers", "embed", "mlp"
    own = {"kernel_in": kernel, "kernel_back": kernel, "bias": ("layers", "mlp")}
    return {"params": own, "carry": {"state": ("batch", "layers", None, None)}}
