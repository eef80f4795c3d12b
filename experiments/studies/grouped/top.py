"""How much faster are the best tokens of a trained grouped head found by visiting few groups?"""

import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from vqjax import GroupedHead, Head
from vqjax.lab.config import Experiment
from vqjax.lab.training import read_variables
from vqjax.lab.training.run import load_text

K = 50
POSITIONS = 30
CALLS = 7
"""Calls for each position, whose median counts."""

SAME = 1e-4
"""Nats by which the two ways may differ: they add float32 numbers in different orders."""


def measure(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """The best tokens after each of some beginnings of real text, one token at a time, both ways."""
  text = load_text(experiment)
  variables, step = read_variables(folder)
  model = text.experiment.model
  hidden_ND = _hidden(text, model, variables)
  head = model.head.clone(parent=None)
  own = {name: tree["head"] for name, tree in variables.items() if "head" in tree}
  k = min(K, head.vocab)
  found = jax.jit(lambda own, h: head.apply(own, h, k, method=GroupedHead.top_k_visited))
  every = jax.jit(lambda own, h: head.apply(own, h, k, method=Head.top_k))
  rows = [_timed(found, every, own, hidden_D) for hidden_D in hidden_ND]
  visited = [row["visited"] for row in rows]
  middle = lambda key: statistics.median(row[key] for row in rows)
  seconds, seconds_all = middle("seconds"), middle("seconds_all")
  kept = {
    **{"vocab": head.vocab, "groups": head.groups_and_slots()[0], "k": k, "positions": len(rows)},
    **{"seconds": seconds, "seconds_all": seconds_all, "ratio": seconds / seconds_all},
    **{"visited": statistics.median(visited), "visited_most": max(visited)},
    **{"mass": middle("mass"), "same": all(row["same"] for row in rows), "step": step},
  }
  return {"result": {}, "top": kept}


def _hidden(text, model, variables) -> np.ndarray:
  """The hidden vector behind the last token of each of the first windows of the test text."""
  tokens = np.asarray(text.splits["test"].tokens)
  count = max(1, min(POSITIONS, len(tokens) // model.context))
  rows = tokens[: count * model.context].reshape(count, -1).astype(np.int32)
  apply = jax.jit(lambda v, x: model.apply(v, x, method="hidden"))
  return np.asarray(apply(variables, rows))[:, -1]


def _timed(found: Callable, every: Callable, own: dict, hidden_D: np.ndarray) -> dict[str, Any]:
  """Both ways in turn, after a call of each that is not counted."""
  ways = {"seconds": found, "seconds_all": every}
  results = {name: jax.block_until_ready(way(own, hidden_D)) for name, way in ways.items()}
  times: dict[str, list[float]] = {name: [] for name in ways}
  for _ in range(CALLS):
    for name, way in ways.items():
      start = time.perf_counter()
      jax.block_until_ready(way(own, hidden_D))
      times[name].append(time.perf_counter() - start)
  log_prob, _, visited = results["seconds"]
  same = np.allclose(log_prob, results["seconds_all"][0], atol=SAME, rtol=0)
  medians = {name: statistics.median(values) for name, values in times.items()}
  return medians | {
    "visited": int(visited),
    "same": bool(same),
    "mass": float(np.exp(log_prob).sum()),
  }
