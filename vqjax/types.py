"""Dimension letters and records that all parts of vqjax share.

The letters are used as suffixes of array names and in jaxtyping signatures:

  B  batch: any number of leading axes      K  codes of a codebook
  N  tokens: a batch, flattened             G  groups of the vocabulary
  T  time                                   S  slots of a group
  D  model width                            M  subspaces of a product quantiser
  V  vocabulary                             W  a tile or block of the vocabulary
"""

from typing import Any, NamedTuple

__all__ = ["Dtype", "MeshAxes", "Shape", "Size"]

Dtype = Any
"""A type that `jnp.dtype` accepts."""

MeshAxes = str | tuple[str, ...]
"""A mesh axis, or several in the order in which they number devices, as in a `PartitionSpec`."""

Shape = tuple[Any, ...]
"""Lengths of axes: integers, or the symbols of `jax.export`."""


class Size(NamedTuple):
  """Cost of a vocabulary layer, computed from its fields without variables.

  Attributes:
    params: number of trained parameters that the layer owns; a tied head does not own the
      parameters of its embedding.
    state_bytes: bytes of all variables that it owns, parameters and integer tables.
    flops_per_token: floating-point operations of `log_prob` (of a head) or of a lookup (of an
      embedding) for one token, without gradients; a multiply-add counts as two.
  """

  params: int
  state_bytes: int
  flops_per_token: int
