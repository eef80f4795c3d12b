"""Floating-point operations of the matrix products of a program."""

import math
import re

from vqjax.lab.plan.hlo import HloModule, Instruction, Shape
from vqjax.lab.plan.loops import Runs

__all__ = []


def matmul_flops(program: HloModule, runs: Runs) -> int:
  """Operations of all products and convolutions, 2·m·n·k for each execution.

  Norms, softmax, the optimiser and other elementwise operations are not counted.
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
  """Operations of a convolution, which may be a product on TPUs."""
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
  """Strides, low paddings and dilations of both operands for each spatial axis."""
  inside = re.search(r"window=\{([^}]*)\}", text)
  fields = dict(part.split("=") for part in inside[1].split()) if inside else {}
  numbers = lambda name: [int(n) for n in fields.get(name, "x".join(["1"] * rank)).split("x") if n]
  low = [int(pair.split("_")[0]) for pair in fields.get("pad", "").split("x") if pair]
  return numbers("stride"), low or [0] * rank, numbers("lhs_dilate"), numbers("rhs_dilate")


def _meetings(
  size: int, taps: int, outputs: int, stride: int, low: int, dilation: int, spread: int
) -> int:
  """Number of pairs of an output and a tap that read an element instead of padding."""
  if taps == 1 and stride == 1 and low == 0 and dilation == 1:
    return min(outputs, size)
  positions = (at * stride + tap * spread - low for at in range(outputs) for tap in range(taps))
  return sum(0 <= p < (size - 1) * dilation + 1 and p % dilation == 0 for p in positions)


_COUNTS = {"dot": _dot, "convolution": _convolution}
