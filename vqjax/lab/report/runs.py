"""Runs as their folders describe them, and the columns that compare them."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vqjax.lab.report import units
from vqjax.lab.run_files import read_config, read_metrics, read_result
from vqjax.lm import records

__all__ = ["Column", "Run", "common_split", "default_columns", "labels", "read_run", "read_runs"]


@dataclasses.dataclass(frozen=True)
class Run:
  """A run, as the JSON files of its folder describe it.

  Attributes:
    folder: the run folder.
    config: nested description of the experiment; empty without a `config.json`.
    config_hash: hash of the experiment; None without a `config.json`.
    metrics: rows of `metrics.jsonl` in their order.
    result: content of `result.json`; None before the run has ended.
  """

  folder: pathlib.Path
  config: Mapping[str, Any]
  config_hash: str | None
  metrics: tuple[Mapping[str, Any], ...]
  result: Mapping[str, Any] | None

  @property
  def name(self) -> str:
    """Name of the experiment, or of the folder where the experiment has none."""
    return str(self.get("name") or self.config.get("name") or self.folder.name)

  @property
  def status(self) -> str:
    """One of "finished", "failed" and, without a result, "unfinished"."""
    return "unfinished" if self.result is None else str(self.get("status") or "finished")

  def get(self, path: str) -> Any:
    """Return a value of the result by a dotted path such as "head.params", or None."""
    value: Any = self.result
    for part in path.split("."):
      value = value.get(part) if isinstance(value, Mapping) else None
    return value


def steps_of(run: Run) -> int | None:
  """Optimiser steps of an ended run; None where they are not known."""
  return run.get("train.steps")


def tokens_of(run: Run) -> int | None:
  """Tokens of the windows that an ended run was trained on; None where they are not known."""
  steps, train, model = (steps_of(run), *(run.config.get(part) for part in ("train", "model")))
  if steps is None or not train or "context" not in (model or {}):
    return None
  return steps * train["batch"] * model["context"]


def read_run(folder: str | pathlib.Path) -> Run:
  """Read the run in a folder; any of its files may be missing.

  Raises:
    ValueError: a file does not hold the expected JSON; the message names the file and the line.
  """
  folder = pathlib.Path(folder)
  config, metrics = read_config(folder) or {}, read_metrics(folder)
  if metrics.problem:
    raise metrics.problem
  return Run(
    folder=folder,
    config=config.get("config", {}),
    config_hash=config.get("hash"),
    metrics=tuple(metrics.rows),
    result=read_result(folder),
  )


def read_runs(folder: str | pathlib.Path) -> list[Run]:
  """Read every run in or below a folder, in the order of their paths."""
  files = pathlib.Path(folder).rglob("*.json")
  folders = {file.parent for file in files if file.name in ("config.json", "result.json")}
  return [read_run(folder) for folder in sorted(folders)]


def labels(runs: Sequence[Run]) -> list[str]:
  """Return the names of runs, with their folders where names repeat."""
  names = [records.printable(run.name) for run in runs]
  return [
    f"{name} ({records.printable(run.folder.name)})" if names.count(name) > 1 else name
    for run, name in zip(runs, names, strict=True)
  ]


@dataclasses.dataclass(frozen=True)
class Column:
  """A column of a table: one number for each run.

  Attributes:
    title: the header, with the unit.
    get: run -> value, or None.
    show: value -> text.
    meaning: what the number is and how it was measured, for the page.
    smaller_is_better: True, False, or None where no value is the best.
  """

  title: str
  get: Callable[[Run], Any]
  show: Callable[[Any], str]
  meaning: str
  smaller_is_better: bool | None = None


def common_split(runs: Sequence[Run]) -> str:
  """Return "test" if every finished run was tested, else "valid"."""
  finished = [run for run in runs if run.status == "finished"]
  tested = finished and all(run.get("test.perplexity") is not None for run in finished)
  return "test" if tested else "valid"


def default_columns(runs: Sequence[Run]) -> list[Column]:
  """Return the columns of quality, sizes and costs."""
  split = common_split(runs)
  # Times on several devices or batch sizes are not compared.
  comparable = len({_timed_on(run) for run in runs if run.status == "finished"}) <= 1
  smaller, larger = (True, False) if comparable else (None, None)
  # Nor is the quality of runs that saw more or fewer tokens.
  budgets = {(steps_of(run), tokens_of(run)) for run in runs if run.status == "finished"}
  lower = True if len(budgets) <= 1 else None

  def column(title, path, show, meaning, smaller_is_better=None) -> Column:
    return Column(title, lambda run: run.get(path), show, meaning, smaller_is_better)

  columns = [
    column(
      f"{split} perplexity",
      f"{split}.perplexity",
      units.fixed(2),
      f"The exponential of nats/token on the {split} split. It depends on the tokenizer: compare it"
      " only between runs with the same one.",
      lower,
    ),
    column(
      f"{split} nats/token",
      f"{split}.nats_per_token",
      units.fixed(4),
      f"Mean of -log p(token), in nats, over all tokens of the {split} split, each given the tokens"
      " before it in its window.",
      lower,
    ),
    column(
      f"{split} bits/byte",
      f"{split}.bits_per_byte",
      units.fixed(4),
      f"Sum of -log2 p(token) over the {split} split, divided by the bytes of its text. It compares"
      " runs with different tokenizers, unless one replaces words by an unknown one.",
      lower,
    ),
    # No size is the best: it is chosen, not measured.
    column(
      "head params",
      "head.params",
      units.count,
      "Trained parameters that the output head owns. The table of a tied head belongs to the"
      " embedding, and counts only in the model.",
    ),
    column(
      "head bytes",
      "head.state_bytes",
      units.size,
      "Bytes of all variables that the head owns, at the precision of training: parameters and"
      " integer tables of codes, without the state of the optimiser.",
    ),
    column(
      "model params",
      "model.params",
      units.count,
      "Trained parameters of the whole model, with embedding and head; shared ones count once.",
    ),
    Column("steps", steps_of, units.count, "Optimiser steps of the run."),
    Column(
      "tokens",
      tokens_of,
      units.count,
      "Tokens of the training windows: steps, times the windows of a step, times the context. Where"
      " runs differ in steps or tokens, no quality is marked as the best.",
    ),
    column(
      "loss, ms",
      "loss.seconds",
      units.milliseconds,
      "Median time of the head's loss and its gradients for one device's share of a micro-batch,"
      " compiled, on the run's device. The rest of the model is not included.",
      smaller,
    ),
    column(
      "loss temp",
      "loss.temp_bytes",
      units.size,
      "Bytes of temporary buffers that XLA allocates for that computation, beyond its inputs and"
      " outputs.",
      smaller,
    ),
    column(
      "tokens/s",
      "train.tokens_per_second",
      units.count,
      "Training tokens per second, mean over the optimiser steps of the run, on the run's device.",
      larger,
    ),
    column(
      "FLOP/s",
      "train.model_flops_per_second",
      units.count,
      "Model FLOPs of training per second: three times the products of the forward pass, attention"
      " included, whatever is recomputed.",
      larger,
    ),
    column(
      "MFU",
      "train.mfu",
      lambda share: f"{share:.1%}".replace("%", " %"),
      "Share of the bfloat16 peak of all devices that model FLOPs are (model FLOPs utilisation);"
      " missing where the peak of the device is not known.",
      larger,
    ),
  ]
  dense = _first_dense(runs)
  if dense is not None:
    at = next(i for i, column in enumerate(columns) if column.title == "loss, ms") + 1
    columns.insert(at, _relative_loss_time(dense))
  return columns


def _first_dense(runs: Sequence[Run]) -> Run | None:
  """Return the first run with a dense head and a loss time, the baseline."""
  is_dense = lambda run: "DenseHead" in str(run.get("head.class")) and run.get("loss.seconds")
  return next(filter(is_dense, runs), None)


def _timed_on(run: Run) -> tuple[Any, Any]:
  """The device and the number of tokens of a loss time."""
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
