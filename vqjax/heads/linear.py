"""The base class of heads whose scores are hidden · rowᵀ + bias."""

from __future__ import annotations

import abc
import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from vqjax.heads import regularizers
from vqjax.heads.base import Head
from vqjax.ops import linear_decoding, sampling, softmax
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.scores import OutputFunction, ScoreOptions, Softcap
from vqjax.ops.vocab_parallel import Replicated, Sharded
from vqjax.types import Dtype


class LinearHead(Head):
  """softmax over the vocabulary of hidden · rowᵀ + bias, by the tiled softmax.

  A subclass gives the rows (`_weight`) and the bias (`_bias`). With z-loss or label smoothing the
  loss still takes one pass over the vocabulary.

  Attributes:
    dtype: dtype of the matrix product's operands; None: the promoted dtype of hidden and rows.
    param_dtype: dtype of the parameters.
    softcap: largest absolute score c: scores are c · tanh(score / c); None: no cap.
    z_loss: coefficient of the mean squared log-normaliser in the training loss.
    label_smoothing: part of the target, in [0, 1), that is spread evenly over the vocabulary in
      the training loss; `log_prob` is of the token itself.
  """

  dtype: Dtype | None = dataclasses.field(default=None, kw_only=True)
  param_dtype: Dtype = dataclasses.field(default=jnp.float32, kw_only=True)
  softcap: float | None = dataclasses.field(default=None, kw_only=True)
  z_loss: float = dataclasses.field(default=0.0, kw_only=True)
  label_smoothing: float = dataclasses.field(default=0.0, kw_only=True)

  @abc.abstractmethod
  def _weight(self) -> RowFactory:
    """The rows, [V, D]."""

  def _bias(self) -> Float[Array, "V"] | None:
    """A score for each token, or None."""
    return None

  def _output(self) -> OutputFunction | None:
    """The function of each score that the softmax is taken of, by default the cap."""
    return None if self.softcap is None else Softcap(self.softcap)

  def _projected(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """The hidden vectors in the basis of `_weight`, by default the model's."""
    return hidden

  def linear(self) -> tuple[RowFactory, Float[Array, "V"] | None]:
    """The rows and the bias that the head scores with; a distillation reads them."""
    return self._weight(), self._bias()

  def check(self) -> None:
    """Check the options of the loss."""
    regularizers.check(self)
    if self.softcap is not None and not 0 < self.softcap < math.inf:
      raise ValueError(
        f"`softcap` must be positive and finite; got {self.softcap}. Give 30, or None for no cap."
      )

  def flops_per_token(self) -> int:
    """One product of width D for each token of the vocabulary."""
    return 2 * self.vocab * self.dim

  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """hidden · rowᵀ + bias, capped, in float32."""
    self._check_hidden(hidden)
    projected = self._projected(hidden)
    return softmax.linear_scores(
      projected, self._weight(), self._bias(), self.dtype, output=self._output()
    )

  def log_prob(
    self,
    hidden: Float[Array, "*B D"],
    tokens: Integer[Array, "*B"],
    temperature: float | int = 1.0,
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats, in tiles; nan for a token outside [0, V)."""
    return self._softmax(hidden, tokens, mean=False, temperature=temperature).log_prob

  def _softmax(self, hidden, tokens, mean, weight=None, temperature=1.0):
    self._check_hidden(hidden)
    return softmax.linear_softmax(
      self._projected(hidden),
      weight or self._weight(),
      tokens,
      self._bias(),
      temperature=temperature,
      output=self._output(),
      mean=mean,
      dtype=self.dtype,
      vocab_axis=self.vocab_axis,
    )

  def _loss_terms(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> tuple[Float[Array, "*B"], dict[str, Float[Array, ""]]]:
    """`log_prob` and `aux`, in one pass over the vocabulary."""
    if not (self.z_loss or self.label_smoothing):
      return super()._loss_terms(hidden, tokens)
    # The mean over the vocabulary costs work in every tile; the log-normaliser is there anyway.
    scores = self._softmax(hidden, tokens, mean=self.label_smoothing > 0)
    return scores.log_prob, regularizers.terms(self, scores, tokens)

  def aux(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> dict[str, Float[Array, ""]]:
    """The terms "z_loss" and "label_smoothing" where their coefficients are not zero."""
    if not (self.z_loss or self.label_smoothing):
      return super().aux(hidden, tokens)
    return self._loss_terms(hidden, tokens)[1]

  def _rows(self) -> dict[str, Sharded | Replicated]:
    weight = self._weight()
    # The bias removes the rows that pad a device's part, so that what they hold does not matter.
    return {
      "per_row": Sharded(weight.per_row, 0),
      "bias": Sharded(self._bias(), -jnp.inf),
      "shared": Replicated(weight.shared),
    }

  def _blocks(self, rows: dict, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    self._check_hidden(hidden)
    weight = dataclasses.replace(self._weight(), per_row=rows["per_row"], shared=rows["shared"])
    return linear_decoding.linear_blocks(
      self._projected(hidden),
      weight,
      rows["bias"],
      self.vocab,
      ScoreOptions(output=self._output(), dtype=self.dtype, vocab_axis=self.vocab_axis),
    )
