"""What does a recurrent language model look like whose vocabulary layers are fields?"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float

from vqjax.models.base import ROWS, LanguageModel
from vqjax.sharding import constrain
from vqjax.types import Dtype


class LSTM(LanguageModel):
  """The language model of Zaremba et al.: embedding, LSTM layers, head, all of one width.

  What it remembers of each row of a batch is the collection `carry`: where the caller has that
  mutable, the next call goes on from there, so that batches of contiguous streams
  (`data.Streams`) are one long text each. Gradients stop at the beginning of a call. Source:
  Zaremba et al., Recurrent neural network regularization, 2014.

  Attributes:
    layers: number of LSTM layers.
    context: tokens of a row, over which gradients flow.
    dropout: probability of zeroing an entry: of the embedding's vectors and of each layer's output,
      never of what goes on in time.
    forget_bias: is added to the forget gate.
    weight_init: initialiser of the kernels and biases.
    dtype: dtype of the computation; parameters are float32, and so is the carry.
  """

  layers: int = 2
  context: int = 20
  dropout: float = 0.0
  forget_bias: float = 0.0
  weight_init: nn.initializers.Initializer = nn.initializers.normal(0.1)
  dtype: Dtype = jnp.float32

  def setup(self):
    self._check()
    square = self.layers, self.dim, 4 * self.dim
    self.kernel_in = self.param("kernel_in", self.weight_init, square, jnp.float32)
    self.kernel_back = self.param("kernel_back", self.weight_init, square, jnp.float32)
    shape = self.layers, 4 * self.dim
    self.bias = self.param("bias", self.weight_init, shape, jnp.float32)
    self.drop = nn.Dropout(self.dropout)

  def _check(self):
    if self.layers < 1 or self.context < 1:
      raise ValueError(f"layers {self.layers} and context {self.context} must be at least 1")
    if not 0 <= self.dropout < 1:
      raise ValueError(f"dropout {self.dropout} is outside [0, 1); 0.5 is usual")
    self.check_layers()

  def body(self, vectors: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
    """The output of the last layer, going on from the carry."""
    x_BTD = self.drop(vectors.astype(self.dtype), deterministic)
    carry_BLSD = self._remembered(vectors.shape[0])
    last = []
    for layer in range(self.layers):
      x_BTD, end_BSD = self._layer(layer, x_BTD, carry_BLSD[:, layer])
      x_BTD = constrain(self.drop(x_BTD, deterministic), ROWS)
      last.append(end_BSD)
    self._remember(jnp.stack(last, axis=1))
    return x_BTD

  def _layer(self, layer, x_BTD, start_BSD):
    """One layer over all times; S is 2: the cell and its output."""
    kernel = self.kernel_back[layer].astype(self.dtype)
    # All times at once; inside the loop there is only what needs the time before.
    gates_BTG = x_BTD @ self.kernel_in[layer].astype(self.dtype) + self.bias[layer]

    def step(carry, gates_BG):
      cell_BD, out_BD = carry
      gates_BG = gates_BG + out_BD.astype(self.dtype) @ kernel
      carry = lstm_cell(gates_BG, cell_BD, self.forget_bias)
      return carry, carry[1]

    start = start_BSD[:, 0], start_BSD[:, 1]
    (cell_BD, out_BD), out_TBD = lax.scan(step, start, jnp.moveaxis(gates_BTG, 1, 0))
    return jnp.moveaxis(out_TBD, 0, 1).astype(self.dtype), jnp.stack([cell_BD, out_BD], axis=1)

  def _remembered(self, rows: int) -> Float[Array, "B L 2 D"]:
    shape = rows, self.layers, 2, self.dim
    if not self.has_variable("carry", "state"):
      return jnp.zeros(shape)
    found = self.get_variable("carry", "state")
    if found.shape != shape:
      raise ValueError(
        f"the carry is that of {found.shape[0]} rows and the batch has {rows}; give batches of one"
        " size, or leave the collection `carry` out"
      )
    return lax.stop_gradient(found)

  def _remember(self, state_BLSD):
    if self.is_mutable_collection("carry"):
      # A fresh model remembers nothing: what it was initialised on is no text.
      state_BLSD = jnp.zeros_like(state_BLSD) if self.is_initializing() else state_BLSD
      self.put_variable("carry", "state", lax.stop_gradient(state_BLSD))

  def own_axes(self) -> dict:
    """Axes of the kernels, the biases and the carry."""
    kernel = "layers", "embed", "mlp"
    own = {"kernel_in": kernel, "kernel_back": kernel, "bias": ("layers", "mlp")}
    return {"params": own, "carry": {"state": ("batch", "layers", None, None)}}


def lstm_cell(
  gates: Float[Array, "B G"], cell: Float[Array, "B D"], forget_bias: float
) -> tuple[Float[Array, "B D"], Float[Array, "B D"]]:
  """The next cell and output; the gates are enter, new, forget and leave, side by side."""
  enter, new, forget, leave = jnp.split(gates.astype(jnp.float32), 4, axis=-1)
  kept = jax.nn.sigmoid(forget + forget_bias) * cell
  cell = kept + jax.nn.sigmoid(enter) * jnp.tanh(new)
  return cell, jax.nn.sigmoid(leave) * jnp.tanh(cell)
