"""The codebook head that learns the assignment of tokens to codes."""

# The row of a token is a sum of its candidates' codewords, of which all shares but one are 0:
#
#   choice [V, C]  + noise  --argmax-->                 share [V, C], one-hot       forward
#                           --softmax(/ temperature)-->   its gradient              backward
#   row = sum over c of share[c] · codebook[candidates[c]]         a tile of rows at a time
#
#   in a training step   `_training_parts` draws the shares of the whole vocabulary, once, and adds
#                        them to the arrays as "share"; the step counter sets the temperature
#   elsewhere            there is no "share", and `_rows` takes the highest choice
#
# The shares are drawn outside of any `shard_map`, so that all devices agree on them, and are then
# split as the rows are.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float, Int

from vqjax.assign.checks import check_codes
from vqjax.assign.multiple import checked_codes, code_dtype
from vqjax.assign.rows import nearest_codes
from vqjax.assign.text import TextStats
from vqjax.heads.base import Arrays
from vqjax.heads.linear import LinearHead
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.vocab_parallel import Sharded
from vqjax.variables import Declaration, Initializer, Variable, integer_variable, row_init

__all__ = ["LearnedCodebookHead"]


def spread_candidates(vocab: int, codes: int, candidates: int) -> Int[np.ndarray, "V C"]:
  """Candidate codes of each token: floor(v·K / V), then others at equal distances."""
  first = np.arange(vocab, dtype=np.int64) * codes // vocab
  steps = np.arange(candidates, dtype=np.int64) * codes // candidates
  return (first[:, None] + steps) % codes


class LearnedCodebookHead(LinearHead):
  """A `CodebookHead` whose assignment is trained.

  Each token chooses one of its candidate codes. In a training step a token's row is the code of the
  highest choice + Gumbel noise (hard), and the choice gets the gradient of softmax((choice + noise)
  / temperature) (straight-through). The temperature falls geometrically from `temperature` to
  `final_temperature` over `anneal` steps; later steps draw no noise, and the assignment of the
  highest choice stays fixed. Outside training steps, as in `log_prob`, every token has the code of
  its highest choice. `vqjax.convert.frozen` gives a `CodebookHead` with the same distribution.

  Source: VQ-Logits, Section 3.3, which proposes this and does not test it; Jang et al., Categorical
  reparameterization with Gumbel-softmax, 2016.

  Attributes:
    codes: number of codes, K.
    candidates: number of codes that a token chooses from, C.
    token_bias: add a score for each token.
    anneal: number of training steps until the assignment is fixed.
    temperature: temperature of the first step.
    final_temperature: temperature that the schedule reaches after `anneal` steps.
    candidates_init: (vocab, codes, candidates) -> int [V, C], the likeliest first, or the array.
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
  candidates_init: Callable[[int, int, int], np.ndarray] = spread_candidates
  codebook_init: Initializer = row_init
  choice_init: Initializer = nn.initializers.zeros_init()
  bias_init: Initializer = nn.initializers.zeros_init()

  def declare(self) -> Declaration:
    """Codebook [K, D], choice and candidates [V, C], bias [V], number of steps."""
    v, k, c, dtype = self.vocab, self.codes, self.candidates, self.param_dtype
    declared = {
      "codebook": Variable((k, self.dim), ("shared_codes", "width"), self.codebook_init, dtype),
      "choice": Variable((v, c), ("vocab", "candidates"), self.choice_init, dtype, pad_value=0),
    }
    if self.token_bias:
      declared["token_bias"] = Variable((v,), ("vocab",), self.bias_init, dtype)
    make = lambda: checked_codes(np.asarray(self.candidates_init(v, k, c)), v, k, c)
    zero = lambda key, shape, dtype: jnp.zeros(shape, dtype)
    return declared | {
      "candidates": integer_variable(
        (v, c), ("vocab", "candidates"), make, code_dtype(k), pad_value=0
      ),
      "steps": Variable((), (), zero, jnp.int32, "schedule", random=False),
    }

  def check(self) -> None:
    super().check()
    check_codes(self.vocab, self.codes)
    if not 1 <= self.candidates <= self.codes:
      raise ValueError(
        f"`candidates` must be in [1, codes]; got {self.candidates} for codes {self.codes}. Reduce"
        " candidates."
      )
    if self.anneal < 1 or not 0 < self.final_temperature <= self.temperature:
      raise ValueError(
        f"`anneal` must be at least 1, and 0 < `final_temperature` <= `temperature`; got anneal"
        f" {self.anneal}, final_temperature {self.final_temperature}, temperature"
        f" {self.temperature}. Lower final_temperature."
      )

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """The codes of the nearest mean contexts, first the one that exchange finds."""
    found, rows = super()._of_text(text), text.contexts(self.dim)
    if rows is None:
      return found
    code = text.codes(self.codes, token_bias=self.token_bias)
    codebook = text.means(code, self.codes, self.dim)
    candidates = nearest_codes(rows, codebook, code, self.candidates)
    choice = np.eye(1, self.candidates, dtype=np.float32).repeat(self.vocab, axis=0)
    return found | {
      "candidates_init": candidates,
      "codebook_init": codebook,
      "choice_init": choice,
    }

  def _rows(self, arrays: Arrays) -> RowFactory:
    share_VC = arrays["share"] if "share" in arrays else _one_hot(arrays["choice"])
    return RowFactory((arrays["candidates"], share_VC), arrays["codebook"], _compose)

  def _training_parts(self, tokens):
    """In a training step, the shares of drawn candidates.

    Then the collection `schedule` is mutable and there is a random stream "sample".
    """
    parts, terms = super()._training_parts(tokens)
    # `init` has a mutable collection as well, and must leave the counter at 0.
    training = self.is_mutable_collection("schedule") and self.has_rng("sample")
    if training and not self.is_initializing():
      parts["share"] = Sharded(self._drawn_shares(), 0)
      self.put_variable("schedule", "steps", self.array("steps") + 1)
    return parts, terms

  def _drawn_shares(self) -> Float[Array, "V C"]:
    """One-hot shares of the drawn candidates, with the gradient of the soft ones."""
    steps, choice_VC = self.array("steps"), self.array("choice")
    done = jnp.minimum(steps / self.anneal, 1.0)
    ratio = self.final_temperature / self.temperature
    noise_VC = jax.random.gumbel(self.make_rng("sample"), choice_VC.shape, jnp.float32)
    learning = steps < self.anneal
    # Masked instead of branched: under jit the step is a traced number.
    choice_VC = choice_VC.astype(jnp.float32) + jnp.where(learning, noise_VC, 0.0)
    # temperature · ratio^done falls from `temperature` to `final_temperature`.
    soft_VC = jax.nn.softmax(choice_VC / (self.temperature * ratio**done))
    # Zero in the forward pass: the straight-through estimator of Gumbel-softmax.
    slope_VC = jnp.where(learning, soft_VC - lax.stop_gradient(soft_VC), 0.0)
    return _one_hot(choice_VC) + slope_VC


def _one_hot(choice_VC):
  best_V = jnp.argmax(lax.stop_gradient(choice_VC), axis=-1)
  return jax.nn.one_hot(best_V, choice_VC.shape[-1], dtype=jnp.float32)


def _compose(per_row, codebook_KD):
  candidate_WC, share_WC = per_row
  # A sum over all candidates although only one has a share: its derivative with respect to the
  # shares, which a gather of the chosen codeword would not have, is what trains the choice.
  return jnp.einsum("wc,wcd->wd", share_WC, codebook_KD[candidate_WC])
