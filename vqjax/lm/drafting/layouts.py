"""Vocabulary layers of drafters that other servers run: clustered heads, trimmed vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from vqjax.heads import DenseHead, RoutedHead

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


def draft_offsets(tokens: ArrayLike, vocab: int) -> dict[str, np.ndarray]:
  """The maps of a trimmed vocabulary under EAGLE-3's names: `d2t` and `t2d`.

  d2t int64 [T] holds offsets, not ids: token i of the drafter is token i + d2t[i] of the target.
  t2d bool [V] marks the target's tokens that the drafter has.

  Args:
    tokens: integers [T], the target's tokens that the drafter keeps, in the drafter's order.
      EAGLE-3 sorts them; FR-Spec's list, sorted by frequency, is this array itself.
    vocab: number of tokens of the target.

  Raises:
    ValueError: a token occurs twice or is outside [0, vocab).
  """
  ids = _checked_ids(tokens, vocab)
  has = np.zeros(vocab, bool)
  has[ids] = True
  return {"d2t": ids - np.arange(len(ids)), "t2d": has}


def draft_tokens(d2t: ArrayLike, vocab: int, t2d: ArrayLike | None = None) -> Int[np.ndarray, "T"]:
  """The target's token for each token of a drafter with EAGLE-3's map of offsets.

  Args:
    d2t: offsets, integers [T].
    vocab: number of tokens of the target.
    t2d: marks the target's tokens that the drafter has, [V]; None: not checked.

  Raises:
    ValueError: the map leads outside the vocabulary or to a token twice, or `t2d` marks others: the
      drafter is of another vocabulary.
  """
  offsets = np.asarray(d2t)
  if offsets.ndim != 1 or not np.issubdtype(offsets.dtype, np.integer):
    raise ValueError(
      f"`d2t` must be integers [T]; got {offsets.dtype} of shape {offsets.shape}. Give the"
      " drafter's tensor `d2t`."
    )
  ids = _checked_ids(offsets.astype(np.int64) + np.arange(len(offsets)), vocab)
  if t2d is not None:
    marked = np.flatnonzero(np.asarray(t2d))
    if np.shape(t2d) != (vocab,) or not np.array_equal(np.sort(ids), marked):
      raise ValueError(
        f"`t2d` must mark the {len(ids)} tokens of `d2t` in a vocabulary of {vocab}; got"
        f" {len(marked)} marked of {np.size(t2d)}. Give both maps of one drafter."
      )
  return ids


def _checked_ids(tokens, vocab):
  ids = np.asarray(tokens)
  if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
    raise ValueError(
      f"a drafter's tokens must be integers [T]; got {ids.dtype} of shape {ids.shape}. Give ids of"
      " the target."
    )
  ids = ids.astype(np.int64)
  outside = ids[(ids < 0) | (ids >= vocab)]
  if outside.size:
    raise ValueError(
      f"a drafter's tokens must be in [0, {vocab}); got {outside[0]}. Give offsets to a map of"
      " offsets, ids to a list of ids, and the target's vocabulary."
    )
  found, count = np.unique(ids, return_counts=True)
  if (count > 1).any():
    raise ValueError(
      f"a drafter's tokens must be distinct; got token {found[count > 1][0]} twice. Give offsets to"
      " a map of offsets, and ids to a list of ids."
    )
  return ids
