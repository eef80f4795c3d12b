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

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

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
"""Number of values of each attribute. They are the digits of a class, the border's changes fastest.
"""

NUM_CLASSES = math.prod(RADIX)
"""184,320, one class for each combination of values."""


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
    for name, used in dataclasses.asdict(self).items():
      if not used or len(set(used)) < len(used) or not set(used) <= set(_all(name)):
        raise ValueError(
          f"`grid.{name}` must have values in [0, {len(NAMES[name])}), each once; got {used}. Leave"
          " it out for all."
        )

  @property
  def num_classes(self) -> int:
    """The number of classes."""
    return len(self.classes)

  @functools.cached_property
  def classes(self) -> Int[np.ndarray, "classes"]:
    """The number of each class of the grid among all 184,320, int32."""
    values = np.meshgrid(*dataclasses.astuple(self), indexing="ij")
    return np.ravel_multi_index(values, RADIX).ravel().astype(np.int32)


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


_STAR = np.angle((0.5 * np.exp(0.2j * np.pi) - 1) / 1j)

EDGES = np.array(
  [
    *([n, np.pi / n, np.cos(np.pi / n), np.pi / n, np.cos(np.pi / n)] for n in (64, 4, 3, 5, 6, 8)),
    [5, _STAR, np.cos(_STAR), _STAR, np.cos(_STAR)],
    [4, 0, 1, np.pi / 2, 0.35],  # an arm of the cross: x <= 1 and y <= 0.35
  ],
  np.float32,
)
"""Five numbers a shape: sides, and two half-planes (angle, offset) of a sector.

A point is turned and mirrored into the half sector of the first corner, which lies at (1, 0). A
circle is a polygon with enough sides to be exact to a tenth of a pixel.
"""


def draw(inputs: Integer[Array, "B 2"]) -> Float[Array, "B 100 100 3"]:
  """Draw pictures by (class, number of the drawing), with red, green and blue in [0, 1].

  The number moves the shape by up to 4 pixels, scales it by up to 3 %, tints the ground and draws
  the noise; this never turns one class into another. The function for `ConvNet.images`.
  """
  # Named, so that a picture does not depend on jax's settings.
  first = jax.random.key(0, impl="threefry2x32")
  key_of = lambda c, n: jax.random.fold_in(jax.random.fold_in(first, c), n)
  return jax.vmap(lambda c, n: _picture(c, key_of(c, n)))(inputs[:, 0], inputs[:, 1])


def _picture(class_index: Int[Array, ""], key: PRNGKeyArray) -> Float[Array, "100 100 3"]:
  """Draw one picture: ground, fill, noise, then border and mark on top."""
  values = jnp.unravel_index(class_index, RADIX)
  shape, pattern, rotation, colour, size, texture, opacity, border = values
  position_key, noise_key = jax.random.split(key)
  jitter = jax.random.uniform(position_key, (6,), minval=-1.0)
  radius = jnp.asarray(RADIUS)[size] * (1 + SCALE * jitter[0])
  x, y = _turned(rotation, POSITION * jitter[1:3])
  rho, angle = jnp.hypot(x, y), jnp.arctan2(y, x)
  distance = _distance(shape, rho, angle, radius)
  inside = _covered(-distance)
  fill = jnp.asarray(COLOURS)[colour]
  ground = 1 - GROUND * (1 + jitter[3:6]) / 2
  filled = inside * _pattern(pattern, x, y) * ((opacity + 1) / 4)
  grain = jax.random.uniform(noise_key, (SIDE, SIDE), minval=-NOISE, maxval=NOISE)
  dash = jnp.where(border == 1, _covered(jnp.sin(DASHES * angle) * rho / DASHES), 1.0)
  mark = _covered(0.6 + 0.15 * radius - jnp.hypot(x - 0.45 * radius, y))
  ink = jnp.maximum(_covered(BORDER - jnp.abs(distance)) * dash, mark)
  image = ground + filled[..., None] * (fill - ground)
  image += (texture * inside * grain)[..., None]
  image += ink[..., None] * (SHADE * fill - image)
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
