"""Windows of tokens some of which are hidden, for BERT."""

import dataclasses

import numpy as np

from experiments.studies.dpq.models.bert import MASKED
from vqjax.lab.data import TokenSplit, Windows
from vqjax.lab.data.pipeline import NONE, Batch


@dataclasses.dataclass(frozen=True)
class Masked(Windows):
  """Windows with hidden tokens to predict: {"inputs", "targets": [B, T], "reset"}.

  Of the chosen positions 80 % are hidden, 10 % have the token of a random position of the text,
  and 10 % are unchanged; only chosen positions have a target. The choice depends on the window and
  the epoch; in `whole` only on the position in the text.

  Source: Devlin et al., BERT, 2019, Section 3.1, whose random tokens are uniform in the vocabulary.

  Attributes:
    part: fraction of the positions that are chosen.
  """

  part: float = 0.15

  def __post_init__(self):
    if not 0 < self.part <= 1:
      raise ValueError(f"`loader.part` must be in (0, 1]; got {self.part}. 1 is the whole text.")

  def text_bytes(self, split):
    return None

  def whole(self, split, *, batch, context):
    # A generator for each window, so that its choice does not depend on the batch size.
    one = np.arange(1)
    for number, plain in enumerate(super().whole(split, batch=batch, context=context)):
      windows = []
      for row in range(batch):
        window = {name: x[row : row + 1] for name, x in plain.items()}
        seed = [0, number * batch + row]
        windows.append(self.mask(window, split, seed=seed, rows=one, batch=1))
      yield {name: np.concatenate([x[name] for x in windows]) for name in windows[0]}

  def _batch_at(self, split, batch, context, seed, rows):
    plain = super()._batch_at(split, batch, context, seed, rows)
    return lambda index: self.mask(plain(index), split, seed=[seed, index], rows=rows, batch=batch)

  def mask(
    self, plain: Batch, split: TokenSplit, *, seed: list[int], rows: np.ndarray, batch: int
  ) -> Batch:
    """Return the batch with hidden tokens; `plain` has its rows `rows`."""
    tokens = plain["targets"]
    # Draws are for the whole batch, so that each process has its rows of the same ones.
    draw, shape = np.random.default_rng(seed), (batch, tokens.shape[1])
    chosen = (draw.random(shape)[rows] < self.part) & (tokens != NONE)
    kind = draw.random(shape)[rows]
    other = split.tokens[draw.integers(0, len(split.tokens), shape)[rows]].astype(np.int32)
    seen = np.where(kind < 0.8, MASKED, np.where(kind < 0.9, other, tokens))
    return plain | {
      "inputs": np.where(chosen, seen, tokens).astype(np.int32),
      "targets": np.where(chosen, tokens, NONE).astype(np.int32),
    }
