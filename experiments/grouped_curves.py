"""What of a run's metrics is kept with its result?"""

import json
import pathlib
from typing import Any

from vqjax.config import Experiment

POINTS = 60
"""Points of a curve that are kept, about."""


def beside(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """{"curves": {"train": [[step, nats], ...], "valid": [[step, nats], ...]}}, thinned."""
  del experiment
  lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
  return {"curves": curves([json.loads(line) for line in lines])}


def curves(rows: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
  """The mean loss of training between the points that are kept, and every evaluation."""
  losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
  width = max(1, len(losses) // POINTS)
  train = []
  for first in range(0, len(losses), width):
    part = losses[first : first + width]
    train.append([part[-1][0], round(sum(loss for _, loss in part) / len(part), 4)])
  valid = [
    [row["step"], round(row["valid"]["nats_per_token"], 4)] for row in rows if "valid" in row
  ]
  return {"train": train, "valid": valid}
