"""The mixture of softmaxes over one table."""

# The arrays of a call, with M components and rows of width E:
#
#   log_prior   [*B, M]      softmax over components
#   projected   [*B, M, E]   a vector for each component, as if there were M times as many tokens
#   log_prob    [*B, M]      `linear_log_prob` of these vectors, one pass over the rows for all M
#   result      [*B]         logsumexp over M of log_prior + log_prob
#
# Blocks of all tokens are mixed probabilities, so that each component is normalised first: one
# pass over the rows for log Z [*B, M], and another one in which scores are mixed, block by block.

from __future__ import annotations

from typing import Any, final

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Float

from vqjax.assign.text import TextStats
from vqjax.heads.base import Arrays, Head
from vqjax.ops import linear_decoding, sampling, softmax, vocab_parallel
from vqjax.ops.scores import ScoreOptions
from vqjax.variables import Declaration, Initializer, Variable, row_init

__all__ = ["MixtureHead"]


class MixtureHead(Head):
  """sum_m prior_m · softmax(weight · tanh(project_m · hidden + offset_m) + bias).

  The priors are softmax(prior · hidden). Components share the table and have a projection each, so
  that the log-probabilities of many contexts have a rank above D + 1, which bounds those of a
  linear head. Every component is scored: a mixture of M costs M times the products of a
  `DenseHead`, in one pass over the tiles of the vocabulary.

  Source: Yang et al., Breaking the Softmax Bottleneck, Eq. 3.

  Attributes:
    components: number of softmaxes, M.
    width: width of the table's rows and of the projected vectors, E; None: D. A narrower table pays
      for the projections.
    use_bias: add a score for each token, in all components alike.
    prior_init: initialiser of the [M, D] weight of the priors.
    project_init: initialiser of the [M·E, D] projections.
    offset_init: initialiser of their [M·E] offsets.
    weight_init: initialiser of the [V, E] weight.
    bias_init: initialiser of the [V] bias.
  """

  components: int
  width: int | None = None
  use_bias: bool = False
  prior_init: Initializer = row_init
  project_init: Initializer = row_init
  offset_init: Initializer = nn.initializers.zeros_init()
  weight_init: Initializer = row_init
  bias_init: Initializer = nn.initializers.zeros_init()

  def declare(self) -> Declaration:
    """Priors [M, D], projections [M·E, D], offsets [M·E], weight [V, E], bias [V]."""
    v, d, m, dtype = self.vocab, self.dim, self.components, self.param_dtype
    e = self._table_width()
    declared = {
      "prior": Variable((m, d), ("components", "embed"), self.prior_init, dtype),
      "project": Variable((m * e, d), ("rank", "embed"), self.project_init, dtype),
      "offset": Variable((m * e,), ("rank",), self.offset_init, dtype),
      "weight": Variable((v, e), ("vocab", "table_embed"), self.weight_init, dtype, pad_value=0),
    }
    if self.use_bias:
      declared["bias"] = Variable((v,), ("vocab",), self.bias_init, dtype)
    return declared

  def check(self) -> None:
    if self.components < 1:
      raise ValueError(
        f"`components` must be at least 1; got {self.components}. 10 to 15 are usual; one is a"
        " DenseHead behind a layer."
      )
    if self._table_width() < 1:
      raise ValueError(
        f"`width` must be at least 1; got {self.width}. None is the width of hidden."
      )

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """Rows that are contexts, and each token's frequency."""
    return super()._of_text(text) | {"weight_init": text.contexts(self._table_width())}

  def _table_width(self):
    return self.dim if self.width is None else self.width

  def flops_per_token(self) -> int:
    """The products of the priors, and of each component's projection and scores."""
    width = self._table_width()
    return 2 * self.components * (self.dim * (1 + width) + width * self.vocab)

  @final
  def log_prior(self, hidden: Float[ArrayLike, "*B D"]) -> Float[Array, "*B M"]:
    """Log-probabilities of the components in nats."""
    return self._on_devices(self._log_prior, hidden)

  def _log_prior(self, arrays, hidden):
    scores = softmax.linear_scores(
      hidden, self._whole(arrays["prior"]), dtype=self._operand_dtype(hidden, arrays["weight"])
    )
    return jax.nn.log_softmax(scores)

  def _projected(self, arrays, hidden):
    """The vectors of the components, [*B, M, E], in float32."""
    scores_BK = softmax.linear_scores(
      hidden,
      self._whole(arrays["project"]),
      arrays["offset"],
      self._operand_dtype(hidden, arrays["weight"]),
    )
    return jnp.tanh(scores_BK).reshape(*hidden.shape[:-1], self.components, self._table_width())

  def _whole(self, weight):
    """A weight on every device, gathered straight from those that hold its parts."""
    return vocab_parallel.token_shards(self.vocab_axis).whole(weight)

  def _log_prob(self, arrays, hidden, token, temperature, counted):
    # A temperature divides the log of the mixture, which is not a mixture at this temperature.
    if temperature != 1:
      return super()._log_prob(arrays, hidden, token, temperature, counted)
    log_prior_BM = self._log_prior(arrays, hidden)
    log_prob_BM = softmax.linear_log_prob(
      self._projected(arrays, hidden),
      arrays["weight"],
      jnp.broadcast_to(token[..., None], log_prior_BM.shape),
      arrays["bias"],
      mask=None if counted is None else jnp.broadcast_to(counted[..., None], log_prior_BM.shape),
      dtype=self._operand_dtype(hidden, arrays["weight"]),
      vocab_axis=self.vocab_axis,
    )
    return jax.nn.logsumexp(log_prior_BM + log_prob_BM, axis=-1)

  def parts(self) -> dict[str, Any]:
    """The variables, with a bias that removes the rows which pad a device's part."""
    return super().parts() | {"bias": self._padded_bias("bias")}

  def _scores(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The log-probabilities, after a pass for the normalisers of the components."""
    log_prior_BM, vectors_BME = self._log_prior(arrays, hidden), self._projected(arrays, hidden)
    parts = linear_decoding.linear_blocks(
      vectors_BME,
      arrays["weight"],
      arrays["bias"],
      self.vocab,
      ScoreOptions(dtype=self._operand_dtype(hidden, arrays["weight"]), vocab_axis=self.vocab_axis),
    )
    above_BM = sampling.log_z(parts) - log_prior_BM

    def block(index):
      score_WBM, token_W = parts.block(index)
      log_prob_WBM = score_WBM - above_BM
      # A removed row has -inf in every component, at which logsumexp has no derivative.
      is_there_WB = ~jnp.isneginf(score_WBM).all(axis=-1)
      safe_WBM = jnp.where(is_there_WB[..., None], log_prob_WBM, 0.0)
      return jnp.where(is_there_WB, jax.nn.logsumexp(safe_WBM, axis=-1), -jnp.inf), token_W

    return parts._replace(block=block, batch=hidden.shape[:-1])
