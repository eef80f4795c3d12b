"""What is kept beside the results of the grouped head's runs: curves, and times of top-k."""

import functools
import pathlib
import statistics
import timeit
from typing import Any

import jax
import numpy as np
import pandas as pd

from vqjax import GroupedHead, Head
from vqjax.lab.config import Experiment
from vqjax.lab.run_files import read_metrics
from vqjax.lab.training import read_run_variables
from vqjax.lab.training.run_folder import load_text

CURVE_POINTS = 60
"""Approximate number of points of a kept training curve."""

BEST, POSITIONS = 50, 30
"""The number of best tokens, and of positions in the text at which they are searched."""


def curves(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """Curves of a run at a plot's resolution: {"curves": {name: [[step, value]]}}.

  "train" has means of the loss between its points. For pictures, "accuracy" and "group_accuracy"
  have the rates of every evaluation.
  """
  del experiment
  metrics = read_metrics(folder).rows
  losses = pd.DataFrame([(row["step"], row["loss"]) for row in metrics if "loss" in row])
  parts = losses.groupby(losses.index // max(1, len(losses) // CURVE_POINTS))
  kept = {"train": [list(point) for point in zip(parts[0].last(), parts[1].mean().round(4))]}
  evaluations = [(row["step"], row["valid"]) for row in metrics if "valid" in row]
  for key in ("accuracy", "group_accuracy"):
    kept[key] = [[step, round(valid[key], 4)] for step, valid in evaluations if key in valid]
  return {"curves": {name: points for name, points in kept.items() if points}}


def time_top_k(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """Time of a trained grouped head's exact top-k, by search and by all groups.

  Args:
    experiment: the trained run.
    folder: its run folder.

  Returns:
    {"top": medians over positions, one token at a time}.

  Raises:
    AssertionError: the two ways differ.
  """
  text = load_text(experiment)
  model, (variables, _) = text.experiment.model, read_run_variables(folder)
  tokens = np.asarray(text.splits["test"].tokens)
  count = min(POSITIONS, len(tokens) // model.context)
  windows_NT = tokens[: count * model.context].reshape(count, -1).astype(np.int32)
  hidden = jax.jit(functools.partial(model.apply, method="hidden"))
  hidden_ND = hidden(variables, windows_NT)[:, -1]
  k = min(BEST, model.head.vocab)
  ways = {
    "seconds": lambda model, hidden: GroupedHead.top_k_visited(model.head, hidden, k),
    "seconds_all": lambda model, hidden: Head.top_k(model.head, hidden, k),
  }
  ways = {name: jax.jit(functools.partial(model.apply, method=way)) for name, way in ways.items()}
  measured = []
  for hidden_D in hidden_ND:
    (log_prob, _, visited), (in_all, _) = (way(variables, hidden_D) for way in ways.values())
    line = {"visited": int(visited), "mass": float(np.exp(log_prob).sum())}
    # Both ways sum up to `vocab` float32 probabilities, in different orders.
    np.testing.assert_allclose(log_prob, in_all, atol=1e-4, rtol=0)
    for name, way in ways.items():
      call = lambda way=way, at=hidden_D: jax.block_until_ready(way(variables, at))
      line[name] = statistics.median(timeit.repeat(call, number=1, repeat=7))
    measured.append(line)
  table = pd.DataFrame(measured)
  sizes = {"vocab": model.head.vocab, "groups": model.head.groups_and_slots()[0]}
  sizes["visited_most"] = int(table["visited"].max())
  return {"top": table.median().to_dict() | sizes}
