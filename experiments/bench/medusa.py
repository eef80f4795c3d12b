"""Benchmark of Medusa's blocks on Gemma 3 270M, trained on stories: tokens a pass, chain and tree.

The blocks share one output layer, of the most frequent tokens of the stories. Passes are counted,
not timed: batches of prompts share them.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.bench import measure, speculation
from experiments.bench.gemma import CACHE
from vqjax.lab.training.provenance import device
from vqjax.lm.drafting import Medusa
from vqjax.lm.drafting.medusa_training import MedusaTraining, frequent_output, medusa_of_rows
from vqjax.lm.generation import DraftTree, Sampling, Typical, generate
from vqjax.lm.jobs import ProgressBars, open_work
from vqjax.lm.lenses.tuned import model_mark


class MedusaSizes(NamedTuple):
  """Sizes of the training and of the comparison.

  Attributes:
    vocab: tokens of the output layer.
    rows: rows of text.
    width: tokens of a row.
    tokens: tokens of a continuation.
    settings: those of the training.
    texts: sizes of prompts, of the benchmark of speculation.
  """

  vocab: int
  rows: int
  width: int
  tokens: int
  settings: MedusaTraining
  texts: speculation.SpeculationSizes


GEMMA = MedusaSizes(
  4096, 1280, 128, 64, MedusaTraining(steps=1200), speculation.GEMMA._replace(prompts=3, foreign=4)
)
QUICK = MedusaSizes(23, 6, 9, 9, MedusaTraining(2, 3, 8, size=4), speculation.QUICK)


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Train blocks on stories, then count the passes of generation with a chain and with a tree."""
  sizes = QUICK if quick else GEMMA
  target = (
    speculation.random_target(sizes.texts) if quick else speculation.gemma_target(sizes.texts)
  )
  start = time.perf_counter()
  drafter, held_out = trained_medusa(target, sizes)
  figures: dict[str, Any] = {
    "sizes": sizes._asdict() | {"settings": dataclasses.asdict(sizes.settings), "texts": None},
    "training_seconds": time.perf_counter() - start,
    "held_out": held_out,
    "tree": drafter.tree.paths,
  }
  yield figures
  chain = dataclasses.replace(drafter, tree=DraftTree.chain(len(drafter.blocks.weight)))
  shapes = {"chain": chain, "tree": drafter}
  shapes["typical"] = dataclasses.replace(drafter, typical=Typical())
  for domain, prompts in target.prompts.items():
    rows = figures[domain] = {}
    for name, sampling in speculation.SAMPLINGS.items():
      rows[name] = {
        shape: tokens_per_pass(target, each, prompts, sampling, sizes.tokens)
        for shape, each in shapes.items()
        if shape != "typical" or not sampling.is_greedy
      }
      yield figures
  measure.show_rows(
    f"tokens a pass, {drafter.tree.size} draft tokens in the tree, {device()}",
    ("", *shapes),
    [
      [f"{domain}, {name}", *(f"{row[s]:.3g}" if s in row else "" for s in shapes)]
      for domain in target.prompts
      for name, row in figures[domain].items()
    ],
  )


def trained_medusa(target: speculation.Target, sizes: MedusaSizes) -> tuple[Medusa, dict[str, Any]]:
  """The drafter, and its figures on held-out rows; an interrupted training goes on."""
  model, variables = target.model, target.variables
  count = min(sizes.rows, len(target.tokens) // sizes.width)
  rows = target.tokens[: count * sizes.width].reshape(count, sizes.width)
  output = frequent_output(model, variables, target.tokens, sizes.vocab)
  with tempfile.TemporaryDirectory() as folder:
    work = pathlib.Path(folder) / "work" if sizes is QUICK else CACHE / "medusa-bench"
    identity = f"{sizes} {model_mark(variables).sum():.6e}"
    with open_work(work, identity), ProgressBars() as bars:
      return medusa_of_rows(work, model, variables, rows, output, sizes.settings, bars, measure.log)


def tokens_per_pass(
  target: speculation.Target,
  drafter: Medusa,
  prompts: list[list[int]],
  sampling: Sampling,
  tokens: int,
) -> float:
  """Mean number of tokens a pass of the model, of prompts that are continued together."""
  result = generate(
    *(target.model, target.variables, prompts, jax.random.key(7), sampling),
    max_tokens=tokens,
    log_probs=False,
    drafter=dataclasses.replace(drafter, cost=0),
  )
  return float(np.mean(result.lengths / result.passes))
