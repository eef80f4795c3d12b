"""Tokenizers of pretrained models: tokenizer.json, SentencePiece, and those inside a GGUF."""

from __future__ import annotations

import base64
import json
import pathlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from vqjax.lm.checkpoints.readers import (
  ModelSource,
  import_checkpoints_extra,
  open_source,
  read_json,
)
from vqjax.outputs import copy_file

__all__ = ["Tokenizer", "from_state", "load_tokenizer"]

SPACE = "\u2581"
"""What SentencePiece writes for a space."""


@runtime_checkable
class Tokenizer(Protocol):
  """Text <-> token ids: what loading, generation, training and evaluation need of a tokenizer.

  Attributes:
    vocab: number of ids, added tokens included.
    pieces: number of ids without added tokens, such as those of images.
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
    model: the library's object.
    add_bos: whether BOS begins a text; None: what the model's post-processor does.
    beside: a tokenizer_config.json that belongs to it; None: there is none.
  """

  def __init__(
    self,
    model,
    bos: int | None,
    eos: Iterable[int],
    *,
    add_bos: bool | None = None,
    beside: pathlib.Path | None = None,
    spelt: bool = False,
    vocab: int | None = None,
  ):
    """Take a model and its special ids.

    Args:
      model: a `tokenizers.Tokenizer`.
      bos: the id of BOS or None.
      eos: the ids that end a text.
      add_bos: whether BOS begins a text; None: what the model's post-processor does.
      beside: a file that is saved with it.
      spelt: "<eos>" that a text spells out is text, not its end.
      vocab: rows of the model's table, where they are more.
    """
    self.model, self.beside, self.add_bos, self._spelt = model, beside, add_bos, spelt
    if spelt:
      model.encode_special_tokens = True
    ids = model.get_vocab(with_added_tokens=True).values()
    self.vocab = max(ids, default=-1) + 1 if vocab is None else vocab
    self.pieces = model.get_vocab_size(with_added_tokens=False)
    self.bos, self.eos = bos, tuple(eos)

  def encode(self, text: str, *, special: bool = True) -> list[int]:
    """The ids of a text."""
    if self.add_bos is None:
      return self.model.encode(text, add_special_tokens=special).ids
    ids = self.model.encode(text, add_special_tokens=False).ids
    return [self.bos, *ids] if special and self.add_bos else ids

  def decode(self, tokens: Iterable[int]) -> str:
    """The text of ids."""
    return self.model.decode([int(token) for token in tokens], skip_special_tokens=True)

  def piece(self, token: int) -> str:
    """The entry of an id in the vocabulary."""
    return self.model.id_to_token(int(token)) or ""

  def state(self) -> str:
    """JSON from which `from_state` makes the tokenizer again."""
    ends = {"bos": self.bos, "eos": self.eos, "add_bos": self.add_bos}
    more = {"spelt": self._spelt, "vocab": self.vocab}
    return json.dumps({"json": self.model.to_str()} | ends | more)

  def save(self, folder: pathlib.Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json where there was one."""
    self.model.save(str(folder / "tokenizer.json"))
    if self.beside is not None:
      copy_file(self.beside, folder / "tokenizer_config.json")


class PiecesTokenizer:
  """A model of the `sentencepiece` library: a file, or pieces with scores.

  Attributes:
    content: the serialised model.
    end: the model's own end of a sentence; -1: it has none.
    add_bos: whether BOS begins a text.
  """

  def __init__(
    self,
    content: bytes,
    bos: int | None,
    eos: Iterable[int],
    *,
    add_bos: bool = True,
    vocab: int | None = None,
  ):
    """Take the content of a .model file.

    Args:
      content: the serialised model.
      bos: the id of BOS or None.
      eos: the ids that end a text.
      add_bos: whether BOS begins a text.
      vocab: rows of the model's table, where they are more.
    """
    self.content, self.add_bos = content, add_bos and bos is not None
    try:
      self._model = import_checkpoints_extra("sentencepiece").SentencePieceProcessor(
        model_proto=content
      )
    except RuntimeError as error:
      raise ValueError(
        f"`content` must be a SentencePiece model; got {error}. The file is damaged: download it"
        " again."
      ) from None
    self.pieces, self.end = self._model.vocab_size(), self._model.eos_id()
    self.vocab = self.pieces if vocab is None else vocab
    self.bos, self.eos = bos, tuple(eos)

  def encode(self, text: str, *, special: bool = True) -> list[int]:
    """The ids of a text."""
    ids = self._model.encode(text)
    return [self.bos, *ids] if special and self.add_bos else ids

  def decode(self, tokens: Iterable[int]) -> str:
    """The text of ids."""
    return self._model.decode([int(token) for token in tokens])

  def piece(self, token: int) -> str:
    """The entry of an id in the vocabulary."""
    return self._model.id_to_piece(int(token)) if 0 <= token < self.pieces else ""

  def state(self) -> str:
    """JSON from which `from_state` makes the tokenizer again."""
    ends = {"bos": self.bos, "eos": self.eos, "add_bos": self.add_bos, "vocab": self.vocab}
    return json.dumps({"pieces": base64.b64encode(self.content).decode()} | ends)

  def save(self, folder: pathlib.Path) -> None:
    """Write tokenizer.model."""
    (folder / "tokenizer.model").write_bytes(self.content)


def from_state(state: str) -> Tokenizer:
  """The tokenizer that `Tokenizer.state` describes; ValueError for another text."""
  try:
    ends = json.loads(state)
    if "json" in ends:
      return JsonTokenizer(
        import_checkpoints_extra("tokenizers").Tokenizer.from_str(ends.pop("json")), **ends
      )
    return PiecesTokenizer(base64.b64decode(ends.pop("pieces"), validate=True), **ends)
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
  """
  proto = import_checkpoints_extra("sentencepiece.sentencepiece_model_pb2").ModelProto()
  proto.trainer_spec.model_type = 2  # BPE
  proto.trainer_spec.byte_fallback = 6 in types
  proto.trainer_spec.vocab_size = len(pieces)
  proto.normalizer_spec.name = "identity"
  proto.normalizer_spec.add_dummy_prefix = add_space
  proto.normalizer_spec.remove_extra_whitespaces = False
  for piece, score, kind in zip(pieces, scores, types, strict=True):
    # A GGUF has user-defined runs of spaces as spaces, which SentencePiece replaces in the text.
    piece = piece.replace(" ", SPACE) if kind == 4 else piece
    proto.pieces.add(piece=piece, score=score, type=kind)
  return PiecesTokenizer(proto.SerializeToString(), bos, eos, add_bos=add_bos)


CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
WORDS = rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
  "gpt-2": rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
  "llama-bpe": rf"{WORDS}|\p{{N}}{{1,3}}|{REST}",
  "qwen2": rf"{WORDS}|\p{{N}}|{REST}",
}
"""Regular expressions that split a text into words, by their names in a GGUF."""


def byte_level(
  vocab: Mapping[str, int], merges: list[tuple[str, str]], pattern: str, special: list[str]
) -> Any:
  """A byte-level BPE of the `tokenizers` library.

  Args:
    vocab: the ids of the tokens, in the letters that stand for bytes.
    merges: the pairs that are merged, the first ones first.
    pattern: name of an entry of `PATTERNS`.
    special: tokens that are matched as a whole.
  """
  library = import_checkpoints_extra("tokenizers")
  model = library.Tokenizer(
    library.models.BPE(vocab=dict(vocab), merges=merges, ignore_merges=pattern == "llama-bpe")
  )
  if pattern == "qwen2":
    model.normalizer = library.normalizers.NFC()
  split = library.pre_tokenizers.Split(library.Regex(PATTERNS[pattern]), "isolated")
  letters = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  model.pre_tokenizer = library.pre_tokenizers.Sequence([split, letters])
  model.decoder = library.decoders.ByteLevel()
  model.add_special_tokens([library.AddedToken(s, normalized=False, special=True) for s in special])
  return model


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


def _of_folder(source: ModelSource) -> Tokenizer | None:
  folder = source.path
  generation = folder / "generation_config.json"
  config = dict(source.config) | (read_json(generation) if generation.is_file() else {})
  bos, eos = config.get("bos_token_id"), config.get("eos_token_id")
  eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
  for name, ids in {"bos_token_id": [] if bos is None else [bos], "eos_token_id": eos}.items():
    if not all(type(token) is int and token >= 0 for token in ids):
      raise ValueError(
        f"`{name}` of {folder} must be a token's number, at least 0; got {config[name]!r}. Download"
        " config.json and generation_config.json again."
      )
  if (folder / "tokenizer.json").is_file():
    library, beside = import_checkpoints_extra("tokenizers"), folder / "tokenizer_config.json"
    try:
      model = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
      raise ValueError(
        f"{folder / 'tokenizer.json'} must be a tokenizer; got {error}. Download it again."
      ) from None
    # Settings of training that some files keep.
    model.no_truncation()
    model.no_padding()
    return JsonTokenizer(model, bos, eos, beside=beside if beside.is_file() else None)
  if (folder / "tokenizer.model").is_file():
    content = (folder / "tokenizer.model").read_bytes()
    return PiecesTokenizer(content, bos, eos)
  vocab, merges = folder / "vocab.json", folder / "merges.txt"
  if vocab.is_file() and merges.is_file():
    lines = merges.read_text("utf-8").split("\n")
    pairs = [tuple(s.split(" ")) for s in lines if s and not s.startswith("#version")]
    kind = "qwen2" if source.config.get("model_type") == "qwen3" else "gpt-2"
    known = read_json(vocab)
    special = [name for name in ("<|endoftext|>",) if name in known]
    return JsonTokenizer(byte_level(known, pairs, kind, special), bos, eos, add_bos=False)
  return None


def _of_gguf(source: ModelSource) -> Tokenizer | None:
  own = lambda key, default=None: source.metadata.get(f"tokenizer.ggml.{key}", default)
  kind, tokens = own("model"), own("tokens")
  if tokens is None:
    return None
  bos, eos = own("bos_token_id"), own("eos_token_id")
  ends = [] if eos is None else [eos]
  types = own("token_type") or [1] * len(tokens)
  if kind == "llama":
    return from_pieces(
      tokens,
      own("scores"),
      types,
      bos=bos,
      eos=ends,
      add_space=own("add_space_prefix", True),
      add_bos=own("add_bos_token", True),
    )
  pattern = own("pre", "gpt-2")
  if kind != "gpt2" or pattern not in PATTERNS:
    raise ValueError(
      f"the tokenizer of {source.path} must be of the kind llama, or gpt2 with one of the patterns"
      f" {', '.join(PATTERNS)}; got {kind} with {pattern}. It is not implemented."
    )
  vocab = {token: number for number, token in enumerate(tokens)}
  merges = [tuple(pair.split(" ")) for pair in own("merges")]
  special = [token for token, kind in zip(tokens, types) if kind in (3, 4)]
  model = byte_level(vocab, merges, pattern, special)
  return JsonTokenizer(model, bos, ends, add_bos=own("add_bos_token", pattern == "llama-bpe"))


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
  types = [6 if is_byte(piece) else 1 for piece in pieces]
  types[:3] = [2, 3, 3]  # unknown, BOS and EOS
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
