"""Which numbers compare two runs, and what does each of them mean?"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from vqjax.lab.report import units
from vqjax.lab.report.rows import Run


@dataclasses.dataclass(frozen=True)
class Column:
  """One number for each run.

  Attributes:
    title: the header, with its unit.
    get: run -> the value; None where the run has none.
    show: value -> how a person reads it.
    meaning: what the number is and how it was measured, for the page.
    smaller_is_better: True, False, or None where neither is.
  """

  title: str
  get: Callable[[Run], Any]
  show: Callable[[Any], str]
  meaning: str
  smaller_is_better: bool | None = None


def default_columns(runs: Sequence[Run]) -> list[Column]:
  """Quality, sizes and costs; quality on one split for all runs, which the headers name."""
  # Over several devices or batches no run is the fastest.
  comparable = len({_timed_on(run) for run in runs if run.status == "finished"}) <= 1
  columns = [*_quality(common_split(runs)), *_sizes(), *_costs(comparable)]
  dense = first_dense(runs)
  if dense is not None:
    at = next(i for i, column in enumerate(columns) if column.title == "loss, ms") + 1
    columns.insert(at, _relative_loss_time(dense))
  return columns


def common_split(runs: Sequence[Run]) -> str:
  """ "test" where every finished run was tested, else "valid": a column never mixes the two."""
  finished = [run for run in runs if run.status == "finished"]
  tested = finished and all(run.get("test.perplexity") is not None for run in finished)
  return "test" if tested else "valid"


def first_dense(runs: Sequence[Run]) -> Run | None:
  """The first run of a dense head whose loss was timed: what the others are compared with."""
  for run in runs:
    if "DenseHead" in str(run.get("head.class")) and run.get("loss.seconds"):
      return run
  return None


def _field(title, path, show, meaning, smaller_is_better=None) -> Column:
  return Column(title, lambda run: run.get(path), show, meaning, smaller_is_better)


def _quality(split: str) -> list[Column]:
  of = f"the {split} split, each token given the ones before it in its window"
  return [
    _field(
      f"{split} perplexity",
      f"{split}.perplexity",
      units.fixed(2),
      f"The exponential of nats/token on {of}. It depends on the tokenizer: compare it only between"
      " runs that share one.",
      True,
    ),
    _field(
      f"{split} nats/token",
      f"{split}.nats_per_token",
      units.fixed(4),
      f"Mean of -log p(token), in nats, over {of}. Sums are exact over all tokens.",
      True,
    ),
    _field(
      f"{split} bits/byte",
      f"{split}.bits_per_byte",
      units.fixed(4),
      f"The same sum in bits, divided by the bytes of the text of the {split} split. It compares"
      " runs with different tokenizers, unless one replaces words by an unknown one.",
      True,
    ),
  ]


def _sizes() -> list[Column]:
  # None is the best: a size is what an experiment chose, not what it found out.
  return [
    _field(
      "head params",
      "head.params",
      units.count,
      "Trained parameters that the output head owns. A tied head owns none of its embedding's,"
      " which then count in the model alone.",
    ),
    _field(
      "head bytes",
      "head.state_bytes",
      units.size,
      "Bytes of all variables the head owns, at the precision they are trained in: parameters and"
      " integer tables of codes, without the optimiser's state.",
    ),
    _field(
      "model params",
      "model.params",
      units.count,
      "Trained parameters of the whole model, embedding and head included; shared ones once.",
    ),
  ]


def _costs(comparable: bool) -> list[Column]:
  return [
    _field(
      "loss, ms",
      "loss.seconds",
      units.milliseconds,
      "Median time of the head's loss and its gradients for a device's part of a micro-batch,"
      " compiled, on the run's device. The rest of the model is not in it.",
      True if comparable else None,
    ),
    _field(
      "loss temp",
      "loss.temp_bytes",
      units.size,
      "Bytes of temporary buffers that XLA plans for that same computation: what the loss adds to"
      " memory beyond its inputs and outputs.",
      True if comparable else None,
    ),
    _field(
      "tokens/s",
      "train.tokens_per_second",
      units.count,
      "Training tokens per second of the whole run's optimiser steps, on the run's device.",
      False if comparable else None,
    ),
  ]


def _timed_on(run: Run) -> tuple[Any, Any]:
  """What a loss time depends on besides the head: the device and the number of tokens."""
  return run.get("device"), run.get("loss.tokens")


def _relative_loss_time(dense: Run) -> Column:
  def relative(run: Run) -> float | None:
    seconds = run.get("loss.seconds")
    same_work = _timed_on(run) == _timed_on(dense)
    return seconds / dense.get("loss.seconds") if seconds is not None and same_work else None

  return Column(
    "loss / dense",
    relative,
    units.ratio,
    f"The loss time as a multiple of that of {dense.name}, the first run with a dense head. Runs on"
    " another device or with another number of tokens in a micro-batch have none.",
    True,
  )
