"""How is the picture of a class drawn, from signed distances, inside compiled code?

Each attribute shows, whatever the others are. A shape lies with its first corner in the direction
of its rotation, and a mark lies there too, halfway to the corner: by it one sees how a circle is
turned, and a shape that a turn brings onto itself. The pattern turns with the shape. The border and
the mark are a dark shade of the colour and opaque, so that a pale colour is told from a strong one
that is seen through. Noise lies on all of the shape, seen through or not, and never beside it.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from vqjax.lab.data.attributes import (
  NAMES,
  NUM_CLASSES,
  Attributes,
  attributes,
  caption,
  checked,
  class_of,
)
from vqjax.ops.vocabulary import in_vocabulary

__all__ = [
  "NAMES",
  "NUM_CLASSES",
  "SIDE",
  "Attributes",
  "attributes",
  "caption",
  "class_of",
  "draw",
  "render",
]

SIDE = 100
"""Rows and columns of a picture, in pixels."""

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
"""Pixels from a stripe to the next, or from a dot to the next."""

PATTERNS = np.array([[9, 0, 0, 0], [0, 1, 0, 0], [-0.5, 1, 1, 0], [0, 0, 0, 1]], np.float32)
"""Weights of 1, cos x, cos y and cos x · cos y in a field that is positive where a pattern is."""

POSITION, SCALE, GROUND = 4.0, 0.03, 0.15
"""How far a key moves a shape, in pixels; scales it; darkens the ground."""

NOISE, SHADE, BORDER, DASHES = 0.2, 0.4, 1.2, 12
"""Largest change by noise; brightness of the border; half its width in pixels; its dashes."""


def _edges() -> np.ndarray:
  """Per shape: sides, and two half-planes (angle, offset) that bound a sector around a corner.

  A point is turned and mirrored into the half sector of the first corner, which lies at (1, 0). A
  circle is a polygon of so many sides that it is nowhere a tenth of a pixel off.
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
  """Pictures of classes, in [0, 1]; red, green and blue come last.

  The key of each moves the shape by up to 4 pixels, scales it by up to 3 %, tints the ground and
  draws the noise: never as much as tells one class from another. Jitted; a class index that is out
  of range and only known when compiled code runs gives a picture of nan.

  Args:
    class_index: numbers in [0, NUM_CLASSES), of any integer type.
    key: a key for each, an array of keys of the same shape.

  Raises:
    ValueError: a class index outside [0, NUM_CLASSES).
  """
  if not isinstance(class_index, jax.core.Tracer):
    class_index = jnp.asarray(checked(class_index, NUM_CLASSES, "class index"))
  if class_index.shape != key.shape:
    raise ValueError(
      f"class indices {class_index.shape} have keys {key.shape}; give each its own, by"
      " jax.random.split"
    )
  return _render(class_index, key)


def draw(inputs: Integer[Array, "*B 2"]) -> Float[Array, "*B 100 100 3"]:
  """Pictures by (class index, number of the drawing), which make the key: `ConvNet.images`."""
  class_index, number = inputs[..., 0], inputs[..., 1]
  # Named, so that a picture does not depend on jax's settings.
  first = jax.random.key(0, impl="threefry2x32")
  key_of = lambda c, n: jax.random.fold_in(jax.random.fold_in(first, c), n)
  keys = jax.vmap(key_of)(class_index.reshape(-1), number.reshape(-1))
  return render(class_index, keys.reshape(class_index.shape))


@jax.jit
def _render(class_index, key):
  known, index = in_vocabulary(class_index, NUM_CLASSES)
  images = jax.vmap(_picture)(index.reshape(-1), key.reshape(-1))
  images = images.reshape(*class_index.shape, SIDE, SIDE, 3)
  return jnp.where(known[..., None, None, None], images, jnp.nan)


def _picture(class_index: Int[Array, ""], key: PRNGKeyArray) -> Float[Array, "100 100 3"]:
  """One picture: ground, fill, noise, then border and mark on top."""
  own = attributes(class_index)
  place_key, noise_key = jax.random.split(key)
  jitter = jax.random.uniform(place_key, (6,), minval=-1.0)
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
  """Coordinates of the pixels, [100, 100] each, in a frame that lies and turns with the shape."""
  turn = rotation * (math.pi / 3)
  cos, sin = jnp.cos(turn), jnp.sin(turn)
  middle = (SIDE - 1) / 2
  right = jnp.arange(SIDE) - middle - offset[0]
  up = (middle - jnp.arange(SIDE) - offset[1])[:, None]
  return right * cos + up * sin, up * cos - right * sin


def _distance(shape, rho, angle, radius):
  """Signed distance from the outline in pixels, negative inside; exact but for corners, outside."""
  sides, first, first_offset, second, second_offset = jnp.asarray(EDGES)[shape]
  sector = 2 * math.pi / sides
  folded = jnp.abs(angle - sector * jnp.round(angle / sector))
  return jnp.maximum(
    rho * jnp.cos(folded - first) - radius * first_offset,
    rho * jnp.cos(folded - second) - radius * second_offset,
  )


def _pattern(pattern, x, y):
  """How much of each pixel the pattern fills."""
  wave = 2 * math.pi / PERIOD
  a, b = jnp.cos(wave * x), jnp.cos(wave * y)
  one, of_x, of_y, of_both = jnp.asarray(PATTERNS)[pattern]
  return _covered((one + of_x * a + of_y * b + of_both * a * b) / wave)


def _covered(depth):
  """The part of a pixel that lies on this side of an edge `depth` pixels away."""
  return jnp.clip(0.5 + depth, 0, 1)
