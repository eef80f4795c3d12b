"""What is kept of each run of the VQ-Logits tables, so that the page needs nothing else?"""

import json
import pathlib
from typing import Any

import numpy as np

from experiments.vq_clusters import clusters
from experiments.vq_settings import RUNS
from vqjax import CodebookHead, LearnedCodebookHead, assign
from vqjax.config import Experiment, config_hash
from vqjax.convert.starts import frozen
from vqjax.data import encode_split, fit_encoder
from vqjax.training import read_variables
from vqjax.training.run import read_json, write_json

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "results" / "vq"

CLUSTERED = "wikitext/vq-1024"
"""The run whose codes Table 8 shows."""


def _folder(scale: str) -> pathlib.Path:
  """Beside the runs for a scale that says nothing, so that nobody commits it."""
  return pathlib.Path(RUNS, scale, "kept") if scale == "smoke" else FOLDER / scale


def _path(scale: str, name: str) -> pathlib.Path:
  return _folder(scale) / f"{name.replace('/', '-')}.json"


def is_done(scale: str, name: str, experiment: Experiment) -> bool:
  """Whether there is a result of exactly this experiment."""
  found = read_json(_path(scale, name))
  return found is not None and found["result"]["config_hash"] == config_hash(experiment)


def keep(scale: str, name: str, experiment: Experiment, folder: pathlib.Path) -> None:
  """Copies a run's result, with the floors of its codes on the test text, also of a failed run."""
  result = read_json(folder / "result.json")
  finished = result["status"] == "finished"
  kept = {
    "name": name,
    "result": result,
    "config": read_json(folder / "config.json")["config"],
    "floors": floors(experiment, folder) if finished else None,
  }
  if finished and name == CLUSTERED:
    kept["clusters"] = clusters(experiment, folder)
  path = _path(scale, name)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_json(path, kept)


def floors(experiment: Experiment, folder: pathlib.Path) -> dict[str, float] | None:
  """The lowest test perplexity that a codebook allows, with and without a token bias.

  A mapping that was learned is that of the highest choices. None for other heads: none of them
  gives all tokens of a code one score.
  """
  head = experiment.model.head
  if not isinstance(head, (CodebookHead, LearnedCodebookHead)):
    return None
  variables, _ = read_variables(folder)
  if isinstance(head, LearnedCodebookHead):
    variables = frozen(variables)
  codes = variables["codes"]
  codes = codes.get("student", codes)
  table = codes.get("head", codes.get("embedding", {}))["assignment"]
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
  found = (json.loads(path.read_text()) for path in sorted(_folder(scale).glob("*.json")))
  return {kept["name"]: kept for kept in found}
