"""How often does each part of a compiled program run, its loops multiplied out?"""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from experiments.plan.hlo import Computation, Instruction, Program

_CALLED = re.compile(r"\b(?:calls|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_KNOWN_TRIPS = re.compile(r'"?known_trip_count"?:?=?\{"?n"?:"?(\d+)"?\}')
_TRANSPARENT = frozenset({"bitcast", "convert", "copy", "copy-start", "copy-done", "reshape"})


class Runs(NamedTuple):
  """How often computations run.

  Attributes:
    times: executions of each computation that runs, loops multiplied out.
    unknown: loops whose trip count could not be found; they are counted once.
  """

  times: dict[str, int]
  unknown: tuple[str, ...]


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
  sources = (source(condition, name) for name in root.operands)
  counter = next((i for i in sources if i.opcode == "get-tuple-element"), None)
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


def source(computation: Computation, name: str) -> Instruction:
  """What an instruction is a copy of, its own kind or another one's layout or type."""
  instruction = computation[name]
  while instruction.opcode in _TRANSPARENT and instruction.operands:
    instruction = computation[instruction.operands[0]]
  return instruction


def constant(computation: Computation, name: str) -> int | None:
  """The integer that an instruction is a copy of; None for anything else."""
  instruction = source(computation, name)
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
  changed = source(body, root.operands[index])
  if changed.opcode == "fusion":
    body = program.computations[changed.attribute("calls").lstrip("%")]
    changed = next(i for i in body.values() if i.root)
  if changed.opcode != "add":
    return 1
  found = [v for name in changed.operands if (v := constant(body, name)) is not None]
  return found[0] if len(found) == 1 and found[0] > 0 else 1
