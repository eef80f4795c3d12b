"""Windows of tokens some of which are hidden, for BERT."""

import dataclasses

import numpy as np

from experiments.studies.dpq.models.bert import MASKED
from vqjax.lab.data import TokenSplit, Windows
from vqjax.lab.data.pipeline import NONE, Batch


@dataclasses.dataclass(frozen=True)
class Masked(Windows):
  """Windows with hidden tokens to predict: {"inputs", "targets": [B, T], "reset"}.

  15 % of the positions are chosen. Of these 80 % are hidden, 10 % have the token of a random
  position of the text, and 10 % are unchanged; only chosen positions have a target. The choice
  depends on the number of the batch and the position in it.

  Source: Devlin et al., BERT, 2019, Section 3.1, whose random tokens are uniform in the vocabulary.
  """

  def text_bytes(self, split):
    return None

  def whole(self, split, *, batch, context):
    for number, plain in enumerate(super().whole(split, batch=batch, context=context)):
      yield _masked(plain, split, [0, number], np.arange(batch), batch)

  def _batch_at(self, split, batch, context, seed, rows):
    plain = super()._batch_at(split, batch, context, seed, rows)
    return lambda index: _masked(plain(index), split, [seed, index], rows, batch)


def _masked(
  plain: Batch, split: TokenSplit, seed: list[int], rows: np.ndarray, batch: int
) -> Batch:
  """The batch with hidden tokens; `plain` has its rows `rows`."""
  tokens = plain["targets"]
  # Draws are for the whole batch, so that each process has its rows of the same ones.
  draw, shape = np.random.default_rng(seed), (batch, tokens.shape[1])
  chosen = (draw.random(shape)[rows] < 0.15) & (tokens != NONE)
  kind = draw.random(shape)[rows]
  other = split.tokens[draw.integers(0, len(split.tokens), shape)[rows]].astype(np.int32)
  seen = np.where(kind < 0.8, MASKED, np.where(kind < 0.9, other, tokens))
  return plain | {
    "inputs": np.where(chosen, seen, tokens).astype(np.int32),
    "targets": np.where(chosen, tokens, NONE).astype(np.int32),
  }
