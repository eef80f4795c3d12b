"""What becomes of a key that no vector chooses any more?"""

import abc
import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from vqjax.ops import quantize
from vqjax.quantizers.base import TABLE_AXES, Quantizer, running


@dataclasses.dataclass(frozen=True)
class Revival:
  """A key that is chosen too rarely takes the place of a random vector of the batch.

  Attributes:
    below: tokens a step that choose a key, as a running mean, below which it is revived.
    decay: of the running mean, a step; it begins at one token.

  Raises:
    ValueError: a number outside its range.
  """

  below: float
  decay: float = 0.99

  def __post_init__(self):
    if not 0 <= self.decay < 1:
      raise ValueError(f"decay {self.decay} is outside [0, 1); 0.99 is usual")
    if not 0 < self.below < 1:
      raise ValueError(
        f"below {self.below} is outside (0, 1): a revived key counts as chosen once a step; 0.01"
        " tokens a step is usual, and no Revival for none"
      )


class KeyedQuantizer(Quantizer):
  """What quantisers share that compare a vector with keys.

  Attributes:
    revival: when a key is revived; None: never. A key that is a parameter stays where it is and is
      moved by an offset, the variable `offset` of the collection `revival`, which an optimiser does
      not see.
  """

  revival: Revival | None = dataclasses.field(default=None, kw_only=True)

  def _check(self):
    super()._check()
    if self.additive and self.shared:
      raise ValueError(
        "a vector that is not cut (additive=True) has one answer in a table that all subspaces"
        " share; give shared=False"
      )

  def setup(self):
    super().setup()
    if self.revival is None:
      return
    shape = self._table_shape(self.dim)
    self.chosen = self.variable("revival", "chosen", lambda: jnp.ones(shape[:2]))
    if self._keys_are_parameters:
      self.offset = self.variable("revival", "offset", lambda: jnp.zeros(shape))

  @property
  def _keys_are_parameters(self) -> bool:
    return True

  @abc.abstractmethod
  def _own_keys(self) -> Float[Array, "Q K C"]:
    """The parameter that the keys are, where they are one."""

  def keys(self) -> Float[Array, "Q K C"]:
    """What vectors are compared with: the parameter, or where its keys have been revived."""
    own = jnp.asarray(self._own_keys())
    if self.revival is None:
      return own
    return own + lax.stop_gradient(jnp.asarray(self.offset.value, own.dtype))

  def _learn(self, query, codes, mask):
    super()._learn(query, codes, mask)
    if self.revival is None or not self.is_mutable_collection("revival"):
      return
    how = self.revival
    counts = quantize.code_counts(codes, self.codes, mask)
    counts = counts.sum(axis=0, keepdims=True) if self.shared else counts
    chosen = running(self.chosen.value, counts, how.decay, mask)
    # Below at the last batch, it had been revived: a batch without a token revives none.
    dead = chosen < how.below
    self.chosen.value = jnp.where(dead, 1.0, chosen)
    self._revive(dead, quantize.drawn_queries(self.make_rng("sample"), query, dead.shape, mask))

  def _revive(self, dead, fresh):
    offset = fresh - lax.stop_gradient(self._own_keys()).astype(fresh.dtype)
    self.offset.value = jnp.where(dead[..., None], offset, self.offset.value)

  def logical_axes(self) -> dict:
    """Axes of the tables, of the running counts and of the offset."""
    axes = super().logical_axes()
    if self.revival is not None:
      axes["revival"] = {"chosen": TABLE_AXES[:2]}
      if self._keys_are_parameters:
        axes["revival"]["offset"] = TABLE_AXES
    return axes
