"""Revival of keys that no vector chooses any more."""

from __future__ import annotations

import abc
import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from vqjax.ops import quantize
from vqjax.quantizers.base import TABLE_AXES, Quantizer, running
from vqjax.variables import Declaration, Variable

__all__ = ["Revival"]


@dataclasses.dataclass(frozen=True)
class Revival:
  """A key that is chosen too rarely is replaced by a random vector of the batch.

  Attributes:
    below: a key is revived where the running mean of the tokens that choose it in a step is below.
    decay: decay of the running mean in each step; the mean starts at one token.

  Raises:
    ValueError: a number is outside its range.
  """

  below: float
  decay: float = 0.99

  def __post_init__(self):
    if not 0 <= self.decay < 1:
      raise ValueError(f"`decay` must be in [0, 1); got {self.decay}. 0.99 is usual.")
    if not 0 < self.below < 1:
      raise ValueError(
        f"`below` must be in (0, 1), since a revived key counts as chosen once; got {self.below}."
        " 0.01 tokens for each step is usual."
      )


class KeyedQuantizer(Quantizer):
  """Base class of quantisers that compare a vector with keys.

  Attributes:
    revival: when a key is revived; None: never. A key that is a parameter keeps its value and is
      moved by an offset, the variable `offset` of the collection `revival`, which an optimiser does
      not see.
  """

  revival: Revival | None = dataclasses.field(default=None, kw_only=True)

  def declare(self) -> Declaration:
    """The base's variables, and running counts and offsets of the keys."""
    declared = dict(super().declare())
    if self.revival is not None:
      shape, options = self._table_shape(self.dim), {"collection": "revival", "random": False}
      ones = lambda key, shape, dtype: jnp.ones(shape, dtype)
      zeros = lambda key, shape, dtype: jnp.zeros(shape, dtype)
      declared["chosen"] = Variable(shape[:2], TABLE_AXES[:2], ones, **options)
      if self._keys_are_parameters:
        declared["offset"] = Variable(shape, TABLE_AXES, zeros, **options)
    return declared

  def check(self) -> None:
    """Check that additive subspaces do not share a table."""
    super().check()
    if self.additive and self.shared:
      raise ValueError(
        "`shared` must be False where `additive` is True, since all subspaces would choose the same"
        " code; got True. Give shared=False."
      )

  @property
  def _keys_are_parameters(self) -> bool:
    return True

  @abc.abstractmethod
  def _own_keys(self) -> Float[Array, "Q K C"]:
    """The parameter that holds the keys, where it exists."""

  def keys(self) -> Float[Array, "Q K C"]:
    """The keys that vectors are compared with, revived ones at their new values."""
    own = jnp.asarray(self._own_keys())
    if self.revival is None:
      return own
    return own + lax.stop_gradient(jnp.asarray(self.array("offset"), own.dtype))

  def _update_state(self, query, codes, mask):
    super()._update_state(query, codes, mask)
    if self.revival is None or not self.is_mutable_collection("revival"):
      return
    counts = quantize.code_counts(codes, self.codes, mask)
    counts = counts.sum(axis=0, keepdims=True) if self.shared else counts
    chosen = running(self.array("chosen"), counts, self.revival.decay, mask)
    # A batch without tokens changes no mean, so it revives no key.
    dead = chosen < self.revival.below
    self.put_variable("revival", "chosen", jnp.where(dead, 1.0, chosen))
    self._revive(dead, quantize.drawn_queries(self.make_rng("sample"), query, dead.shape, mask))

  def _revive(self, dead, fresh):
    offset = fresh - lax.stop_gradient(self._own_keys()).astype(fresh.dtype)
    moved = jnp.where(dead[..., None], offset, self.array("offset"))
    self.put_variable("revival", "offset", moved)
