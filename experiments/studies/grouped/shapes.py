"""Pictures of 184,320 classes of shapes: their attributes and their drawing.

Source: LLM Vocabulary Compression for Low-Compute Environments, Appendix C.1.
Pictures are drawn from signed distances.

Each attribute is visible for all values of the others. The first corner of a shape and a mark
halfway to it lie in the direction of its rotation: the mark shows how a circle or a symmetric shape
is turned. The pattern turns with the shape. The border and the mark are an opaque dark shade of the
colour, so that a pale colour differs from a strong transparent one. Noise covers the shape only.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from vqjax.ops.vocabulary import in_vocabulary

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
"""Names of the values of each attribute, in the paper's order."""

RADIX = tuple(len(names) for names in NAMES.values())
"""Number of values of each attribute: 8, 4, 6, 12, 5, 2, 4 and 2."""

NUM_CLASSES = math.prod(RADIX)
"""184,320, one class for each combination of values."""


class Attributes(NamedTuple):
  """The number of a value of each attribute, as arrays or integers."""

  shape: Any
  pattern: Any
  rotation: Any
  colour: Any
  size: Any
  texture: Any
  opacity: Any
  border: Any


def attributes(class_index: Integer[Array | np.ndarray, "*B"] | int) -> Attributes:
  """Return the attributes of classes, the digits of their numbers.

  The border's digit changes fastest. Traced class numbers are not checked.

  Raises:
    ValueError: a number is outside [0, NUM_CLASSES).
  """
  left, digits = checked(class_index, NUM_CLASSES, "class_index"), []
  for radix in reversed(RADIX):
    digits.append(left % radix)
    left = left // radix
  return Attributes(*reversed(digits))


def class_of(values: Attributes) -> Int[Array | np.ndarray, "*B"]:
  """Return the class with these attributes, int32.

  Raises:
    ValueError: an attribute does not have the value.
  """
  total = 0
  for (name, names), value in zip(NAMES.items(), values, strict=True):
    total = total * len(names) + checked(value, len(names), name)
  return total


def caption(class_index: int) -> str:
  """Return the class in words, such as "a medium red circle, striped, ..."."""
  words = [names[int(at)] for names, at in zip(NAMES.values(), attributes(class_index))]
  shape, pattern, rotation, colour, size, texture, opacity, border = words
  noise = ", with noise" if texture == "noise" else ""
  return (
    f"a {size} {colour} {shape}, {pattern}, turned by {rotation}{noise}, opacity {opacity},"
    f" {border} border"
  )


def checked(number: Any, count: int, name: str) -> Any:
  """Return checked integers as int32, so that narrow types do not overflow later.

  Raises:
    ValueError: one is outside [0, count); traced values are not checked.
    TypeError: they are not integers.
  """
  if not isinstance(number, jax.Array):
    number = np.asarray(number)
  if not np.issubdtype(number.dtype, np.integer):
    raise TypeError(f"`{name}` must be integers; got {number.dtype}. Convert them.")
  if not isinstance(number, jax.core.Tracer):
    values = np.asarray(number)
    outside = values[(values < 0) | (values >= count)]
    if outside.size:
      raise ValueError(f"`{name}` must be in [0, {count}); got {outside.flat[0]}. Correct it.")
  return number.astype(np.int32)


def _all(name: str) -> tuple[int, ...]:
  return tuple(range(len(NAMES[name])))


@dataclasses.dataclass(frozen=True)
class Grid:
  """A subset of the values of each attribute, and the classes that they make.

  Each field holds the numbers of the values that are used, which `NAMES` names. The default is all
  values, and then classes have their own numbers.

  Raises:
    ValueError: a field is empty, or has a value twice or one outside its attribute.
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
        raise ValueError(
          f"`grid.{name}` must have some values, each once; got {used}. Leave it out for all."
        )
      checked(used, len(names), f"grid.{name}")

  @property
  def num_classes(self) -> int:
    """The number of classes."""
    return math.prod(len(getattr(self, name)) for name in NAMES)

  @functools.cached_property
  def classes(self) -> np.ndarray:
    """The number of each class of the grid among all 184,320: int32 [num_classes]."""
    used = [np.asarray(getattr(self, name), np.int32) for name in NAMES]
    return np.asarray(class_of(Attributes(*np.meshgrid(*used, indexing="ij", copy=False)))).ravel()


SIDE = 100
"""Height and width of a picture, in pixels."""

RADIUS = np.array([11.0, 17.0, 24.0, 32.0, 41.0], np.float32)
"""Distance from the centre to the corners for each size, in pixels."""

COLOURS = np.array(
  [
    *((230, 25, 25), (0, 120, 20), (30, 60, 220), (250, 220, 20)),
    *((110, 20, 140), (255, 140, 0), (255, 120, 165), (130, 75, 30)),
    *((40, 220, 240), (255, 30, 220), (120, 240, 40), (0, 125, 130)),
  ],
  np.float32,
) / np.float32(255)
"""Red, green and blue of each colour, in [0, 1]."""

PERIOD = 8.0
"""Distance between stripes or dots, in pixels."""

PATTERNS = np.array([[9, 0, 0, 0], [0, 1, 0, 0], [-0.5, 1, 1, 0], [0, 0, 0, 1]], np.float32)
"""Weights of 1, cos x, cos y and cos x · cos y in a field that is positive where a pattern is."""

POSITION, SCALE, GROUND = 4.0, 0.03, 0.15
"""Largest shift by a key, in pixels; largest change of scale; largest tint of the ground."""

NOISE, SHADE, BORDER, DASHES = 0.2, 0.4, 1.2, 12
"""Amplitude of noise; brightness of the border; half its width in pixels; number of its dashes."""


def _edges() -> np.ndarray:
  """Five numbers a shape: sides, and two half-planes (angle, offset) of a sector.

  A point is turned and mirrored into the half sector of the first corner, which lies at (1, 0). A
  circle is a polygon with enough sides to be exact to a tenth of a pixel.
  """
  rows = []
  for name in NAMES["shape"]:
    if name == "cross":  # an arm: x <= 1 and y <= 0.35
      rows.append([4, 0.0, 1.0, math.pi / 2, 0.35])
    elif name == "star":
      inner = 0.5 * np.exp(1j * math.pi / 5)
      angle = float(np.angle((inner - 1) / 1j))
      rows.append([5, angle, math.cos(angle), angle, math.cos(angle)])
    else:
      sides = {"circle": 64, "square": 4, "triangle": 3, "pentagon": 5, "hexagon": 6, "octagon": 8}
      half = math.pi / sides[name]
      rows.append([sides[name], half, math.cos(half), half, math.cos(half)])
  return np.array(rows, np.float32)


EDGES = _edges()


def render(class_index: Integer[Array, "*B"], key: PRNGKeyArray) -> Float[Array, "*B 100 100 3"]:
  """Draw pictures of classes, with red, green and blue in [0, 1].

  The key of each moves the shape by up to 4 pixels, scales it by up to 3 %, tints the ground and
  draws the noise; this never turns one class into another. Jitted; a traced class index that is out
  of range gives a picture of nan.

  Args:
    class_index: numbers in [0, NUM_CLASSES), of any integer type.
    key: an array of keys, one for each class index.

  Raises:
    ValueError: a class index is outside [0, NUM_CLASSES), or the keys have another shape.
  """
  if not isinstance(class_index, jax.core.Tracer):
    class_index = jnp.asarray(checked(class_index, NUM_CLASSES, "class_index"))
  if class_index.shape != key.shape:
    raise ValueError(
      f"`key` must have the shape {class_index.shape} of `class_index`; got {key.shape}. Use"
      " jax.random.split."
    )
  return _render(class_index, key)


def draw(inputs: Integer[Array, "*B 2"]) -> Float[Array, "*B 100 100 3"]:
  """Draw pictures by (class index, number of the drawing), which make the key.

  The function for `ConvNet.images`.
  """
  class_index, number = inputs[..., 0], inputs[..., 1]
  # Named, so that a picture does not depend on jax's settings.
  first = jax.random.key(0, impl="threefry2x32")
  key_of = lambda c, n: jax.random.fold_in(jax.random.fold_in(first, c), n)
  keys = jax.vmap(key_of)(class_index.reshape(-1), number.reshape(-1))
  return render(class_index, keys.reshape(class_index.shape))


@jax.jit
def _render(class_index, key):
  valid, index = in_vocabulary(class_index, NUM_CLASSES)
  images = jax.vmap(_picture)(index.reshape(-1), key.reshape(-1))
  images = images.reshape(*class_index.shape, SIDE, SIDE, 3)
  return jnp.where(valid[..., None, None, None], images, jnp.nan)


def _picture(class_index: Int[Array, ""], key: PRNGKeyArray) -> Float[Array, "100 100 3"]:
  """Draw one picture: ground, fill, noise, then border and mark on top."""
  own = attributes(class_index)
  position_key, noise_key = jax.random.split(key)
  jitter = jax.random.uniform(position_key, (6,), minval=-1.0)
  radius = jnp.asarray(RADIUS)[own.size] * (1 + SCALE * jitter[0])
  x, y = _turned(own.rotation, POSITION * jitter[1:3])
  rho, angle = jnp.hypot(x, y), jnp.arctan2(y, x)
  distance = _distance(own.shape, rho, angle, radius)
  inside = _covered(-distance)
  colour = jnp.asarray(COLOURS)[own.colour]
  ground = 1 - GROUND * (1 + jitter[3:6]) / 2
  filled = inside * _pattern(own.pattern, x, y) * ((own.opacity + 1) / 4)
  grain = jax.random.uniform(noise_key, (SIDE, SIDE), minval=-NOISE, maxval=NOISE)
  dash = jnp.where(own.border == 1, _covered(jnp.sin(DASHES * angle) * rho / DASHES), 1.0)
  mark = _covered(0.6 + 0.15 * radius - jnp.hypot(x - 0.45 * radius, y))
  ink = jnp.maximum(_covered(BORDER - jnp.abs(distance)) * dash, mark)
  image = ground + filled[..., None] * (colour - ground)
  image += (own.texture * inside * grain)[..., None]
  image += ink[..., None] * (SHADE * colour - image)
  return jnp.clip(image, 0, 1)


def _turned(rotation, offset):
  """The coordinates of the pixels, [100, 100] each, in the frame of the shape."""
  turn = rotation * (math.pi / 3)
  cos, sin = jnp.cos(turn), jnp.sin(turn)
  middle = (SIDE - 1) / 2
  right = jnp.arange(SIDE) - middle - offset[0]
  up = (middle - jnp.arange(SIDE) - offset[1])[:, None]
  return right * cos + up * sin, up * cos - right * sin


def _distance(shape, rho, angle, radius):
  """The signed distance from the outline in pixels, negative inside.

  It is exact except at corners, outside.
  """
  sides, first, first_offset, second, second_offset = jnp.asarray(EDGES)[shape]
  sector = 2 * math.pi / sides
  folded = jnp.abs(angle - sector * jnp.round(angle / sector))
  return jnp.maximum(
    rho * jnp.cos(folded - first) - radius * first_offset,
    rho * jnp.cos(folded - second) - radius * second_offset,
  )


def _pattern(pattern, x, y):
  """The part of each pixel that the pattern fills."""
  wave = 2 * math.pi / PERIOD
  a, b = jnp.cos(wave * x), jnp.cos(wave * y)
  one, of_x, of_y, of_both = jnp.asarray(PATTERNS)[pattern]
  return _covered((one + of_x * a + of_y * b + of_both * a * b) / wave)


def _covered(depth):
  """The part of a pixel that lies on this side of an edge `depth` pixels away."""
  return jnp.clip(0.5 + depth, 0, 1)
