"""VQ-Logits on WikiText-2, for the paper's WikiText-103, with its variations of the codebook.

vqjax study experiments/studies/vq_logits/wikitext.py --out experiments/studies/vq_logits/wikitext
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from configs.vq_logits import wikitext103
from experiments.studies.study_page import read_paper
from experiments.studies.vq_logits.rows import (
  V,
  converted,
  floors,
  main_rows,
  paper_tuning,
  read_assignment,
  scratch,
  small,
  small_tuning,
)
from experiments.studies.words import single_tokens
from vqjax import assign, convert, heads
from vqjax.lab import starting_points
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import WikiText, WordTokenizer, fit_tokenizer
from vqjax.lab.study import Row, Study
from vqjax.lm.tokenizers import Tokenizer

CODES = 256, 512, 1024, 2048, 4096, 8192
"""Sizes of codebooks: those of the paper's Table 1 and Figure 2."""

SMALLEST = 1024
"""The smallest codebook of Table 1, which Tables 2, 6 and 7 vary."""

CLUSTERED = "vq-1024"
"""The row whose words on one code are kept."""

WITHOUT_HEAD = "embedding", "position", "blocks", "final_norm"
"""Scope of fine-tuning: all parameters except those of the head."""


def study() -> Study:
  """The study of the small decoder."""
  base = small(WikiText(), WordTokenizer(split=False), steps=900)
  return _study(base, small_tuning(base, 300), cutoffs=(2500, 10_000), rank=64)


def paper() -> Study:
  """The study of the paper's decoder."""
  # A word list may have fewer words than the paper's.
  base = wikitext103.experiment("dense", V)
  return _study(base, paper_tuning(base), cutoffs=(20_000, 80_000), rank=512)


def _study(base: Experiment, tuning: Train, **sizes: Any) -> Study:
  rows = main_rows(base, tuning, CODES, **sizes) | _ablations(base, tuning)
  return Study(base, rows, seeds=1, reference="full", measure=measurements)


def _ablations(base: Experiment, tuning: Train) -> dict[str, Row]:
  """The rows of the paper's Tables 2, 6 and 7."""
  head = heads.CodebookHead(V, base.model.dim, SMALLEST, dtype=base.model.dtype)
  to, inputs = convert.ToCodebook, convert.KMeans(inputs=True)
  as_paper, at_random = to(convert.KMeans()), to(convert.Fixed(assign.Random(0)))
  row = lambda label, target, scope=(): converted(tuning, label, head, target, scope=scope)
  mapped = starting_points.Mapped(inputs)
  return {
    "vq-1024-fixed": row("k-means init, fixed C", as_paper, WITHOUT_HEAD),
    "vq-1024-scratch": scratch(base, tuning, "random init, learned C", head, mapped),
    "vq-1024-inputs": row("k-means on input embeddings", to(inputs)),
    "vq-1024-bins": row("frequency bins", to(convert.FrequencyBins())),
    "vq-1024-random": row("random assignment", at_random),
    "vq-1024-head": row("C and head layers", as_paper, starting_points.HEAD),
    "vq-1024-codebook": row("only C", as_paper, starting_points.CODEBOOK),
  }


def measurements(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """The floors of a run, and of one also `clusters`: `code_words` of the paper's Table 8."""
  measured = floors(experiment, folder)
  if experiment.name == CLUSTERED:
    table = read_paper(pathlib.Path(__file__).with_name("paper.csv"))["Table 8"]
    tokenizer = fit_tokenizer(experiment.data, experiment.tokenizer)
    words = [row["words"].split() for row in table.values()]
    assignment = read_assignment(folder)
    measured["clusters"] = [code_words(tokenizer, assignment, row) for row in words]
  return measured


def code_words(
  tokenizer: Tokenizer, assignment: np.ndarray, words: Sequence[str]
) -> dict[str, list[str]]:
  """Each of the words that is one token -> the ten most frequent tokens on its code."""
  # Tokens are numbered by falling frequency.
  members = lambda token: np.flatnonzero(assignment == assignment[token])[:10]
  return {
    word: [tokenizer.decode([v]).strip() for v in members(token)]
    for word, token in single_tokens(tokenizer, words).items()
  }
