"""What do the letters and records that every part of vqjax shares mean?

One glossary of dimension letters, used as suffixes of array names and in jaxtyping signatures:

  B  batch: any number of leading axes      K  codes of a codebook
  N  tokens: a batch, flattened             G  groups of the vocabulary
  T  time                                   S  slots of a group
  D  model width                            M  subspaces of a product quantiser
  V  vocabulary                             W  a tile or block of the vocabulary
"""

from typing import Any, NamedTuple

Dtype = Any
"""Whatever `jnp.dtype` accepts."""


class Size(NamedTuple):
  """What a vocabulary layer costs, from its fields alone.

  Attributes:
    params: number of trained parameters that the layer itself owns; a tied head owns none of its
      embedding's.
    state_bytes: bytes of all variables it owns, at their own dtypes: parameters and integer tables.
    flops_per_token: floating-point operations of `log_prob` (a head) or of a look-up (an
      embedding) for one token, forward, counting a multiply-add as two.
  """

  params: int
  state_bytes: int
  flops_per_token: int
