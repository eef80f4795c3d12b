"""The base class of heads whose scores are hidden · rowᵀ + bias."""

# A subclass gives a factory of the rows that a device holds (`_rows`), and may declare a variable
# `bias` or `token_bias`. What reads them:
#
#   log_prob, loss_terms   `linear_softmax`   tiles of tokens by rows, with a gradient of its own
#   sample, top_k          `linear_blocks`    one product for a few vectors, blocks of rows for many
#   logits                 `linear_scores`    one product with all rows
#   linear()               rows and bias as they are, for a distillation from another loop
#
# Rows may be kept in another basis than the model's: `_projected` then takes the hidden vector
# there, once a call, and `_linear` gives the rows in the model's basis.

from __future__ import annotations

import abc
import dataclasses
from typing import Any, final

from jaxtyping import Array, Float

from vqjax.heads.base import Arrays, RegularizedHead
from vqjax.ops import linear_decoding, sampling, softmax, vocab_parallel
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.scores import OutputFunction, ScoreOptions, Softcap, check_softcap

__all__ = ["LinearHead"]


class LinearHead(RegularizedHead):
  """softmax over the vocabulary of hidden · rowᵀ + bias, by the tiled softmax.

  A subclass gives the rows, and declares a variable `bias` or `token_bias` if it has one. With
  z-loss or label smoothing the loss still takes one pass over the vocabulary.

  Attributes:
    softcap: largest absolute score c: scores are c · tanh(score / c); None: no cap. It chooses the
      program. A head without a bias has a c of each token, or a traced one, at `softcap=1`: from
      hidden / c and temperature / c.
  """

  softcap: float | None = dataclasses.field(default=None, kw_only=True)

  @abc.abstractmethod
  def _rows(self, arrays: Arrays) -> RowFactory:
    """The rows that this device holds, [V, D]."""

  def _output(self) -> OutputFunction | None:
    """The function of each score that the softmax is taken of, by default the cap."""
    return None if self.softcap is None else Softcap(self.softcap)

  def _projected(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """The hidden vectors in the basis of `_rows`, by default the model's."""
    del arrays
    return hidden

  def _linear(self, arrays: Arrays) -> tuple[RowFactory, Float[Array, "V"] | None]:
    """The rows in the model's basis, and the bias."""
    return self._rows(arrays), arrays["bias"]

  @final
  def linear(self) -> tuple[RowFactory, Float[Array, "V"] | None]:
    """The rows and the bias that the head scores with; a distillation reads them.

    Raises:
      ValueError: the scores are another function of them.
    """
    whole = lambda: vocab_parallel.over_vocabulary(None, self._linear, self.parts())
    return self._computed(whole, None)

  def parts(self) -> dict[str, Any]:
    """The variables, with a bias under the one name "bias"."""
    found = super().parts()
    # Declared without a `pad_value`: rows that pad a device's part need a bias of -inf, even where
    # the head has no bias of its own.
    name = "token_bias" if found.pop("token_bias", None) else "bias"
    return found | {"bias": self._padded_bias(name)}

  def check(self) -> None:
    super().check()
    check_softcap(self.softcap)

  def flops_per_token(self) -> int:
    """One product of width D for each token of the vocabulary."""
    return 2 * self.vocab * self.dim

  def _logits(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """hidden · rowᵀ + bias, capped, in float32."""
    return softmax.linear_scores(
      self._projected(arrays, hidden),
      self._rows(arrays),
      arrays["bias"],
      self.dtype,
      output=self._output(),
    )

  def _log_prob(self, arrays, hidden, token, temperature, counted):
    return self._softmax(arrays, hidden, token, counted, temperature=temperature).log_prob

  def _softmax(self, arrays, hidden, token, counted, mean=False, temperature=1.0):
    return softmax.linear_softmax(
      self._projected(arrays, hidden),
      self._rows(arrays),
      token,
      arrays["bias"],
      temperature=temperature,
      output=self._output(),
      mean=mean,
      mask=counted,
      dtype=self.dtype,
      vocab_axis=self.vocab_axis,
    )

  def _loss_terms(self, arrays, hidden, token, known, counted):
    # The mean over the vocabulary costs work in every tile; the log-normaliser is there anyway.
    scores = self._softmax(arrays, hidden, token, counted, mean=self.label_smoothing > 0)
    return scores.log_prob, self._regularizers(scores, known)

  def _scores(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    return linear_decoding.linear_blocks(
      self._projected(arrays, hidden),
      self._rows(arrays),
      arrays["bias"],
      self.vocab,
      ScoreOptions(output=self._output(), dtype=self.dtype, vocab_axis=self.vocab_axis),
    )
