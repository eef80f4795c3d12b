"""What does a softmax head look like whose training loss scores a sample of the vocabulary?"""

import dataclasses
from collections.abc import Callable

from jaxtyping import Array, Float, Integer

from vqjax.heads.dense import DenseHead
from vqjax.ops import sampled_softmax
from vqjax.ops.vocabulary import mean_in_vocabulary

Proposal = Callable[[int], Float[Array, "V"]]
"""vocab -> log-probabilities [V] with which tokens are drawn, up to a constant."""


class SampledSoftmaxHead(DenseHead):
  """A `DenseHead` that is trained on the scores of `samples` tokens instead of all V.

  `loss_terms`, given a random stream "sample" as training steps do, estimates the log-probability
  from one sample for all tokens of the batch (`ops.sampled`): O(N·S·D), consistent as S grows,
  exact at S = V. Everything else, `log_prob` included, is exact, and so is `loss_terms` without the
  stream: evaluation is that of the full softmax. Source: Jean et al. (2014).

  Attributes:
    samples: number of different tokens drawn for each step, S.
    proposal: vocab -> log-probabilities of the draw: `ops.sampled.log_uniform`, Zipf's law over
      token ids, or `UnigramProposal(counts)`.
  """

  samples: int = dataclasses.field(kw_only=True)
  proposal: Proposal = dataclasses.field(default=sampled_softmax.log_uniform, kw_only=True)

  def setup(self):
    super().setup()
    sampled_softmax.check_samples(self.samples, self.vocab)
    if self.softcap is not None or self.label_smoothing:
      raise ValueError(
        f"softcap {self.softcap} and label_smoothing {self.label_smoothing} need all scores, of"
        " which a sampled softmax has a few; leave them out, or take DenseHead"
      )

  def loss_terms(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> tuple[Float[Array, "*B"], dict[str, Float[Array, ""]]]:
    """An estimate of `log_prob` from a sample, and `aux`; exact without a stream "sample"."""
    if not self.has_rng("sample"):
      return super().loss_terms(hidden, tokens)
    self._check_hidden(hidden)
    candidates = sampled_softmax.draw_candidates(
      self.make_rng("sample"), self.proposal(self.vocab), self.samples
    )
    found = sampled_softmax.sampled_softmax(
      *(hidden, self._weight().all(), tokens, candidates, self._bias()),
      dtype=self.dtype,
      vocab_axis=self.vocab_axis,
    )
    if not self.z_loss:
      return found.log_prob, {}
    z_loss = self.z_loss * mean_in_vocabulary(found.log_z**2, tokens, self.vocab)
    return found.log_prob, {"z_loss": z_loss}
