"""What instructions does a compiled program hold, and how often does each of them run?"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")
_CALLED = re.compile(r"\b(?:calls|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_KNOWN_TRIPS = re.compile(r'"?known_trip_count"?:?=?\{"?n"?:"?(\d+)"?\}')
_TRANSPARENT = frozenset({"bitcast", "convert", "copy", "copy-start", "copy-done", "reshape"})


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
    return -(-self.size * bits(self.dtype) // 8)


class Instruction(NamedTuple):
  """One line of HLO.

  Attributes:
    name: unique in its computation.
    opcode: `dot`, `all-reduce-start`, ...
    shapes: the arrays it returns; several for a tuple.
    operands: names of the instructions it reads.
    text: all that stands after the opcode's opening parenthesis.
    root: whether it is what its computation returns.
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


class Program(NamedTuple):
  """A module: its computations by name, and which of them is run first."""

  computations: dict[str, Computation]
  entry: str

  def shapes(self, computation: str, operand: str) -> tuple[Shape, ...]:
    """The arrays that an operand consists of."""
    return self.computations[computation][operand].shapes


class Runs(NamedTuple):
  """How often computations run.

  Attributes:
    times: executions of each computation that runs, loops multiplied out.
    unknown: loops whose trip count could not be found; they are counted once.
  """

  times: dict[str, int]
  unknown: tuple[str, ...]


def bits(dtype: str) -> int:
  """Bits of one element: 16 for "bf16", 8 for "f8e4m3fn" and "pred", 0 for "token"."""
  found = _BITS.match(dtype)
  if dtype == "pred":
    return 8
  return int(found[1]) if found else 0


def parse(text: str) -> Program:
  """The module whose HLO text is given, of any compiler and any stage.

  Raises:
    ValueError: the text has no entry computation, so it is no HLO module.
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
      current[instruction.name] = instruction
  if entry is None:
    raise ValueError(f"no ENTRY computation in {len(text)} characters; give the text of a module")
  return Program(computations, entry)


def _instruction(root: bool, name: str, rest: str) -> Instruction:
  end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
  type_text, (opcode, text) = rest[:end], rest[end:].strip().split("(", 1)
  shapes = tuple(
    Shape(kind, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n))
    for kind, dims in _SHAPE.findall(type_text)
  )
  inside = text[: _closing("(" + text, 0) - 1]
  operands = re.findall(r"%([\w.\-]+)", inside)
  if not operands and opcode not in ("constant", "parameter"):
    operands = [part.split()[-1] for part in inside.split(",") if part.strip()]
  return Instruction(name, opcode, shapes, tuple(operands), text, root)


def _closing(text: str, start: int) -> int:
  depth = 0
  for at in range(start, len(text)):
    depth += {"(": 1, ")": -1}.get(text[at], 0)
    if depth == 0:
      return at
  return len(text)


def runs(program: Program) -> Runs:
  """How often each computation runs when the program runs once.

  Every branch of a conditional is counted, which is an upper bound. Computations that a reduction,
  a sort or a scatter applies to single elements are left out.
  """
  times: dict[str, int] = defaultdict(int)
  unknown: list[str] = []

  def visit(name: str, count: int):
    times[name] += count
    for instruction in program.computations[name].values():
      factor = 1
      if instruction.opcode == "while":
        trips = trip_count(program, name, instruction)
        factor = 1 if trips is None else trips
        unknown.extend([instruction.name] if trips is None else [])
      for called in called_by(instruction):
        visit(called, count * factor)

  visit(program.entry, 1)
  return Runs(dict(times), tuple(unknown))


def called_by(instruction: Instruction) -> Iterator[str]:
  """Computations that an instruction runs on whole arrays."""
  # The other halves of an asynchronous pair name the same computation again.
  if instruction.opcode in ("async-update", "async-done"):
    return
  yield from _CALLED.findall(instruction.text)
  for names in _BRANCHES.findall(instruction.text):
    yield from (name.strip().lstrip("%") for name in names.split(","))
  if instruction.opcode == "call":
    yield instruction.attribute("to_apply").lstrip("%")


def trip_count(program: Program, where: str, loop: Instruction) -> int | None:
  """Iterations of a `while` in the computation `where`; None where they are not constant.

  The compiler's annotation is taken where there is one. Else the loop must count a variable up from
  a constant, by a constant, while it is below a constant, as `lax.scan` and `lax.fori_loop` do.
  """
  if known := _KNOWN_TRIPS.search(loop.text):
    return int(known[1])
  condition = program.computations[loop.attribute("condition").lstrip("%")]
  root = next(i for i in condition.values() if i.root)
  test = _through_fusion(program, root)
  counter = next((i for i in map(condition.get, root.operands) if _is_counter(i)), None)
  limit = next((v for n in root.operands if (v := constant(condition, n)) is not None), None)
  if limit is None and test is not root:
    inner = program.computations[root.attribute("calls").lstrip("%")]
    limit = next((v for n in test.operands if (v := constant(inner, n)) is not None), None)
  direction = test.attribute("direction")
  if test.opcode != "compare" or counter is None or limit is None:
    return None
  if direction not in ("LT", "LE"):
    return None
  index = int(counter.attribute("index"))
  start, step = _start(program, where, loop, index), _step(program, loop, index)
  return max(0, -(-(limit + (direction == "LE") - start) // step))


def _through_fusion(program: Program, root: Instruction) -> Instruction:
  if root.opcode != "fusion":
    return root
  inner = program.computations[root.attribute("calls").lstrip("%")]
  return next(i for i in inner.values() if i.root)


def _is_counter(instruction: Instruction | None) -> bool:
  return instruction is not None and instruction.opcode == "get-tuple-element"


def constant(computation: Computation, name: str) -> int | None:
  """The integer that an instruction is a copy of; None for anything else."""
  instruction = computation[name]
  while instruction.opcode in _TRANSPARENT and instruction.operands:
    instruction = computation[instruction.operands[0]]
  if instruction.opcode != "constant":
    return None
  found = re.match(r"(-?\d+)\)", instruction.text)
  return int(found[1]) if found else None


def _start(program: Program, where: str, loop: Instruction, index: int) -> int:
  """The first value of the counter: 0 where the text does not show a constant."""
  computation = program.computations[where]
  initial = computation[loop.operands[0]]
  if initial.opcode != "tuple":
    return 0
  return constant(computation, initial.operands[index]) or 0


def _step(program: Program, loop: Instruction, index: int) -> int:
  """What an iteration adds to the counter: 1 where the text does not show a constant."""
  body = program.computations[loop.attribute("body").lstrip("%")]
  root = next(i for i in body.values() if i.root)
  if root.opcode != "tuple":
    return 1
  changed = body[root.operands[index]]
  if changed.opcode == "fusion":
    body = program.computations[changed.attribute("calls").lstrip("%")]
    changed = next(i for i in body.values() if i.root)
  if changed.opcode != "add":
    return 1
  found = [v for name in changed.operands if (v := constant(body, name)) is not None]
  return found[0] if len(found) == 1 and found[0] > 0 else 1
