"""How many floating-point operations does a program spend in matrix products?"""

import math
import re

from experiments.plan.hlo import Instruction, Program, Shape
from experiments.plan.loops import Runs


def matmul_flops(program: Program, runs: Runs) -> int:
  """Operations in all products and convolutions, 2·m·n·k each, times how often they run.

  What is between the products (norms, softmax, the optimiser) is left out.
  """
  total = 0
  for name, times in runs.times.items():
    for instruction in program.computations[name].values():
      if count := _COUNTS.get(instruction.opcode):
        operands = [program.shapes(name, operand)[0] for operand in instruction.operands]
        total += times * count(instruction, *operands)
  return total


def _dot(instruction: Instruction, lhs: Shape, rhs: Shape) -> int:
  del rhs
  found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.text)
  axes = [int(axis) for axis in found[1].split(",") if axis] if found else []
  return 2 * instruction.shapes[0].size * math.prod(lhs.dims[axis] for axis in axes)


def _convolution(instruction: Instruction, lhs: Shape, rhs: Shape) -> int:
  """TPUs write every product so: a batch axis is a window that meets each element once."""
  lhs_labels, rhs_labels, out_labels = re.search(
    r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.text
  ).groups()
  out = instruction.shapes[0]
  outer = out.dims[out_labels.index("b")] * out.dims[out_labels.index("f")]
  inner = rhs.dims[rhs_labels.index("i")]
  window = _window(instruction.text, len(out_labels) - 2)
  pairs = math.prod(
    _meetings(
      lhs.dims[lhs_labels.index(label)],
      rhs.dims[rhs_labels.index(label)],
      out.dims[out_labels.index(label)],
      *(field[at] for field in window),
    )
    for at, label in enumerate(str(n) for n in range(len(out_labels) - 2))
  )
  return 2 * outer * inner * pairs


def _window(text: str, rank: int) -> tuple[list, list, list, list]:
  """Strides, low paddings, and dilations of both operands, for each spatial axis."""
  inside = re.search(r"window=\{([^}]*)\}", text)
  fields = dict(part.split("=") for part in inside[1].split()) if inside else {}
  numbers = lambda name: [int(n) for n in fields.get(name, "x".join(["1"] * rank)).split("x") if n]
  low = [int(pair.split("_")[0]) for pair in fields.get("pad", "").split("x") if pair]
  return numbers("stride"), low or [0] * rank, numbers("lhs_dilate"), numbers("rhs_dilate")


def _meetings(
  size: int, taps: int, outputs: int, stride: int, low: int, dilation: int, spread: int
) -> int:
  """Pairs of an output and a tap that read an element, neither padding nor a hole."""
  if taps == 1 and stride == 1 and low == 0 and dilation == 1:
    return min(outputs, size)
  places = (at * stride + tap * spread - low for at in range(outputs) for tap in range(taps))
  return sum(0 <= p < (size - 1) * dilation + 1 and p % dilation == 0 for p in places)


_COUNTS = {"dot": _dot, "convolution": _convolution}
