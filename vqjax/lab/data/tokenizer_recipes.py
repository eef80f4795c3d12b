"""Tokenizers: words, byte-level byte-pair encoding and SentencePiece."""

import abc
import collections
import dataclasses
import io
import json
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers

from vqjax.lab.data.corpus_files import import_extra
from vqjax.lm import checkpoints
from vqjax.lm.texts import data_path, read_text
from vqjax.lm.tokenizers import Tokenizer, from_state, load_tokenizer
from vqjax.lm.tokenizers.byte_level import begin_with
from vqjax.lm.tokenizers.reading import FILES, JsonTokenizer, PiecesTokenizer

__all__ = [
  "BPETokenizer",
  "CheckpointTokenizer",
  "Documents",
  "JSONTokenizer",
  "SentencePieceTokenizer",
  "TokenizerRecipe",
  "WordTokenizer",
]

Documents = Callable[[], Iterable[str]]
"""A function that returns the documents from the first on, at each call."""

EOS, UNKNOWN, END_OF_TEXT = "<eos>", "<unk>", "<|endoftext|>"

LONGEST_LINE = 2**30
"""Bytes of the longest line that SentencePiece trains on; its own limit leaves much prose out."""


class TokenizerRecipe(abc.ABC):
  """A recipe for a tokenizer: a frozen dataclass that can stand in a config."""

  @abc.abstractmethod
  def fit(self, documents: Documents) -> Tokenizer:
    """Return the tokenizer for these training documents."""

  def load(self, state: str) -> Tokenizer:
    """Return the tokenizer that `TokenizerRecipe.state` came from."""
    return from_state(state)

  def files(self) -> tuple[Path, ...]:
    """Return the files that `fit` reads beside the documents."""
    return ()


def _json(text: str, where: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{where} must be JSON; got {error}. Restore it.") from None


@dataclasses.dataclass(frozen=True)
class WordTokenizer(TokenizerRecipe):
  """A token for each word, numbered by falling frequency, then alphabetically.

  `<eos>` and `<unk>` are numbered by their frequency too. `<unk>` stands for words that are left
  out, and for words that only held-out text has.

  Attributes:
    vocab: most tokens, `<eos>` and `<unk>` included; 0: no limit.
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
        f"`tokenizer.vocab` must be 0 (no limit) or at least 3; got {self.vocab}. Raise it:"
        f" {EOS} and {UNKNOWN} take two."
      )

  def fit(self, documents: Documents) -> Tokenizer:
    """Count words and keep the most frequent."""
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
    frequency = {word: counts[word] for word in kept}
    left_out = counts.total() - sum(frequency.values())
    frequency |= {EOS: ends, UNKNOWN: unknown + left_out}
    return _Words(self, sorted(frequency, key=lambda word: (-frequency[word], word)))

  def words(self, document: str) -> list[str]:
    """Return the words of a document, in order."""
    document = document.lower() if self.lowercase else document
    if self.split:
      return re.findall(r"<unk>|\w+(?:'\w+)?|[^\w\s]", document)
    return document.split()

  def load(self, state: str) -> Tokenizer:
    """Return the tokenizer of a JSON list of words."""
    words = _json(state, "`state`")
    is_right = isinstance(words, list) and all(isinstance(word, str) for word in words)
    if not is_right or len({*words}) < len(words) or not {EOS, UNKNOWN} <= {*words}:
      raise ValueError(
        f"`state` must be a JSON list of different words with {EOS} and {UNKNOWN}; got"
        f" {state[:40]!r}. Fit the tokenizer again."
      )
    return _Words(self, words)


class _Words:
  """A tokenizer by a list of words; a text follows the end of another, as in training."""

  def __init__(self, recipe: WordTokenizer, words: list[str]):
    """Take the words in the order of their numbers."""
    self._recipe, self._words = recipe, words
    self._number = {word: number for number, word in enumerate(words)}
    self.vocab = self.pieces = len(words)
    self.bos, self._unknown = self._number[EOS], self._number[UNKNOWN]
    self.eos = (self.bos,)

  def encode(self, text: str, *, special: bool = True) -> list[int]:
    """Return the words' numbers, with `<unk>` for unknown words."""
    ids = [self._number.get(word, self._unknown) for word in self._recipe.words(text)]
    return [self.bos, *ids] if special else ids

  def decode(self, tokens: Iterable[int]) -> str:
    """Return the words with a space between."""
    return " ".join(self._words[token] for token in tokens if token != self.bos)

  def piece(self, token: int) -> str:
    """Return the word of a number."""
    return self._words[token] if 0 <= token < self.vocab else ""

  def state(self) -> str:
    """Return a JSON list of the words."""
    return json.dumps(self._words, ensure_ascii=False)


@dataclasses.dataclass(frozen=True)
class BPETokenizer(TokenizerRecipe):
  """Byte-level byte-pair encoding, trained on documents or read from GPT-2's files.

  Attributes:
    vocab: tokens of a trained encoding, at least 257 (256 bytes and the end of a document).
    folder: folder with GPT-2's vocab.json and merges.txt, here or under $VQJAX_DATA; None: train.
  """

  vocab: int = 8192
  folder: str | None = None

  def fit(self, documents: Documents) -> Tokenizer:
    """Train the merges, or read GPT-2's."""
    if self.folder is not None:
      vocab_file, merges_file = self.files()
      vocab = _json(read_text(vocab_file), str(vocab_file))
      lines = read_text(merges_file).split("\n")
      # The line "#version: 0.2" may be missing; as a pair it could not be a merge.
      pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
      try:
        model = _byte_level(tokenizers.models.BPE(vocab=vocab, merges=pairs))
      except Exception as error:  # the library raises nothing narrower
        raise ValueError(
          f"{vocab_file} and {merges_file.name} must be those of one tokenizer; got {error}. Fetch"
          " both again."
        ) from None
      model.add_special_tokens([END_OF_TEXT])
      return _with_end(model, END_OF_TEXT)
    if self.vocab < 257:
      raise ValueError(
        f"`tokenizer.vocab` must be at least 257 for 256 bytes and the end of a document; got"
        f" {self.vocab}. Raise it."
      )
    model = _byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=self.vocab,
      special_tokens=[EOS],
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    )
    model.train_from_iterator(documents(), trainer)
    return _with_end(model, EOS)

  def files(self) -> tuple[Path, ...]:
    """Return GPT-2's two files, where they are used."""
    if self.folder is None:
      return ()
    folder = data_path(self.folder, kind="tokenizer.folder")
    files = folder / "vocab.json", folder / "merges.txt"
    if missing := [file.name for file in files if not file.is_file()]:
      raise FileNotFoundError(
        f"`tokenizer.folder` must hold vocab.json and merges.txt; got {folder} without"
        f" {', '.join(missing)}. Give the folder of GPT-2's two files."
      )
    return files


def _byte_level(bpe: tokenizers.models.BPE) -> tokenizers.Tokenizer:
  model = tokenizers.Tokenizer(bpe)
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = tokenizers.decoders.ByteLevel()
  return model


def _file_in(path: str, field: str, name: str, others: str) -> Path:
  """The file of a tokenizer, here or under $VQJAX_DATA, which may be given as its folder."""
  found = data_path(path, kind=field)
  file = found / name if found.is_dir() else found
  if not file.is_file():
    raise FileNotFoundError(f"`{field}` must hold {name}; got {found} without it. Of {others}.")
  return file


def _with_end(model: tokenizers.Tokenizer, end: str) -> Tokenizer:
  number = model.token_to_id(end)
  begin_with(model, end)
  return JsonTokenizer(model, number, [number], spelt=True)


@dataclasses.dataclass(frozen=True)
class JSONTokenizer(TokenizerRecipe):
  """A tokenizer.json, as `tokenizers` and `transformers` save it, without a model.

  Attributes:
    path: the file, or its folder, here or under $VQJAX_DATA.
    end: the token that ends a document; "": `eos_token` of a tokenizer_config.json beside the file.
  """

  path: str
  end: str = ""

  def fit(self, documents: Documents) -> Tokenizer:
    """Read the tokenizer."""
    del documents
    file, *beside = self.files()
    try:
      model = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
      raise ValueError(
        f"`tokenizer.path` must be a tokenizer.json; got {file}: {error}. Save it with"
        " tokenizer.save(file), or give another."
      ) from None
    model.no_truncation()
    model.no_padding()
    end, added = self.end, [token.content for token in model.get_added_tokens_decoder().values()]
    for config in [] if end else beside:
      named = _json(read_text(config), str(config)).get("eos_token") or ""
      end = named.get("content", "") if isinstance(named, dict) else named
    if model.token_to_id(end) is None:
      raise ValueError(
        f"`tokenizer.end` must be the token of {file} that ends a document; got {end!r}. Give one"
        f" such as {', '.join(added) or 'a token of its vocabulary'}."
      )
    return _with_end(model, end)

  def files(self) -> tuple[Path, ...]:
    """Return the file, and the configuration beside it, if there is one."""
    others = "other files use SentencePieceTokenizer(model=...) or BPETokenizer(folder=...)"
    file = _file_in(self.path, "tokenizer.path", "tokenizer.json", others)
    config = file.with_name("tokenizer_config.json")
    return (file, config) if config.is_file() else (file,)


@dataclasses.dataclass(frozen=True)
class SentencePieceTokenizer(TokenizerRecipe):
  """SentencePiece: a unigram model trained on the documents, or an existing model.

  A trained model decodes to the exact text, except for U+2581, which it uses for blanks: text is
  not normalised, and characters too rare for a piece are spelt in bytes. Pieces come in order of
  falling probability, after `<unk>`, `</s>`, which ends a document, and the 256 bytes.

  Source: Kudo and Richardson 2018; VQ-Logits, Appendix A, has 32,000 pieces trained on C4.

  Attributes:
    vocab: pieces of a trained model, all included.
    model: a .model file, or a folder with tokenizer.model, here or under $VQJAX_DATA; None: train.
    lines: most lines to train on; of more lines, a uniform sample of this size with a fixed seed.
  """

  vocab: int = 32_000
  model: str | None = None
  lines: int = 4_000_000

  def __post_init__(self):
    if self.lines < 1:
      raise ValueError(f"`tokenizer.lines` must be at least 1; got {self.lines}. Raise it.")

  def fit(self, documents: Documents) -> Tokenizer:
    """Train the pieces, or read the model."""
    if self.model is None:
      return _with_last_piece(self._train(documents()))
    (path,) = self.files()
    try:
      return _with_last_piece(path.read_bytes())
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from None

  def files(self) -> tuple[Path, ...]:
    """Return the model's file, where one is used."""
    if self.model is None:
      return ()
    others = "a tokenizer.json use JSONTokenizer(path)"
    return (_file_in(self.model, "tokenizer.model", "tokenizer.model", others),)

  def _train(self, documents: Iterable[str]) -> bytes:
    """The content of a .model file trained on the documents' lines."""
    lines = (line for document in documents for line in document.split("\n") if line.strip())
    sample = _sample(lines, self.lines)
    if not sample:
      raise ValueError(
        "`documents` must have words to train SentencePiece on; got none. Give more text."
      )
    model = io.BytesIO()
    try:
      import_extra("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=iter(sample),
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
      limit = str(error)
      if largest := re.search(r"value <= (\d+)", limit):
        limit = f"at most {largest[1]}, the pieces of this text"
      elif smallest := re.search(r"required_chars\. \d+ vs (\d+)", limit):
        limit = f"at least {smallest[1]}, for 256 bytes and the text's characters"
      raise ValueError(
        f"`tokenizer.vocab` must be {limit}; got {self.vocab}. Give a number in these bounds."
      ) from None
    return model.getvalue()


def _with_last_piece(content: bytes) -> Tokenizer:
  """The tokenizer of a .model file whose model has an end-of-sentence piece."""
  end = PiecesTokenizer(content, None, ()).end
  if end < 0:
    raise ValueError(
      "`content` must have an end-of-sentence piece; got a model without one. Train it with eos_id"
      " set."
    )
  return PiecesTokenizer(content, end, [end], spelt=True)


@dataclasses.dataclass(frozen=True)
class CheckpointTokenizer(TokenizerRecipe):
  """The tokenizer of a pretrained model; a document begins as its texts do and ends with EOS.

  Attributes:
    path: the model's folder or file, here or under $VQJAX_DATA.
  """

  path: str

  def fit(self, documents: Documents) -> Tokenizer:
    """Read the tokenizer."""
    del documents
    path = data_path(self.path, kind="tokenizer.path")
    if path.is_dir():
      is_model = any([*path.glob("*.safetensors"), *path.glob("*.gguf")])
    else:
      is_model = path.suffix not in (".json", ".model")
    if not is_model:
      raise ValueError(
        f"`tokenizer.path` must be a pretrained model with its weights; got {path}. Take"
        " JSONTokenizer for a tokenizer.json or its folder, and SentencePieceTokenizer(model=...)"
        " for a tokenizer.model."
      )
    found = load_tokenizer(path)
    if not found.eos:
      raise ValueError(
        "`tokenizer.path` must have a token that ends a text; got a tokenizer without one. Set"
        " eos_token_id in its config.json."
      )
    found.vocab = checkpoints.decoder(path).embedding.vocab
    return found

  def files(self) -> tuple[Path, ...]:
    """Return the files that hold the tokenizer."""
    path = data_path(self.path, kind="tokenizer.path")
    if path.is_dir():
      files = [path / name for name in FILES]
    else:
      files = [path, *path.parent.glob("tok*.bin")]
    return tuple(file for file in files if file.is_file())


def _sample(lines: Iterable[str], size: int) -> list[str]:
  """A uniform sample by a reservoir, which need not know the number of lines."""
  # The library samples too, but differently in each process.
  draw = random.Random(0)
  kept: list[str] = []
  for number, line in enumerate(lines):
    if number < size:
      kept.append(line)
      continue
    position = int(draw.random() * (number + 1))
    if position < size:
      kept[position] = line
  return kept
