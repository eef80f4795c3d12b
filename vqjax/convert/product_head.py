"""Which head scores with the codes and values of a compact embedding?"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vqjax.assign.multiple import code_dtype
from vqjax.embeddings import CompactEmbedding
from vqjax.heads import ProductHead
from vqjax.ops import packing


def to_head(
  small: CompactEmbedding, bias: Float[Array, "V"] | None = None, **options: Any
) -> tuple[ProductHead, dict[str, Any]]:
  """A `ProductHead` whose rows are the embedding's vectors, and its variables.

  What a `DenseHead(embedding=DPQEmbedding(...))` becomes once it is trained: input and output have
  the same codes and values. A table that all subspaces share is repeated for each.

  Args:
    small: what `embedding.compact(variables)` gave, or a file.
    bias: the trained head's bias, if it has one.
    options: further fields of the head, such as `softcap`.

  Raises:
    ValueError: the vectors are sums (`additive`), which no ProductHead has.
  """
  if small.additive:
    raise ValueError(
      "additive codes are sums of whole vectors, which a ProductHead does not have; train with"
      " additive=False"
    )
  size = small.vocab, small.dim, small.codes, small.subspaces
  head = ProductHead(*size, token_bias=bias is not None, **options)
  shape = small.subspaces, small.codes, small.dim // small.subspaces
  params = {"tables": jnp.broadcast_to(jnp.asarray(small.values), shape)}
  if bias is not None:
    params["token_bias"] = jnp.asarray(bias)
  every = jnp.arange(small.vocab)
  codes = packing.unpacked_rows(jnp.asarray(small.data), every, small.subspaces, small.bits)
  kind = code_dtype(small.codes)
  return head, {"params": params, "codes": {"codes": np.asarray(codes).astype(kind)}}
