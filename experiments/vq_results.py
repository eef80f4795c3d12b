"""What is kept of each run of the VQ-Logits tables, so that the page needs nothing else?"""

import json
import pathlib
from typing import Any

import numpy as np

from vqjax import assign
from vqjax.config import Experiment, config_hash
from vqjax.data import encode_split, fit_encoder
from vqjax.training import read_variables
from vqjax.training.run import read_json, write_json

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "results" / "vq"


def _path(scale: str, name: str) -> pathlib.Path:
  return FOLDER / scale / f"{name.replace('/', '-')}.json"


def is_done(scale: str, name: str, experiment: Experiment) -> bool:
  """Whether there is a result of exactly this experiment."""
  found = read_json(_path(scale, name))
  return found is not None and found["result"]["config_hash"] == config_hash(experiment)


def keep(scale: str, name: str, experiment: Experiment, folder: pathlib.Path) -> None:
  """Copies a run's result, with the floors of its codes on the test text."""
  kept = {
    "name": name,
    "result": read_json(folder / "result.json"),
    "config": read_json(folder / "config.json")["config"],
    "floors": floors(experiment, folder),
  }
  path = _path(scale, name)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_json(path, kept)


def floors(experiment: Experiment, folder: pathlib.Path) -> dict[str, float] | None:
  """The lowest test perplexity that the codes allow, with and without a token bias, if any."""
  variables, _ = read_variables(folder)
  codes = variables.get("codes", {})
  codes = codes.get("student", codes)
  table = codes.get("head", codes.get("embedding", {})).get("assignment")
  if table is None or "low" in variables["params"].get("head", {}):
    return None
  encoder = fit_encoder(experiment.data, experiment.tokenizer)
  test = encode_split(experiment.data, encoder, "test")
  counts = np.bincount(np.asarray(test.tokens), minlength=len(table))
  size = {"codes": int(table.max()) + 1}
  floor = lambda bias: assign.floor(table, counts, token_bias=bias, **size)
  without = floor(False)
  return {
    "uniform": without.perplexity,
    "bias": floor(True).perplexity,
    "largest_code": int(without.sizes.max()),
    "dead_codes": len(without.dead),
  }


def read(scale: str) -> dict[str, dict[str, Any]]:
  """Every kept result of a scale by the name of its run."""
  found = (json.loads(path.read_text()) for path in sorted((FOLDER / scale).glob("*.json")))
  return {kept["name"]: kept for kept in found}
