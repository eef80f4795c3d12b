"""Variables of trained layers: parts, merging, and conversion to fixed codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from vqjax.assign.multiple import code_dtype
from vqjax.embeddings import CompactEmbedding
from vqjax.heads import CodebookHead, Head, ProductHead
from vqjax.ops import bit_packing
from vqjax.ops.product import nearest_codes

__all__ = ["frozen", "head_of", "merged", "part_of", "to_head", "with_part"]

Variables = dict[str, Any]
"""{collection: {name: array or subtree}}, as `module.init` returns it."""


def part_of(variables: Mapping[str, Any], name: str) -> Variables:
  """The variables of a model's submodule `name`, such as "head" or "embedding"."""
  return {collection: tree[name] for collection, tree in variables.items() if name in tree}


def head_of(model: nn.Module, variables: Mapping[str, Any]) -> tuple[Head, Variables]:
  """The head of a model as a layer by itself, and its variables.

  Those of a tied head include the embedding's, under the name "embedding". The pair is that of
  `flax.linen.Module.unbind`: `head.apply(variables, ...)`, or `vqjax.nnx.from_linen(*pair)`.

  Args:
    model: a model with fields `head` and `embedding`, such as `checkpoints.load` returns.
    variables: its variables.
  """
  head, own = model.head.clone(parent=None), part_of(variables, "head")
  if getattr(head, "embedding", None) is not None:
    for collection, tree in part_of(variables, "embedding").items():
      own[collection] = {**own.get(collection, {}), "embedding": tree}
  return head, own


def with_part(variables: Mapping[str, Any], name: str, part: Mapping[str, Any]) -> Variables:
  """A model's variables with those of the submodule `name` replaced by `part`."""
  replaced = {
    collection: {key: subtree for key, subtree in tree.items() if key != name}
    for collection, tree in variables.items()
  }
  for collection, subtree in part.items():
    replaced[collection] = replaced.get(collection, {}) | {name: subtree}
  return {collection: tree for collection, tree in replaced.items() if tree}


def merged(fresh: Any, given: Any) -> Any:
  """`fresh` with the arrays of `given` in place of its own, cast to its dtypes.

  Raises:
    ValueError: `given` has a variable that `fresh` does not have.
  """
  if not isinstance(given, dict):
    return np.asarray(given, np.asarray(fresh).dtype)
  if unknown := given.keys() - fresh.keys():
    raise ValueError(
      f"`given` must have variables of the model, {', '.join(sorted(fresh))}; got"
      f" {', '.join(sorted(unknown))}. Use the model that the conversion is for."
    )
  return fresh | {name: merged(fresh[name], value) for name, value in given.items()}


def frozen(learned: Mapping[str, Any]) -> Variables:
  """The variables of a fixed head from those of a head that learned its codes.

  A `LearnedProductHead` becomes a `ProductHead` and a `LearnedCodebookHead` becomes a
  `CodebookHead`, with the same distribution in evaluation.

  Args:
    learned: the head's own variables, {"params": {...}, "codes": {...}}.

  Raises:
    ValueError: the head has no learned codes.
  """
  params = dict(learned["params"])
  if "latent" in params:
    codes = np.asarray(jax.jit(nearest_codes)(params.pop("latent"), params["tables"]))
    fixed = {"codes": codes.astype(code_dtype(params["tables"].shape[1]))}
  elif "choice" in params:
    best = np.asarray(params.pop("choice")).argmax(axis=-1)[:, None]
    candidates = np.asarray(learned["codes"]["candidates"])
    fixed = {"assignment": np.take_along_axis(candidates, best, axis=-1)[:, 0].astype(np.int32)}
  else:
    raise ValueError(
      "`learned` must be the variables of a LearnedProductHead or a LearnedCodebookHead; got a head"
      f" with {', '.join(sorted(params)) or 'no parameters'}. Convert the head that"
      " was trained."
    )
  return {"params": params, "codes": fixed}


def to_head(
  small: CompactEmbedding, bias: Float[Array, "V"] | None = None, **options: Any
) -> tuple[Head, Variables]:
  """The head that scores with a compact embedding's vectors, and its variables.

  It is a `ProductHead`, or a `CodebookHead` where a token has one code. A trained
  `DenseHead(embedding=DPQEmbedding(...))` is converted so: the input and the output then have the
  same codes and values. A table that all subspaces share is repeated for each subspace. The pair is
  that of `flax.linen.Module.unbind`: `head.apply(variables, ...)`, or `head.bind(variables)`.

  Args:
    small: the result of `compress`, of `embedding.compact(variables)` or of
      `CompactEmbedding.load`.
    bias: the bias of the trained head; None: that of `small`, if it has one.
    options: further fields of the head, such as `dtype`.

  Raises:
    ValueError: the vectors are sums of codewords (`additive`), which a ProductHead cannot score.
  """
  if small.additive:
    raise ValueError(
      "`small.additive` must be False, because a ProductHead concatenates sub-vectors; got True."
      " Train the embedding with additive=False."
    )
  bias = small.bias if bias is None else bias
  params = {} if bias is None else {"token_bias": jnp.asarray(bias, jnp.float32)}
  tokens = jnp.arange(small.vocab)
  codes = bit_packing.bit_unpacked_rows(
    jnp.asarray(small.data), tokens, small.subspaces, small.bits
  )
  codes, values = np.asarray(codes), jnp.asarray(small.values)
  fields = {"token_bias": bias is not None} | options
  if small.subspaces == 1 and small.codes <= small.vocab and small.basis is None:
    head = CodebookHead(small.vocab, small.dim, small.codes, **fields)
    params["codebook"] = values[0]
    return head, {"params": params, "codes": {"assignment": codes[:, 0].astype(np.int32)}}
  if small.basis is not None:
    fields, params["basis"] = {"rotated": True} | fields, jnp.asarray(small.basis, jnp.float32)
  head = ProductHead(small.vocab, small.dim, small.codes, small.subspaces, **fields)
  params["tables"] = jnp.broadcast_to(values, (small.subspaces, *values.shape[1:]))
  return head, {"params": params, "codes": {"codes": codes.astype(code_dtype(small.codes))}}
