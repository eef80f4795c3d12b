"""Run the VQ-Logits study: the paper's heads, its baselines, and others.

python -m experiments.studies.vq_logits.run --scale smoke
python -m experiments.studies.vq_logits.run --scale cpu            runs what is missing, renders
python -m experiments.studies.vq_logits.run --scale cpu --list     lists the runs and which are done
python -m experiments.studies.vq_logits.run --scale cpu --only ptb/vq-1024,ptb/full
python -m experiments.studies.vq_logits.run --render               renders the kept results

A stopped run is resumed. Results are kept in results.jsonl; the page docs/results/vq_logits.md is
prose with generated tables and figures, which --scale cpu and --render rewrite.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.studies.study import PaperStudy
from experiments.studies.vq_logits import report
from experiments.studies.vq_logits.rows import VQLogitsRow, rows
from experiments.studies.vq_logits.settings import SCALES, SEEDS, VQLogitsSetting
from experiments.studies.words import single_tokens
from vqjax import CodebookHead, assign
from vqjax.lab import exits
from vqjax.lab.config import Experiment
from vqjax.lab.data import encode_split, fit_tokenizer
from vqjax.lab.study.jobs import StudyJob, training_job
from vqjax.lab.training import read_run_variables
from vqjax.lm.tokenizers import Tokenizer

CLUSTERED = "wikitext/vq-1024"
"""The run whose words on one code are kept."""


def measurements(name: str, experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """What is kept beside the result of a run.

  Returns:
    `floors`: the lowest test perplexities that the codes allow, without and with a token bias; None
    for a head whose tokens do not share the scores of fixed codes. Of one run also `clusters`: for
    each row of the paper's Table 8, `code_words`.
  """
  if not isinstance(experiment.model.head, CodebookHead):
    return {"floors": None}
  codes = read_run_variables(folder)[0]["codes"]
  # A distilled model has its head in "student".
  assignment = codes.get("student", codes)["head"]["assignment"]
  tokenizer = fit_tokenizer(experiment.data, experiment.tokenizer)
  test = encode_split(experiment.data, tokenizer, "test")
  counts = np.bincount(np.asarray(test.tokens), minlength=len(assignment))
  floor = lambda bias: assign.floor(assignment, counts, token_bias=bias).perplexity
  measured: dict[str, Any] = {"floors": {"uniform": floor(False), "bias": floor(True)}}
  if name == CLUSTERED:
    table = report.PAPER["Table 8"].values()
    words = [row["words"].split() for row in table]
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


def jobs(scale: str) -> list[StudyJob]:
  """All runs of a scale, each after those that it starts from."""
  return [
    _job(own, row)
    for setting in SCALES[scale].values()
    for seed in range(SEEDS)
    for own in [dataclasses.replace(setting, dense=dataclasses.replace(setting.dense, seed=seed))]
    for row in rows(own)
    if seed == 0 or row.name in own.repeated
  ]


def _job(setting: VQLogitsSetting, row: VQLogitsRow) -> StudyJob:
  seed = row.experiment.seed
  named = lambda row: f"{setting.name}/{row}" + (f"-s{seed}" if seed else "")
  measure = functools.partial(measurements, named(row.name))
  needs = tuple(map(named, row.needs))
  folder = setting.path(row.name)
  return training_job(named(row.name), row.label, row.experiment, folder, measure, needs)


STUDY = PaperStudy(
  name="vq_logits",
  description=__doc__,
  scales=tuple(SCALES),
  jobs=jobs,
  tables=report.shown_tables,
  update=report.update,
)

if __name__ == "__main__":
  exits.run_main(STUDY.main)
