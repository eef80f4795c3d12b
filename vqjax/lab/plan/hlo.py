"""Instructions of a compiled program, parsed from its HLO text.

JAX has no API for them: `memory_analysis` is used where it suffices, but `cost_analysis` counts the
body of a loop once, adds elementwise operations to products and knows no collectives.
"""

import math
import re
from typing import NamedTuple

__all__ = []

_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")


class Shape(NamedTuple):
  """The type of an array: an element type as HLO spells it, and dimensions."""

  dtype: str
  dims: tuple[int, ...]

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    """Bytes of the array, without the padding of any layout."""
    return -(-self.size * _bits(self.dtype) // 8)


class Instruction(NamedTuple):
  """One line of HLO.

  Attributes:
    name: unique in its computation.
    opcode: `dot`, `all-reduce-start`, ...
    shapes: the arrays it returns; several for a tuple.
    operands: names of the instructions it reads.
    text: the text after the opcode's opening parenthesis.
    root: whether its computation returns it.
  """

  name: str
  opcode: str
  shapes: tuple[Shape, ...]
  operands: tuple[str, ...]
  text: str
  root: bool

  def attribute(self, name: str) -> str | None:
    """The value of `name=...`, up to the next comma or space; None without one."""
    found = re.search(rf"\b{name}=([^\s,]+)", self.text)
    return found[1] if found else None


Computation = dict[str, Instruction]


class HloModule(NamedTuple):
  """A module: its computations by name, and the name of its entry."""

  computations: dict[str, Computation]
  entry: str

  def shapes(self, computation: str, operand: str) -> tuple[Shape, ...]:
    """Shapes of the arrays of an operand."""
    return self.computations[computation][operand].shapes


def _bits(dtype: str) -> int:
  """Bits of one element: 16 for "bf16", 8 for "f8e4m3fn" and "pred", 0 for "token"."""
  found = _BITS.match(dtype)
  if dtype == "pred":
    return 8
  return int(found[1]) if found else 0


def parse_hlo(text: str) -> HloModule:
  """Parse the HLO text of a module, from any compiler and any stage.

  Raises:
    ValueError: the text has no entry computation.
  """
  computations: dict[str, Computation] = {}
  entry, current = None, {}
  for line in text.splitlines():
    line = _COMMENT.sub("", line) if "/*" in line else line
    if header := _HEADER.match(line):
      current = computations.setdefault(header[2], {})
      entry = header[2] if header[1] else entry
    elif found := _INSTRUCTION.match(line):
      instruction = _instruction(bool(found[1]), found[2], found[3])
      for name in instruction.operands:
        if "#" in name:
          current.setdefault(name, _element(current, name))
      current[instruction.name] = instruction
  if entry is None:
    raise ValueError(
      f"`text` must have an ENTRY computation; got {len(text)} characters without one. Pass the"
      " text of a whole module."
    )
  return HloModule(computations, entry)


def _instruction(root: bool, name: str, rest: str) -> Instruction:
  end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
  type_text, (opcode, text) = rest[:end], rest[end:].strip().split("(", 1)
  shapes = tuple(
    Shape(kind, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n))
    for kind, dims in _SHAPE.findall(type_text)
  )
  inside = text[: _closing("(" + text, 0) - 1]
  operands = re.findall(r"%([\w.\-]+(?:#\d+)?)", inside)
  if not operands and opcode not in ("constant", "parameter"):
    operands = [part.split()[-1] for part in inside.split(",") if part.strip()]
  return Instruction(name, opcode, shapes, tuple(operands), text, root)


def _element(computation: Computation, name: str) -> Instruction:
  """The instruction of an element that jaxlib 0.12 writes in place, as `%tuple#1`."""
  of, _, index = name.partition("#")
  # `shapes` is flat: a tuple within a tuple would shift the index.
  shapes = computation[of].shapes[int(index) :][:1]
  return Instruction(name, "get-tuple-element", shapes, (of,), f"%{of}), index={index}", False)


def _closing(text: str, start: int) -> int:
  depth = 0
  for at in range(start, len(text)):
    depth += {"(": 1, ")": -1}.get(text[at], 0)
    if depth == 0:
      return at
  return len(text)
