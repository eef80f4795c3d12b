"""Time of a program for TPUs by the compiler's own account of each fusion.

The executable's text gives `estimated_cycles` for each operation on the chip. They are added up,
with loops multiplied out, and divided by the clock. It is an estimate of one compiler for one chip
without contention, not a run: operations without an account (kernels written by hand, copies to
other memory that overlap with products) count nothing.
"""

import re
from collections import Counter
from typing import NamedTuple

from vqjax.lab.plan import hlo, loops

__all__ = ["CLOCK", "estimate"]

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NAME = re.compile(r'op_name="([^"]*)"')

CLOCK = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
"""Cycles a second: the published bfloat16 peak over 131,072, 262,144 and 524,288 operations."""


class InstructionCost(NamedTuple):
  """Executions of one instruction.

  Attributes:
    name: the instruction, and the JAX operation at its root.
    result: its first result, as "f32[2048,4096]".
    times: number of executions.
    cycles: of all of them.
  """

  name: str
  result: str
  times: int
  cycles: int


class CycleEstimate(NamedTuple):
  """Cycles of a program, and its parts in descending order.

  Attributes:
    cycles: sum over all parts.
    parts: instructions that have an account.
    unknown: number of loops whose trip count is not in the text; they count once.
  """

  cycles: int
  parts: tuple[InstructionCost, ...]
  unknown: int


def estimate(text: str) -> CycleEstimate:
  """Cycles of an executable from its text; of a conditional, the branch that costs less."""
  program = hlo.parse_hlo(text)
  unknown = 0

  def parts_of(name: str, times: int) -> Counter:
    nonlocal unknown
    found = Counter()
    for instruction in program.computations[name].values():
      if instruction.opcode == "while":
        trips = loops.trip_count(program, name, instruction)
        unknown += trips is None
        body = instruction.attribute("body").lstrip("%")
        found += parts_of(body, times * (1 if trips is None else trips))
      elif instruction.opcode == "conditional":
        branches = [parts_of(called, times) for called in loops.called_by(instruction)]
        found += min(branches, key=Counter.total)
      elif cycles := _CYCLES.search(instruction.text):
        found[_part(instruction, times)] += times * int(cycles[1])
    return found

  parts = parts_of(program.entry, 1)
  largest = (InstructionCost(*key, cycles) for key, cycles in parts.most_common())
  return CycleEstimate(parts.total(), tuple(largest), unknown)


def _part(instruction: hlo.Instruction, times: int) -> tuple[str, str, int]:
  found = _NAME.search(instruction.text)
  operation = found[1].rsplit("/", 1)[-1] if found else instruction.opcode
  shape = instruction.shapes[0] if instruction.shapes else hlo.Shape("token", ())
  result = f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
  return f"{instruction.name} ({operation})", result, times
