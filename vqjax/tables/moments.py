"""Statistics of a model's use of its table, by which errors of the table are weighed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from vqjax.ops.vocabulary import host_array, is_count
from vqjax.tables.tensor_files import load_file, save_file

__all__ = ["SHRINKAGE", "Moments"]

FIELDS = "hidden", "counts", "tokens", "inputs"
"""Tensors of a file; `inputs` may be missing."""

SHRINKAGE = 0.1
"""Part of the mean eigenvalue of the moments that is added to all of them."""


@dataclasses.dataclass(frozen=True)
class Moments:
  """Second moments of what a table meets, and how often each token occurs.

  An error e of the row of a token of probability p costs about p · eᵀ H e / 2 nats as a row of an
  output head, and p · eᵀ F e / 2 nats as a row of an input embedding.

  Attributes:
    hidden: H [D, D], the mean of h hᵀ over the final hidden states h of a text.
    counts: occurrences of each token, [V], of every language that matters: rows of tokens that do
      not occur get the fewest bits.
    tokens: number of hidden states of which `hidden` is the mean.
    inputs: F [D, D], the mean of g gᵀ over the gradients g of the log-probability of tokens that
      the model draws, by the input vectors; None: unknown, or the table is an output head alone.
  """

  hidden: Float[np.ndarray, "D D"]
  counts: Float[np.ndarray, "V"]
  tokens: int
  inputs: Float[np.ndarray, "D D"] | None = None

  def __post_init__(self):
    object.__setattr__(self, "hidden", _square("hidden", self.hidden))
    if self.inputs is not None:
      object.__setattr__(self, "inputs", _square("inputs", self.inputs))
      if self.inputs.shape != self.hidden.shape:
        raise ValueError(
          f"`inputs` must have the shape of `hidden`, {self.hidden.shape}; got"
          f" {self.inputs.shape}. Take both from one model."
        )
    counts = host_array("counts", self.counts).astype(np.float64)
    if counts.ndim != 1 or not counts.size:
      raise ValueError(
        f"`counts` must have a number for each token, [V]; got shape {counts.shape}. Use"
        " numpy.bincount(tokens, minlength=vocab)."
      )
    if not np.isfinite(counts).all() or counts.min() < 0:
      bad = int(np.flatnonzero(~(np.isfinite(counts) & (counts >= 0)))[0])
      raise ValueError(
        f"`counts` must be finite and not negative; got {counts[bad]} for token {bad}. Count the"
        " tokens again."
      )
    if not counts.any():
      raise ValueError(
        "`counts` must not be all 0: no token of the text is in the vocabulary. Give a text of a"
        " language that the tokenizer knows."
      )
    object.__setattr__(self, "counts", counts)
    if not is_count(self.tokens) or self.tokens < 1:
      raise ValueError(
        f"`tokens` must be an integer of at least 1; got {self.tokens!r}. Give the number of hidden"
        " states."
      )
    object.__setattr__(self, "tokens", int(self.tokens))

  def check(self, vocab: int, dim: int) -> None:
    """Check that these are the moments of a table [vocab, dim].

    Raises:
      ValueError: width or vocabulary differ.
    """
    if len(self.hidden) != dim:
      raise ValueError(
        f"`moments` must have the width of the table, {dim}; got {len(self.hidden)}. Collect them"
        " from the model whose table is compressed."
      )
    if len(self.counts) != vocab:
      raise ValueError(
        f"`counts` must have an entry for each of the {vocab} rows of the table; got"
        f" {len(self.counts)}. Pad them with 0 for rows that no token has."
      )

  def metric(self, shrinkage: float = SHRINKAGE) -> Float[np.ndarray, "D D"]:
    """The metric of errors of a row, H + F + shrinkage · trace / D · I, positive definite."""
    metric = self.hidden if self.inputs is None else self.hidden + self.inputs
    mean = np.trace(metric) / len(metric) or 1.0
    return metric + shrinkage * mean * np.eye(len(metric))

  def of_tables(self, names: Sequence[str]) -> dict[str, "Moments"]:
    """What errors of each table of a model cost.

    Args:
      names: "embedding" for a tied model, whose table is an input and an output, or "embedding" and
        "head". An embedding of unknown F is weighed as the head is.
    """
    if len(names) == 1:
      return {names[0]: self}
    inputs = self.hidden if self.inputs is None else self.inputs
    return {
      "embedding": dataclasses.replace(self, hidden=inputs, inputs=None),
      "head": dataclasses.replace(self, inputs=None),
    }

  def save(self, path: str | os.PathLike) -> None:
    """Write the file that `load` reads, of safetensors."""
    tensors = {"hidden": self.hidden.astype(np.float32), "counts": self.counts}
    tensors["tokens"] = np.asarray([self.tokens], np.int64)
    if self.inputs is not None:
      tensors["inputs"] = self.inputs.astype(np.float32)
    save_file(tensors, path)

  @classmethod
  def load(cls, path: str | os.PathLike) -> "Moments":
    """Read moments that `save` wrote, or another program with the same names of tensors.

    Raises:
      ValueError: the file is not one of safetensors, lacks a tensor, or holds an impossible one.
    """
    tensors, _ = load_file(path)
    missing = [name for name in FIELDS[:3] if name not in tensors]
    if missing:
      raise ValueError(
        f"{path} must hold the tensors {', '.join(FIELDS[:3])}; it lacks {', '.join(missing)}."
        " Write it with Moments.save."
      )
    unknown = sorted(set(tensors) - set(FIELDS))
    if unknown:
      raise ValueError(
        f"{path} must hold no tensors but {', '.join(FIELDS)}; got {', '.join(unknown)}. Remove"
        " them."
      )
    if tensors["tokens"].size != 1:
      raise ValueError(
        f"`tokens` of {path} must be one number; got shape {tensors['tokens'].shape}. Write it with"
        " Moments.save."
      )
    try:
      return cls(**tensors | {"tokens": int(tensors["tokens"].reshape(()))})
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from None


def _square(name, moment):
  moment = host_array(name, moment).astype(np.float64)
  if moment.ndim != 2 or moment.shape[0] != moment.shape[1] or not moment.size:
    raise ValueError(
      f"`{name}` must be a square matrix [D, D]; got shape {moment.shape}. Give the mean of the"
      " outer products of vectors of width D."
    )
  if not np.isfinite(moment).all():
    raise ValueError(
      f"`{name}` must be finite; got {np.count_nonzero(~np.isfinite(moment))} entries of"
      f" {moment.size} that are not. Collect it in float32 or float64."
    )
  scale = max(np.abs(moment).max(), np.finfo(np.float64).tiny)
  if np.abs(moment - moment.T).max() > 1e-3 * scale or np.diag(moment).min() < -1e-6 * scale:
    raise ValueError(
      f"`{name}` must be a second moment, symmetric with a diagonal that is not negative. Give the"
      " mean of the outer products of the vectors with themselves."
    )
  return (moment + moment.T) / 2
