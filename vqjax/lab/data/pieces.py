"""How is text cut into SentencePiece's pieces, and how does a unigram model of them come to be?"""

import base64
import dataclasses
import io
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import sentencepiece

from vqjax.lab.data.files import data_path
from vqjax.lab.data.tokenizers import Documents, Encoder, Tokenizer, documents_of

LONGEST_LINE = 2**30
"""Bytes of the longest line that is trained on; the library's own limit leaves much prose out."""


@dataclasses.dataclass(frozen=True)
class SentencePieceTokenizer(Tokenizer):
  """SentencePiece: a unigram model trained on the documents, or a model that is there.

  A trained model gives every text back exactly but for U+2581, which is its sign for a blank: text
  is not normalised, and characters too rare for a piece are spelt in bytes. Pieces come in order of
  falling probability, after `<unk>`, `</s>`, which ends a document, and the 256 bytes.

  Source: Kudo and Richardson 2018; VQ-Logits, Appendix A, has 32,000 pieces trained on C4.

  Attributes:
    vocab: pieces to have when trained here, all included.
    model: a .model file, here or under $VQJAX_DATA; None: train.
    lines: most lines to train on; of more, a fair sample of this many, always the same.
  """

  vocab: int = 32_000
  model: str | None = None
  lines: int = 4_000_000

  def __post_init__(self):
    if self.lines < 1:
      raise ValueError(f"tokenizer.lines {self.lines} leave nothing to train on; give at least 1")

  def fit(self, documents: Documents) -> Encoder:
    """Trains the pieces, or reads the model."""
    if self.model is None:
      return SentencePieceEncoder(self._train(documents()))
    path = data_path(self.model, kind="tokenizer.model")
    try:
      return SentencePieceEncoder(path.read_bytes())
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from None

  def files(self) -> tuple[Path, ...]:
    """The model, where there is one."""
    return () if self.model is None else (data_path(self.model, kind="tokenizer.model"),)

  def load(self, state: str) -> Encoder:
    """From the model's bytes in base 64."""
    return SentencePieceEncoder(base64.b64decode(state, validate=True))

  def _train(self, documents: Iterable[str]) -> bytes:
    lines = _sample(_lines(documents), self.lines)
    if not lines:
      raise ValueError("no text to train SentencePiece on; give training documents with words")
    model = io.BytesIO()
    try:
      sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="unigram",
        vocab_size=self.vocab,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        max_sentence_length=LONGEST_LINE,
        # Sums are added up thread by thread: another number of threads would be another model.
        num_threads=16,
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        pad_id=-1,
        minloglevel=2,
      )
    except RuntimeError as error:
      raise ValueError(self._explain(str(error))) from None
    return model.getvalue()

  def _explain(self, error: str) -> str:
    if largest := re.search(r"value <= (\d+)", error):
      return (
        f"tokenizer.vocab {self.vocab} is more than the training text has pieces for; the largest"
        f" that works is {largest[1]}"
      )
    if smallest := re.search(r"required_chars\. \d+ vs (\d+)", error):
      return (
        f"tokenizer.vocab {self.vocab} has no room for 256 bytes and the text's characters; give at"
        f" least {smallest[1]}"
      )
    return f"SentencePiece cannot be trained with tokenizer.vocab {self.vocab}: {error}"


class SentencePieceEncoder(Encoder):
  """A model of the `sentencepiece` library."""

  def __init__(self, content: bytes):
    """`content` is that of a .model file whose model has an end-of-sentence piece."""
    self._content = content
    try:
      self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
      raise ValueError(f"this is no SentencePiece model ({error}); give a .model file") from None
    self.vocab, self.eos = self._model.vocab_size(), self._model.eos_id()
    if self.eos < 0:
      raise ValueError("the model has no end-of-sentence piece; train one with eos_id set")

  def encode(self, document: str) -> np.ndarray:
    """The document's pieces and the end of a sentence."""
    return np.array([*self._model.encode(document), self.eos], np.int64)

  def decode(self, tokens: Iterable[int]) -> str:
    """The text of the pieces."""
    return "\n".join(self._model.decode(part) for part in documents_of(tokens, self.eos))

  def state(self) -> str:
    """The model's bytes in base 64."""
    return base64.b64encode(self._content).decode()


def _lines(documents: Iterable[str]) -> Iterator[str]:
  for document in documents:
    yield from filter(str.strip, document.split("\n"))


def _sample(lines: Iterable[str], size: int) -> list[str]:
  """`size` of the lines, each as likely as any other: a reservoir, which needs no count of them."""
  # The library samples too, but differently in each process.
  draw = random.Random(0)
  kept: list[str] = []
  for number, line in enumerate(lines):
    if number < size:
      kept.append(line)
      continue
    place = int(draw.random() * (number + 1))
    if place < size:
      kept[place] = line
  return kept
