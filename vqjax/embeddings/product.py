"""What does an embedding look like whose tokens have M fixed codes each?"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Integer

from vqjax.assign.multiple import checked_codes, code_dtype, mixed_radix
from vqjax.embeddings.base import Embedding
from vqjax.embeddings.compact import CompactEmbedding
from vqjax.ops import packing, product, vocab_parallel
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype, Size


class ProductEmbedding(Embedding):
  """Codes that somebody has found, and values that may be trained: K·D parameters, M codes a token.

  What product quantisation of a trained table gives, and what ships of codes that were learned
  first and fixed then. The codes are the variable `codes` of the collection `codes`: saved and
  restored with the parameters, never trained.

  Attributes:
    codes: values to choose from, K.
    subspaces: codes of a token, M.
    shared: one table of values for all of the M codes.
    additive: the vector is the mean of M vectors of width D; False: M parts of width D/M each.
    codes_init: (vocab, codes, subspaces) -> int [V, M].
    values_init: initialiser of the values [M or 1, K, D or D/M].
    dtype: dtype of the vectors handed out; None: that of the parameters.
    param_dtype: dtype of the values.
  """

  codes: int
  subspaces: int
  shared: bool = False
  additive: bool = False
  codes_init: Callable[[int, int, int], np.ndarray] = mixed_radix
  values_init: nn.initializers.Initializer = nn.initializers.normal(0.02)
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def setup(self):
    if self.vocab < 1:
      raise ValueError(f"vocab {self.vocab} holds no token; give at least 1")
    if self.codes < 1 or self.subspaces < 1:
      raise ValueError(
        f"codes {self.codes} and subspaces {self.subspaces} must be at least 1; 32 and 25 are usual"
      )
    if not self.additive and self.dim % self.subspaces:
      raise ValueError(
        f"dim {self.dim} is not divisible by {self.subspaces} subspaces; give a divisor, or"
        " additive=True"
      )
    self.values_table = self.param("values", self.values_init, self._shape, self.param_dtype)
    self.code_table = self.variable("codes", "codes", self._initial_codes)

  @property
  def _shape(self) -> tuple[int, int, int]:
    width = self.dim if self.additive else self.dim // self.subspaces
    return (1 if self.shared else self.subspaces), self.codes, width

  def _initial_codes(self):
    found = np.asarray(self.codes_init(self.vocab, self.codes, self.subspaces))
    return jnp.asarray(checked_codes(found, self.vocab, self.codes, self.subspaces))

  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token's codes; nan for a token outside [0, V)."""
    known, token = in_vocabulary(tokens, self.vocab)
    look_up = lambda rows, token: vocab_parallel.sharded_lookup(
      rows[0], token, self.vocab_axis, jnp.dtype(jnp.int32)
    )
    rows = (vocab_parallel.Sharded(jnp.asarray(self.code_table.value), 0),)
    code = vocab_parallel.over_vocabulary(self.vocab_axis, look_up, rows, token)
    vectors = product.compose(code, self._values(), self.additive).astype(self._out)
    return jnp.where(known[..., None], vectors, jnp.nan)

  def _values(self):
    return jnp.asarray(self.values_table, jnp.float32)

  @property
  def _out(self):
    return jnp.dtype(self.dtype or self.param_dtype)

  def table(self) -> Float[Array, "V D"]:
    """The vectors of the whole vocabulary, in `param_dtype`."""
    code = jnp.asarray(self.code_table.value, jnp.int32)
    return product.compose(code, self._values(), self.additive).astype(self.param_dtype)

  def compact(self, variables: dict) -> CompactEmbedding:
    """What ships: packed codes, and the values."""
    return CompactEmbedding(
      data=packing.packed(np.asarray(variables["codes"]["codes"]), packing.bits_for(self.codes)),
      values=np.asarray(variables["params"]["values"], np.float32),
      vocab=self.vocab,
      dim=self.dim,
      codes=self.codes,
      subspaces=self.subspaces,
      additive=self.additive,
      dtype=self._out.name,
    )

  def shipped(self) -> Size:
    """`compact`'s: float32 values, and codes at ceil(log2 K) bits."""
    params, _, adding = self.size()
    bits = packing.bits_for(self.codes)
    codes = packing.packed_bytes(self.vocab, self.subspaces, bits)
    return Size(params, 4 * params + codes, adding)

  def size(self) -> Size:
    """The values, and the codes as they lie in memory; an additive look-up adds up M vectors."""
    params = int(np.prod(self._shape))
    codes = self.vocab * self.subspaces * code_dtype(self.codes).itemsize
    adding = self.subspaces * self.dim if self.additive else 0
    return Size(params, params * jnp.dtype(self.param_dtype).itemsize + codes, adding)

  def logical_axes(self) -> dict:
    """Axes of the values and of the codes."""
    return {
      "params": {"values": ("subspaces", "sub_codes", "sub_embed")},
      "codes": {"codes": ("vocab", "subspaces")},
    }
