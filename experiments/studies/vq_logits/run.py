"""Run the VQ-Logits study: the paper's heads, its baselines, and others.

python -m experiments.studies.vq_logits.run --scale smoke
python -m experiments.studies.vq_logits.run --scale cpu            runs what is missing, renders
python -m experiments.studies.vq_logits.run --scale cpu --list     lists the runs and which are done
python -m experiments.studies.vq_logits.run --scale cpu --only ptb/vq-1024,ptb/full
python -m experiments.studies.vq_logits.run --render               renders the kept results

A stopped run is resumed. Results are kept in results.jsonl; the page docs/results/vq_logits.md is
prose with generated tables and figures, which --scale cpu and --render rewrite.
"""

import collections
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.studies.study import PaperStudy
from experiments.studies.vq_logits import report
from experiments.studies.vq_logits.rows import VQLogitsRow, rows
from experiments.studies.vq_logits.settings import SCALES, VQLogitsSetting
from experiments.studies.words import single_tokens
from vqjax import CodebookHead, LearnedCodebookHead, assign, convert
from vqjax.lab import exits
from vqjax.lab.config import Experiment
from vqjax.lab.data import encode_split, fit_tokenizer
from vqjax.lab.study.jobs import StudyJob, training_job
from vqjax.lab.training import read_run_variables
from vqjax.lm.tokenizers import Tokenizer

SHOWN_WORDS = 10
"""Number of further words of a code that Table 8 shows."""


def floors(experiment: Experiment, folder: pathlib.Path) -> dict[str, float] | None:
  """Lowest test perplexities that a codebook allows, without and with a token bias.

  A learned assignment is that of the highest choices. Returns None for heads whose tokens do not
  share the scores of codes.
  """
  head = experiment.model.head
  if not isinstance(head, (CodebookHead, LearnedCodebookHead)):
    return None
  variables, _ = read_run_variables(folder)
  if isinstance(head, LearnedCodebookHead):
    own = convert.frozen(convert.part_of(variables, "head"))
    variables = convert.with_part(variables, "head", own)
  codes = variables["codes"]
  # A distilled model has its head in "student", and a tied head its codes in the embedding.
  codes = codes.get("student", codes)
  assignment = codes.get("head", codes.get("embedding", {}))["assignment"]
  tokenizer = fit_tokenizer(experiment.data, experiment.tokenizer)
  test = encode_split(experiment.data, tokenizer, "test")
  counts = np.bincount(np.asarray(test.tokens), minlength=len(assignment))
  floor = functools.partial(assign.floor, assignment, counts, codes=int(assignment.max()) + 1)
  uniform = floor(token_bias=False)
  return {
    "uniform": uniform.perplexity,
    "bias": floor(token_bias=True).perplexity,
    "largest_code": int(uniform.sizes.max()),
    "dead_codes": len(uniform.dead),
  }


CLUSTERED = "wikitext/vq-1024"
"""The run whose words on one code are kept."""


def clusters(experiment: Experiment, folder: pathlib.Path) -> list[dict[str, Any]]:
  """The code that holds most words of each row of Table 8."""
  variables, _ = read_run_variables(folder)
  assignment = variables["codes"]["head"]["assignment"]
  tokenizer = fit_tokenizer(experiment.data, experiment.tokenizer)
  train = encode_split(experiment.data, tokenizer, "train")
  counts = np.bincount(np.asarray(train.tokens), minlength=len(assignment))
  return [
    shared_code(tokenizer, assignment, counts, row["words"].split())
    for row in report.PAPER["Table 8"].values()
  ]


def shared_code(
  tokenizer: Tokenizer, assignment: np.ndarray, counts: np.ndarray, words: Sequence[str]
) -> dict[str, Any]:
  """The code that most of some words are on.

  Args:
    tokenizer: tokenizer of the text.
    assignment: int [V], token -> code.
    counts: [V], frequencies of the tokens.
    words: words of one row of Table 8.

  Returns:
    `words`; `known`, the words that are one token; and unless there is none, `code`, `held` (the
    known words on it), `others` (the most frequent other words on it) and `size` (its tokens).
  """
  token = single_tokens(tokenizer, words)
  if not token:
    return {"words": list(words), "known": []}
  code, _ = collections.Counter(int(assignment[v]) for v in token.values()).most_common(1)[0]
  members = np.flatnonzero(assignment == code)
  by_count = members[np.argsort(-counts[members], kind="stable")]
  others = [v for v in by_count if v not in token.values()]
  return {
    "words": list(words),
    "known": list(token),
    "code": code,
    "held": [word for word, v in token.items() if assignment[v] == code],
    "others": [tokenizer.decode([v]).strip() for v in others[:SHOWN_WORDS]],
    "size": len(members),
  }


def jobs(scale: str) -> list[StudyJob]:
  """All runs of a scale, each after those that it starts from."""
  return [
    _job(setting, row, seed)
    for setting in SCALES[scale].values()
    for seed in range(setting.seeds)
    for row in rows(setting)
    if seed == 0 or row.headline
  ]


def _job(setting: VQLogitsSetting, row: VQLogitsRow, seed: int) -> StudyJob:
  named = lambda name: f"{setting.name}/{name}" + (f"-s{seed}" if seed else "")

  def measure(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
    measured: dict[str, Any] = {"floors": floors(experiment, folder)}
    if named(row.name) == CLUSTERED:
      measured["clusters"] = clusters(experiment, folder)
    return measured

  return training_job(
    named(row.name),
    row.label,
    row.experiment(seed),
    setting.path(row.name, seed),
    measure,
    tuple(named(name) for name in row.needs),
  )


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
