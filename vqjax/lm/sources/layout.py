"""Layouts of tensors in files, and of the variables that they become."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

__all__ = []


@dataclasses.dataclass(frozen=True)
class Layout:
  """A reshaping and a permutation of axes, such as "(h c) d -> d h c".

  A name is the length of an axis, a number the length itself, and parentheses join axes, of which
  the first varies slowest. The left side is the tensor of the file, the right side the variable.

  Attributes:
    text: the two sides.
  """

  text: str

  @property
  def keeps_rows(self) -> bool:
    """Whether the first axis of the tensor is also that of the variable."""
    (first, *_), (own, *_) = self._sides
    return first == own and len(first) == 1

  @property
  def _sides(self) -> list[list[list[str]]]:
    """Both sides as a list of axes, each a list of the names that it joins."""
    sides = self.text.split("->")
    return [[axis.strip("()").split() for axis in re.findall(r"\([^)]*\)|\S+", s)] for s in sides]

  def _lengths(self, shape: Sequence[int], side: int) -> dict[str, int]:
    """The length of each name, from the shape of the file's (0) or the variable's (1) tensor."""
    known: dict[str, int] = {}
    for axis, length in zip(self._sides[side], shape, strict=True):
      known |= {name: int(name) for name in axis if name.isdigit()}
      unknown = [name for name in axis if name not in known]
      rest = math.prod(known[name] for name in axis if name in known)
      # Only one name of an axis may be unknown, as in "(2 i)".
      known |= dict.fromkeys(unknown[:1], length // rest)
    return known

  def file_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the file's tensor, from that of the variable."""
    lengths = self._lengths(shape, 1)
    return tuple(math.prod(lengths[name] for name in axis) for axis in self._sides[0])

  def variable(self, tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The variable of this shape; a view of the tensor where its axes are only permuted."""
    return self._moved(tensor, shape, 0, 1).reshape(shape)

  def tensor(self, variable: np.ndarray) -> np.ndarray:
    """The file's tensor, of a variable."""
    shape = variable.shape
    return self._moved(variable, shape, 1, 0).reshape(self.file_shape(shape))

  def _moved(self, array, shape, of, to):
    lengths, sides = self._lengths(shape, 1), self._sides
    names, wanted = ([name for axis in sides[side] for name in axis] for side in (of, to))
    return array.reshape([lengths[name] for name in names]).transpose(
      [names.index(name) for name in wanted]
    )
