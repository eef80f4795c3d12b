"""Decoders with other tokens: rows of the vocabulary layers kept, dropped, moved and added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import traverse_util
from jaxtyping import Float, Int

from vqjax.convert.trained_variables import Variables
from vqjax.embeddings import (
  CodebookEmbedding,
  DenseEmbedding,
  Int8Embedding,
  ProductEmbedding,
  ScalarEmbedding,
)
from vqjax.heads import CodebookHead, DenseHead, LowRankHead, ProductHead
from vqjax.lm.models import Transformer

__all__ = ["NewRow", "mean_of_all", "mean_of_parts", "mean_of_parts_at_length", "resize", "sampled"]

NewRow = Callable[[Float[np.ndarray, "V D"], Sequence[int]], Float[np.ndarray, "D"]]
"""(rows of a dense table, ids that a new token consists of) -> its row."""

LAYERS = (DenseHead, DenseEmbedding, CodebookHead, CodebookEmbedding, ProductHead)
LAYERS += (ProductEmbedding, ScalarEmbedding, Int8Embedding, LowRankHead)
"""Layers whose tokens have entries of their own, which do not depend on where other tokens are."""


def mean_of_parts(table: Float[np.ndarray, "V D"], parts: Sequence[int]) -> np.ndarray:
  """The mean of the rows that a new token consists of."""
  return table[list(parts)].mean(axis=0)


def mean_of_parts_at_length(table: Float[np.ndarray, "V D"], parts: Sequence[int]) -> np.ndarray:
  """The mean of the rows that a new token consists of, as long as they are on average."""
  rows = table[list(parts)]
  mean = rows.mean(axis=0)
  return mean * (np.linalg.norm(rows, axis=1).mean() / max(np.linalg.norm(mean), 1e-12))


def mean_of_all(table: Float[np.ndarray, "V D"], parts: Sequence[int]) -> np.ndarray:
  """The mean of all rows.

  Its probability is at most the mean one, so that no prediction changes much. Source: Hewitt,
  Initializing New Word Embeddings for Pretrained Language Models, 2021.
  """
  del parts
  return table.mean(axis=0)


def sampled(seed: int = 0, scale: float = 1e-9) -> NewRow:
  """Rows from a normal distribution with the mean of all rows and `scale` times their covariance.

  Different new tokens then have different rows; transformers takes the same scale.
  """
  draw, roots = np.random.default_rng(seed), {}

  def row(table: Float[np.ndarray, "V D"], parts: Sequence[int]) -> np.ndarray:
    del parts
    if id(table) not in roots:
      covariance = np.cov(table, rowvar=False) * scale
      values, vectors = np.linalg.eigh(np.atleast_2d(covariance))
      # The table is kept too, so that its identity stays its own.
      roots[id(table)] = table, table.mean(axis=0), vectors * np.sqrt(np.maximum(values, 0))
    _, mean, root = roots[id(table)]
    return mean + root @ draw.normal(size=table.shape[1])

  return row


def resize(
  model: Transformer,
  variables: Variables,
  source: Int[np.ndarray, "W"],
  new: Mapping[int, Sequence[int]] | None = None,
  row: NewRow = mean_of_parts,
) -> tuple[Transformer, Variables]:
  """The decoder with a vocabulary of W tokens, and its variables.

  Token i has what token `source[i]` had. New tokens have rows of their own in dense tables, input
  and output; elsewhere they share the codes and the bias of the first token that they consist of.

  Example:
    >>> import numpy as np, jax
    >>> from vqjax import DenseEmbedding, DenseHead
    >>> from vqjax.lm import checkpoints, models
    >>> layers = DenseEmbedding(5, 8), DenseHead(5, 8)
    >>> model = models.Transformer(*layers, 8, layers=1, heads=2, context=4)
    >>> variables = model.init(jax.random.key(0), np.zeros((1, 1), int))
    >>> source = np.array([0, 1, 2, 3, 4, 2])
    >>> grown, more = checkpoints.resize(model, variables, source, new={5: [2, 4]})
    >>> print(grown.head.vocab, more["params"]["head"]["weight"].shape)
    6 (6, 8)

  Args:
    model: the decoder.
    variables: its variables.
    source: for each token of the new vocabulary a token of the old one.
    new: new token -> the old tokens that it consists of; its row is the mean of all without any.
    row: makes the rows of new tokens.

  Raises:
    ValueError: a token is outside the vocabulary, a vocabulary layer has no entries of tokens, such
      as a grouped head, or the model has memories of n-grams.
  """
  source, new = np.asarray(source), dict(new or {})
  vocab = model.head.vocab
  used = np.concatenate([source, *(np.asarray(parts, np.int64) for parts in new.values())])
  if source.ndim != 1 or not len(source) or used.min() < 0 or used.max() >= vocab:
    raise ValueError(
      f"`source` and `new` must name tokens in [0, {vocab}); got {used.min(initial=0)} to"
      f" {used.max(initial=0)}. Give ids of the model's vocabulary."
    )
  for name in ("embedding", "head"):
    if not isinstance(layer := getattr(model, name), LAYERS):
      raise ValueError(
        f"`model.{name}` must have entries for each token to be resized; got a"
        f" {type(layer).__name__}. Resize the dense model, and convert it again."
      )
  if model.memories:
    raise ValueError(
      "`model` must have no memories to be resized, whose rows are hashes of token ids; got"
      f" {len(model.memories)}. Compress its tables instead."
    )
  flat = traverse_util.flatten_dict(dict(variables))
  axes = traverse_util.flatten_dict(model.logical_axes())
  resized: dict[tuple[str, ...], Any] = {}
  for path, value in flat.items():
    names = axes.get(path, ())
    if path[1] not in ("embedding", "head") or "vocab" not in names:
      resized[path] = value
      continue
    value = np.asarray(value)
    taken = np.take(value, source, axis=names.index("vocab"))
    is_dense = isinstance(getattr(model, path[1]), (DenseHead, DenseEmbedding))
    if is_dense and path[2:] == ("weight",) and new:
      wide = value.astype(np.float32)
      mean = wide.mean(axis=0)
      for token, parts in new.items():
        taken[token] = row(wide, parts) if len(parts) else mean
    resized[path] = taken
  count = len(source)
  embedding = model.embedding.clone(vocab=count)
  fields = {"vocab": count}
  if getattr(model.head, "embedding", None) is not None:
    fields["embedding"] = embedding
  made = model.clone(embedding=embedding, head=model.head.clone(**fields))
  return made, traverse_util.unflatten_dict(resized)
