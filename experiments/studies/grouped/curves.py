"""What of a run's metrics is kept with its result?"""

import json
import pathlib
from typing import Any

from vqjax.lab.config import Experiment

POINTS = 60
"""Points of a curve that are kept, about."""


def beside(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """{"curves": {"train": [[step, nats], ...], "valid": [[step, nats], ...], ...}}, thinned."""
  del experiment
  lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
  return {"curves": curves([json.loads(line) for line in lines])}


def curves(rows: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
  """The mean loss of training between the points that are kept, and every evaluation.

  Of pictures, the accuracy of the class and, of a grouped head, that of the group.
  """
  losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
  width = max(1, len(losses) // POINTS)
  train = []
  for first in range(0, len(losses), width):
    part = losses[first : first + width]
    train.append([part[-1][0], round(sum(loss for _, loss in part) / len(part), 4)])
  found = {"train": train}
  evaluations = [(row["step"], row["valid"]) for row in rows if "valid" in row]
  for key, name in EVALUATED.items():
    points = [[step, round(valid[key], 4)] for step, valid in evaluations if key in valid]
    if points:
      found[name] = points
  return found


EVALUATED = {"nats_per_token": "valid", "accuracy": "accuracy", "group_accuracy": "group_accuracy"}
"""What an evaluation has -> the name of its curve."""
