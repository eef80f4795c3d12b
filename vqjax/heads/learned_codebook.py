"""What does a codebook head look like that learns which code each token sits on?"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from vqjax.assign.multiple import checked_codes, code_dtype
from vqjax.assign.table import check_codes
from vqjax.heads import regularizers
from vqjax.heads.base import bytes_of, row_init
from vqjax.heads.linear import LinearHead
from vqjax.ops.row_factory import RowFactory
from vqjax.types import Size


def spread(vocab: int, codes: int, candidates: int) -> Int[np.ndarray, "V C"]:
  """Candidates without knowledge of the tokens: floor(v·K / V), then others at even distances."""
  first = np.arange(vocab, dtype=np.int64) * codes // vocab
  steps = np.arange(candidates, dtype=np.int64) * codes // candidates
  return (first[:, None] + steps) % codes


class LearnedCodebookHead(LinearHead):
  """A `CodebookHead` whose mapping is trained: each token chooses among some candidate codes.

  In a training step a token's row is the code of the highest of choice + Gumbel noise (hard), and
  the choice gets the gradient of softmax((choice + noise) / temperature) (straight-through). The
  temperature falls geometrically from `temperature` towards `final_temperature` over `anneal`
  steps; from then on there is no noise, the mapping is that of the highest choice and stays.
  Everywhere else, `log_prob` included, it is that mapping too. `vqjax.convert.Frozen` gives a
  `CodebookHead` with the same distribution.

  Source: VQ-Logits, Section 3.3, which names this and does not try it; Jang et al., Categorical
  reparameterization with Gumbel-softmax, 2016.

  Attributes:
    codes: number of codes, K.
    candidates: codes that a token chooses from, C.
    token_bias: give each token a score of its own inside its code.
    anneal: training steps until the mapping is fixed.
    temperature: of the first step.
    final_temperature: what it would be in the step in which the mapping is fixed.
    candidates_init: (vocab, codes, candidates) -> int [V, C], the likeliest first.
    codebook_init: initialiser of the [K, D] codebook.
    choice_init: initialiser of the [V, C] scores of the candidates.
    bias_init: initialiser of the [V] token bias.
  """

  codes: int
  candidates: int = 8
  token_bias: bool = False
  anneal: int = 1000
  temperature: float = 1.0
  final_temperature: float = 0.1
  candidates_init: Callable[[int, int, int], np.ndarray] = spread
  codebook_init: nn.initializers.Initializer = row_init
  choice_init: nn.initializers.Initializer = nn.initializers.zeros_init()
  bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

  def setup(self):
    self._check_loss()
    check_codes(self.vocab, self.codes)
    if not 1 <= self.candidates <= self.codes:
      raise ValueError(
        f"candidates {self.candidates} of {self.codes} codes; give 1 to {self.codes}"
      )
    if self.anneal < 1 or not 0 < self.final_temperature <= self.temperature:
      raise ValueError(
        f"anneal {self.anneal}, temperature {self.temperature} to {self.final_temperature}: give at"
        " least 1 step, and temperatures above 0 that do not rise"
      )
    new = lambda name, init, *shape: self.param(name, init, shape, self.param_dtype)
    self.codebook = new("codebook", self.codebook_init, self.codes, self.dim)
    self.choice = new("choice", self.choice_init, self.vocab, self.candidates)
    if self.token_bias:
      self.bias = new("token_bias", self.bias_init, self.vocab)
    self.candidate_table = self.variable("codes", "candidates", self._initial_candidates)
    self.steps = self.variable("schedule", "steps", lambda: jnp.int32(0))

  def _initial_candidates(self):
    found = np.asarray(self.candidates_init(self.vocab, self.codes, self.candidates))
    return jnp.asarray(checked_codes(found, self.vocab, self.codes, self.candidates))

  def _weight(self) -> RowFactory:
    return self._rows_of(_one_hot(self.choice))

  def _rows_of(self, share_VC) -> RowFactory:
    own = jnp.asarray(self.candidate_table.value), share_VC
    return RowFactory(own, self.codebook, _compose)

  def _bias(self) -> Float[Array, "V"] | None:
    return self.bias if self.token_bias else None

  def loss_terms(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> tuple[Float[Array, "*B"], dict[str, Float[Array, ""]]]:
    """As `LinearHead`; in a training step, of drawn codes while the mapping is learned.

    A training step is one in which the collection `schedule` may change and rngs has the stream
    "sample".
    """
    training = self.is_mutable_collection("schedule") and self.has_rng("sample")
    if self.is_initializing() or not training:
      return super().loss_terms(hidden, tokens)
    rows = self._rows_of(self._drawn())
    self.steps.value = self.steps.value + 1
    found = self._softmax(hidden, tokens, self.label_smoothing > 0, rows)
    return found.log_prob, regularizers.terms(self, found, tokens)

  def _drawn(self) -> Float[Array, "V C"]:
    """One-hot shares of the drawn candidates, with the gradient of the soft ones."""
    done = jnp.minimum(self.steps.value / self.anneal, 1.0)
    ratio = self.final_temperature / self.temperature
    noise_VC = jax.random.gumbel(self.make_rng("sample"), self.choice.shape, jnp.float32)
    learning = self.steps.value < self.anneal
    choice_VC = self.choice.astype(jnp.float32) + jnp.where(learning, noise_VC, 0.0)
    soft_VC = jax.nn.softmax(choice_VC / (self.temperature * ratio**done))
    slope_VC = jnp.where(learning, soft_VC - lax.stop_gradient(soft_VC), 0.0)
    return _one_hot(choice_VC) + slope_VC

  def size(self) -> Size:
    """K·D + V·C parameters, V for a token bias, one to four bytes a candidate; and the step."""
    params = self.codes * self.dim + self.vocab * self.candidates
    params += self.vocab if self.token_bias else 0
    state = bytes_of(params, self.param_dtype) + bytes_of(1, jnp.int32)
    state += bytes_of(self.vocab * self.candidates, code_dtype(self.codes))
    return Size(params, state, 2 * self.vocab * self.dim)

  def logical_axes(self) -> dict:
    """Axes of the codebook, the choice, the token bias and the candidates; the step has none."""
    params = {"codebook": ("shared_codes", "width"), "choice": ("vocab", "candidates")}
    if self.token_bias:
      params["token_bias"] = ("vocab",)
    codes = {"candidates": ("vocab", "candidates")}
    return {"params": params, "codes": codes, "schedule": {"steps": ()}}


def _one_hot(choice_VC):
  best_V = jnp.argmax(lax.stop_gradient(choice_VC), axis=-1)
  return jax.nn.one_hot(best_V, choice_VC.shape[-1], dtype=jnp.float32)


def _compose(own, codebook_KD):
  candidate_WC, share_WC = own
  return jnp.einsum("wc,wcd->wd", share_WC, codebook_KD[candidate_WC])
