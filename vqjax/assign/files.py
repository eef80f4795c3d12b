"""How is an assignment kept in a file that no other vocabulary can be read with?"""

import dataclasses
import pathlib
import re

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from vqjax.assign.table import checked

_HEADER = re.compile(r"vocab (\d+) codes (\d+) tokenizer (\S+)")


def save(assignment: ArrayLike, path: str | pathlib.Path, *, codes: int, fingerprint: str) -> None:
  """Writes a header line, then `token code` in a line for each token.

  Args:
    assignment: the code of each token, integers [V].
    path: the file; its folder is made.
    codes: number of codes, K.
    fingerprint: of the tokenizer whose tokens these are: `Encoder.fingerprint()`.

  Raises:
    ValueError: a table that is no assignment of `codes` codes, or a fingerprint with blanks.
  """
  table = checked(assignment, np.size(assignment), codes)
  header = f"vocab {table.size} codes {codes} tokenizer {fingerprint}"
  if not _HEADER.fullmatch(header):
    raise ValueError(f"fingerprint {fingerprint!r} is no word; give Encoder.fingerprint()")
  lines = (f"{token} {code}\n" for token, code in enumerate(table))
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"{header}\n{''.join(lines)}", encoding="ascii")


def load(
  path: str | pathlib.Path, vocab: int, codes: int, *, fingerprint: str | None = None
) -> Int[np.ndarray, "V"]:
  """The assignment in a file of `save`, int32 [V]; its lines may be in any order.

  Args:
    path: the file.
    vocab: tokens that it must have.
    codes: codes that it must have.
    fingerprint: of the tokenizer that it must be for; None: any with that vocabulary.

  Raises:
    ValueError: another vocabulary, number of codes or tokenizer; a line that is not `token code`; a
      token or code outside; a token twice or missing. The message names the line.
  """
  path = pathlib.Path(path)
  header, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
  _check_header(path, header, vocab, codes, fingerprint)
  table, line_of = np.full(vocab, -1, np.int32), np.zeros(vocab, np.int64)
  for number, line in enumerate(lines, 2):
    token, code = _parsed(f"{path}, line {number}", line, vocab, codes)
    if line_of[token]:
      raise ValueError(
        f"{path}, line {number}: token {token} has a code in line {line_of[token]} already; keep"
        " one of the two lines"
      )
    table[token], line_of[token] = code, number
  missing = np.flatnonzero(line_of == 0)
  if missing.size:
    raise ValueError(
      f"{path}: token {missing[0]} has no code ({missing.size} such tokens), and line"
      f" {len(lines) + 1} is the last; add a line `{missing[0]} CODE`, or save the table again"
    )
  return table


def _check_header(path, header: str, vocab: int, codes: int, fingerprint: str | None):
  found = _HEADER.fullmatch(header.strip())
  if not found:
    raise ValueError(
      f"{path}, line 1: {header[:60]!r} is no header; write it with assign.save: `vocab {vocab}"
      f" codes {codes} tokenizer FINGERPRINT`"
    )
  for name, here, wanted in (("vocab", found[1], vocab), ("codes", found[2], codes)):
    if int(here) != wanted:
      raise ValueError(
        f"{path}, line 1: {name} {here}, where {wanted} is wanted; take a file for {name} {wanted},"
        f" or set the head's {name} to {here}"
      )
  if fingerprint not in (None, found[3]):
    raise ValueError(
      f"{path}, line 1: made for the tokenizer {found[3]}, not for {fingerprint}: its tokens mean"
      " other text; make the assignment again with this tokenizer, or use the other one"
    )


def _parsed(where: str, line: str, vocab: int, codes: int) -> tuple[int, int]:
  try:
    token, code = map(int, line.split())
  except ValueError:
    raise ValueError(f"{where}: {line[:60]!r} is not `token code`; write two integers") from None
  if not 0 <= token < vocab:
    raise ValueError(f"{where}: token {token} is outside [0, {vocab}); remove the line")
  if not 0 <= code < codes:
    raise ValueError(f"{where}: code {code} is outside [0, {codes}); give token {token} another")
  return token, code


@dataclasses.dataclass(frozen=True)
class FromFile:
  """The assignment in a file, for a config.

  The path is part of what a run is, the file's content is not: give a new table a new name.

  Attributes:
    path: a file that `save` wrote.
    fingerprint: of the tokenizer that it must be for; None: any with that vocabulary.
  """

  path: str
  fingerprint: str | None = None

  def __call__(self, vocab: int, codes: int) -> Int[np.ndarray, "V"]:
    """Token -> code, int32 [V]; errors as `load`."""
    return load(self.path, vocab, codes, fingerprint=self.fingerprint)
