"""A tokenizer of a larger vocabulary, of which no text at hand has so many tokens."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable

from vqjax.lab.data import TokenizerRecipe
from vqjax.lab.data.tokenizer_recipes import Documents
from vqjax.lm.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class SpreadTokenizer(TokenizerRecipe):
  """A tokenizer that spreads another tokenizer's tokens over a larger vocabulary.

  No text at hand has 262,144 different tokens. If the tokens of a smaller vocabulary are spread
  evenly over it, each group of a head has its share of tokens that occur and of tokens that do not.

  Attributes:
    inner: the other tokenizer.
    vocab: size of the larger vocabulary.
  """

  inner: TokenizerRecipe
  vocab: int

  def fit(self, documents: Documents) -> Tokenizer:
    """Fit the inner tokenizer."""
    return Spread(self.inner.fit(documents), self.vocab)

  def load(self, state: str) -> Tokenizer:
    """Load the state of a `Spread`."""
    return Spread(self.inner.load(json.loads(state)["inner"]), self.vocab)

  def files(self) -> tuple[pathlib.Path, ...]:
    """Files of the inner tokenizer."""
    return self.inner.files()


class Spread:
  """A tokenizer whose tokens are multiples of `stride`."""

  def __init__(self, inner: Tokenizer, vocab: int):
    """Spread the tokens of `inner` over a vocabulary of `vocab` tokens."""
    self._inner, self.vocab, self.pieces = inner, vocab, vocab
    self.stride = vocab // inner.vocab
    self.bos = None if inner.bos is None else inner.bos * self.stride
    self.eos = tuple(end * self.stride for end in inner.eos)

  def encode(self, text: str, *, special: bool = True) -> list[int]:
    """Spread tokens of a text."""
    return [token * self.stride for token in self._inner.encode(text, special=special)]

  def decode(self, tokens: Iterable[int]) -> str:
    """Text of the tokens, each as the nearest one below that occurs."""
    return self._inner.decode([self._below(token) for token in tokens])

  def piece(self, token: int) -> str:
    """Entry of the nearest token below that occurs."""
    return self._inner.piece(self._below(token))

  def _below(self, token: int) -> int:
    return min(int(token) // self.stride, self._inner.vocab - 1)

  def state(self) -> str:
    """State of the inner tokenizer, and the vocabulary."""
    return json.dumps({"inner": self._inner.state(), "vocab": self.vocab})
