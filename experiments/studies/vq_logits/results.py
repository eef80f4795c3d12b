"""What is kept beside the result of a run of the VQ-Logits tables?"""

import pathlib
from typing import Any

import numpy as np

from experiments.studies.vq_logits.clusters import clusters
from vqjax import CodebookHead, LearnedCodebookHead, assign
from vqjax.lab.config import Experiment
from vqjax.lab.conversion.starts import frozen
from vqjax.lab.data import encode_split, fit_encoder
from vqjax.lab.training import read_variables

CLUSTERED = "wikitext/vq-1024"
"""The run whose codes Table 8 shows."""


def with_floors(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """The floors of a run's codes on the test text."""
  return {"floors": floors(experiment, folder)}


def with_clusters(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """The same, and the words on its codes."""
  return with_floors(experiment, folder) | {"clusters": clusters(experiment, folder)}


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
