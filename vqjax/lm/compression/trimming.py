"""Models without the tokens that a text does not use: fewer rows, and a tokenizer for them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from vqjax.lm import checkpoints, tokenizers
from vqjax.lm.checkpoints.loading import write_folder
from vqjax.lm.compression.exports import ROWS, NewTensor, rewrite_gguf, stored_tables
from vqjax.lm.generation import score
from vqjax.lm.models import Transformer
from vqjax.lm.sources.readers import (
  ModelSource,
  check_not_compressed,
  gguf_header,
  import_checkpoints_extra,
  open_source,
  read_json,
)
from vqjax.lm.texts import pieces
from vqjax.lm.tokenizers.reading import JsonTokenizer, PiecesTokenizer, Tokenizer
from vqjax.outputs import check_output, copy_file, new_output
from vqjax.types import Dtype

__all__ = ["Trimmed", "trim"]

HELD_OUT = 0.1
"""Part of each text that is not counted: what the report says is measured on it."""

PIECE = 1500
"""Characters of a text that are scored in a row."""

SCORED = 24_000
"""Characters that are scored, at most."""

SPACE = "\u2581"
"""A space in pieces of SentencePiece; decoding restores it from this piece, not from its bytes."""

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
"""SentencePiece's types of pieces."""


@dataclasses.dataclass(frozen=True)
class Trimmed:
  """What trimming a model did, measured on the part of the texts that was not counted.

  Attributes:
    vocab: tokens before.
    kept: tokens after.
    required: tokens that every text needs: special ones, bytes, the space, and what ends a text.
    coverage: part of the tokens of the text, as they were, that are kept.
    tokens: tokens of the text before.
    tokens_after: tokens of the text after.
    spelled: part of the tokens after that stand for a byte or for an unknown character.
    lines: lines of the text.
    restored: lines that decoding restores before.
    restored_after: lines that decoding restores after.
    table_bytes: bytes of the vocabulary tables before.
    table_bytes_after: bytes of them after.
    nats_per_byte: negative log-probability of a byte of the text before; None: not computed.
    nats_per_byte_after: the same after.
  """

  vocab: int
  kept: int
  required: int
  coverage: float
  tokens: int
  tokens_after: int
  spelled: float
  lines: int
  restored: int
  restored_after: int
  table_bytes: int
  table_bytes_after: int
  nats_per_byte: float | None
  nats_per_byte_after: float | None


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """The tokens of a tokenizer, and what they need.

  Attributes:
    names: the token of each id; None: no token has it.
    required: ids that every text needs.
    spelling: ids of bytes and of the unknown token, of which each text could consist.
    parts: token -> tokens that it is merged from, step by step.
    rebuilt: ids to keep, rising -> the tokenizer of these, whose ids are their positions.
  """

  names: list[str | None]
  required: set[int]
  spelling: set[int]
  parts: Callable[[str], set[str]]
  rebuilt: Callable[[Int[np.ndarray, "N"]], Tokenizer]


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
  """The vocabulary of a tokenizer.

  Raises:
    ValueError: its model is neither BPE nor Unigram.
  """
  if isinstance(tokenizer, PiecesTokenizer):
    return _of_pieces(tokenizer)
  if isinstance(tokenizer, JsonTokenizer):
    return _of_json(tokenizer)
  raise ValueError(
    f"`tokenizer` must be one of `tokenizers` or of SentencePiece; got {type(tokenizer).__name__}."
    " Others are not trimmed."
  )


def kept_tokens(
  found: Vocabulary, counts: Int[np.ndarray, "V"], keep: int
) -> Int[np.ndarray, "keep"]:
  """The ids of the `keep` most frequent tokens with all that they need, rising.

  Where a token needs more others than there is room for, rarer ones take its place.

  Raises:
    ValueError: `keep` is not between the tokens that must stay and those that there are, or no
      token was counted but those that could spell any text.
  """
  vocab = len(counts)
  required = {token for token in found.required if token < vocab}
  if not len(required) < keep <= vocab:
    raise ValueError(
      f"`keep` must be above {len(required):,}, the special tokens and bytes that must stay, and at"
      f" most {vocab:,}; got {keep:,}. Change it."
    )
  free = counts.copy()
  free[sorted(required | {token for token in found.spelling if token < vocab})] = 0
  if not free.any():
    raise ValueError(
      f"the text must have tokens that the model knows; got {int(counts.sum()):,} tokens, all of"
      " them bytes, unknown or special. Give a text in a language of the model."
    )
  number_of = {name: number for number, name in enumerate(found.names) if name is not None}
  kept = set(required)
  # Unseen tokens come last, in the order of their ids: merges are numbered by frequency.
  for token in np.argsort(-free, kind="stable").tolist():
    if len(kept) == keep:
      break
    # Rows of a padded table may follow the last token.
    name = found.names[token] if token < len(found.names) else None
    if token in kept or name is None:
      continue
    needed = {number_of[part] for part in found.parts(name) if part in number_of} | {token}
    needed = {number for number in needed if number < vocab} - kept
    if len(kept) + len(needed) <= keep:
      kept |= needed
  return np.asarray(sorted(kept))


def _merge_parts(name: str, rank: Callable[[str, str], float | None]) -> set[str]:
  """The characters of a token, and what byte-pair encoding makes of them until it is whole.

  Args:
    name: the token.
    rank: a pair -> when it is merged, the lowest first; None: never.
  """
  pieces, made = list(name), set(name)
  while len(pieces) > 1:
    ranks = [rank(*pair) for pair in itertools.pairwise(pieces)]
    known = [(r, at) for at, r in enumerate(ranks) if r is not None]
    if not known:
      return set()  # merges never make it: it is matched as a whole, or not at all
    _, at = min(known)
    pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    made.add(pieces[at])
  return made


def _of_pieces(tokenizer: PiecesTokenizer) -> Vocabulary:
  library = import_checkpoints_extra("sentencepiece.sentencepiece_model_pb2")
  proto = library.ModelProto.FromString(tokenizer.content)
  pieces = list(proto.pieces)
  score_of = {piece.piece: piece.score for piece in pieces if piece.type == NORMAL}
  ends = {tokenizer.bos, *tokenizer.eos} - {None}
  typed = lambda *types: {number for number, piece in enumerate(pieces) if piece.type in types}

  def rank(left: str, right: str) -> float | None:
    merged = score_of.get(left + right)
    return None if merged is None else -merged

  def rebuilt(ids: np.ndarray) -> Tokenizer:
    new = library.ModelProto()
    new.CopyFrom(proto)
    del new.pieces[:]
    new.pieces.extend(pieces[number] for number in ids)
    new.trainer_spec.vocab_size = len(ids)
    number_of = {int(old): number for number, old in enumerate(ids)}
    for field in ("unk_id", "bos_id", "eos_id", "pad_id"):
      if new.trainer_spec.HasField(field):
        setattr(new.trainer_spec, field, number_of.get(getattr(proto.trainer_spec, field), -1))
    return PiecesTokenizer(
      new.SerializeToString(),
      number_of.get(tokenizer.bos),
      [number_of[token] for token in tokenizer.eos],
      add_bos=tokenizer.add_bos,
      added=[
        dataclasses.replace(token, number=number_of[number])
        for number, token in tokenizer.added.items()
        if number in number_of
      ],
      spaced=tokenizer.spaced,
    )

  is_bpe = proto.trainer_spec.model_type == 2
  return Vocabulary(
    [piece.piece for piece in pieces],
    typed(UNKNOWN, CONTROL, BYTE) | ends | {n for n, p in enumerate(pieces) if p.piece == SPACE},
    typed(UNKNOWN, BYTE),
    # Unigram takes the most probable pieces: what a text does not use has no part in it.
    (lambda name: _merge_parts(name, rank)) if is_bpe else (lambda name: set()),
    rebuilt,
  )


def _of_json(tokenizer: JsonTokenizer) -> Vocabulary:
  state = json.loads(tokenizer.model.to_str())
  model, added = state["model"], state["added_tokens"]
  kind = model["type"]
  has_affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
  if kind not in ("BPE", "Unigram") or has_affixes:
    raise ValueError(
      "the tokenizer must be BPE without affixes, or Unigram, to be trimmed; got"
      f" {kind}{' with affixes' if has_affixes else ''}. Keep all of its tokens."
    )
  if kind == "BPE":
    number_of = dict(model["vocab"])
    unknown = {number_of[model["unk_token"]]} if model.get("unk_token") in number_of else set()
  else:
    number_of = {name: number for number, (name, _) in enumerate(model["vocab"])}
    unknown = set() if model.get("unk_id") is None else {model["unk_id"]}
  number_of |= {token["content"]: token["id"] for token in added}
  names: list[str | None] = [None] * (max(number_of.values()) + 1)
  for name, number in number_of.items():
    names[number] = name
  pairs = [
    tuple(p.split(" ", 1)) if isinstance(p, str) else tuple(p) for p in model.get("merges", [])
  ]
  rank_of = {pair: number for number, pair in reversed(list(enumerate(pairs)))}
  alphabet = {f"<0x{byte:02X}>" for byte in range(256)} if model.get("byte_fallback") else set()
  spaces = {number_of[SPACE]} if SPACE in number_of else set()
  if any('"ByteLevel"' in json.dumps(state[part]) for part in ("pre_tokenizer", "decoder")):
    alphabet |= {*import_checkpoints_extra("tokenizers").pre_tokenizers.ByteLevel.alphabet()}
  letters = {number_of[name] for name in alphabet if name in number_of}
  special = {token["id"] for token in added if token["special"]}
  ends = {tokenizer.bos, *tokenizer.eos} - {None}
  framed = {numbers[at] for numbers, at in _framing(state.get("post_processor"))}

  def rebuilt(ids: np.ndarray) -> Tokenizer:
    new_of = {int(old): number for number, old in enumerate(ids)}
    new = json.loads(json.dumps(state))
    if kind == "BPE":
      kept = {name: new_of[old] for name, old in model["vocab"].items() if old in new_of}
      whole_pairs = [p for p in pairs if p[0] in kept and p[1] in kept and p[0] + p[1] in kept]
      new["model"] |= {"vocab": kept, "merges": [list(pair) for pair in whole_pairs]}
    else:
      entries = [entry for old, entry in enumerate(model["vocab"]) if old in new_of]
      new["model"] |= {"vocab": entries}
      if model.get("unk_id") is not None:
        new["model"]["unk_id"] = new_of[model["unk_id"]]
    new["added_tokens"] = [t | {"id": new_of[t["id"]]} for t in added if t["id"] in new_of]
    for numbers, at in _framing(new.get("post_processor")):
      numbers[at] = new_of[numbers[at]]
    library = import_checkpoints_extra("tokenizers").Tokenizer.from_str(json.dumps(new))
    wrong = [
      names[old] for old, number in new_of.items() if library.id_to_token(number) != names[old]
    ]
    if wrong:
      raise ValueError(
        f"the tokenizer must number its tokens without gaps; got other numbers for {wrong[:3]}"
        " after trimming. Keep all of its tokens."
      )
    return JsonTokenizer(
      library,
      new_of.get(tokenizer.bos),
      [new_of[token] for token in tokenizer.eos],
      beside=tokenizer.beside,
    )

  return Vocabulary(
    names,
    special | letters | unknown | spaces | ends | framed,
    letters | unknown,
    (lambda name: _merge_parts(name, lambda *pair: rank_of.get(pair)))
    if kind == "BPE"
    else (lambda name: set()),
    rebuilt,
  )


def _framing(processor: Any) -> Iterator[tuple[list, int]]:
  """Lists with the ids that a post-processor adds to every text, and the index of each id."""
  if not isinstance(processor, Mapping):
    return
  for one in processor.get("processors", ()):
    yield from _framing(one)
  special = processor.get("special_tokens")
  for entry in special.values() if isinstance(special, Mapping) else ():
    for at in range(len(entry["ids"])):
      yield entry["ids"], at
  for end in ("sep", "cls"):
    if isinstance(processor.get(end), list):
      yield processor[end], 1


def trim(
  path: str | pathlib.Path,
  out: str | pathlib.Path,
  keep: int,
  texts: Sequence[str],
  *,
  dtype: Dtype = jnp.float32,
  scored: int = SCORED,
) -> Trimmed:
  """Write a model with the `keep` tokens that texts use most, and with a tokenizer for them.

  Special tokens and those of bytes stay, and so do the tokens that others are merged from, so that
  a text whose tokens are all kept has the same tokens as before. The first nine tenths of each text
  are counted; what the report says is measured on the rest.

  Args:
    path: a folder of safetensors, a GGUF, or a file of llama2.c, with its tokenizer.
    out: the folder that is written; it is whole or not there. A GGUF becomes `model.gguf` in it,
      with the block types that it has, and another model what transformers loads.
      `checkpoints.load` reads both. `trimming.json` has the report and the kept ids.
    keep: tokens that are kept.
    texts: texts of the language that the model is for.
    dtype: dtype in which the model is loaded and scored. The number format of the file is kept.
    scored: characters that are scored before and after; 0: none.

  Raises:
    FileNotFoundError: there is no model, or it has no tokenizer.
    FileExistsError: `out` exists.
    ValueError: see `kept_tokens`; the tokenizer is of another kind, or `scored` is negative.
  """
  check_output(out, folder=True)
  if not any(text.strip() for text in texts):
    raise ValueError("`texts` must have text; got none. Give a text of the model's language.")
  if scored < 0:
    raise ValueError(f"`scored` must be 0 or more characters; got {scored}. {SCORED} is usual.")
  # What may be refused comes before the weights are read.
  source = open_source(path)
  check_not_compressed(source)
  tokenizer = tokenizers.load_tokenizer(path)
  vocab = source.decoder().head.vocab
  counted, held = zip(*(_split(text) for text in texts))
  counts = np.zeros(vocab, np.int64)
  for piece in pieces(counted, 100_000):
    tokens = np.asarray(tokenizer.encode(piece, special=False), np.int64)
    counts += np.bincount(tokens[tokens < vocab], minlength=vocab)
  found = vocabulary(tokenizer)
  ids = kept_tokens(found, counts, keep)
  model, variables, _ = checkpoints.load(path, dtype=dtype)
  small, fewer = checkpoints.resize(model, variables, ids)
  with new_output(out, folder=True) as partial:
    if source.kind == "gguf":
      partial.mkdir()
      _write_gguf(source, model, partial / "model.gguf", ids)
    else:
      write_folder(partial, small, fewer, found.rebuilt(ids), dtype=dtype_of_file(source))
      _renumber_files(source.path if source.path.is_dir() else source.path.parent, partial, ids)
    written = tokenizers.load_tokenizer(partial)
    report = _measured(
      (model, variables, tokenizer), (small, fewer, written), found, ids, held, scored
    )
    size = sum(tensor.nbytes for _, tensor in stored_tables(source, model).values())
    report = dataclasses.replace(
      report, table_bytes=size, table_bytes_after=size // vocab * len(ids)
    )
    content = dataclasses.asdict(report) | {"ids": ids.tolist()}
    (partial / "trimming.json").write_text(json.dumps(content) + "\n", "utf-8")
  return report


def _write_gguf(
  source: ModelSource, model: Transformer, out: pathlib.Path, ids: Int[np.ndarray, "N"]
) -> None:
  """Write a GGUF again with these rows of its tables, byte for byte, and these of its tokens."""
  header, ggml = gguf_header(source.path), "tokenizer.ggml."

  def rows_of(name: str) -> NewTensor:
    entry = header.entries[name]
    rows = header.data[entry.first :][: entry.nbytes].reshape(entry.shape[0], -1)
    chunks = (rows[ids[first : first + ROWS]] for first in range(0, len(ids), ROWS))
    shape = len(ids), *entry.shape[1:]
    return NewTensor(name, shape, entry.kind, len(ids) * rows.shape[1], chunks)

  old = header.metadata
  number_of = {int(token): number for number, token in enumerate(ids)}
  of_tokens = [ggml + name for name in ("tokens", "scores", "token_type") if ggml + name in old]
  new: dict[str, Any] = {key: [old[key][token] for token in number_of] for key in of_tokens}
  kept = {*new[ggml + "tokens"]}
  for key, value in old.items():
    if key == ggml + "merges":
      # The first part may begin with a space.
      pairs = ((m[: m.index(" ", 1)], m[m.index(" ", 1) + 1 :]) for m in value)
      new[key] = [" ".join(p) for p in pairs if kept.issuperset((*p, "".join(p)))]
    elif key.startswith(ggml) and key.endswith("_token_id"):
      new[key] = number_of.get(value)
    elif key == f"{old['general.architecture']}.vocab_size":
      new[key] = len(ids)
    elif key == "tokenizer.huggingface.json":
      new[key] = None
  replaced = {name: [rows_of(name)] for name, _ in stored_tables(source, model).values()}
  rewrite_gguf(source.path, out, replaced, new)


TABLES = ("embed_tokens.weight", "token_embd.weight", "wte.weight")
"""Ends of the names of embeddings in files."""


def dtype_of_file(source: ModelSource) -> str:
  """The number format of a model's embedding; bfloat16 for a quantised one."""
  table = next((t for n, t in source.tensors.items() if n.endswith(TABLES)), None)
  return {"F32": "float32", "F16": "float16"}.get(table and table.format, "bfloat16")


def _split(text: str) -> tuple[str, str]:
  """The part of a text that is counted and the rest, cut at the end of a line or word."""
  at = int(len(text) * (1 - HELD_OUT))
  for end in ("\n", " "):
    if (found := text.find(end, at)) >= 0:
      return text[: found + 1], text[found + 1 :]
  return text[:at], text[at:]


LISTS_OF_IDS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
"""Further keys of generation_config.json that hold tokens, or sequences of them."""


def _renumber_files(source: pathlib.Path, folder: pathlib.Path, ids: np.ndarray) -> None:
  """Number the tokens of other libraries' files anew: what begins, ends and pads texts."""
  number_of = {int(old): number for number, old in enumerate(ids)}
  for name in ("special_tokens_map.json", "chat_template.jinja"):
    if (source / name).is_file() and (folder / "tokenizer.json").is_file():
      copy_file(source / name, folder / name)
  config = folder / "tokenizer_config.json"
  # Beside tokenizer.json it is the model's own; beside tokenizer.model it was written anew.
  if config.is_file() and (folder / "tokenizer.json").is_file():
    read = read_json(config)
    if isinstance(added := read.get("added_tokens_decoder"), dict):
      known = {int(old): entry for old, entry in added.items() if int(old) in number_of}
      read["added_tokens_decoder"] = {str(number_of[old]): entry for old, entry in known.items()}
    config.write_text(json.dumps(read, indent=2) + "\n", "utf-8")
  if (source / "generation_config.json").is_file():
    read = read_json(source / "generation_config.json")
    for key, value in list(read.items()):
      if value is None or not (key.endswith("_token_id") or key in LISTS_OF_IDS):
        continue
      old = value if isinstance(value, list) else [value]
      # A member may be a sequence of tokens, which is kept where all of them are.
      kept = [m for m in old if number_of.keys() >= {*(m if isinstance(m, list) else [m])}]
      new = [[number_of[n] for n in m] if isinstance(m, list) else number_of[m] for m in kept]
      read[key] = new if isinstance(value, list) else new[0] if new else None
    (folder / "generation_config.json").write_text(json.dumps(read, indent=2) + "\n", "utf-8")


def _measured(before, after, found: Vocabulary, ids: np.ndarray, held, scored: int) -> Trimmed:
  """The report, without the bytes of the tables."""
  vocab, tokenizer, written = before[0].head.vocab, before[2], after[2]
  is_kept = np.zeros(max(vocab, len(found.names)), bool)
  is_kept[ids] = True
  number_of = {int(old): number for number, old in enumerate(ids)}
  spelling = np.asarray(sorted(number_of[n] for n in found.spelling if n in number_of), np.int64)
  lines = [line for text in held for line in text.splitlines() if line]
  tokens = tokens_after = covered = spelled = restored = restored_after = 0
  for piece in pieces(held, 100_000):
    old, new = (np.asarray(t.encode(piece, special=False), np.int64) for t in (tokenizer, written))
    tokens, tokens_after = tokens + len(old), tokens_after + len(new)
    covered, spelled = covered + is_kept[old].sum(), spelled + np.isin(new, spelling).sum()
  for line in lines:
    restored += tokenizer.decode(tokenizer.encode(line, special=False)) == line
    restored_after += written.decode(written.encode(line, special=False)) == line
  nats = [None, None]
  if scored:
    text = "\n".join(lines)[:scored]
    nats = [_nats_per_byte(*whole_model, text) for whole_model in (before, after)]
  return Trimmed(
    vocab=vocab,
    kept=len(ids),
    required=len(found.required),
    coverage=float(covered / max(1, tokens)),
    tokens=tokens,
    tokens_after=tokens_after,
    spelled=float(spelled / max(1, tokens_after)),
    lines=len(lines),
    restored=int(restored),
    restored_after=int(restored_after),
    table_bytes=0,
    table_bytes_after=0,
    nats_per_byte=nats[0],
    nats_per_byte_after=nats[1],
  )


def _nats_per_byte(model: Transformer, variables, tokenizer: Tokenizer, text: str) -> float | None:
  """Negative log-probability of a byte, of pieces that each follow what begins a text."""
  rows = [tokenizer.encode(piece) for piece in pieces([text], PIECE)]
  rows = [row for row in rows if len(row) > 1]
  if not rows:
    return None
  scores = score(model, variables, rows, batch=4)
  total = sum(float(log_prob.sum(dtype=float)) for log_prob in scores)
  # The first token is not predicted; that of BOS stands for no byte.
  first = sum(len(tokenizer.decode(row[:1]).encode()) for row in rows)
  return -total / (len(text.encode()) - first)
