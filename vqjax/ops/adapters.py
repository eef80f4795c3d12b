"""The tiled loss under the signatures of other libraries, for their call sites.

Each function has the name, the arguments and the result of the original, but computes logits a tile
at a time, forward and backward. Where the original takes logits, the function takes hidden vectors
and a kernel [D, V] instead. Results are float32; a label outside of the vocabulary gives nan, where
an original may wrap or clip it. Modules of a model are read by the attributes that the originals
read, without an import of the library.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from vqjax.ops import vocab_parallel
from vqjax.ops.row_factory import columns
from vqjax.ops.softmax import linear_cross_entropy, linear_softmax
from vqjax.ops.vocabulary import check_arrays
from vqjax.types import MeshAxes

__all__ = [
  "compute_chunked_logps",
  "linear_softmax_cross_entropy_loss",
  "softmax_cross_entropy_with_integer_labels",
  "vocab_tiling_nnx_loss",
]


def softmax_cross_entropy_with_integer_labels(
  hidden: Float[Array, "*B D"],
  kernel: Float[Array, "D V"],
  labels: Integer[Array, "*B"],
  axis: int = -1,
  where: Bool[Array, "..."] | None = None,
  **options: Any,
) -> Float[Array, "*B"]:
  """Cross-entropy of each label, as Optax computes it from logits = hidden · kernel.

  Args:
    hidden: one vector for each label.
    kernel: one column for each class.
    labels: classes in [0, V).
    axis: axis of the classes in the logits, which is their last.
    where: False for labels that are left out, [*B] or [*B, 1]: their loss is 0, without a gradient.
    **options: further options of `linear_cross_entropy`, such as `vocab_axis`.

  Raises:
    ValueError: `axis` is another axis, `where` selects single classes, or as
      `linear_cross_entropy`.
  """
  if axis not in (-1, hidden.ndim - 1):
    raise ValueError(
      f"`axis` must be the last one, -1 or {hidden.ndim - 1}; got {axis}. Move the classes of other"
      " logits to the end."
    )
  check_arrays(where=where)
  if where is not None:
    if where.dtype != bool or where.shape not in (labels.shape, (*labels.shape, 1)):
      raise ValueError(
        f"`where` must be bool of shape {labels.shape} or {(*labels.shape, 1)}; got"
        f" {where.dtype} of shape {where.shape}. Remove classes with a bias of -inf instead."
      )
    where = where.reshape(labels.shape)
  return linear_cross_entropy(hidden, columns(kernel), labels, mask=where, **options)


def linear_softmax_cross_entropy_loss(
  x: Float[Array, "B H"],
  labels: Integer[Array, "B"],
  weights: Float[Array, "H V"],
  *,
  reduction: Literal["sum", "mean", "none"] = "sum",
  precision: Any = None,
  implementation: Any = None,
  **options: Any,
) -> Float[Array, "..."]:
  """Cross-entropy of a linear layer, as tokamax computes it.

  Args:
    x: one vector for each label.
    labels: classes in [0, V).
    weights: one column for each class.
    reduction: "sum" and "mean" over the labels, or "none".
    precision: None, as in tokamax.
    implementation: ignored: there is one.
    **options: further options of `linear_cross_entropy`, such as `vocab_axis`.

  Raises:
    ValueError: `reduction` is unknown, or as `linear_cross_entropy`.
    NotImplementedError: `precision` is not None.
  """
  del implementation
  if precision is not None:
    raise NotImplementedError(
      f"`precision` must be None; got {precision}. Give dtype=jnp.float32 for float32 operands, and"
      " set jax_default_matmul_precision for their products."
    )
  return linear_cross_entropy(x, columns(weights), labels, reduction=reduction, **options)


def vocab_tiling_nnx_loss(
  model: Any,
  hidden_states: Float[Array, "*B D"],
  data: dict[str, Array],
  config: Any,
  is_train: bool,
  *,
  vocab_axis: MeshAxes | None = "tensor",
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Summed loss with its z-loss, and the z-loss alone, as MaxText's vocabulary tiling has them.

  Args:
    model: a MaxText model: `decoder.decoder_norm` and `decoder.dropout` are applied, and the weight
      is `token_embedder.embedding` or `decoder.logits_dense.kernel`.
    hidden_states: hidden states before the final norm.
    data: "targets", and "targets_segmentation", which is 0 for padding.
    config: `enable_dropout`, `logits_via_embedding`, `normalize_embedding_logits`,
      `final_logits_soft_cap`, `logits_dot_in_fp32`, `dtype` and `z_loss_multiplier` are read.
    is_train: whether dropout may be on.
    vocab_axis: mesh axis over which the vocabulary is sharded, or a tuple of several; ignored where
      the mesh in context lacks one of them.

  Raises:
    ValueError: as `linear_softmax`.
  """
  decoder = model.decoder
  deterministic = not (config.enable_dropout and is_train)
  hidden = decoder.dropout(decoder.decoder_norm(hidden_states), deterministic=deterministic)
  dtype, softcap = jnp.float32 if config.logits_dot_in_fp32 else config.dtype, None
  if config.logits_via_embedding:
    weight = model.token_embedder.embedding[...]
    softcap = config.final_logits_soft_cap or None
    if config.normalize_embedding_logits:
      hidden = hidden / hidden.shape[-1] ** 0.5
  else:
    weight = columns(decoder.logits_dense.kernel[...])
  stats = linear_softmax(
    hidden,
    weight,
    data["targets"],
    mask=data["targets_segmentation"] != 0,
    softcap=softcap,
    dtype=dtype,
    vocab_axis=vocab_axis if vocab_parallel.in_mesh(vocab_axis) else None,
  )
  # Both are sums: the caller divides by the number of targets, as with the original.
  z_loss = config.z_loss_multiplier * jnp.sum(stats.log_z**2)
  return z_loss - jnp.sum(stats.log_prob), z_loss


def compute_chunked_logps(
  model: Any,
  hidden_states: Float[Array, "*B D"],
  target_ids: Integer[Array, "*B"],
  temperature: float,
  chunk_size: int,
  return_entropy: bool,
  **options: Any,
) -> Float[Array, "*B"] | tuple[Float[Array, "*B"], Float[Array, "*B"]]:
  """Log-probabilities of tokens, and the entropies on request, as tunix computes them.

  Args:
    model: a tunix model: the weight is `lm_head.w`, or `embedder.input_embedding` of a tied model;
      `config` may have a `final_logit_softcap`.
    hidden_states: hidden states after the final norm.
    target_ids: the tokens.
    temperature: divides the logits; 0 stands for 1, as in tunix.
    chunk_size: ignored: tiles are chosen by the device.
    return_entropy: whether to return the entropies too.
    **options: further options of `linear_softmax`, such as `mask` and `vocab_axis`.

  Raises:
    ValueError: as `linear_softmax`.
  """
  del chunk_size
  config = model.config
  tied = getattr(config, "use_tied_embedding", getattr(config, "weight_tying", None))
  if tied is None:
    # Gemma models have no such setting, and no other weight.
    tied = not hasattr(model, "lm_head")
  stats = linear_softmax(
    hidden_states,
    model.embedder.input_embedding[...] if tied else columns(model.lm_head.w[...]),
    target_ids,
    temperature=temperature or 1.0,
    softcap=getattr(config, "final_logit_softcap", None),
    entropy=return_entropy,
    **{"dtype": getattr(config, "dtype", None)} | options,
  )
  return (stats.log_prob, stats.entropy) if return_entropy else stats.log_prob
