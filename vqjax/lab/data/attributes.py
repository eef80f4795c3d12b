"""Which attributes make the 184,320 classes of pictures, and how is a class numbered by them?"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, Integer

NAMES = {
  "shape": ("circle", "square", "triangle", "pentagon", "hexagon", "octagon", "star", "cross"),
  "pattern": ("solid", "striped", "dotted", "checkered"),
  "rotation": ("0°", "60°", "120°", "180°", "240°", "300°"),
  "colour": (
    *("red", "green", "blue", "yellow", "purple", "orange"),
    *("pink", "brown", "cyan", "magenta", "lime", "teal"),
  ),
  "size": ("tiny", "small", "medium", "large", "huge"),
  "texture": ("none", "noise"),
  "opacity": ("0.25", "0.5", "0.75", "1.0"),
  "border": ("solid", "dashed"),
}
"""Names of the values of each attribute, in the paper's order: LLM Vocabulary Compression for
Low-Compute Environments, Appendix C.1."""

RADIX = tuple(len(names) for names in NAMES.values())
"""How many values each attribute has: 8, 4, 6, 12, 5, 2, 4 and 2."""

NUM_CLASSES = math.prod(RADIX)
"""184,320: one class for each combination."""


class Attributes(NamedTuple):
  """The number of a value of each attribute, arrays or integers; `NAMES` says what they mean."""

  shape: Any
  pattern: Any
  rotation: Any
  colour: Any
  size: Any
  texture: Any
  opacity: Any
  border: Any


def attributes(class_index: Integer[Array | np.ndarray, "*B"] | int) -> Attributes:
  """The attributes of classes: digits of their numbers, of which the border's goes fastest.

  Of numbers that are only known when compiled code runs, those that are no class have no meaning.

  Raises:
    ValueError: a number outside [0, NUM_CLASSES).
  """
  left, digits = checked(class_index, NUM_CLASSES, "class index"), []
  for radix in reversed(RADIX):
    digits.append(left % radix)
    left = left // radix
  return Attributes(*reversed(digits))


def class_of(values: Attributes) -> Int[Array | np.ndarray, "*B"]:
  """The class that has these attributes: int32.

  Raises:
    ValueError: a value that its attribute does not have.
  """
  total = 0
  for (name, names), value in zip(NAMES.items(), values, strict=True):
    total = total * len(names) + checked(value, len(names), name)
  return total


def caption(class_index: int) -> str:
  """The class in words, such as "a medium red circle, striped, turned by 60°, ..."."""
  words = [names[int(at)] for names, at in zip(NAMES.values(), attributes(class_index))]
  shape, pattern, rotation, colour, size, texture, opacity, border = words
  noise = ", with noise" if texture == "noise" else ""
  return (
    f"a {size} {colour} {shape}, {pattern}, turned by {rotation}{noise}, opacity {opacity},"
    f" {border} border"
  )


def checked(number: Any, count: int, what: str) -> Any:
  """The integers as int32, so that narrow ones do not wrap in what is computed of them.

  Raises:
    ValueError: one is outside [0, count), as far as that is known before compiled code runs.
    TypeError: they are no integers.
  """
  if not isinstance(number, jax.Array):
    number = np.asarray(number)
  if not np.issubdtype(number.dtype, np.integer):
    raise TypeError(f"{what} has dtype {number.dtype}; give integers")
  if not isinstance(number, jax.core.Tracer):
    known = np.asarray(number)
    wrong = known[(known < 0) | (known >= count)]
    if wrong.size:
      raise ValueError(f"{what} {wrong.flat[0]} is outside 0..{count - 1}; give one of these")
  return number.astype(np.int32)


def _all(name: str) -> tuple[int, ...]:
  return tuple(range(len(NAMES[name])))


@dataclasses.dataclass(frozen=True)
class Grid:
  """Some values of each attribute, and the classes that they make, numbered 0..num_classes - 1.

  Each field holds the numbers of the values that are used; `NAMES` has what they mean. All of them,
  the default, make the whole set of classes under their own numbers.

  Raises:
    ValueError: a field is empty, or names a value twice or one that there is not.
  """

  shape: tuple[int, ...] = _all("shape")
  pattern: tuple[int, ...] = _all("pattern")
  rotation: tuple[int, ...] = _all("rotation")
  colour: tuple[int, ...] = _all("colour")
  size: tuple[int, ...] = _all("size")
  texture: tuple[int, ...] = _all("texture")
  opacity: tuple[int, ...] = _all("opacity")
  border: tuple[int, ...] = _all("border")

  def __post_init__(self):
    for name, names in NAMES.items():
      used = getattr(self, name)
      if not used or len(set(used)) < len(used):
        raise ValueError(f"grid.{name} {used} is empty or names a value twice; name some, once")
      checked(used, len(names), f"grid.{name}")

  @property
  def num_classes(self) -> int:
    """How many classes there are."""
    return math.prod(len(getattr(self, name)) for name in NAMES)

  @functools.cached_property
  def classes(self) -> np.ndarray:
    """The number among all 184,320 of each class of the grid: int32 [num_classes]."""
    used = [np.asarray(getattr(self, name), np.int32) for name in NAMES]
    return np.asarray(class_of(Attributes(*np.meshgrid(*used, indexing="ij", copy=False)))).ravel()


EVERY_CLASS = Grid()
"""All 184,320."""
