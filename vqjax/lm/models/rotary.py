"""Rotary position embeddings, and the scalings of their frequencies for long contexts."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

__all__ = ["Dynamic", "LinearScaling", "Llama3", "LongRope", "Rotary", "Yarn"]


@dataclasses.dataclass(frozen=True)
class LinearScaling:
  """Positions divided by a factor. Source: Chen et al., Position Interpolation, 2023.

  Attributes:
    factor: the divisor.
  """

  factor: float

  magnitude = 1.0
  """Factor of cosines and sines."""

  by_length = False
  """Whether the frequencies depend on the length of a text."""

  def __call__(self, frequency: np.ndarray, base: float, length: Int[Array, "*b 1"]) -> np.ndarray:
    """The scaled frequencies."""
    del base, length
    return frequency / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3:
  """Low frequencies divided by a factor, high ones kept, and a ramp between, as in Llama 3.1.

  Attributes:
    factor: the divisor of low frequencies.
    low: turns within `context` below which a frequency is low.
    high: turns within `context` above which a frequency is high.
    context: positions that the model was trained with before its context was extended.
  """

  factor: float
  low: float
  high: float
  context: int

  magnitude, by_length = 1.0, False

  def __call__(self, frequency: np.ndarray, base: float, length: Int[Array, "*b 1"]) -> np.ndarray:
    """The scaled frequencies."""
    del base, length
    turns = self.context * frequency / (2 * math.pi)
    kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
    return kept * frequency + (1 - kept) * frequency / self.factor


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
  """Factor of cosines and sines for a context that is so many times as long."""
  return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class Yarn:
  """A ramp over the frequencies' numbers, and larger scores. Source: Peng et al., YaRN, 2023.

  Attributes:
    factor: the divisor of low frequencies.
    context: positions that the model was trained with before its context was extended.
    fast: turns within `context` above which a frequency is kept.
    slow: turns within `context` below which a frequency is divided.
    attention: factor of cosines and sines; None: that of the paper.
    truncate: the ends of the ramp are whole numbers.
  """

  factor: float
  context: int
  fast: float = 32.0
  slow: float = 1.0
  attention: float | None = None
  truncate: bool = True

  by_length = False

  @property
  def magnitude(self) -> float:
    """Factor of cosines and sines, and so the square root of that of the scores."""
    return yarn_magnitude(self.factor) if self.attention is None else self.attention

  def __call__(self, frequency: np.ndarray, base: float, length: Int[Array, "*b 1"]) -> np.ndarray:
    """The scaled frequencies."""
    del length
    number = lambda turns: (
      len(frequency) * math.log(self.context / (turns * 2 * math.pi)) / math.log(base)
    )
    first, last = number(self.fast), number(self.slow)
    if self.truncate:
      first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(frequency) - 1)
    divided = np.clip((np.arange(len(frequency)) - first) / max(last - first, 1e-3), 0, 1)
    return (1 - divided) * frequency + divided * frequency / self.factor


@dataclasses.dataclass(frozen=True)
class Divisors:
  """Each frequency divided by a number of its own, as a GGUF gives them.

  Attributes:
    divisors: a number for each of C/2 frequencies.
  """

  divisors: tuple[float, ...]

  magnitude, by_length = 1.0, False

  def __call__(self, frequency: np.ndarray, base: float, length: Int[Array, "*b 1"]) -> np.ndarray:
    """The scaled frequencies."""
    del base, length
    return frequency / np.array(self.divisors)


@dataclasses.dataclass(frozen=True)
class Dynamic:
  """A larger base for texts that are longer than `context`, as transformers' "dynamic" scaling.

  The base grows with the length of the text, its largest position and 1.

  Attributes:
    factor: how much longer a text is for which the base is stretched by about as much.
    context: length up to which nothing is changed.
  """

  factor: float
  context: int

  magnitude, by_length = 1.0, True

  def __call__(
    self, frequency: np.ndarray, base: float, length: Int[Array, "*b 1"]
  ) -> Float[Array, "*b half"]:
    """The scaled frequencies."""
    del base
    width = 2 * len(frequency)
    length = jnp.maximum(length, self.context).astype(jnp.float32)
    growth = self.factor * length / self.context - (self.factor - 1)
    # Frequency i is base^(-2i/C), and the base grows by growth^(C/(C-2)).
    power = np.arange(0, width, 2, dtype=np.float32) / (width - 2)
    return np.float32(frequency) * growth**-power


@dataclasses.dataclass(frozen=True)
class LongRope:
  """Frequencies divided by numbers of their own, others for long texts. Source: LongRoPE, 2024.

  Attributes:
    short: a divisor for each frequency, in texts of at most `context` tokens.
    long: a divisor for each frequency, in longer texts.
    context: positions that the model was trained with before its context was extended.
    magnitude: factor of cosines and sines.
  """

  short: tuple[float, ...]
  long: tuple[float, ...]
  context: int
  magnitude: float = 1.0

  by_length = True

  def __call__(
    self, frequency: np.ndarray, base: float, length: Int[Array, "*b 1"]
  ) -> Float[Array, "*b half"]:
    """The scaled frequencies."""
    del base
    short, long = (np.float32(frequency / np.array(x)) for x in (self.short, self.long))
    return jnp.where(length > self.context, long, short)


@dataclasses.dataclass(frozen=True)
class Rotary:
  """Rotation of queries and keys by angles that grow with the position.

  Entry i and entry i + C/2 of a head of width C are the two coordinates of a plane, which position
  t turns by t · base^(-2i/C). Source: Su et al., RoFormer, 2021; halves as in GPT-NeoX.

  Attributes:
    base: ratio of the first to the last frequency, almost.
    scaling: a scaling of the frequencies; None: none.
    fraction: part of each head that is turned, from its first entry on; the rest stays.
  """

  base: float = 10_000.0
  scaling: LinearScaling | Llama3 | Yarn | Divisors | Dynamic | LongRope | None = None
  fraction: float = 1.0

  def table(
    self, position: Int[Array, "*B T"], width: int
  ) -> tuple[Float[Array, "*B T half"], Float[Array, "*B T half"]]:
    """Cosines and sines of the angles of each position, float32.

    A text is as long as the largest of its positions and 1, whatever others in a batch are.
    """
    width = int(width * self.fraction)
    frequency, magnitude = self.base ** -(np.arange(0, width, 2) / width), 1.0
    if self.scaling is not None:
      frequency = self.scaling(frequency, self.base, position.max(-1, keepdims=True) + 1)
      magnitude = self.scaling.magnitude
    frequency = jnp.asarray(frequency, jnp.float32)
    angle = position[..., None].astype(jnp.float32) * frequency[..., None, :]
    return magnitude * jnp.cos(angle), magnitude * jnp.sin(angle)


def rotate(
  x_BTHC: Float[Array, "B T H C"], cos: Float[Array, "*b T half"], sin: Float[Array, "*b T half"]
) -> Float[Array, "B T H C"]:
  """The first entries of each head, turned, and the rest; computed in float32."""
  width = 2 * cos.shape[-1]
  first, second = jnp.split(x_BTHC[..., :width].astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[..., None, :], sin[..., None, :]
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  turned = turned.astype(x_BTHC.dtype)
  if width == x_BTHC.shape[-1]:
    return turned
  return jnp.concatenate([turned, x_BTHC[..., width:]], axis=-1)
