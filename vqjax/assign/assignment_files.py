"""Assignments in text files, which record the tokenizer that they are for."""

from __future__ import annotations

import pathlib
import re

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from vqjax.assign.checks import checked_assignment
from vqjax.outputs import write_text

__all__ = ["load_assignment", "save_assignment"]

_HEADER = re.compile(r"vocab (\d+) codes (\d+) tokenizer (\S+)")


def save_assignment(
  assignment: ArrayLike, path: str | pathlib.Path, *, codes: int, fingerprint: str
) -> None:
  """Write an assignment as a header line and a line `token code` for each token.

  Args:
    assignment: the code of each token, integers [V].
    path: the file; its folder is created.
    codes: number of codes, K.
    fingerprint: fingerprint of the tokenizer, such as `vqjax.lab.data.fingerprint`'s.

  Raises:
    ValueError: the table is not an assignment to `codes` codes, or the fingerprint has blanks.
  """
  table = checked_assignment(assignment, np.size(assignment), codes)
  header = f"vocab {table.size} codes {codes} tokenizer {fingerprint}"
  if not _HEADER.fullmatch(header):
    raise ValueError(
      f"`fingerprint` must be one word; got {fingerprint!r}. Give the hash of the tokenizer."
    )
  lines = (f"{token} {code}\n" for token, code in enumerate(table))
  write_text(path, f"{header}\n{''.join(lines)}")


def load_assignment(
  path: str | pathlib.Path, vocab: int, codes: int, *, fingerprint: str | None = None
) -> Int[np.ndarray, "V"]:
  """The assignment in a file that `save_assignment` wrote, int32 [V], its lines in any order.

  Args:
    path: the file.
    vocab: required number of tokens, V.
    codes: required number of codes, K.
    fingerprint: required fingerprint of the tokenizer; None: any.

  Raises:
    ValueError: the file has another vocabulary, number of codes or tokenizer, a line that is not
      `token code`, a token or code out of range, or a token twice or never. The message names the
      line.
  """
  path = pathlib.Path(path)
  header, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
  _check_header(path, header, vocab, codes, fingerprint)
  table, line_of = np.full(vocab, -1, np.int32), np.zeros(vocab, np.int64)
  for number, line in enumerate(lines, 2):
    token, code = _parsed(f"{path}, line {number}", line, vocab, codes)
    if line_of[token]:
      raise ValueError(
        f"{path}, line {number}: `token` must occur once; got {token} as in line {line_of[token]}."
        " Keep one of the two lines."
      )
    table[token], line_of[token] = code, number
  missing = np.flatnonzero(line_of == 0)
  if missing.size:
    raise ValueError(
      f"{path}: every token must have a code; got none for token {missing[0]} ({missing.size} such"
      f" tokens) in {len(lines) + 1} lines. Add a line `{missing[0]} CODE`, or save it again."
    )
  return table


def _check_header(path, header: str, vocab: int, codes: int, fingerprint: str | None):
  fields = _HEADER.fullmatch(header.strip())
  if not fields:
    raise ValueError(
      f"{path}, line 1: the header must be `vocab {vocab} codes {codes} tokenizer FINGERPRINT`; got"
      f" {header[:60]!r}. Write the file with assign.save."
    )
  for name, here, required in (("vocab", fields[1], vocab), ("codes", fields[2], codes)):
    if int(here) != required:
      raise ValueError(
        f"{path}, line 1: `{name}` must be {required}; got {here}. Use another file, or set the"
        f" head's {name} to {here}."
      )
  if fingerprint not in (None, fields[3]):
    raise ValueError(
      f"{path}, line 1: `tokenizer` must be {fingerprint}; got {fields[3]}, whose tokens are other"
      " text. Make the assignment again with this tokenizer, or use the other one."
    )


def _parsed(where: str, line: str, vocab: int, codes: int) -> tuple[int, int]:
  try:
    token, code = map(int, line.split())
  except ValueError:
    raise ValueError(
      f"{where}: a line must be `token code`, two integers; got {line[:60]!r}. Write the file"
      " with assign.save."
    ) from None
  if not 0 <= token < vocab:
    raise ValueError(f"{where}: `token` must be in [0, {vocab}); got {token}. Remove the line.")
  if not 0 <= code < codes:
    raise ValueError(
      f"{where}: `code` must be in [0, {codes}); got {code} for token {token}. Use another file, or"
      " more codes."
    )
  return token, code
