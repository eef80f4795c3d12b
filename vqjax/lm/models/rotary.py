"""Rotary position embeddings, and the scalings of their frequencies for long contexts."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

__all__ = ["LinearScaling", "Llama3", "Rotary", "Yarn"]


@dataclasses.dataclass(frozen=True)
class LinearScaling:
  """Positions divided by a factor. Source: Chen et al., Position Interpolation, 2023.

  Attributes:
    factor: the divisor.
  """

  factor: float

  magnitude = 1.0
  """Factor of cosines and sines."""

  def __call__(self, frequency: np.ndarray, base: float) -> np.ndarray:
    """The scaled frequencies."""
    del base
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

  magnitude = 1.0

  def __call__(self, frequency: np.ndarray, base: float) -> np.ndarray:
    """The scaled frequencies."""
    del base
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
  """

  factor: float
  context: int
  fast: float = 32.0
  slow: float = 1.0
  attention: float | None = None

  @property
  def magnitude(self) -> float:
    """Factor of cosines and sines, and so the square root of that of the scores."""
    return yarn_magnitude(self.factor) if self.attention is None else self.attention

  def __call__(self, frequency: np.ndarray, base: float) -> np.ndarray:
    """The scaled frequencies."""
    number = lambda turns: (
      len(frequency) * math.log(self.context / (turns * 2 * math.pi)) / math.log(base)
    )
    first = max(math.floor(number(self.fast)), 0)
    last = min(math.ceil(number(self.slow)), 2 * len(frequency) - 1)
    divided = np.clip((np.arange(len(frequency)) - first) / max(last - first, 1e-3), 0, 1)
    return (1 - divided) * frequency + divided * frequency / self.factor


@dataclasses.dataclass(frozen=True)
class Divisors:
  """Each frequency divided by a number of its own, as a GGUF gives them.

  Attributes:
    divisors: a number for each of C/2 frequencies.
  """

  divisors: tuple[float, ...]

  magnitude = 1.0

  def __call__(self, frequency: np.ndarray, base: float) -> np.ndarray:
    """The scaled frequencies."""
    del base
    return frequency / np.array(self.divisors)


@dataclasses.dataclass(frozen=True)
class Rotary:
  """Rotation of queries and keys by angles that grow with the position.

  Entry i and entry i + C/2 of a head of width C are the two coordinates of a plane, which position
  t turns by t · base^(-2i/C). Source: Su et al., RoFormer, 2021; halves as in GPT-NeoX.

  Attributes:
    base: ratio of the first to the last frequency, almost.
    scaling: a scaling of the frequencies, `LinearScaling`, `Llama3`, `Yarn` or `Divisors`; None:
      none.
  """

  base: float = 10_000.0
  scaling: LinearScaling | Llama3 | Yarn | Divisors | None = None

  def table(
    self, position: Int[Array, "*B T"], width: int
  ) -> tuple[Float[Array, "*B T half"], Float[Array, "*B T half"]]:
    """Cosines and sines of the angles of each position, float32."""
    frequency, magnitude = self.base ** -(np.arange(0, width, 2) / width), 1.0
    if self.scaling is not None:
      frequency, magnitude = self.scaling(frequency, self.base), self.scaling.magnitude
    angle = position[..., None].astype(jnp.float32) * np.float32(frequency)
    return magnitude * jnp.cos(angle), magnitude * jnp.sin(angle)


def rotate(
  x_BTHC: Float[Array, "B T H C"], cos: Float[Array, "*b T half"], sin: Float[Array, "*b T half"]
) -> Float[Array, "B T H C"]:
  """The vectors of each head, turned; computed in float32."""
  first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[..., None, :], sin[..., None, :]
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x_BTHC.dtype)
