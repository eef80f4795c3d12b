"""Benchmark of the heads of the comparison: a training step and a decoding step of each."""

import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import measure
from experiments.bench.measure import Call, compare
from experiments.bench.training_step import TrainingStep
from experiments.studies.comparison.compressed import GROUPS, InMemory
from experiments.studies.comparison.page import AT_RANDOM, deployed, head_of, is_tied, works
from vqjax import Head, heads
from vqjax.lab.config import with_vocab
from vqjax.lab.report import units
from vqjax.lab.study import Study
from vqjax.lab.training.provenance import device

ROUNDS = 21
VOCAB = {"ptb": 10_000, "stories": 50_257}


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Time the rows of each study beside its untied full softmax."""
  figures: dict[str, Any] = {}
  for name, vocab in VOCAB.items():
    figures[name] = _study(name, vocab, *((3, 1) if quick else (None, ROUNDS)))
    yield figures


def _study(of: str, vocab: int, most: int | None, rounds: int) -> dict[str, Any]:
  """Print and return the seconds of each row, and their ratios to those of the dense head.

  A row that is compressed after its training has no step of its own. Samples are compared with
  the median of the rows that sample as the untied full softmax does.
  """
  study = works()[of].study
  reference, every = AT_RANDOM, [*study.rows][:most]
  decoding = compare({name: _sample(study, name, vocab) for name in every}, rounds)
  same = [name for name in every if _deployed(study, name) == _deployed(study, reference)]
  of_reference = statistics.median(decoding[name].seconds for name in same)
  figures, dense = {}, _step(study, reference, vocab)
  for name in every:
    sample = decoding[name].seconds
    figures[name] = {"sample_seconds": sample, "sample": sample / of_reference}
    if name not in study.trained:
      continue
    measure.log(f"measuring {of}/{name}")
    own = _step(study, name, vocab)
    # In turn, since the noise of a machine changes over time.
    turns = [(dense(), own()) for _ in range(rounds)]
    of_dense, seconds = map(statistics.median, zip(*turns, strict=True))
    figures[name] |= {"step_seconds": seconds, "step": seconds / of_dense}
    own.end()
  base, model = study.base, study.base.model
  measure.show_rows(
    f"{of}: a training step of {base.train.batch * model.context} tokens, over that of the full"
    f" softmax, and a sample at batch 1, over the median of the dense heads, V={vocab:,},"
    f" D={model.dim}, float32, {device()}",
    ("head", "step, ms", "ratio", "sample, ms", "ratio"),
    [
      [
        study.row(name).label,
        _shown(figures[name].get("step_seconds"), 1e3, 1),
        _shown(figures[name].get("step")),
        _shown(figures[name]["sample_seconds"], 1e3),
        _shown(figures[name]["sample"]),
      ]
      for name in every
    ],
  )
  return figures


def _shown(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
  return units.MISSING if value is None else f"{scale * value:.{digits}f}"


def _step(study: Study, name: str, vocab: int) -> TrainingStep:
  step = TrainingStep(with_vocab(study.experiment(name), vocab))
  step()
  return step


def _deployed(study: Study, name: str) -> Head:
  """The head of inference, with rows of its own: they cost what those of an embedding do."""
  if isinstance(study.row(name), InMemory):
    base = study.base.model
    return heads.PackedHead(0, base.dim, use_bias=True, row_groups=GROUPS, is_ranked=False)
  own = {"embedding": None} if is_tied(study, name) else {}
  return deployed(head_of(study, name)).clone(**own)


def _sample(study: Study, name: str, vocab: int) -> Call:
  """A sample at batch 1 by the head of inference."""
  head = _deployed(study, name).clone(vocab=vocab)
  hidden, key = jax.random.normal(jax.random.key(0), (1, head.dim)), jax.random.key(1)
  variables = jax.jit(head.init)(jax.random.key(2), jnp.zeros((1, head.dim)))
  sample = lambda variables, hidden, key: head.apply(variables, hidden, key, method="sample")
  return sample, (variables, hidden, key)
