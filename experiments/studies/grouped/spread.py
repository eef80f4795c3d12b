"""How does a text of 50,257 tokens fill a vocabulary of 262,144?

No text here has so many tokens. The numbers of its own are spread evenly over the larger
vocabulary: each group of a head then has its share of them, and of others that never occur.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vqjax.lab.data import Encoder, Tokenizer
from vqjax.lab.data.tokenizers import Documents


@dataclasses.dataclass(frozen=True)
class SpreadTokenizer(Tokenizer):
  """Another tokenizer's tokens, token t numbered t · floor(vocab / its vocabulary).

  Attributes:
    inner: the tokenizer.
    vocab: how many tokens there are to be; at least as many as it has.
  """

  inner: Tokenizer
  vocab: int

  def fit(self, documents: Documents) -> Encoder:
    """The inner tokenizer, fitted."""
    return SpreadEncoder(self.inner.fit(documents), self.vocab)

  def load(self, state: str) -> Encoder:
    """From the inner one's state."""
    return SpreadEncoder(self.inner.load(json.loads(state)["inner"]), self.vocab)

  def files(self) -> tuple[Path, ...]:
    """Those of the inner tokenizer."""
    return self.inner.files()


class SpreadEncoder(Encoder):
  """An encoder whose numbers are multiples of `stride`."""

  def __init__(self, inner: Encoder, vocab: int):
    """`vocab` tokens, of which the inner encoder's are spread out."""
    if vocab < inner.vocab:
      raise ValueError(f"{inner.vocab} tokens do not spread over {vocab}; give at least as many")
    self._inner, self.vocab = inner, vocab
    self.stride = vocab // inner.vocab
    self.eos = inner.eos * self.stride

  def encode(self, document: str) -> np.ndarray:
    """The inner tokens, spread."""
    return self._inner.encode(document) * self.stride

  def decode(self, tokens: Iterable[int]) -> str:
    """The text; a number between those that occur reads as the one before it."""
    most = self._inner.vocab - 1
    return self._inner.decode(min(int(token) // self.stride, most) for token in tokens)

  def state(self) -> str:
    """The inner encoder's, and the size."""
    return json.dumps({"inner": self._inner.state(), "vocab": self.vocab})
