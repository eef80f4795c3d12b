"""A recurrent translator with attention."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from experiments.studies.dpq.models.translator import EncoderDecoder, Inputs, mean_terms
from experiments.studies.lstm import lstm_cell
from vqjax.lm.models.base import check_dropout

Carry = tuple[Array, Array]
"""(cell, output) of a layer."""


class RecurrentDecoding(NamedTuple):
  """The state of decoding; sentences on the first axis."""

  memory: Float[Array, "B S D"]
  real: Bool[Array, "B S"]
  carry: Float[Array, "B L 2 D"]
  fed: Float[Array, "B D"]


class RecurrentTranslator(EncoderDecoder):
  """An LSTM encoder-decoder with attention, of Luong et al.

  The first layer of the encoder is bidirectional, with D/2 units in each direction; the others are
  forward. The decoder begins with the final state of the encoder. Its output attends to the memory
  (general scores, scaled), and the attentional vector tanh(W [context; output]) is the input of the
  head and, beside the vector of the next token, of the next step. Source: Luong, Pham and Manning,
  Effective approaches to attention-based neural machine translation, 2015.

  Attributes:
    layers: number of layers of the encoder, and of the decoder.
    context: largest number of tokens in a sentence.
    dropout: probability of zeroing an entry of each layer's input.
    forget_bias: constant that is added to the pre-activations of the forget gates.
    weight_init: initialiser of the kernels.
  """

  layers: int = 2
  context: int = 50
  dropout: float = 0.2
  forget_bias: float = 1.0
  weight_init: nn.initializers.Initializer = nn.initializers.normal(0.1)

  def setup(self):
    if self.dim % 2:
      raise ValueError(f"`dim` must be even, for two directions; got {self.dim}. Add 1.")
    for name in ("layers", "context"):
      if getattr(self, name) < 1:
        raise ValueError(f"`{name}` must be at least 1; got {getattr(self, name)}. Raise it.")
    check_dropout(self.dropout)
    self.check_layers()
    half, own = self.dim // 2, self.dim
    new = lambda name, enter, width: (
      self.param(f"{name}_kernel", self.weight_init, (enter + width, 4 * width)),
      self.param(f"{name}_bias", nn.initializers.zeros_init(), (4 * width,)),
    )
    self.both_ways = new("forward", own, half), new("backward", own, half)
    self.reading = [new(f"reading_{n}", own, own) for n in range(1, self.layers)]
    # The input of the first layer includes the attentional vector of the step before.
    self.writing = [new(f"writing_{n}", own * (1 + (n == 0)), own) for n in range(self.layers)]
    # Parameters, not modules: they are used inside a lax.scan.
    self.score = self.param("score", self.weight_init, (own, own))
    self.score_scale = self.param("score_scale", nn.initializers.ones_init(), ())
    self.attentional = self.param("attentional", self.weight_init, (2 * own, own))
    self.drop = nn.Dropout(self.dropout)

  def _embedded(self, embedding, tokens, deterministic):
    vectors, terms = embedding.loss_terms(tokens, deterministic)
    return jnp.where((tokens >= 0)[..., None], vectors, 0.0), terms

  def _read(self, weights, x_BSD, real_BS, backward=False):
    """Outputs [B, S, W] and final state of a layer; padding keeps the state."""
    width = weights[1].shape[0] // 4
    start = (jnp.zeros((len(x_BSD), width)),) * 2

    def step(carry, given):
      x_BD, real_B = given
      after = self._cell(weights, x_BD, carry)
      carry = tuple(jnp.where(real_B[:, None], new, old) for new, old in zip(after, carry))
      return carry, carry[1]

    over_time = jnp.moveaxis(x_BSD, 1, 0), real_BS.T
    last, out = lax.scan(step, start, over_time, reverse=backward)
    return jnp.moveaxis(out, 0, 1), last

  def _cell(self, weights, x_BD, carry: Carry) -> Carry:
    kernel, bias = weights
    gates = jnp.concatenate([x_BD, carry[1]], axis=-1) @ kernel + bias
    return lstm_cell(gates, carry[0], self.forget_bias)

  def _encode(self, source, deterministic):
    self.check_length(source)
    real_BS = source >= 0
    x_BSD, terms = self._embedded(self.embedding, source, deterministic)
    x_BSD = self.drop(x_BSD, deterministic)
    sides = [
      self._read(weights, x_BSD, real_BS, backward)
      for weights, backward in zip(self.both_ways, (False, True))
    ]
    x_BSD = jnp.concatenate([out for out, _ in sides], axis=-1)
    carries = [tuple(jnp.concatenate(pair, axis=-1) for pair in zip(*(last for _, last in sides)))]
    for weights in self.reading:
      x_BSD, last = self._read(weights, self.drop(x_BSD, deterministic), real_BS)
      carries.append(last)
    carry_BLSD = jnp.stack([jnp.stack(carry, axis=1) for carry in carries], axis=1)
    fed = jnp.zeros((len(source), self.dim))
    return RecurrentDecoding(x_BSD, real_BS, carry_BLSD, fed), terms

  def _write(self, state: RecurrentDecoding, x_BD, keep) -> RecurrentDecoding:
    """The state after one more token; `keep` is the dropout mask [B, L, 2D]."""
    x_BD = jnp.concatenate([x_BD, state.fed], axis=-1)
    carries = []
    for layer, weights in enumerate(self.writing):
      if keep is not None:
        x_BD = x_BD * keep[:, layer, : x_BD.shape[-1]]
      carry = state.carry[:, layer, 0], state.carry[:, layer, 1]
      carry = self._cell(weights, x_BD, carry)
      carries.append(jnp.stack(carry, axis=1))
      x_BD = carry[1]
    score_BS = jnp.einsum("bd,bsd->bs", x_BD @ self.score, state.memory) * self.score_scale
    share_BS = jax.nn.softmax(jnp.where(state.real, score_BS, -1e30), axis=-1)
    context_BD = jnp.einsum("bs,bsd->bd", share_BS, state.memory)
    fed = jnp.tanh(jnp.concatenate([context_BD, x_BD], axis=-1) @ self.attentional)
    return state._replace(carry=jnp.stack(carries, axis=1), fed=fed)

  def hidden_and_terms(
    self, inputs: Inputs, deterministic: bool = True
  ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, ""]]]:
    """The attentional vectors of the target, and the embeddings' terms of the loss."""
    state, terms = self._encode(inputs["source"], deterministic)
    x_BTD, target_terms = self._embedded(self.of_target, inputs["target"], deterministic)
    rows, length = inputs["target"].shape
    keep = None
    if not deterministic and self.dropout:
      # Random masks of all layers and times are drawn at once, outside of the scan.
      shape = length, rows, self.layers, 2 * self.dim
      kept = jax.random.bernoulli(self.make_rng("dropout"), 1 - self.dropout, shape)
      keep = kept / (1 - self.dropout)

    def step(state, given):
      state = self._write(state, *given)
      return state, state.fed

    over_time = jnp.moveaxis(x_BTD, 1, 0), keep
    _, hidden = lax.scan(step, state, over_time)
    return jnp.moveaxis(hidden, 0, 1), mean_terms(terms, target_terms)

  def begin(self, source: Integer[Array, "B S"], beams: int) -> RecurrentDecoding:
    """The initial state of decoding, with each source repeated `beams` times in a row."""
    state, _ = self._encode(source, True)
    return jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), state)

  def step(
    self, tokens: Integer[Array, "B"], state: RecurrentDecoding
  ) -> tuple[Float[Array, "B D"], RecurrentDecoding]:
    """The attentional vectors after one more token of each target, and the next state."""
    x_BD, _ = self._embedded(self.of_target, tokens, True)
    state = self._write(state, x_BD, None)
    return state.fed, state

  def own_axes(self) -> dict:
    """Logical axes of the parameters of both LSTMs and of the attention."""
    own: dict[str, tuple] = {
      "score": ("embed", "norm"),
      "score_scale": (),
      "attentional": ("norm", "embed"),
    }
    reading = [f"reading_{n}" for n in range(1, self.layers)]
    writing = [f"writing_{n}" for n in range(self.layers)]
    for name in ("forward", "backward", *reading, *writing):
      own |= {f"{name}_kernel": ("embed", "mlp"), f"{name}_bias": ("mlp",)}
    return {"params": own}
