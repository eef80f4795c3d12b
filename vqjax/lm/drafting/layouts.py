"""The clustered head of drafters that other servers run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vqjax.heads import DenseHead, RoutedHead

__all__ = ["routed_head", "routed_tensors"]

CENTROIDS = "masked_embedding.centroids.weight"
ORDERING = "masked_embedding.token_ordering"
"""Tensors of `Gemma4AssistantForCausalLM`: the centroids [C, D], and the tokens [V] by cluster."""


def routed_tensors(head: RoutedHead, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """The tensors of a routed head under the names of Gemma 4's drafters.

  The config of the drafter has `num_centroids` = head.clusters, `centroid_intermediate_top_k` =
  head.budget and `use_ordered_embeddings` = True; the rows are those of its embedding.

  Raises:
    ValueError: the head has a bias or a cap, which the layout has not, or clusters of two sizes.
  """
  if head.use_bias or head.softcap is not None:
    raise ValueError(
      "`head` must have neither a bias nor a cap, for which Gemma 4's drafters have no place; got"
      f" use_bias={head.use_bias}, softcap={head.softcap}. Train a head without them."
    )
  _check_sizes(head.vocab, head.clusters)
  return {
    CENTROIDS: np.asarray(variables["params"]["centroids"]),
    ORDERING: np.asarray(variables["codes"]["order"], np.int64),
  }


def routed_head(
  head: DenseHead, variables: Mapping[str, Any], tensors: Mapping[str, Any], budget: int = 32
) -> tuple[RoutedHead, dict[str, Any]]:
  """The routed head of a Gemma 4 drafter, and its variables.

  Args:
    head: the dense head over the drafter's rows.
    variables: its variables.
    tensors: arrays under the names of `routed_tensors`, such as those of a safetensors file.
    budget: `centroid_intermediate_top_k` of the drafter's config.

  Raises:
    ValueError: a tensor is missing or has another shape, or the order is not a permutation.
  """
  missing = [name for name in (CENTROIDS, ORDERING) if name not in tensors]
  if missing:
    raise ValueError(
      f"`tensors` must have {CENTROIDS} and {ORDERING}; it lacks {' and '.join(missing)}. Drafters"
      " with `use_ordered_embeddings` = false have a dense head."
    )
  centroids, order = (np.asarray(tensors[name]) for name in (CENTROIDS, ORDERING))
  if centroids.ndim != 2 or centroids.shape[1] != head.dim:
    raise ValueError(
      f"{CENTROIDS} must have shape [C, {head.dim}]; got {list(centroids.shape)}. Give the head of"
      " the drafter, whose width is not the target's."
    )
  if not np.isfinite(centroids.astype(np.float32)).all():
    raise ValueError(f"{CENTROIDS} must be finite; got nan or inf. Read the file again.")
  _check_sizes(head.vocab, len(centroids))
  made, own = RoutedHead.from_dense(head, variables, order, len(centroids), budget)
  centroids = centroids.astype(np.asarray(own["params"]["centroids"]).dtype)
  return made, {**own, "params": {**own["params"], "centroids": centroids}}


def _check_sizes(vocab, clusters):
  if vocab % clusters:
    raise ValueError(
      f"`clusters` must divide the vocabulary, {vocab}, in Gemma 4's layout; got {clusters}. Make"
      " the head with 2048, or another divisor."
    )
