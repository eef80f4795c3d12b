"""How do parameters begin where Flax has no initialiser for it?"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray


@dataclasses.dataclass(frozen=True)
class SymmetricUniform:
  """Uniform in [-scale, scale), as recurrent models of Zaremba et al. begin.

  Attributes:
    scale: of the interval.
  """

  scale: float

  def __call__(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """An array of the shape."""
    return jax.random.uniform(key, shape, dtype, -self.scale, self.scale)
