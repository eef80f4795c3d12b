"""Comparison of a decoder with others that differ from it in their vocabulary tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vqjax.convert.trained_variables import Variables
from vqjax.lm.models import Transformer
from vqjax.lm.texts import TextWindows
from vqjax.ops import distillation

__all__ = ["Reference", "summary", "with_tables"]

TOKENS_AT_ONCE = 512
"""Tokens that are scored at a time."""

RESAMPLES = 1000
"""Draws of windows from which the interval of a mean divergence is taken."""

TABLES = "embedding", "head"
"""Tables of a decoder; a tied one has the first alone."""


def tables_of(model: Transformer, variables: Variables) -> dict[str, np.ndarray]:
  """The tables of a decoder, [V, D] each; a tied model has one."""
  names = TABLES if model.head.embedding is None else TABLES[:1]
  return {name: np.asarray(variables["params"][name]["weight"]) for name in names}


def with_tables(variables: Variables, tables: Mapping[str, Any]) -> Variables:
  """The variables with other tables."""
  params = dict(variables["params"])
  for name, table in tables.items():
    params[name] = dict(params[name]) | {"weight": table}
  return dict(variables) | {"params": params}


class Reference:
  """A model whose distributions others are compared with, over given windows."""

  def __init__(self, model: Transformer, variables: Variables, of: TextWindows):
    """Compute the hidden states, which are kept."""
    self.model, self.variables, self.windows = model, variables, of
    self._hidden = [self._states(variables, row) for row in of.tokens]

  def _states(self, variables, row):
    states = _states(variables, jnp.asarray(row)[None], model=self.model)[0]
    # The first prediction has no context, and the last no target.
    return np.asarray(states[1:-1])

  def compare(
    self, students: Sequence[Variables], progress: Callable[[float], None] = lambda part: None
  ) -> list[dict[str, np.ndarray]]:
    """Divergence, agreement and log-probabilities of each token: arrays [N, T - 2] a student."""
    found: list[list[Any]] = [[] for _ in students]
    count = len(self.windows.tokens)
    at_once = max(1, TOKENS_AT_ONCE // (self.windows.tokens.shape[1] - 2))
    for first in range(0, count, at_once):
      rows = range(first, min(first + at_once, count))
      # The last part is filled up with its last window, so that it needs no program of its own.
      filled = [*rows] + [rows[-1]] * (at_once - len(rows))
      hidden = []
      for variables in students:
        own = {row: self._states(variables, self.windows.tokens[row]) for row in rows}
        hidden.append(np.concatenate([own[row] for row in filled]))
      teacher = np.concatenate([self._hidden[row] for row in filled])
      targets = self.windows.tokens[filled][:, 2:].reshape(-1)
      compared = _compared(students, self.variables, hidden, teacher, targets, model=self.model)
      for own, part in zip(found, compared):
        own.append([np.asarray(x).reshape(at_once, -1)[: len(rows)] for x in part])
      progress(rows.stop / count)
    fields = distillation.LinearComparison._fields
    return [dict(zip(fields, map(np.concatenate, zip(*own)))) for own in found]


@functools.partial(jax.jit, static_argnames="model")
def _states(variables, tokens_BT, *, model):
  return model.apply(variables, tokens_BT, method="hidden")


@functools.partial(jax.jit, static_argnames="model")
def _compared(students, teacher, hidden, teacher_hidden, targets, *, model):
  def side(prefix, own, vectors):
    weight, bias = model.apply(own, method=lambda m: m.head.linear())
    return distillation.Side(prefix, vectors, weight, bias, model.head.softcap)

  return distillation.linear_comparison(
    [side("", own, vectors) for own, vectors in zip(students, hidden)],
    side("teacher_", teacher, teacher_hidden),
    targets,
  )


def summary(found: Mapping[str, np.ndarray], of: TextWindows) -> dict[str, Any]:
  """Means of a comparison, of all tokens and by domain.

  "kl_interval" has 95 % of the mean divergences of windows that are drawn with replacement. It is
  that of texts like these: windows of one document are not independent.
  """

  def means(rows):
    kl = found["kl"][rows].astype(np.float64)
    own = kl.mean(axis=1)
    drawn = np.random.default_rng(0).integers(0, len(own), (RESAMPLES, len(own)))
    return {
      "tokens": int(kl.size),
      "kl": float(kl.mean()),
      "kl_interval": [float(x) for x in np.quantile(own[drawn].mean(axis=1), (0.025, 0.975))],
      "kl_p99": float(np.quantile(kl, 0.99)),
      "top1": float(found["agrees"][rows].mean()),
      "nats": float(-found["log_prob"][rows].mean(dtype=np.float64)),
      "nats_before": float(-found["teacher_log_prob"][rows].mean(dtype=np.float64)),
    }

  present = [d for d in range(len(of.names)) if (of.domain == d).any()]
  domains = {of.names[d]: means(of.domain == d) for d in present}
  return means(slice(None)) | {"domains": domains}


def check_finite(variables: Variables) -> None:
  """Raise ValueError unless all numbers of a model are finite."""
  for path, value in jax.tree_util.tree_leaves_with_path(variables["params"]):
    if not np.isfinite(np.asarray(value)).all():
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      raise ValueError(
        f"`{name}` must be finite; got NaN or an infinity. The model is damaged: download it again."
      )


def hardest(
  found: Mapping[str, np.ndarray], of: TextWindows, tokenizer: Any, count: int = 12
) -> list[dict[str, Any]]:
  """The tokens before which the distributions differ most."""
  kl = found["kl"]
  decode = str if tokenizer is None else tokenizer.decode
  order = np.argsort(-kl, axis=None)[:count]
  rows = []
  for window, at in zip(*np.unravel_index(order, kl.shape)):
    tokens = of.tokens[window]
    rows.append(
      {
        "domain": of.names[of.domain[window]],
        "before": decode([int(t) for t in tokens[max(0, at - 6) : at + 2]]),
        "token": decode([int(tokens[at + 2])]),
        "kl": float(kl[window, at]),
      }
    )
  return rows
