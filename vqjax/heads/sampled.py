"""The sampled softmax head, whose training loss scores a sample of the vocabulary."""

# A step with a random stream "sample", as in training:
#
#   _training_parts   S tokens by the proposal, once for the batch and outside of any `shard_map`
#   _loss_terms       the rows of these S tokens and of the targets -> estimates of log p and log Z
#
# In the estimate of Z a drawn token counts 1 / (the probability that it is drawn at all), and the
# target counts once, drawn or not. Whether there are candidates is known from `arrays`: without
# the stream there are none, and the loss is the dense head's.

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from vqjax.assign.text import TextStats
from vqjax.heads.dense import DenseHead
from vqjax.heads.unigram import UnigramProposal
from vqjax.ops import sampled_softmax
from vqjax.ops.vocab_parallel import Replicated

__all__ = ["SampledSoftmaxHead"]

# vocab -> log-probabilities [V] with which tokens are drawn, up to a constant.
Proposal = Callable[[int], Float[Array, "V"]]


class SampledSoftmaxHead(DenseHead):
  """A `DenseHead` that is trained on the scores of a sample of the tokens.

  Given a random stream "sample", as in training steps, `loss_terms` estimates the log-probability
  from one sample for all tokens of the batch (`ops.sampled_softmax`): O(N·S·D), consistent as S
  grows, exact at S = V. Without the stream `loss_terms` is exact, as is every other method, so
  evaluation uses the full softmax. Source: Jean et al. (2014).

  Attributes:
    samples: number of different tokens drawn for each step, S.
    proposal: vocab -> log-probabilities of the draw: `ops.sampled_softmax.log_uniform`, Zipf's law
      over token ids, or `UnigramProposal(counts)`.
  """

  samples: int = dataclasses.field(kw_only=True)
  proposal: Proposal = dataclasses.field(default=sampled_softmax.log_uniform, kw_only=True)

  def check(self) -> None:
    super().check()
    sampled_softmax.check_samples(self.samples, self.vocab)
    if self.output is not None:
      raise ValueError(
        f"`output` must be None, since scores are estimated as they are; got {self.output}. Leave"
        " it out, or take DenseHead."
      )
    if self.softcap is not None or self.label_smoothing:
      raise ValueError(
        f"`softcap` must be None and `label_smoothing` 0, since both need all scores; got"
        f" {self.softcap} and {self.label_smoothing}. Leave them out, or take DenseHead."
      )

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """The fields of a dense head, and draws by frequency."""
    return super()._of_text(text) | {"proposal": UnigramProposal(text.counts)}

  def _training_parts(self, tokens):
    """Candidates, where there is a random stream "sample"."""
    parts, terms = super()._training_parts(tokens)
    if self.has_rng("sample"):
      key = self.make_rng("sample")
      drawn = sampled_softmax.draw_candidates(key, self.proposal(self.vocab), self.samples)
      parts["candidates"] = Replicated(drawn)
    return parts, terms

  def _loss_terms(self, arrays, hidden, token, known, counted):
    if "candidates" not in arrays:
      return super()._loss_terms(arrays, hidden, token, known, counted)
    scores = sampled_softmax.sampled_softmax(
      hidden,
      self._rows(arrays).all(),
      token,
      arrays["candidates"],
      arrays["bias"],
      dtype=self.dtype,
      vocab_axis=self.vocab_axis,
    )
    return scores.log_prob, self._regularizers(scores, known)
