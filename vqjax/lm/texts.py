"""Texts: files by their paths, tokens in windows, and counts of tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["TextWindows", "data_path", "encode_text", "read_text", "text_windows"]

WINDOW = 256
"""Tokens of a window, with the one that begins every text."""

LEAST_WINDOW = 3
"""Least tokens of a window: the first prediction has no context, and the last no target."""


def data_path(path: str, kind: str = "path") -> pathlib.Path:
  """Return the existing file or folder `path`, here or under `$VQJAX_DATA`.

  Raises:
    ValueError: `path` is empty.
    FileNotFoundError: it exists neither here nor under `$VQJAX_DATA`.
  """
  if not path:
    raise ValueError(f"`{kind}` must name a file or folder; got an empty path. Give one.")
  here = pathlib.Path(path)
  with contextlib.suppress(RuntimeError):  # ~name of nobody
    here = here.expanduser()
  if here.exists():
    return here
  root = os.environ.get("VQJAX_DATA")
  if root and not here.is_absolute() and (pathlib.Path(root) / here).exists():
    return pathlib.Path(root) / here
  where = f"VQJAX_DATA={root}" if root else "VQJAX_DATA, which is not set"
  raise FileNotFoundError(
    f"`{kind}` must exist here or under {where}; got {path!r}. Give an existing path, or set"
    " VQJAX_DATA to the folder that holds it."
  )


def read_text(path: pathlib.Path) -> str:
  """Return a file's text with `\\n` line ends and without a byte-order mark.

  Raises:
    ValueError: it is a device, or not UTF-8; the message names the file and the byte offset.
  """
  if path.is_char_device() or path.is_block_device():  # some never end
    raise ValueError(f"{path} must be a file of text; got a device. Give a file, or a pipe.")
  return _decoded(path.read_bytes(), path).removeprefix("\ufeff").replace("\r\n", "\n")


def split_documents(text: str, separator: str) -> Iterator[str]:
  """Yield the documents of a text between separators, without blanks around them or empty ones.

  Args:
    text: the text of a file.
    separator: what is between two documents, such as "<|endoftext|>"; `\\n` (a backslash and an n,
      as a shell passes it) stands for the end of a line.
  """
  for document in text.split(separator.replace("\\n", "\n")):
    if document.strip():
      yield document.strip()


def check_separator(separator: str | None, name: str) -> None:
  """Raise ValueError for an empty separator, given by the option or field `name`."""
  if separator == "":
    raise ValueError(
      f"`{name}` must be a text between documents; got an empty one. Give one such as"
      " '<|endoftext|>', or '\\n' for a document in each line."
    )


def read_lines(path: pathlib.Path) -> Iterator[str]:
  """Yield the lines of a file; only `\\n` ends a line, not a form feed or U+2028.

  Raises:
    ValueError: the file is not UTF-8; the message names the file and the byte offset.
  """
  offset = 0
  with path.open("rb") as file:
    for line in file:
      text = _decoded(line, path, offset)
      text = text if offset else text.removeprefix("\ufeff")
      yield text.removesuffix("\n").removesuffix("\r")
      offset += len(line)


def _decoded(content: bytes, path: pathlib.Path, offset: int = 0) -> str:
  try:
    return content.decode("utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path} must be UTF-8; got byte 0x{content[error.start]:02x} at offset"
      f" {offset + error.start}. Convert it with `iconv -t utf-8`, or leave it out."
    ) from None


@dataclasses.dataclass(frozen=True)
class TextWindows:
  """Windows of text of several domains.

  Attributes:
    tokens: int32 [N, T].
    domain: domain of each window, [N].
    names: names of the domains.
  """

  tokens: np.ndarray
  domain: np.ndarray
  names: tuple[str, ...]

  def take(self, count: int) -> "Windows":
    """Evenly many windows of each domain, `count` in all or fewer."""
    at = _round_robin([np.flatnonzero(self.domain == d) for d in range(len(self.names))])[:count]
    return TextWindows(self.tokens[at], self.domain[at], self.names)


def text_windows(
  encoded: Mapping[str, Sequence[int]], begin: Sequence[int], length: int
) -> TextWindows:
  """Windows of tokens of each domain, each with the tokens that begin every text.

  Args:
    encoded: tokens of the text of each domain, without those that begin it.
    begin: tokens that begin every text.
    length: tokens of a window.
  """
  rows, domain = [], []
  own = length - len(begin)
  for number, tokens in enumerate(encoded.values()):
    for first in range(0, len(tokens) - own + 1, own):
      rows.append([*begin, *tokens[first : first + own]])
      domain.append(number)
  shape = (len(rows), length)
  return TextWindows(
    np.asarray(rows, np.int32).reshape(shape), np.asarray(domain, np.int64), tuple(encoded)
  )


def _round_robin(groups):
  """One entry of each group in turn."""
  longest = max(map(len, groups), default=0)
  entries = [group[at] for at in range(longest) for group in groups if at < len(group)]
  return np.asarray(entries, np.int64)


def encode_text(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
  """The tokens that begin every text, and those of the text itself.

  A long text is encoded in pieces that end with a line or word, since some tokenizers take
  quadratic time.
  """
  begin = list(tokenizer.encode(""))
  tokens = []
  for piece in pieces([text], 2**16):
    tokens += list(tokenizer.encode(piece))[len(begin) :]
  return begin, tokens


def check_window(length: int) -> None:
  """Raise ValueError unless windows of so many tokens have one that is predicted from another."""
  if length < LEAST_WINDOW:
    raise ValueError(
      f"`--window` must be at least {LEAST_WINDOW} tokens, and not above the model's context; got"
      f" {length}. {WINDOW} is usual."
    )


def check_tokens(count: int) -> None:
  """Raise ValueError unless there are tokens to calibrate with."""
  if count < 1:
    raise ValueError(f"`--tokens` must be at least 1; got {count}. 16384 is usual.")


def read_texts(paths: Sequence[pathlib.Path], option: str = "--text") -> dict[str, str]:
  """Texts by the names of their files; by their paths where two files have one name.

  Raises:
    FileNotFoundError: a file does not exist.
    ValueError: a file is given twice, is a folder, or is not text.
  """
  found = [data_path(str(path), kind=option) for path in paths]
  for path in found:
    if path.is_dir():
      raise ValueError(f"`{option}` must name files; {path} is a folder. Give the files in it.")
  check_different([path.resolve() for path in found], option)
  names = [path.name for path in paths]
  return {
    str(path) if names.count(path.name) > 1 else path.name: read_text(file)
    for path, file in zip(paths, found)
  }


def check_different(values: Sequence[Any], option: str) -> None:
  """Raise ValueError for files or texts of which two are the same."""
  if len(set(values)) < len(values):
    twice = next(value for value in values if values.count(value) > 1)
    raise ValueError(f"`{option}` must name different files; got {twice} twice. Give it once.")


def encode_texts(
  texts: Mapping[str, str], tokenizer: Any, length: int, least: Callable[[int], int], option: str
) -> tuple[list[int], dict[str, list[int]]]:
  """The tokens that begin every text, and those of each text, of which each has a window.

  Args:
    texts: texts by their names.
    tokenizer: the tokenizer of the model.
    length: tokens of a window.
    least: tokens of a window without those that begin it -> tokens that a text must have.
    option: how the texts were given.

  Raises:
    ValueError: a text has too few tokens, or none that the tokenizer knows.
  """
  begin, encoded = list(tokenizer.encode("")), {}
  check_window(length)
  if length <= len(begin):
    raise ValueError(
      f"`--window` must be above the {len(begin)} tokens that begin every text; got {length}. Give"
      " more."
    )
  needed = least(length - len(begin))
  for name, text in texts.items():
    _, tokens = encode_text(tokenizer, text)
    _check_known(name, text, tokens, tokenizer, option)
    if len(tokens) < needed:
      raise ValueError(
        f"each text of `{option}` must have {needed:,} tokens for a window of {length}; got"
        f" {len(tokens):,} in {name}. Give more text, or leave it out."
      )
    encoded[name] = tokens
  return begin, encoded


def counts_of(
  encoded: Mapping[str, Sequence[int]], begin: Sequence[int], vocab: int, length: int
) -> np.ndarray:
  """Occurrences of each token, [V]; each text counts alike, however long it is.

  Args:
    encoded: tokens of each text, without those that begin it.
    begin: tokens that begin every text.
    vocab: number of tokens of the vocabulary.
    length: tokens of a window.
  """
  counts = np.zeros(vocab)
  for tokens in encoded.values():
    counts += np.bincount(np.asarray(tokens, np.int64), minlength=vocab) / max(1, len(tokens))
  counts *= sum(map(len, encoded.values())) / len(encoded)
  # What begins every text is an input of each window, and all later positions attend to it.
  counts[begin] += counts.sum() / length
  return counts


def _check_known(name: str, text: str, tokens: Sequence[int], tokenizer: Any, option: str) -> None:
  """Raise ValueError for a text, given by `option`, of which the tokenizer knows nothing."""
  pieces = (tokenizer.decode([token]).strip() for token in dict.fromkeys(tokens[:10_000]))
  if text.strip() and not any(piece and piece in text for piece in pieces):
    raise ValueError(
      f"`{option}` must hold tokens of the model's tokenizer; got none in {name}. Give text in a"
      " language that the model knows."
    )


def pieces(texts: Iterable[str], most: int) -> Iterator[str]:
  """Texts in pieces of about `most` characters, cut after the ends of lines where possible."""
  for text in texts:
    start = 0
    while start < len(text):
      end = start + most
      if end < len(text):
        end = max(text.rfind("\n", start, end), text.rfind(" ", start, end), start + most // 2) + 1
      yield text[start:end]
      start = end
