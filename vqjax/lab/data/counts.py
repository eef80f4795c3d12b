"""How often does each token occur, and for which tokenizer is that true?"""

import dataclasses
import zipfile
from pathlib import Path

import numpy as np

from vqjax.lab.data.cache import TokenSplit
from vqjax.lab.data.files import atomic_file
from vqjax.lab.data.tokenizers import Encoder


@dataclasses.dataclass(frozen=True, eq=False)
class TokenCounts:
  """Occurrences of each token of a vocabulary in some text.

  Attributes:
    counts: int64 [V]; a token that does not occur has 0.
    fingerprint: of the tokenizer: `Encoder.fingerprint()`.
  """

  counts: np.ndarray
  fingerprint: str

  def save(self, path: str | Path) -> None:
    """Writes the file, complete or not at all: NumPy's npz with the two arrays."""
    with atomic_file(Path(path)) as file:
      np.savez_compressed(file, counts=self.counts, fingerprint=np.array(self.fingerprint))


def count_tokens(split: TokenSplit, encoder: Encoder) -> TokenCounts:
  """Counts the tokens of a split that the encoder made.

  Raises:
    ValueError: a token outside the encoder's vocabulary.
  """
  if split.tokens.size and int(split.tokens.max()) >= encoder.vocab:
    raise ValueError(
      f"token {split.tokens.max()} is outside the vocabulary of {encoder.vocab}; count with the"
      " tokenizer that made the tokens"
    )
  counts = np.bincount(split.tokens, minlength=encoder.vocab)
  return TokenCounts(counts.astype(np.int64), encoder.fingerprint())


def load_counts(path: str | Path, encoder: Encoder) -> TokenCounts:
  """The counts in a file of `TokenCounts.save`, made with this very tokenizer.

  Raises:
    ValueError: the tokenizer changed since the counts were taken, or the file holds no counts.
  """
  path = Path(path)
  remedy = "count the tokens again with vqjax.lab.data.counts.count_tokens"
  try:
    with np.load(path, allow_pickle=False) as file:
      found = TokenCounts(file["counts"], str(file["fingerprint"]))
  except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
    raise ValueError(f"{path} holds no token counts ({error}); {remedy}") from None
  if found.fingerprint != encoder.fingerprint():
    raise ValueError(
      f"the tokenizer changed since the counts were taken: {path} is for {found.fingerprint}, this"
      f" one is {encoder.fingerprint()}; {remedy}, or use the other tokenizer"
    )
  if found.counts.shape != (encoder.vocab,) or not np.issubdtype(found.counts.dtype, np.integer):
    raise ValueError(
      f"{path} holds {found.counts.dtype} of shape {found.counts.shape} for a vocabulary of"
      f" {encoder.vocab}; {remedy}"
    )
  return found
