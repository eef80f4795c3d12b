"""Tokenizers of pretrained models: tokenizer.json, SentencePiece, and those inside a GGUF."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import json
import pathlib
import re
import struct
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from vqjax.lm.records import one_line, shown
from vqjax.lm.sources.readers import (
  ModelSource,
  import_checkpoints_extra,
  open_source,
  read_json,
)
from vqjax.lm.texts import read_text
from vqjax.lm.tokenizers.byte_level import (
  FLAGS,
  RULES,
  SPACE,
  AddedToken,
  add_tokens,
  begin_with,
  byte_level,
)
from vqjax.lm.tokenizers.gguf_vocabulary import (
  BYTE,
  CONTROL,
  NORMAL,
  UNKNOWN,
  UNUSED,
  USER_DEFINED,
  padding_name,
  read_vocabulary,
)
from vqjax.outputs import copy_file

__all__ = ["Tokenizer", "canonical_ids", "from_state", "load_tokenizer"]


@runtime_checkable
class Tokenizer(Protocol):
  """Text <-> token ids: what loading, generation, training and evaluation need of a tokenizer.

  Attributes:
    vocab: number of ids, added tokens included.
    pieces: number of ids without added tokens, such as those of images. Each lower id has a piece.
    bos: the id that begins a text; None: there is none, or it is not added.
    eos: the ids that end one.
  """

  vocab: int
  pieces: int
  bos: int | None
  eos: tuple[int, ...]

  def encode(self, text: str, *, special: bool = True) -> list[int]:
    """The ids of a text; `special` adds what begins every text, such as BOS."""

  def decode(self, tokens: Iterable[int]) -> str:
    """The text of ids; control tokens are left out."""

  def piece(self, token: int) -> str:
    """The entry of an id in the vocabulary, as the tokenizer's file writes it; "" without one."""

  def state(self) -> str:
    """JSON from which `from_state` makes the tokenizer again."""


class JsonTokenizer:
  """A model of the `tokenizers` library, such as a tokenizer.json.

  Attributes:
    model: the library's object, whose post-processor adds what begins a text.
    beside: a tokenizer_config.json that belongs to it; None: there is none.
  """

  def __init__(
    self,
    model,
    bos: int | None,
    eos: Iterable[int],
    *,
    beside: pathlib.Path | None = None,
    spelt: bool = False,
    vocab: int | None = None,
    file: str = "the tokenizer",
  ):
    """Take a model and its special ids.

    Args:
      model: a `tokenizers.Tokenizer`.
      bos: the id of BOS or None.
      eos: the ids that end a text.
      beside: a file that is saved with it.
      spelt: "<eos>" that a text spells out is text, not its end.
      vocab: rows of the model's table, where they are more.
      file: where it is from, for messages.
    """
    self.model, self.beside, self._spelt, self._file = model, beside, spelt, file
    if spelt:
      model.encode_special_tokens = True
    ids = {*model.get_vocab(with_added_tokens=True).values()}
    self.vocab = max(ids, default=-1) + 1 if vocab is None else vocab
    base = range(model.get_vocab_size(with_added_tokens=False))
    self.pieces = next((number for number in base if number not in ids), len(base))
    self.bos, self.eos = bos, tuple(eos)
    # Added tokens are text, but the library decodes their letters as bytes.
    self._verbatim = {}
    if "ByteLevel" in repr(model.decoder):  # alone, or in a sequence
      shown = {n: t.content for n, t in model.get_added_tokens_decoder().items() if not t.special}
      self._verbatim = {n: text for n, text in shown.items() if model.decode([n]) != text}

  def encode(self, text: str, *, special: bool = True) -> list[int]:
    """The ids of a text."""
    _check_text(text)
    try:
      return self.model.encode(text, add_special_tokens=special).ids
    except KeyboardInterrupt:
      raise
    except BaseException as error:  # the library's panics are no exceptions
      raise ValueError(
        f"{self._file} must encode every text; got {one_line(error)}. Download it again."
      ) from None

  def decode(self, tokens: Iterable[int]) -> str:
    """The text of ids; those without a token, such as -1, have none."""
    runs: list[list[int]] = [[]]
    texts = [""]
    for token in map(int, tokens):
      if not 0 <= token < self.vocab:
        continue
      if token in self._verbatim:
        texts.append(self._verbatim[token])
        runs.append([])
      else:
        runs[-1].append(token)
    decoded = (self.model.decode(run, skip_special_tokens=True) for run in runs)
    return "".join(text + run for text, run in zip(texts, decoded))

  def piece(self, token: int) -> str:
    """The entry of an id in the vocabulary."""
    return (self.model.id_to_token(int(token)) or "") if 0 <= token < self.vocab else ""

  def state(self) -> str:
    """JSON from which `from_state` makes the tokenizer again."""
    ends = {"bos": self.bos, "eos": self.eos}
    more = {"spelt": self._spelt, "vocab": self.vocab}
    return json.dumps({"json": self.model.to_str()} | ends | more)

  def save(self, folder: pathlib.Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json where there was one."""
    self.model.save(str(folder / "tokenizer.json"))
    if self.beside is not None:
      copy_file(self.beside, folder / "tokenizer_config.json")


class PiecesTokenizer:
  """A model of the `sentencepiece` library: a file, or pieces with scores.

  The library spells tokens that control a model, and puts a space before each text. Here a text is
  split at these tokens first, and what is between them is encoded by the library.

  Attributes:
    content: the serialised model, added tokens included.
    end: the model's own end of a sentence; -1: it has none.
    add_bos: whether BOS begins a text.
    added: tokens that are matched as a whole, besides the model's own control tokens.
    spaced: which parts of a text the model's space is put before: "each", or the "first" one.
  """

  def __init__(
    self,
    content: bytes,
    bos: int | None,
    eos: Iterable[int],
    *,
    add_bos: bool = True,
    vocab: int | None = None,
    added: Iterable[AddedToken] = (),
    spaced: str = "each",
    spelt: bool = False,
  ):
    """Take the content of a .model file.

    Args:
      content: the serialised model.
      bos: the id of BOS or None.
      eos: the ids that end a text.
      add_bos: whether BOS begins a text.
      vocab: rows of the model's table, where they are more.
      added: further tokens that are matched as a whole; their ids may follow those of the model.
      spaced: which parts of a text the model's space is put before: "each", or the "first" one.
      spelt: "</s>" that a text spells out is text, not its end.
    """
    self.add_bos, self.spaced, self._spelt = add_bos and bos is not None, spaced, spelt
    self.added = {token.number: token for token in added}
    self.content = _with_pieces(content, self.added) if self.added else content
    self._model, proto = _processor(self.content), _proto(self.content)
    types = [piece.type for piece in proto.pieces]
    self._unspaced = self._model
    if spaced == "first":
      proto.normalizer_spec.add_dummy_prefix = False
      self._unspaced = _processor(proto.SerializeToString())
    count = self.pieces = len(types)
    while self.pieces - 1 in self.added:
      self.pieces -= 1
    self._unused = {number for number, kind in enumerate(types) if kind == UNUSED}
    self.pieces = min(self.pieces, *self._unused, count)
    self.end = self._model.eos_id()
    self.vocab = count if vocab is None else vocab
    self.bos, self.eos = bos, tuple(eos)
    controls = [number for number, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)]
    own = [AddedToken(self._model.id_to_piece(number), number) for number in controls]
    self.whole = {token.text: token for token in [*own, *self.added.values()]}
    self._left_out = self._unused | {t.number for t in self.whole.values() if t.control}
    matched = () if spelt else self.whole
    self._lengths = sorted({len(text) for text in matched}, reverse=True)
    first = "".join(sorted({re.escape(text[0]) for text in matched}))
    self._begin = re.compile(f"[{first}]") if first else None

  def encode(self, text: str, *, special: bool = True) -> list[int]:
    """The ids of a text."""
    _check_text(text)
    ids = [self.bos] if special and self.add_bos else []
    model = self._model
    for part in self._parts(text):
      if isinstance(part, AddedToken):
        ids.append(part.number)
      else:
        ids += model.encode(part)
      model = self._unspaced
    return ids

  def _parts(self, text: str) -> Iterator[str | AddedToken]:
    """The tokens that are matched as a whole, the longest of each place, and the text between."""
    end = 0
    for place in self._begin.finditer(text) if self._begin else ():
      at = place.start()
      if at < end:
        continue
      token = next((t for n in self._lengths if (t := self.whole.get(text[at : at + n]))), None)
      if token is None:
        continue
      before = text[end:at].rstrip() if token.lstrip else text[end:at]
      if before:
        yield before
      yield token
      end = at + len(token.text)
      if token.rstrip:
        end = BLANKS.match(text, end).end()
    if text[end:]:
      yield text[end:]

  def decode(self, tokens: Iterable[int]) -> str:
    """The text of ids."""
    known = range(self._model.vocab_size())
    return self._model.decode([int(t) for t in tokens if t in known and t not in self._left_out])

  def piece(self, token: int) -> str:
    """The entry of an id in the vocabulary."""
    is_known = 0 <= token < self._model.vocab_size() and token not in self._unused
    return self._model.id_to_piece(int(token)) if is_known else ""

  def state(self) -> str:
    """JSON from which `from_state` makes the tokenizer again."""
    ends = {"bos": self.bos, "eos": self.eos, "add_bos": self.add_bos, "vocab": self.vocab}
    more = {"added": [dataclasses.asdict(token) for token in self.added.values()]}
    text = base64.b64encode(self.content).decode()
    return json.dumps(
      {"pieces": text} | ends | more | {"spaced": self.spaced, "spelt": self._spelt}
    )

  def save(self, folder: pathlib.Path) -> None:
    """Write tokenizer.model, and in tokenizer_config.json what it does not say."""
    (folder / "tokenizer.model").write_bytes(self.content)
    added = {
      str(token.number): {
        "content": token.text,
        "lstrip": token.lstrip,
        "normalized": False,
        "rstrip": token.rstrip,
        "single_word": False,
        "special": token.control,
      }
      for token in self.whole.values()
    }
    config = {"add_bos_token": self.add_bos, "legacy": self.spaced == "each"}
    text = json.dumps(config | {"added_tokens_decoder": added}, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", "utf-8")


BLANKS = re.compile(r"\s*")
SURROGATE = re.compile("[\ud800-\udfff]")


def _check_text(text: str) -> None:
  """Raise ValueError for half of a pair of surrogates, which UTF-8 does not have."""
  if not text.isascii() and (half := SURROGATE.search(text)):
    raise ValueError(
      f"`text` must be Unicode; got the surrogate {half[0]!a} at character {half.start()},"
      " which stands for a byte or half of a character. Read the text with errors='replace'."
    )


def _processor(content: bytes) -> Any:
  """The library's object of a .model file."""
  return _parsed(
    lambda: import_checkpoints_extra("sentencepiece").SentencePieceProcessor(model_proto=content)
  )


def _proto(content: bytes) -> Any:
  """The message of a .model file."""
  library = import_checkpoints_extra("sentencepiece.sentencepiece_model_pb2")
  proto = _parsed(lambda: library.ModelProto.FromString(content))
  if not proto.pieces:
    raise ValueError(
      "`content` must be a SentencePiece model; got one without pieces. The file is damaged:"
      " download it again."
    )
  return proto


def _parsed(read: Callable[[], Any]) -> Any:
  try:
    return read()
  except Exception as error:
    if isinstance(error, ImportError):
      raise
    raise ValueError(
      f"`content` must be a SentencePiece model; got {one_line(error).rstrip('.')}. The file is"
      " damaged: download it again."
    ) from None


@contextlib.contextmanager
def _of_file(path: pathlib.Path) -> Iterator[None]:
  """Name the file in an error about the content of a tokenizer, or of the libraries."""
  try:
    yield
  except (ValueError, RuntimeError) as error:
    if str(path) in str(error):
      raise
    raise ValueError(
      f"{path}: {one_line(error).rstrip('.')}. It is damaged, or not that of a tokenizer."
    ) from None


def _with_pieces(content: bytes, added: Mapping[int, AddedToken]) -> bytes:
  """A SentencePiece model that has the added tokens too, and unused pieces between."""
  proto = _proto(content)
  for number in range(len(proto.pieces), max(added) + 1):
    proto.pieces.add(piece=padding_name(number), score=0.0, type=UNUSED)
  for number, token in added.items():
    piece = proto.pieces[number]
    if piece.piece.replace(SPACE, " ") != token.text.replace(SPACE, " ") and piece.type != UNUSED:
      raise ValueError(
        f"an added token must have an id of its own; got {number} for {token.text!r}, which is"
        f" {piece.piece!r} in the model. Download the files of one tokenizer."
      )
    if piece.type == UNUSED:
      piece.piece = token.text
    if piece.type not in (UNKNOWN, BYTE):
      piece.type = CONTROL if token.control else USER_DEFINED
  proto.trainer_spec.vocab_size = len(proto.pieces)
  return proto.SerializeToString()


def from_state(state: str) -> Tokenizer:
  """The tokenizer that `Tokenizer.state` describes; ValueError for another text."""
  try:
    ends = json.loads(state)
    if "json" in ends:
      return JsonTokenizer(
        import_checkpoints_extra("tokenizers").Tokenizer.from_str(ends.pop("json")), **ends
      )
    added = [AddedToken(**token) for token in ends.pop("added")]
    content = base64.b64decode(ends.pop("pieces"), validate=True)
    return PiecesTokenizer(content, added=added, **ends)
  except Exception as error:  # the libraries raise nothing narrower
    raise ValueError(
      f"`state` must be that of a tokenizer; got {state[:40]!r} ({error}). Read the model again."
    ) from None


def from_pieces(
  pieces: list[str],
  scores: list[float],
  types: list[int],
  *,
  bos: int | None,
  eos: Iterable[int],
  add_space: bool,
  add_bos: bool,
  rstripped: Iterable[int] = (),
) -> PiecesTokenizer:
  """A SentencePiece BPE model of pieces, of which the one with the highest score is merged first.

  Args:
    pieces: the pieces, in which `SPACE` stands for a space.
    scores: their scores.
    types: SentencePiece's types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    bos: the id of BOS or None.
    eos: the ids that end a text.
    add_space: a text is encoded as if it began with a space.
    add_bos: whether BOS begins a text.
    rstripped: ids of tokens to which the spaces behind them belong.
  """
  proto = import_checkpoints_extra("sentencepiece.sentencepiece_model_pb2").ModelProto()
  proto.trainer_spec.model_type = 2  # BPE
  proto.trainer_spec.byte_fallback = BYTE in types
  proto.trainer_spec.vocab_size = len(pieces)
  proto.normalizer_spec.name = "identity"
  proto.normalizer_spec.add_dummy_prefix = add_space
  proto.normalizer_spec.remove_extra_whitespaces = False
  added, rstripped = [], {*rstripped}
  controls = {piece for piece, kind in zip(pieces, types) if kind in (CONTROL, UNKNOWN)}
  ends = lambda piece: itertools.combinations(range(len(piece) + 1), 2)
  holds_control = lambda piece: any(piece[a:b] in controls for a, b in ends(piece))
  for number, (piece, score, kind) in enumerate(zip(pieces, scores, types, strict=True)):
    is_text, rstrip = kind == USER_DEFINED, number in rstripped
    # The library finds user-defined pieces too, but puts no space before the text behind them, and
    # a control token that one has in it would be found first.
    if rstrip or (is_text and (add_space or holds_control(piece))):
      added.append(AddedToken(piece, number, control=not is_text, rstrip=rstrip))
    # A GGUF has user-defined runs of spaces as spaces, which SentencePiece replaces in the text.
    piece = piece.replace(" ", SPACE) if is_text else piece
    proto.pieces.add(piece=piece, score=score, type=kind)
  return PiecesTokenizer(proto.SerializeToString(), bos, eos, add_bos=add_bos, added=added)


def load_tokenizer(path: str | pathlib.Path) -> Tokenizer:
  """The tokenizer of a model, without its weights.

  Raises:
    FileNotFoundError: there is no tokenizer.
  """
  found = find_tokenizer(open_source(path))
  if found is None:
    raise FileNotFoundError(
      f"{path} must have a tokenizer: tokenizer.json, tokenizer.model, vocab.json with merges.txt,"
      " or tok*.bin beside a file of llama2.c. Download it too."
    )
  return found


def find_tokenizer(source: ModelSource) -> Tokenizer | None:
  """The tokenizer that belongs to a source; None: there is none."""
  if source.kind == "gguf":
    return _of_gguf(source)
  if source.kind == "llama2.c":
    return _of_llama2c(source)
  return _of_folder(source)


FILES = (
  *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json"),
  *("added_tokens.json", "special_tokens_map.json", "config.json", "generation_config.json"),
)
"""Files of a folder on which its tokenizer depends."""

WORD_RULES = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2", "Qwen3Tokenizer": "qwen2"}
"""`tokenizer_class` of a folder with vocab.json and merges.txt -> name of its rule."""


def _of_folder(source: ModelSource) -> Tokenizer | None:
  folder = source.path
  config = dict(source.config) | _optional(folder / "generation_config.json")
  bos, eos = config.get("bos_token_id"), config.get("eos_token_id")
  eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
  for name, ids in {"bos_token_id": [] if bos is None else [bos], "eos_token_id": eos}.items():
    if not all(type(token) is int and token >= 0 for token in ids):
      raise ValueError(
        f"`{name}` of {folder} must be a token's number, at least 0; got {config[name]!r}. Download"
        " config.json and generation_config.json again."
      )
  if (folder / "tokenizer.json").is_file():
    library = import_checkpoints_extra("tokenizers")
    try:
      model = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
      raise ValueError(
        f"{folder / 'tokenizer.json'} must be a tokenizer; got {one_line(error)}. Download it"
        " again."
      ) from None
    # Settings of training that some files keep.
    model.no_truncation()
    model.no_padding()
    settings = _optional(folder / "tokenizer_config.json")
    named = _named_tokens(settings, _optional(folder / "special_tokens_map.json"))
    _add_beside(folder, model, settings, named)
    bos, eos = _ends_of(named, model.token_to_id, bos, eos)
    file = str(folder / "tokenizer.json")
    return JsonTokenizer(model, bos, eos, beside=_beside(folder), file=file)
  return _without_json(folder, config["model_type"], bos, eos)


def _without_json(
  folder: pathlib.Path, model_type: str, bos: int | None, eos: list[int]
) -> Tokenizer | None:
  """The tokenizer of a folder without tokenizer.json, and of these ids in its config."""
  settings = _optional(folder / "tokenizer_config.json")
  file = folder / "tokenizer.model"
  if file.is_file():
    content = file.read_bytes()
    with _of_file(file):
      known = {piece.piece: number for number, piece in enumerate(_proto(content).pieces)}
  elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
    content, known = None, read_json(folder / "vocab.json")
  else:
    return None
  named = _named_tokens(settings, _optional(folder / "special_tokens_map.json"))
  numbers = _optional(folder / "added_tokens.json")
  # By default it is a special token of the classes that read merges.
  special = named | {"default": AddedToken("<|endoftext|>", -1)}
  added = _added_tokens(folder, settings, numbers, known, special)
  number_of = known | {token.text: token.number for token in added}
  bos, eos = _ends_of(named, number_of.get, bos, eos)
  adds_bos = _setting(folder, settings, "add_bos_token", content is not None)
  if content is not None:
    spaced = "each" if _setting(folder, settings, "legacy", True) else "first"
    with _of_file(file):
      if not _setting(folder, settings, "add_prefix_space", True):
        proto = _proto(content)
        proto.normalizer_spec.add_dummy_prefix = False
        content = proto.SerializeToString()
      return PiecesTokenizer(content, bos, eos, add_bos=adds_bos, added=added, spaced=spaced)
  model = _of_words(folder, settings, model_type, number_of, added)
  if adds_bos and bos is not None:
    if model.id_to_token(bos) is None:
      raise ValueError(
        f"`bos_token_id` of {folder} must be a token of vocab.json or added_tokens.json; got {bos}."
        " Download the files of one tokenizer."
      )
    begin_with(model, model.id_to_token(bos))
  return JsonTokenizer(model, bos, eos, beside=_beside(folder))


def _ends_of(
  named: Mapping[str, AddedToken],
  number_of: Callable[[str], int | None],
  bos: int | None,
  eos: list[int],
) -> tuple[int | None, list[int]]:
  """BOS and what ends a text: those of the config, or else the named tokens."""
  own = {name: number_of(named[name].text) for name in ("bos_token", "eos_token") if name in named}
  bos = own.get("bos_token") if bos is None else bos
  return bos, eos or [n for n in [own.get("eos_token")] if n is not None]


NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Names of special tokens, in the order in which transformers adds those without an id."""


def _add_beside(
  folder: pathlib.Path, model: Any, settings: Mapping[str, Any], named: Mapping[str, AddedToken]
) -> None:
  """Add the tokens to a tokenizer.json that the files beside it have in addition, or name."""
  known = model.get_vocab(with_added_tokens=True)
  own = {token.content: token.special for token in model.get_added_tokens_decoder().values()}
  text_of = {number: text for text, number in known.items()}
  left_out = []

  def fits(text: Any, number: Any) -> bool:
    """Whether tokenizer.json does not contradict the id of a token; others are found later."""
    if not isinstance(text, str) or type(number) is not int:
      return True
    is_kept = known.get(text, number) == number and text_of.get(number, text) == text
    left_out.extend([] if is_kept else [text])
    return is_kept

  numbers = {t: n for t, n in _optional(folder / "added_tokens.json").items() if fits(t, n)}
  entries = _setting(folder, settings, "added_tokens_decoder", {})
  number_of = lambda key: int(key) if key.isdecimal() and len(key) < 10 else None
  content = lambda entry: entry.get("content") if isinstance(entry, dict) else None
  entries = {n: entry for n, entry in entries.items() if fits(content(entry), number_of(n))}
  settings = dict(settings) | {"added_tokens_decoder": entries}
  # Those of tokenizer.json stay as they are, except that a named token is a control token.
  new, end = [], max(model.get_vocab_size(with_added_tokens=False), *(known[t] + 1 for t in own), 0)
  listed = _added_tokens(folder, settings, numbers, known, named)
  for token in sorted(listed, key=lambda token: token.number):
    if token.text in known:
      new += [token] if token.control and not own.get(token.text) else []
    elif token.number == end:
      new.append(token)
      end += 1
    else:
      left_out.append(token.text)
  if left_out:
    warnings.warn(
      f"{folder / 'tokenizer.json'} has other ids than added_tokens.json or tokenizer_config.json"
      f" beside it, whose {shown(left_out[0])} is left out: use the files of one tokenizer.",
      stacklevel=2,
    )
  in_order = {f"{name}_token": named.get(f"{name}_token") for name in NAMES} | dict(named)
  absent = {token.text: token for token in in_order.values() if token and token.text not in known}
  add_tokens(model, [*new, *(t for t in absent.values() if t.text not in {x.text for x in new})])


def _of_words(
  folder: pathlib.Path,
  settings: Mapping[str, Any],
  model_type: str,
  number_of: Mapping[str, int],
  added: list[AddedToken],
) -> Any:
  """The model of a folder with merges.txt, of tokens and added tokens."""
  own = {"qwen3": "Qwen2Tokenizer"}.get(model_type, "GPT2Tokenizer")
  made = _setting(folder, settings, "tokenizer_class", own)
  rule = WORD_RULES.get(made.removesuffix("Fast"))
  if rule is None:
    raise ValueError(
      f"`tokenizer_class` of {folder / 'tokenizer_config.json'} must be one of"
      f" {', '.join(WORD_RULES)} for vocab.json and merges.txt; got {shown(made)}, whose words are"
      " split by tokenizer.json. Download that too."
    )
  lines = read_text(folder / "merges.txt").split("\n")
  pairs = [tuple(s.split(" ")) for s in lines if s and not s.startswith("#version")]
  try:
    model = byte_level(number_of, pairs, RULES[rule], added)
  except Exception as error:  # the library raises nothing narrower
    raise ValueError(
      f"vocab.json and merges.txt of {folder} must be those of one tokenizer; got"
      f" {one_line(error)}. Download both again."
    ) from None
  if _setting(folder, settings, "add_prefix_space", False):
    model.pre_tokenizer = import_checkpoints_extra("tokenizers").pre_tokenizers.ByteLevel()
  return model


def _optional(path: pathlib.Path) -> dict[str, Any]:
  return read_json(path) if path.is_file() else {}


def _beside(folder: pathlib.Path) -> pathlib.Path | None:
  """The tokenizer_config.json that is saved with a tokenizer."""
  path = folder / "tokenizer_config.json"
  return path if path.is_file() else None


MOST_BEHIND = 2**16
"""Ids behind those of a vocabulary that its added tokens may have."""


def _setting(folder: pathlib.Path, settings: Mapping[str, Any], key: str, default: Any) -> Any:
  """A value of tokenizer_config.json of the type of `default`, which stands for null too."""
  value = settings.get(key)
  if value is not None and type(value) is not type(default):
    raise ValueError(
      f"`{key}` of {folder / 'tokenizer_config.json'} must be of the type"
      f" {type(default).__name__}; got {value!r}. Download it again."
    )
  return default if value is None else value


def _named_tokens(*files: Mapping[str, Any]) -> dict[str, AddedToken]:
  """The special tokens in tokenizer_config.json and the like, by their names and without ids."""
  named = {}
  for settings in files:
    for key, value in settings.items():
      many = key in ("additional_special_tokens", "extra_special_tokens")
      if many and isinstance(value, dict):
        value = [*value.values()]
      values = value if many and isinstance(value, list) else [value]
      if not many and not key.endswith("_token"):
        continue
      for at, entry in enumerate(values):
        entry = entry if isinstance(entry, dict) else {"content": entry}
        if isinstance(text := entry.get("content"), str):
          token = AddedToken(text, -1, **{flag: entry.get(flag) is True for flag in FLAGS})
          named[f"{key}/{at}" if many else key] = token
  return named


def _added_tokens(
  folder: pathlib.Path,
  settings: Mapping[str, Any],
  numbers: Mapping[str, Any],
  known: Mapping[str, Any],
  named: Mapping[str, AddedToken],
) -> list[AddedToken]:
  """The tokens of a folder without tokenizer.json that are matched as a whole.

  Args:
    folder: the folder.
    settings: its tokenizer_config.json.
    numbers: its added_tokens.json, the ids of texts.
    known: ids of the vocabulary without added tokens.
    named: the special tokens.
  """
  special = {t.text: {flag: getattr(t, flag) for flag in FLAGS} for t in named.values()}
  added = {
    text: {"number": known[text]} | flags for text, flags in special.items() if text in known
  }
  added |= {text: {"number": number} | special.get(text, {}) for text, number in numbers.items()}
  for number, entry in _setting(folder, settings, "added_tokens_decoder", {}).items():
    is_number = number.isdecimal() and len(number) < 10
    if not (is_number and isinstance(entry, dict) and isinstance(entry.get("content"), str)):
      raise ValueError(
        f"`added_tokens_decoder` of {folder / 'tokenizer_config.json'} must have a `content` for"
        f" each id; got {entry!r} for {number!r}. Download it again."
      )
    flags = {flag: entry.get(flag) is True for flag in FLAGS}
    is_control = entry.get("special") is True or entry["content"] in special
    added[entry["content"]] = {"number": int(number), "control": is_control} | flags
  if wrong := [number for number in known.values() if type(number) is not int or number < 0]:
    raise ValueError(
      f"vocab.json of {folder} must have a number for each token; got {wrong[0]!r}. Download it"
      " again."
    )
  by_number, end = {number: text for text, number in known.items()}, len(known) + MOST_BEHIND
  for text, entry in added.items():
    number = entry["number"]
    is_id = text and type(number) is int and 0 <= number < end
    if not is_id or by_number.setdefault(number, text) != text:
      raise ValueError(
        f"each added token of {folder} must have a text and an id of its own, below {end:,}; got"
        f" {number!r} for {text!r}. Download its files again."
      )
  return [AddedToken(text, **({"control": text in special} | e)) for text, e in added.items()]


def _of_gguf(source: ModelSource) -> Tokenizer | None:
  read = read_vocabulary(source.metadata, source.path)
  if read is None:
    return None
  if read.kind == "llama":
    with _of_file(source.path):
      return from_pieces(
        read.tokens,
        read.scores,
        read.types,
        bos=read.bos,
        eos=read.eos,
        add_space=read.add_space,
        add_bos=read.add_bos,
        rstripped=read.rstripped,
      )
  added = [
    AddedToken(token, number, kind != USER_DEFINED)
    for number, (token, kind) in enumerate(zip(read.tokens, read.types))
    if kind in (UNKNOWN, CONTROL, USER_DEFINED)
  ]
  needed = {part for pair in read.merges for part in (*pair, "".join(pair))}
  vocab = {
    token: number
    for number, (token, kind) in enumerate(zip(read.tokens, read.types))
    if kind != UNUSED or token in needed
  }
  try:
    model = byte_level(vocab, read.merges, read.rule, added)
  except Exception as error:  # the library raises nothing narrower
    raise ValueError(
      f"`tokenizer.ggml.merges` of {source.path} must be pairs of its tokens; got {error}. Convert"
      " the model again."
    ) from None
  if read.add_bos:
    begin_with(model, read.tokens[read.bos])
  return JsonTokenizer(model, read.bos, read.eos, vocab=len(read.tokens))


def _of_llama2c(source: ModelSource) -> Tokenizer | None:
  vocab = source.config["vocab_size"]
  files = [source.path.parent / name for name in (f"tok{vocab}.bin", "tokenizer.bin")]
  file = next((file for file in files if file.is_file()), None)
  if file is None:
    return None
  data, at, pieces, scores = file.read_bytes(), 4, [], []
  try:
    while at < len(data):
      score, length = struct.unpack_from("<fi", data, at)
      piece = data[at + 8 : at + 8 + length]
      if length < 0 or len(piece) != length:
        raise ValueError("a piece that is longer than the file")
      pieces.append(piece.decode("utf-8").replace(" ", SPACE))
      scores.append(score)
      at += 8 + length
  except (struct.error, ValueError) as error:
    raise ValueError(
      f"{file} must be a tokenizer of llama2.c; got {error}. Copy it again."
    ) from None
  is_byte = lambda piece: len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
  types = [BYTE if is_byte(piece) else NORMAL for piece in pieces]
  types[:3] = [UNKNOWN, CONTROL, CONTROL]  # BOS and EOS
  pieces[:3] = ["<unk>", "<s>", "</s>"]
  return from_pieces(pieces, scores, types, bos=1, eos=[2], add_space=True, add_bos=True)


def check_size(tokenizer: Tokenizer, vocab: int, path: pathlib.Path) -> None:
  """Raise ValueError unless a tokenizer has the size of a vocabulary.

  Tables are often padded to a round number of rows, and added tokens may be without a row, such as
  those of images in a model of text.
  """
  padding = max(64, vocab // 100)
  if not vocab - padding <= tokenizer.vocab or tokenizer.pieces > vocab:
    raise ValueError(
      f"the tokenizer of {path} must have the model's {vocab:,} tokens, or at most {padding:,}"
      f" fewer; got {tokenizer.vocab:,}. Use the tokenizer that belongs to the weights."
    )


def canonical_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
  """The canonical id of each token: tokens that read alike have one, by order of appearance.

  Case, accents, compatibility forms of characters and the kind and number of spaces make no
  difference; a token of spaces alone is not an empty one. Control tokens and parts of characters
  are told apart by their pieces. Source: Engram (arXiv 2601.07372), Section 2.2.

  Returns:
    V integers from 0, for `vqjax.ops.ngrams.CanonicalHash`.
  """
  known: dict[str, int] = {}
  found = []
  for token in range(tokenizer.vocab):
    text = tokenizer.decode([token])
    key = tokenizer.piece(token) if not text or "\ufffd" in text else _canonical(text) or text
    found.append(known.setdefault(key, len(known)))
  return tuple(found)


def _canonical(text: str) -> str:
  text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
  text = "".join(c.lower() for c in text if unicodedata.category(c) != "Mn")
  text = re.sub("[ \t\r\n]+", " ", text)
  return text if text == " " else text.strip()
