"""Benchmark of the heads of the comparison: a training step and a decoding step of each."""

import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import measure
from experiments.bench.measure import Call, compare
from experiments.bench.training_step import TrainingStep
from experiments.studies.comparison.rows import (
  SCALES,
  ComparisonRow,
  ComparisonSetting,
  deployed,
  rows,
)
from vqjax import Head
from vqjax.lab.config import with_vocab
from vqjax.lab.report import units
from vqjax.lab.training.provenance import device

ROUNDS = 21
VOCAB = {"ptb": 10_000, "stories": 50_257}


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Time the rows of each setting beside its reference."""
  figures: dict[str, Any] = {}
  for setting in SCALES["smoke" if quick else "cpu"]:
    if setting.name not in VOCAB:  # its heads are those of another setting
      continue
    vocab, rounds = (400, 1) if quick else (VOCAB[setting.name], ROUNDS)
    figures[setting.name] = _setting(setting, vocab, rounds)
    yield figures


def _setting(s: ComparisonSetting, vocab: int, rounds: int) -> dict[str, Any]:
  """Print and return the seconds of each row, and their ratios to those of the dense head.

  A row that is compressed after its training has no step of its own. Samples are compared with
  the median of the rows that sample as the first one does.
  """
  reference, *_ = every = rows(s)
  decoding = compare({row.name: _sample(row, vocab) for row in every}, rounds)
  same = [row.name for row in every if _deployed(row) == _deployed(reference)]
  of_reference = statistics.median(decoding[name].seconds for name in same)
  figures, dense = {}, _step(reference, s, vocab)
  for row in every:
    sample = decoding[row.name].seconds
    figures[row.name] = {"sample_seconds": sample, "sample": sample / of_reference}
    if row.source is not None:
      continue
    measure.log(f"measuring {s.name}/{row.name}")
    own = _step(row, s, vocab)
    # In turn, since the noise of a machine changes over time.
    turns = [(dense(), own()) for _ in range(rounds)]
    of_dense, seconds = map(statistics.median, zip(*turns, strict=True))
    figures[row.name] |= {"step_seconds": seconds, "step": seconds / of_dense}
    own.end()
  measure.show_rows(
    f"{s.name}: a training step of {s.train.batch * s.context} tokens, over that of the first row,"
    f" and a sample at batch 1, over the median of the dense heads, V={vocab:,}, D={s.dim},"
    f" float32, {device()}",
    ("head", "step, ms", "ratio", "sample, ms", "ratio"),
    [
      [
        row.label,
        _shown(figures[row.name].get("step_seconds"), 1e3, 1),
        _shown(figures[row.name].get("step")),
        _shown(figures[row.name]["sample_seconds"], 1e3),
        _shown(figures[row.name]["sample"]),
      ]
      for row in every
    ],
  )
  return figures


def _shown(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
  return units.MISSING if value is None else f"{scale * value:.{digits}f}"


def _step(row: ComparisonRow, s: ComparisonSetting, vocab: int) -> TrainingStep:
  step = TrainingStep(with_vocab(row.experiment(s, 0), vocab))
  step()
  return step


def _deployed(row: ComparisonRow) -> Head:
  """The head of inference, with rows of its own: they cost what those of an embedding do."""
  own = {"embedding": None} if row.is_tied else {}
  return deployed(row.head()).clone(**own)


def _sample(row: ComparisonRow, vocab: int) -> Call:
  """A sample at batch 1 by the head of inference."""
  head = _deployed(row).clone(vocab=vocab)
  hidden, key = jax.random.normal(jax.random.key(0), (1, head.dim)), jax.random.key(1)
  variables = jax.jit(head.init)(jax.random.key(2), jnp.zeros((1, head.dim)))
  sample = lambda variables, hidden, key: head.apply(variables, hidden, key, method="sample")
  return sample, (variables, hidden, key)
