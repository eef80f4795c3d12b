"""Models with the tokenizer of another, such as a drafter with that of the model it drafts for."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from vqjax.lm import checkpoints, tokenizers
from vqjax.lm.checkpoints.resizing import NewRow, mean_of_parts
from vqjax.lm.compression.growing import Grown, write_grown
from vqjax.lm.compression.trimming import SCORED
from vqjax.lm.sources.readers import check_not_compressed, open_source
from vqjax.lm.tokenizers.byte_level import SPACE
from vqjax.lm.tokenizers.reading import JsonTokenizer, Tokenizer
from vqjax.outputs import check_output
from vqjax.types import Dtype

__all__ = ["match", "transplant"]


def match(
  old: Tokenizer, new: Tokenizer, vocab: int, vocab_after: int
) -> tuple[np.ndarray, dict[int, list[int]]]:
  """Old tokens for those of another tokenizer, as `checkpoints.resize` takes them.

  Pieces are compared by their bytes, and control tokens by their names and by what they are for.

  Args:
    old: the tokenizer that a model has.
    new: the one that it gets.
    vocab: rows that the model has.
    vocab_after: rows that it gets.

  Returns:
    An old token for each new one; for those that none equals, the tokens that spell it, if any.
  """
  texts, others = _texts(old, vocab), _texts(new, vocab_after)
  known = {text: token for token, text in reversed(texts.items())}
  roles = {new.bos: old.bos} | dict.fromkeys(new.eos, next(iter(old.eos), None))
  begin = len(old.encode("\n", special=False))

  def spelled(text: bytes) -> list[int]:
    string = text.decode(errors="ignore")
    # A tokenizer may put a space before a text.
    ways = [old.encode("\n" + string, special=False)[begin:]]
    ways += [old.encode(s, special=False) for s in (string, string.removeprefix(" "))]
    ways.append([known.get(bytes([byte]), -1) for byte in text])
    joined = lambda way: b"".join(t for t in map(texts.get, way) if isinstance(t, bytes))
    return next((way for way in ways if joined(way) == text), [])

  source, parts = np.zeros(vocab_after, np.int64), {}
  for token in range(vocab_after):
    text = others.get(token)
    same = known.get(text, roles.get(token))
    if same is None:
      parts[token] = spelled(text) if isinstance(text, bytes) else []
      same = parts[token][0] if parts[token] else 0
    source[token] = same
  return source, parts


def _texts(tokenizer: Tokenizer, vocab: int) -> dict[int, bytes | str]:
  """The bytes that each token stands for, or the name of a control token."""
  letters, added = {}, getattr(tokenizer, "whole", {}).values()
  controls, verbatim = {token.number for token in added if token.control}, {}
  if isinstance(tokenizer, JsonTokenizer):
    added = tokenizer.model.get_added_tokens_decoder()
    controls = {number for number, token in added.items() if token.special}
    verbatim = {number: token.content.encode() for number, token in added.items()}
    if "ByteLevel" in json.dumps(json.loads(tokenizer.model.to_str())["decoder"]):
      # GPT-2's letters for bytes: themselves where they are visible, and 256 on for the others.
      shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
      others = sorted({*range(256)} - {*shown})
      letters = {chr(b): bytes([b]) for b in shown}
      letters |= {chr(256 + n): bytes([b]) for n, b in enumerate(others)}
  found: dict[int, bytes | str] = {}
  for token in range(min(vocab, tokenizer.vocab)):
    name = tokenizer.piece(token)
    if token in controls:
      found[token] = name
    elif letters and token not in verbatim:
      found[token] = b"".join(letters.get(letter, letter.encode()) for letter in name)
    elif len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
      found[token] = bytes.fromhex(name[3:5])
    else:
      found[token] = verbatim.get(token, name.replace(SPACE, " ").encode())
  return {token: text for token, text in found.items() if text}


def transplant(
  path: str | pathlib.Path,
  out: str | pathlib.Path,
  other: str | pathlib.Path,
  *,
  row: NewRow = mean_of_parts,
  texts: Sequence[str] = (),
  dtype: Dtype = jnp.float32,
  scored: int = SCORED,
) -> Grown:
  """Write a model with the tokenizer and the number of rows of another.

  Tokens of the same text keep their rows. Others are new: they get the mean of the old tokens that
  spell them, and those that nothing spells, such as control tokens, the mean of all rows.

  Args:
    path: the model, as in `grow`.
    out: the folder that is written, as in `grow`.
    other: the model whose tokenizer it gets; its weights are not read.
    row: makes the rows of tokens that old ones spell.
    texts: texts on which the model is scored before and after.
    dtype: dtype in which the model is loaded and scored, as in `grow`.
    scored: characters of the texts that are scored.

  Raises:
    FileNotFoundError: there is no model, or one has no tokenizer.
    FileExistsError: `out` exists.
  """
  check_output(out, folder=True)
  check_not_compressed(source := open_source(path))
  giver, given = open_source(other), tokenizers.load_tokenizer(other)
  before = checkpoints.load(path, dtype=dtype)
  sizes = before.model.head.vocab, giver.decoder().head.vocab
  tokens, new = match(before.tokenizer, given, *sizes)
  after = *checkpoints.resize(before.model, before.variables, tokens, new, row), given
  return write_grown(out, (source, giver), before, after, new, texts, scored)
