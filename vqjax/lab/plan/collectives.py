"""Collective operations of a program: kinds, bytes and mesh axes."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from vqjax.lab.plan.hlo import HloModule, Instruction
from vqjax.lab.plan.loops import Runs

__all__ = []

KINDS = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-broadcast",
  "collective-permute",
)
_MESH_GROUPS = re.compile(
  r"mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective operation of a program.

  Attributes:
    kind: one of `KINDS`.
    bytes: the whole array that a group reduces, gathers or exchanges, once, as one device sees it:
      a gather's result, any other's operand.
    group: devices that take part together.
    axes: the axes of the mesh along which they differ.
    spread: the farthest two of them are apart, in the mesh's order of devices.
    times: how often it runs.
  """

  kind: str
  bytes: int
  group: int
  axes: tuple[str, ...]
  spread: int
  times: int

  @property
  def sent(self) -> float:
    """Bytes that one device sends in all runs, a lower bound for ring algorithms.

    2(n-1)/n of the array for an all-reduce over n devices; (n-1)/n for a gather, a reduce-scatter
    and an exchange, whose hops over more than one link are not counted; 1 for a permutation.
    """
    n = self.group
    factor = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(self.kind, (n - 1) / n)
    return factor * self.bytes * self.times


def collectives(program: HloModule, runs: Runs, mesh: Mapping[str, int]) -> list[Collective]:
  """List the collectives that move data in a program on a mesh (axis -> devices).

  An all-reduce of which each device keeps its own slice alone counts as the reduce-scatter that
  compilers for accelerators make of it.
  """
  found = []
  for name, times in runs.times.items():
    seen = set()
    for instruction in program.computations[name].values():
      kind = instruction.opcode.removesuffix("-start")
      # Before optimisation the same gather may be written twice; it is done once.
      same = kind, instruction.operands, instruction.shapes, instruction.attribute("replica_groups")
      if kind in KINDS and same not in seen:
        seen.add(same)
        found.append(_collective(program, name, instruction, kind, times, mesh))
  return [one for one in found if one.group > 1 and one.bytes]


def _collective(program, computation, instruction, kind, times, mesh) -> Collective:
  groups = _device_groups(instruction, math.prod(mesh.values()))
  group = groups.shape[1]
  operands = sum(
    shape.bytes for name in instruction.operands for shape in program.shapes(computation, name)
  )
  if kind == "all-reduce" and _is_sliced(program, computation, instruction, group):
    kind = "reduce-scatter"
  size = operands * group if kind == "all-gather" else operands
  spread = int((groups.max(axis=1) - groups.min(axis=1)).max()) if groups.size else 0
  return Collective(kind, size, group, spanned(groups, mesh), spread, times)


def _is_sliced(program: HloModule, computation: str, instruction: Instruction, group: int) -> bool:
  """Whether every reader of an all-reduce keeps only the shard of its device."""
  readers = list(_readers(program.computations[computation], instruction))
  return bool(readers) and all(
    reader.opcode == "dynamic-slice" and reader.shapes[0].size * group == read.size
    for reader, read in readers
  )


def _readers(computation, instruction) -> Iterator:
  for reader in computation.values():
    if instruction.name in reader.operands:
      if reader.opcode in ("get-tuple-element", "bitcast", "reshape", "copy", "convert"):
        yield from _readers(computation, reader)
      else:
        yield reader, instruction.shapes[0]


def spanned(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
  """Mesh axes along which the devices of some group differ."""
  if not groups.size:
    return ()
  coordinates = np.stack(np.unravel_index(groups, tuple(mesh.values())))
  differ = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
  return tuple(axis for axis, differs in zip(mesh, differ, strict=True) if differs)


def _device_groups(instruction: Instruction, devices: int) -> np.ndarray:
  """Device groups [groups, devices] of a collective; pairs for a permutation.

  Raises:
    ValueError: the groups are written in a form that is not known.
  """
  text = instruction.text
  if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}", text):
    numbers = np.array([int(n) for n in re.findall(r"\d+", pairs[1])], int).reshape(-1, 2)
    return numbers[numbers[:, 0] != numbers[:, 1]]
  at = text.find("replica_groups=")
  return parse_groups(text[at + len("replica_groups=") :] if at >= 0 else "{}", devices)


def parse_groups(text: str, devices: int) -> np.ndarray:
  """Device groups [groups, devices], from any of the three forms of HLO.

  {{0,1},{2,3}}; [2,2]<=[4] or [2,2]<=[2,2]T(1,0): the numbers below 4 as an array of the second
  shape, transposed, reshaped to the first; mesh['a'=2,'b'=2] {'b'}: along axes of a mesh, whose
  devices may be in another order, mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}.

  Raises:
    ValueError: another form.
  """
  if text.startswith("{}"):
    return np.arange(devices).reshape(1, -1)
  if found := re.match(r"\{((?:\{[\d,]*\},?\s*)+)\}", text):
    return np.array([_numbers(group) for group in re.findall(r"\{([\d,]*)\}", found[1])])
  if found := re.match(r"\[([\d,]+)\](<=\[[\d,]+\](?:T\([\d,]+\))?)", text):
    return _iota(found[2]).reshape(_numbers(found[1]))
  if found := _MESH_GROUPS.match(text):
    return _along_axes(*found.groups())
  raise ValueError(
    f"`replica_groups` must be in a form that parse_groups reads; got {text[:80]!r}. Add the form."
  )


def _iota(text: str) -> np.ndarray:
  """Expand "<=[2,4]T(1,0)": the numbers from 0 in this shape, transposed."""
  found = re.match(r"<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
  shape = _numbers(found[1])
  numbers = np.arange(math.prod(shape)).reshape(shape)
  return numbers.transpose(_numbers(found[2])) if found[2] else numbers


def _along_axes(mesh: str, order: str | None, axes: str) -> np.ndarray:
  """Groups along axes of a mesh in HLO; 'b':(2)2 is a part of an axis."""
  sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
  ids = np.arange(math.prod(sizes.values()))
  if order is not None:
    ids = _iota(f"<={order.removeprefix('<=')}") if "[" in order else np.array(_numbers(order))
  parts = {name: [(name, size)] for name, size in sizes.items()}
  chosen = []
  for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes):
    if before:
      after = sizes[name] // (int(before) * int(size))
      parts[name] = [(name, int(before)), (f"{name}*", int(size)), (f"{name}**", after)]
    chosen.append(f"{name}*" if before else name)
  flat = [part for some in parts.values() for part in some]
  names = [name for name, _ in flat]
  array = ids.reshape([size for _, size in flat])
  kept = [at for at, name in enumerate(names) if name not in chosen]
  moved = [names.index(name) for name in chosen]
  group = math.prod(flat[at][1] for at in moved)
  return array.transpose(kept + moved).reshape(-1, group)


def _numbers(text: str) -> list[int]:
  return [int(n) for n in text.split(",") if n]
