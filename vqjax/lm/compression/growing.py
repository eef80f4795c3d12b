"""Models with further tokens: rows for them, and a tokenizer that finds them in texts."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from vqjax.lm import checkpoints, tokenizers
from vqjax.lm.checkpoints.loading import write_folder
from vqjax.lm.checkpoints.resizing import NewRow, mean_of_parts
from vqjax.lm.compression.trimming import PIECE, SCORED, dtype_of_file
from vqjax.lm.generation import score
from vqjax.lm.sources.readers import (
  check_not_compressed,
  import_checkpoints_extra,
  open_source,
)
from vqjax.lm.texts import pieces
from vqjax.lm.tokenizers.byte_level import AddedToken
from vqjax.lm.tokenizers.reading import JsonTokenizer, PiecesTokenizer, Tokenizer
from vqjax.outputs import check_output, copy_file, new_output
from vqjax.types import Dtype

__all__ = ["Grown", "grow"]


@dataclasses.dataclass(frozen=True)
class Grown:
  """What new tokens did to a model, before it is trained again.

  Attributes:
    vocab: rows of the tables before.
    vocab_after: rows after; rows of padding are used first.
    copied: rows that were there before.
    ids: new token -> its id.
    parts: new token -> the tokens of which it consisted; empty: none spell it, and its row is the
      mean of all.
    tokens: tokens of the text before; 0 without a text.
    tokens_after: tokens of it after.
    nats_per_byte: negative log-probability of a byte of the text before; None: without a text.
    nats_per_byte_after: the same after.
    new_tokens: new tokens in the text.
    new_token_nats: negative log-probability of one of them; None: there is none.
  """

  vocab: int
  vocab_after: int
  copied: int
  ids: dict[str, int]
  parts: dict[str, list[str]]
  tokens: int
  tokens_after: int
  nats_per_byte: float | None
  nats_per_byte_after: float | None
  new_tokens: int
  new_token_nats: float | None


def grow(
  path: str | pathlib.Path,
  out: str | pathlib.Path,
  tokens: Sequence[str],
  *,
  row: NewRow = mean_of_parts,
  texts: Sequence[str] = (),
  multiple: int = 1,
  dtype: Dtype = jnp.float32,
  scored: int = SCORED,
) -> Grown:
  """Write a model with further tokens, and with a tokenizer that finds them in texts.

  A new token is matched as a whole, before the tokenizer's own rules. Its ids are those behind the
  tokenizer's last one: rows of padding that the tables have there get numbers first.

  Args:
    path: a folder of safetensors, a GGUF, or a file of llama2.c, with its tokenizer.
    out: the folder that is written, one that `checkpoints.load` and transformers load; it is whole
      or not there. `growing.json` in it has the report.
    tokens: the texts of the new tokens.
    row: makes the rows of new tokens, such as `checkpoints.mean_of_parts`.
    texts: texts on which the model is scored before and after.
    multiple: the tables get a multiple of so many rows.
    dtype: dtype in which the model is loaded and scored. The number format of the file is kept, or
      bfloat16 for a quantised one.
    scored: characters of the texts that are scored.

  Raises:
    FileNotFoundError: there is no model, or it has no tokenizer.
    FileExistsError: `out` exists.
    ValueError: a token is empty, there already or given twice, or the tokenizer is of another kind.
  """
  check_output(out, folder=True)
  if multiple < 1 or scored < 1:
    raise ValueError(
      f"`multiple` and `scored` must be at least 1; got {multiple} and {scored}. 64 rows are usual."
    )
  check_not_compressed(source := open_source(path))
  tokenizer = tokenizers.load_tokenizer(path)
  parts = _parts(tokenizer, tokens)
  larger, ids = _with_tokens(tokenizer, tokens)
  before = checkpoints.load(path, dtype=dtype)
  vocab = before.model.head.vocab
  after = max(vocab, *(number + 1 for number in ids.values()))
  after += -after % multiple
  # Rows of padding behind the new tokens are copies of the last row.
  sources = np.minimum(np.arange(after), vocab - 1)
  new = {ids[token]: own for token, own in parts.items()}
  for number, own in new.items():
    sources[number] = own[0]
  made = checkpoints.resize(before.model, before.variables, sources, new, row)
  return write_grown(out, (source, source), before, (*made, larger), new, texts, scored)


def write_grown(out, sources, before, after, new, texts, scored) -> Grown:
  """Write a model, variables and tokenizer with new tokens; report on them and on those before.

  Args:
    out: the folder that is written.
    sources: the model before, and the one whose tokenizer it is.
    before: model, variables and tokenizer.
    after: the same with new tokens.
    new: new token -> the old tokens that it consists of.
    texts: texts that are scored.
    scored: characters of them.
  """
  (model, _, tokenizer), (grown, more, larger) = before, after
  with new_output(out, folder=True) as partial:
    write_folder(partial, grown, more, larger, dtype=dtype_of_file(sources[0]))
    folder = sources[1].path if sources[1].path.is_dir() else sources[1].path.parent
    for name in ("special_tokens_map.json", "chat_template.jinja", "generation_config.json"):
      if (folder / name).is_file():
        copy_file(folder / name, partial / name)
    text = "\n".join(texts)[:scored]
    old = _scores(*before, text, ())
    now = _scores(grown, more, tokenizers.load_tokenizer(partial), text, list(new))
    names = {number: name for number in new if (name := larger.piece(number))}
    report = Grown(
      vocab=model.head.vocab,
      vocab_after=grown.head.vocab,
      copied=grown.head.vocab - len(new),
      ids={name: number for number, name in names.items()},
      parts={name: [tokenizer.piece(n) for n in new[number]] for number, name in names.items()},
      tokens=old[0],
      tokens_after=now[0],
      nats_per_byte=old[1],
      nats_per_byte_after=now[1],
      new_tokens=now[2],
      new_token_nats=now[3],
    )
    content = json.dumps(dataclasses.asdict(report), indent=2, ensure_ascii=False)
    (partial / "growing.json").write_text(content + "\n", "utf-8")
  return report


def _parts(tokenizer: Tokenizer, tokens: Sequence[str]) -> dict[str, list[int]]:
  """The tokens of which each new one consists."""
  found: dict[str, list[int]] = {}
  for token in tokens:
    own = tokenizer.encode(token, special=False) if token.strip() else []
    if not own or token in found or (len(own) == 1 and tokenizer.decode(own) == token):
      what = "twice" if token in found else "which is a token" if own else "without a text"
      raise ValueError(
        f"`tokens` must be new texts, each once; got {token!r} {what}. Take it out of the list."
      )
    found[token] = own
  if not found:
    raise ValueError("`tokens` must have a text; got none. Write one a line.")
  return found


def _with_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> tuple[Tokenizer, dict[str, int]]:
  """The tokenizer with further tokens that are matched as a whole, and their ids."""
  if isinstance(tokenizer, JsonTokenizer):
    library = import_checkpoints_extra("tokenizers")
    larger = library.Tokenizer.from_str(tokenizer.model.to_str())
    larger.add_tokens([library.AddedToken(token, normalized=False) for token in tokens])
    ids = {token: larger.token_to_id(token) for token in tokens}
    return JsonTokenizer(larger, tokenizer.bos, tokenizer.eos, beside=tokenizer.beside), ids
  if isinstance(tokenizer, PiecesTokenizer):
    ids = {token: tokenizer.vocab + number for number, token in enumerate(tokens)}
    added = [*tokenizer.added.values()]
    added += [AddedToken(token, number, control=False) for token, number in ids.items()]
    larger = PiecesTokenizer(
      tokenizer.content,
      tokenizer.bos,
      tokenizer.eos,
      add_bos=tokenizer.add_bos,
      added=added,
      # A space before the text behind each new token would not be in the text.
      spaced="first",
    )
    return larger, ids
  raise ValueError(
    f"`tokenizer` must be one of `tokenizers` or of SentencePiece; got {type(tokenizer).__name__}."
    " Others do not grow."
  )


def _scores(model, variables, tokenizer, text, new):
  """Tokens of a text, nats a byte, and the number and the nats of new tokens."""
  rows = [tokenizer.encode(piece) for piece in pieces([text], PIECE)] if text.strip() else []
  rows = [row for row in rows if len(row) > 1]
  if not rows:
    return 0, None, 0, None
  found = [np.asarray(x, np.float64) for x in score(model, variables, rows, batch=4)]
  first = sum(len(tokenizer.decode(row[:1]).encode()) for row in rows)
  nats = -sum(x.sum() for x in found) / (len(text.encode()) - first)
  of_new = [-x[np.isin(row[1:], new)] for x, row in zip(found, rows)]
  count = sum(map(len, of_new))
  mean = float(np.concatenate(of_new).mean()) if count else None
  return sum(map(len, rows)), float(nats), count, mean
