"""Files that this project writes: whole, with a checksum, and read by a schema.

The checksum is the CRC-32 of zlib, which misses no flipped bit and no damage of up to 32 bits in a
row, and runs at the speed of memory. It guards against failing disks, not against forgery.
"""

import dataclasses
import errno
import functools
import json
import math
import os
import pathlib
import re
import types
import typing
import zlib
from collections.abc import Mapping
from typing import Any

from vqjax.outputs import write_text

__all__ = [
  "CHECKSUM",
  "checksum",
  "dumps",
  "parse_json",
  "printable",
  "read",
  "read_json_rows",
  "sealed",
  "write",
]

CHECKSUM = "checksum"
"""The member of a JSON object that holds the checksum of the others."""

CHUNK = 2**22
"""Bytes that are read at a time."""

NO_PERMISSION = frozenset(
  {
    errno.EACCES,
    errno.EROFS,
    errno.EPERM,
    errno.EFBIG,
    errno.EDQUOT,
    errno.ENOTDIR,
    errno.EEXIST,
  }
)
"""Errors of a folder that another folder may not have."""

FAILED_WRITES = ("Failed to write", "Failed writing", "Error writing")
"""Texts of TensorStore's errors for a failed write, which carry no error number."""

LOST_ARRAYS = re.compile(r"Save failed: .* missing.*\b")
"""Begin of Orbax's error for a checkpoint without the arrays that it has just written."""


class DamagedError(ValueError):
  """A file is not what this version wrote; the message names it and the remedy."""


def checksum(*parts: bytes) -> str:
  """Return 8 hexadecimal digits that change with any bit of the parts."""
  value = 0
  for part in parts:
    value = zlib.crc32(part, value)
  return f"{value:08x}"


def file_checksum(path: str | os.PathLike[str]) -> str:
  """Return the checksum of a file's bytes."""
  value = 0
  with open(path, "rb") as file:
    while part := file.read(CHUNK):
      value = zlib.crc32(part, value)
  return f"{value:08x}"


def sealed(value: Mapping[str, Any], previous: str = "") -> dict[str, Any]:
  """Return the object with a checksum of its members, and of what came before it."""
  members = {name: member for name, member in value.items() if name != CHECKSUM}
  return members | {CHECKSUM: checksum(previous.encode(), _canonical(members))}


def _canonical(value: Any) -> bytes:
  return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse_json(
  content: str | bytes,
  schema: type,
  where: str,
  remedy: str,
  *,
  seal: bool = True,
  previous: str = "",
) -> dict[str, Any]:
  """Return the JSON object in a text, checked against a schema.

  Args:
    content: the text, or its UTF-8 bytes.
    schema: a dataclass: a field without a default is required, members that it does not have are
      allowed, and the types of the others are checked.
    where: the file, and the line in it, for messages.
    remedy: what to do about a damaged file: a sentence.
    seal: whether the object must have the checksum of `sealed`, which is not returned.
    previous: the checksum of the row before.

  Raises:
    DamagedError: it is not such an object.
  """

  def damaged(problem: str, verdict: str = "is damaged") -> DamagedError:
    return DamagedError(f"{where} {verdict}: {problem}. {remedy}")

  def refuse(constant: str):
    raise ValueError(f"{constant} is not JSON")

  try:
    text = content if isinstance(content, str) else content.decode("utf-8")
    value = json.loads(text, parse_constant=refuse)
  except UnicodeDecodeError as error:
    raise damaged(f"byte {error.start} is not UTF-8") from None
  except json.JSONDecodeError as error:
    raise damaged(f"line {error.lineno}, column {error.colno} is not JSON ({error.msg})") from None
  except RecursionError:
    raise damaged("it is nested too deeply") from None
  except ValueError as error:
    raise damaged(str(error)) from None
  is_sealed = seal and isinstance(value, dict)
  if is_sealed:
    found = value.pop(CHECKSUM, None)
    if found is None:
      raise damaged("it has no checksum", "is damaged or of another version of vqjax")
    try:
      wanted = sealed(value, previous)[CHECKSUM]
    except (ValueError, RecursionError) as error:
      raise damaged(f"it has no checksum ({error})") from None
    if found != wanted:
      raise damaged(f"its checksum must be {wanted}; got {printable(str(found))[:20]}")
  if problem := problem_of(value, schema, ""):
    raise damaged(problem, "is of another version of vqjax" if is_sealed else "is damaged")
  return value


@dataclasses.dataclass(frozen=True)
class Range:
  """The numbers that a field may hold, in `Annotated[int, Range(1, 9)]`.

  Attributes:
    least: the smallest.
    most: the largest.
    above: `least` itself is not among them.
  """

  least: float
  most: float
  above: bool = False

  def problem(self, value: float) -> str | None:
    """What the number must be, or None."""
    is_above = value > self.least if self.above else value >= self.least
    if is_above and value <= self.most:
      return None
    return f"in {'(' if self.above else '['}{self.least:,}, {self.most:,}]"


@functools.cache  # evaluating the annotations takes milliseconds
def hints_of(schema: type) -> dict[str, Any]:
  """The annotations of a dataclass, with their ranges."""
  return typing.get_type_hints(schema, include_extras=True)


def problem_of(value: Any, hint: Any, at: str) -> str | None:
  """What is wrong with a value of JSON for an annotation, or None."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  name = f"`{one_line(at)}`" if at else "it"
  if origin in (typing.Union, types.UnionType):
    objects = [option for option in arguments if dataclasses.is_dataclass(option)]
    if objects and isinstance(value, dict):
      # Where every member is optional, any object would do: the one with most of these members.
      shared = lambda option: len({f.name for f in dataclasses.fields(option)} & value.keys())
      return problem_of(value, max(objects, key=shared), at)
    problems = [problem_of(value, option, at) for option in arguments]
    return None if None in problems else problems[0]
  if hint is Any:
    return None
  if origin is typing.Annotated:
    if problem := problem_of(value, arguments[0], at):
      return problem
    ranges = [one for one in arguments[1:] if isinstance(one, Range)]
    wanted = ranges[0].problem(value) if ranges else None
    return wanted and f"{name} must be {wanted}; got {shown(value)}"
  if dataclasses.is_dataclass(hint):
    if not isinstance(value, dict):
      return f"{name} must be a JSON object; got {shown(value)}"
    hints = hints_of(hint)
    for field in dataclasses.fields(hint):
      required = field.default is field.default_factory  # both are MISSING
      inner = f"{at}.{field.name}" if at else field.name
      if field.name not in value:
        if required:
          return f"`{inner}` is missing"
      elif problem := problem_of(value[field.name], hints[field.name], inner):
        return problem
    return None
  if origin in (dict, list):
    if not isinstance(value, origin):
      kind = "object" if origin is dict else "list"
      return f"{name} must be a JSON {kind}; got {shown(value)}"
    entries = value.items() if origin is dict else enumerate(value)
    for key, item in entries:
      if problem := problem_of(item, arguments[-1], f"{at}.{key}" if at else f"{key}"):
        return problem
    return None
  if origin is typing.Literal:
    # 1 and True are equal.
    is_right = any(type(value) is type(one) and value == one for one in arguments)
    kind = " or ".join(json.dumps(one) if isinstance(one, bool) else repr(one) for one in arguments)
  else:
    is_number = type(value) in (int, float) and _is_finite(value)
    is_right = is_number if hint is float else type(value) is hint
    kind = {float: "a number", int: "an integer", str: "a text", bool: "true or false"}.get(
      hint, "null"
    )
    is_right = value is None if hint is type(None) else is_right
  return None if is_right else f"{name} must be {kind}; got {shown(value)}"


def _is_finite(number: float) -> bool:
  try:
    return math.isfinite(number)
  except OverflowError:  # an integer of hundreds of digits
    return False


def shown(value: Any) -> str:
  """A value in a message: short, on one line, and without control characters."""
  try:
    return printable(repr(value))[:60]
  except ValueError:  # an integer of thousands of digits
    return f"a number of {value.bit_length():,} bits" if isinstance(value, int) else "a long value"


def printable(text: str) -> str:
  """Return the text with control characters, such as those that colour a terminal, escaped."""
  return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def one_line(name: Any) -> str:
  """Return a name, such as that of a file, in one line without control characters."""
  return printable(str(name)).replace("\n", "\\n").replace("\t", "\\t")


def without_control(text: str) -> str:
  """Return a text to print, in which only control characters but ends of lines are escaped."""
  return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def read(
  path: str | os.PathLike[str],
  schema: type,
  remedy: str = "Restore the file, or remove it.",
  *,
  seal: bool = True,
) -> dict[str, Any] | None:
  """Return the object in a file, as `parse_json` does; None if the file does not exist."""
  try:
    content = pathlib.Path(path).read_bytes()
  except FileNotFoundError:
    return None
  return parse_json(content, schema, str(path), remedy, seal=seal)


@dataclasses.dataclass
class JSONRows:
  """The rows of a file of JSON lines, up to the first damaged one.

  Attributes:
    rows: the rows, without their checksums.
    checksums: the checksum of each row, which covers all rows before it.
    lines: the lines of the rows, as they are in the file.
    problem: what is wrong after these rows; None for nothing but a last line without an end, which
      a running or killed process leaves.
  """

  rows: list[dict[str, Any]]
  checksums: list[str]
  lines: list[str]
  problem: DamagedError | None = None


def read_json_rows(
  path: str | os.PathLike[str],
  schema: type,
  remedy: str = "Restore the file, or remove it.",
  *,
  seal: bool = True,
) -> JSONRows:
  """Return the rows of a file; a missing file has none.

  A row's checksum covers the rows before it, so that a row that is lost in the middle shows.
  """
  found = JSONRows([], [], [])
  try:
    content = pathlib.Path(path).read_bytes()
  except FileNotFoundError:
    return found
  *lines, rest = content.split(b"\n")
  if rest and not seal:  # a file that is edited by hand may lack the last end of a line
    lines.append(rest)
  for number, line in enumerate(lines, 1):
    previous = found.checksums[-1] if found.checksums else ""
    try:
      where = f"{path}, line {number},"
      row = parse_json(line, schema, where, remedy, seal=seal, previous=previous)
    except DamagedError as error:
      found.problem = error
      break
    found.rows.append(row)
    found.lines.append(line.decode())
    found.checksums.append(sealed(row, previous)[CHECKSUM] if seal else "")
  return found


def dumps(value: Mapping[str, Any]) -> str:
  """Return an object as one line of JSON; raise ValueError for NaN and infinity."""
  return json.dumps(value, allow_nan=False) + "\n"


def write(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
  """Write an object to a file with its checksum, whole or not at all."""
  write_text(path, json.dumps(sealed(value), indent=2, allow_nan=False) + "\n")


def set_aside(path: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Move a damaged file or folder into a folder, under a name that is free."""
  folder.mkdir(parents=True, exist_ok=True)
  target, number = folder / path.name, 1
  while target.exists():
    target, number = folder / f"{path.name}.{number}", number + 1
  path.rename(target)
  return target


def disk_error(error: Exception, folder: pathlib.Path, last_good: int | None = None) -> Exception:
  """Return an OSError with the remedy for a full disk; other errors unchanged.

  `last_good` is the step of the newest complete checkpoint.
  """
  text, code = str(error), getattr(error, "errno", None)
  lost = LOST_ARRAYS.match(text)
  if code in (errno.EMFILE, errno.ENFILE):
    message = "too many files are open. Raise the limit, as `ulimit -n 4096` does, and run again."
  elif code == errno.ENOSPC or "No space left" in text:
    code, message = errno.ENOSPC, "the disk is full. Free some space and run again to resume."
  elif lost or code in (errno.ENOENT, errno.ESTALE) or os.strerror(errno.ENOENT) in text:
    code, words = code or errno.ENOENT, lost[0] if lost else text[-200:]
    message = (
      f"a file is gone ({words}): the folder was removed or replaced. Run again to start over."
    )
  elif code in NO_PERMISSION:
    message = f"cannot write ({text}). Choose a folder with --run."
  elif code == errno.EIO:
    message = f"the disk fails ({text}). Check it, or choose a folder on another one with --run."
  elif any(phrase in text for phrase in FAILED_WRITES):
    code = errno.EIO
    message = (
      f"a checkpoint could not be written ({text.splitlines()[-1][-200:]}). Check the disk's space"
      " and the limit on file sizes, then run again to resume."
    )
  else:
    return error
  kept = "" if last_good is None else f" Checkpoint {last_good} is complete and kept."
  # Not with the number and the folder, around which Python would put further words.
  explained = OSError(f"{folder}: {message}{kept}")
  explained.errno = code
  return explained
