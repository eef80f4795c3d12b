"""How does a document become numbers, and back?"""

import abc
import collections
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers

from vqjax.lab.data.files import content_hash, data_path

Documents = Callable[[], Iterable[str]]
"""Yields the documents anew on each call."""

EOS, UNKNOWN = "<eos>", "<unk>"


class Encoder(abc.ABC):
  """A fitted tokenizer.

  Attributes:
    vocab: number of different tokens.
    eos: the token that ends a document.
  """

  vocab: int
  eos: int

  @abc.abstractmethod
  def encode(self, document: str) -> np.ndarray:
    """The tokens of a document and the one that ends it, int64."""

  @abc.abstractmethod
  def decode(self, tokens: Iterable[int]) -> str:
    """The text of tokens; those that end a document become line ends."""

  @abc.abstractmethod
  def state(self) -> str:
    """All there is to know to rebuild it, as text."""

  def fingerprint(self) -> str:
    """A hash that changes with anything that `encode` depends on."""
    return content_hash([type(self).__name__, self.state()])


class Tokenizer(abc.ABC):
  """A recipe for an `Encoder`: a frozen dataclass that can stand in a config."""

  @abc.abstractmethod
  def fit(self, documents: Documents) -> Encoder:
    """The encoder for these training documents."""

  @abc.abstractmethod
  def load(self, state: str) -> Encoder:
    """The encoder that `Encoder.state` came from."""

  def files(self) -> tuple[Path, ...]:
    """The files that `fit` reads beside the documents."""
    return ()


@dataclasses.dataclass(frozen=True)
class WordTokenizer(Tokenizer):
  """A token for each word, numbered by falling frequency; ties in alphabetical order.

  `<eos>` and `<unk>` have their places by frequency too. `<unk>` stands for words that are left out
  and for those that held-out text has and training text lacks.

  Attributes:
    vocab: most tokens to have, with `<eos>` and `<unk>`; 0: as many as there are.
    min_count: occurrences below which a word is left out.
    lowercase: fold upper case.
    split: separate words and punctuation; False: only blanks separate, as in prepared corpora.
  """

  vocab: int = 0
  min_count: int = 1
  lowercase: bool = False
  split: bool = True

  def __post_init__(self):
    if self.vocab < 0 or self.vocab in (1, 2):
      raise ValueError(
        f"tokenizer.vocab {self.vocab} has no room for a word beside {EOS} and {UNKNOWN}; give at"
        " least 3, or 0 for no limit"
      )

  def fit(self, documents: Documents) -> Encoder:
    """Counts words; keeps the most frequent."""
    counts: collections.Counter[str] = collections.Counter()
    ends = 0
    for document in documents():
      counts.update(self.words(document))
      ends += 1
    unknown = counts.pop(UNKNOWN, 0)
    counts.pop(EOS, None)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    room = self.vocab - 2 if self.vocab else len(ranked)
    kept = [word for word in ranked[:room] if counts[word] >= self.min_count]
    left_out = counts.total() - sum(counts[word] for word in kept)
    frequency = {word: counts[word] for word in kept}
    frequency |= {EOS: ends, UNKNOWN: unknown + left_out}
    return WordEncoder(self, sorted(frequency, key=lambda word: (-frequency[word], word)))

  def words(self, document: str) -> list[str]:
    """The words of a document, in order."""
    document = document.lower() if self.lowercase else document
    if self.split:
      return re.findall(r"<unk>|\w+(?:'\w+)?|[^\w\s]", document)
    return document.split()

  def load(self, state: str) -> Encoder:
    """From the JSON list of words."""
    return WordEncoder(self, json.loads(state))


class WordEncoder(Encoder):
  """A table of words."""

  def __init__(self, tokenizer: WordTokenizer, words: list[str]):
    """`words` in the order of their numbers."""
    self._tokenizer, self._words = tokenizer, words
    self._number = {word: number for number, word in enumerate(words)}
    self.vocab = len(words)
    self.eos, self._unknown = self._number[EOS], self._number[UNKNOWN]

  def encode(self, document: str) -> np.ndarray:
    """The words' numbers, `<unk>`'s for those not in the table, and `<eos>`'s."""
    words = self._tokenizer.words(document)
    numbers = [self._number.get(word, self._unknown) for word in words]
    return np.array([*numbers, self.eos], np.int64)

  def decode(self, tokens: Iterable[int]) -> str:
    """Words with a space between."""
    words = ("\n" if t == self.eos else self._words[t] for t in tokens)
    return " ".join(words).replace(" \n ", "\n").replace(" \n", "\n")

  def state(self) -> str:
    """A JSON list of the words."""
    return json.dumps(self._words, ensure_ascii=False)


@dataclasses.dataclass(frozen=True)
class BPETokenizer(Tokenizer):
  """Byte-level byte-pair encoding: trained on the documents, or GPT-2's own.

  Attributes:
    vocab: tokens to have when trained here, at least 257 (256 bytes and the end of a document).
    folder: folder with GPT-2's vocab.json and merges.txt, here or under $VQJAX_DATA; None: train.
  """

  vocab: int = 8192
  folder: str | None = None

  def fit(self, documents: Documents) -> Encoder:
    """Trains the merges, or reads GPT-2's."""
    if self.folder is not None:
      return BPEEncoder(_gpt2(data_path(self.folder, kind="tokenizer.folder")))
    if self.vocab < 257:
      raise ValueError(
        f"tokenizer.vocab {self.vocab} is too small for byte-level BPE; give at least 257: 256"
        " bytes and the end of a document"
      )
    model = _byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=self.vocab,
      special_tokens=[EOS],
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    )
    model.train_from_iterator(documents(), trainer)
    return BPEEncoder(model)

  def files(self) -> tuple[Path, ...]:
    """GPT-2's two files, where they are used."""
    if self.folder is None:
      return ()
    return _gpt2_files(data_path(self.folder, kind="tokenizer.folder"))

  def load(self, state: str) -> Encoder:
    """From the JSON of the `tokenizers` library."""
    return BPEEncoder(tokenizers.Tokenizer.from_str(state))


class BPEEncoder(Encoder):
  """A model of the `tokenizers` library."""

  def __init__(self, model: tokenizers.Tokenizer):
    """`model` has `<eos>` or GPT-2's `<|endoftext|>`."""
    self._model = model
    # "<eos>" that a document spells out is text, not its end.
    model.encode_special_tokens = True
    ends = [model.token_to_id(name) for name in (EOS, "<|endoftext|>")]
    self.eos = next(number for number in ends if number is not None)
    self.vocab = model.get_vocab_size()

  def encode(self, document: str) -> np.ndarray:
    """The document's byte pairs and the end."""
    numbers = self._model.encode(document, add_special_tokens=False).ids
    return np.array([*numbers, self.eos], np.int64)

  def decode(self, tokens: Iterable[int]) -> str:
    """The bytes of the tokens as text; a broken character becomes U+FFFD."""
    return "\n".join(self._model.decode(part) for part in documents_of(tokens, self.eos))

  def state(self) -> str:
    """The JSON of the `tokenizers` library."""
    return self._model.to_str()


def documents_of(tokens: Iterable[int], eos: int) -> Iterator[list[int]]:
  """The lists of tokens between those that end a document, and the list after the last end."""
  part: list[int] = []
  for token in tokens:
    if token == eos:
      yield part
      part = []
    else:
      part.append(int(token))
  yield part


def _byte_level(bpe: tokenizers.models.BPE) -> tokenizers.Tokenizer:
  model = tokenizers.Tokenizer(bpe)
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = tokenizers.decoders.ByteLevel()
  return model


def _gpt2_files(folder: Path) -> tuple[Path, Path]:
  for name in ("vocab.json", "merges.txt"):
    if not (folder / name).is_file():
      raise FileNotFoundError(
        f"{folder} has no {name}; GPT-2's folder holds vocab.json, merges.txt"
      )
  return folder / "vocab.json", folder / "merges.txt"


def _gpt2(folder: Path) -> tokenizers.Tokenizer:
  vocab_file, merges_file = _gpt2_files(folder)
  vocab = json.loads(vocab_file.read_text(encoding="utf-8"))
  lines = merges_file.read_text(encoding="utf-8").split("\n")
  # The line "#version: 0.2" may be missing; as a pair it could not be a merge.
  pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
  model = _byte_level(tokenizers.models.BPE(vocab=vocab, merges=pairs))
  model.add_special_tokens(["<|endoftext|>"])
  return model
