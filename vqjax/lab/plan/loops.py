"""Execution counts of the parts of a compiled program, with loops multiplied out."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from vqjax.lab.plan.hlo import Computation, HloModule, Instruction

__all__ = []

_CALLED = re.compile(r"\b(?:calls|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_KNOWN_TRIPS = re.compile(r'"?known_trip_count"?:?=?\{"?n"?:"?(\d+)"?\}')
_TRANSPARENT = frozenset({"bitcast", "convert", "copy", "copy-start", "copy-done", "reshape"})


class Runs(NamedTuple):
  """Execution counts of computations.

  Attributes:
    times: executions of each computation, with loops multiplied out.
    unknown: loops with an unknown trip count, which are counted once.
  """

  times: dict[str, int]
  unknown: tuple[str, ...]


def runs(program: HloModule) -> Runs:
  """Count the executions of each computation in one run of the program.

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
  """Names of the computations that an instruction applies to whole arrays."""
  # The other halves of an asynchronous pair name the same computation again.
  if instruction.opcode in ("async-update", "async-done"):
    return
  yield from _CALLED.findall(instruction.text)
  for names in _BRANCHES.findall(instruction.text):
    yield from (name.strip().lstrip("%") for name in names.split(","))
  if instruction.opcode == "call":
    yield instruction.attribute("to_apply").lstrip("%")


def trip_count(program: HloModule, where: str, loop: Instruction) -> int | None:
  """Number of iterations of a `while` in the computation `where`, or None.

  The compiler's annotation is used if present. Otherwise the loop must count a variable up from a
  constant by a constant to a constant, as `lax.scan` and `lax.fori_loop` do.
  """
  if known := _KNOWN_TRIPS.search(loop.text):
    return int(known[1])
  condition = program.computations[loop.attribute("condition").lstrip("%")]
  root = next(i for i in condition.values() if i.root)
  test = _through_fusion(program, root)
  sources = (_source(condition, name) for name in root.operands)
  counter = next((i for i in sources if i.opcode == "get-tuple-element"), None)
  limit = next((v for n in root.operands if (v := _constant(condition, n)) is not None), None)
  if limit is None and test is not root:
    inner = program.computations[root.attribute("calls").lstrip("%")]
    limit = next((v for n in test.operands if (v := _constant(inner, n)) is not None), None)
  direction = test.attribute("direction")
  if test.opcode != "compare" or counter is None or limit is None:
    return None
  if direction not in ("LT", "LE"):
    return None
  index = int(counter.attribute("index"))
  start, step = _start(program, where, loop, index), _step(program, loop, index)
  return max(0, -(-(limit + (direction == "LE") - start) // step))


def _through_fusion(program: HloModule, root: Instruction) -> Instruction:
  if root.opcode != "fusion":
    return root
  inner = program.computations[root.attribute("calls").lstrip("%")]
  return next(i for i in inner.values() if i.root)


def _source(computation: Computation, name: str) -> Instruction:
  """The instruction of which `name` is a copy, up to layout and type."""
  instruction = computation[name]
  while instruction.opcode in _TRANSPARENT and instruction.operands:
    instruction = computation[instruction.operands[0]]
  return instruction


def _constant(computation: Computation, name: str) -> int | None:
  """The integer constant of which `name` is a copy; None for anything else."""
  instruction = _source(computation, name)
  if instruction.opcode != "constant":
    return None
  found = re.match(r"(-?\d+)\)", instruction.text)
  return int(found[1]) if found else None


def _start(program: HloModule, where: str, loop: Instruction, index: int) -> int:
  """The first value of the counter; 0 if the text shows no constant."""
  computation = program.computations[where]
  initial = computation[loop.operands[0]]
  if initial.opcode != "tuple":
    return 0
  return _constant(computation, initial.operands[index]) or 0


def _step(program: HloModule, loop: Instruction, index: int) -> int:
  """The increment of the counter; 1 if the text shows no constant."""
  body = program.computations[loop.attribute("body").lstrip("%")]
  root = next(i for i in body.values() if i.root)
  if root.opcode != "tuple":
    return 1
  changed = _source(body, root.operands[index])
  if changed.opcode == "fusion":
    body = program.computations[changed.attribute("calls").lstrip("%")]
    changed = next(i for i in body.values() if i.root)
  if changed.opcode != "add":
    return 1
  found = [v for name in changed.operands if (v := _constant(body, name)) is not None]
  return found[0] if len(found) == 1 and found[0] > 0 else 1
