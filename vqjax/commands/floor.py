"""Command that computes the perplexity floor of a config, before any training.

vqjax floor configs/lm_codebook.py
vqjax floor configs/lm_codebook.py model.head.codes=512 --json floor.json
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vqjax import CodebookHead, assign
from vqjax.commands.console import OutputFile, option
from vqjax.commands.run_folders import config_parser, with_config
from vqjax.lab.config import Experiment, config_hash
from vqjax.lab.data import fingerprint, fit_tokenizer
from vqjax.lab.data.token_cache import count_tokens
from vqjax.lab.training.program import keys
from vqjax.lab.training.run_folder import EncodedText, load_text
from vqjax.lab.training.step import init_state
from vqjax.lm import records

__all__ = []

QUANTILES = {"least": 0, "10%": 0.1, "half": 0.5, "90%": 0.9, "most": 1}

EXAMPLES = """\
examples:
  vqjax floor configs/lm_codebook.py
  vqjax floor configs/lm_codebook.py model.head.assignment_init.fraction=0.5

Nothing is trained. The floor is the perplexity of a model that predicts the code of every token
with certainty; no model with these codes is below it. The best token bias is the log-frequency of
the tokens in the split itself."""


def measured_floors(experiment: Experiment) -> dict[str, Any]:
  """Return the floors of an experiment's assignment on its own text, as JSON.

  `splits` has for each split the number of tokens, and the floor in nats per token and as
  perplexity, without and with a token bias. `worst` are the tokens of the training text with the
  largest cost, with a token bias if the head has one.

  Raises:
    ValueError: the head has no codes, or the assignment does not fit the vocabulary.
    FileNotFoundError: the run that the experiment starts from does not exist.
  """
  head = experiment.model.head
  if not isinstance(head, CodebookHead):
    raise ValueError(
      f"`model.head` must be a CodebookHead; got a {type(head).__name__} in {experiment.name!r},"
      " whose perplexity has no floor above 1. Give a config such as configs/lm_codebook.py."
    )
  text = load_text(experiment)
  head = text.experiment.model.head
  tokenizer = fit_tokenizer(experiment.data, experiment.tokenizer)
  assignment = assign.checked_assignment(_assignment(text), head.vocab, head.codes)
  counts = {name: count_tokens(split, tokenizer) for name, split in text.splits.items()}

  def floor(name: str, token_bias: bool) -> assign.Floor:
    return assign.floor(assignment, counts[name], codes=head.codes, token_bias=token_bias)

  def scores(name: str, token_bias: bool) -> dict[str, float]:
    bound = floor(name, token_bias)
    return {"nats": bound.nats, "perplexity": bound.perplexity}

  own = floor("train", head.token_bias)
  return {
    "name": experiment.name,
    "config": config_hash(text.experiment),
    "tokenizer": fingerprint(tokenizer),
    "vocab": head.vocab,
    "codes": head.codes,
    "token_bias": head.token_bias,
    "splits": {
      name: {
        "tokens": int(counts[name].sum()),
        "uniform": scores(name, token_bias=False),
        "token_bias": scores(name, token_bias=True),
      }
      for name in counts
    },
    "sizes": {name: float(np.quantile(own.sizes, at)) for name, at in QUANTILES.items()},
    "dead": len(own.dead),
    "worst": [row._asdict() | {"text": tokenizer.decode([row.token])} for row in own.worst],
  }


def _assignment(text: EncodedText) -> np.ndarray:
  """Return the initial assignment of the head, or that of `init_from`."""
  experiment, model = text.experiment, text.experiment.model
  head = model.head
  if experiment.init_from is None:
    return (head.embedding or head).assignment_init(head.vocab, head.codes)
  key, _ = keys(experiment.seed)
  fresh = init_state(model, optax.identity(), key).variables
  codes = experiment.init_from(text, model, jax.device_get(fresh))["codes"]
  # In a distillation the head is part of the student.
  codes = codes.get("student", codes)
  return codes["head" if head.embedding is None else "embedding"]["assignment"]


def _show_floors(floors: dict[str, Any], console: Console) -> None:
  """Print the result of `measured_floors`."""
  bias = "with" if floors["token_bias"] else "without"
  console.print(
    f"[bold]{escape(floors['name'])}[/], V = {floors['vocab']:,}, K = {floors['codes']:,}; its head"
    f" is {bias} a token bias"
  )
  table = Table("split", title="Perplexity floor", title_justify="left")
  for column in ("tokens", "without token bias", "with the best token bias"):
    table.add_column(column, justify="right")
  for name, row in floors["splits"].items():
    perplexities = (f"{row[kind]['perplexity']:,.2f}" for kind in ("uniform", "token_bias"))
    table.add_row(name, f"{row['tokens']:,}", *perplexities)
  console.print(table)

  table = Table(title="Tokens of a code", title_justify="left")
  for name in (*floors["sizes"], "codes without a token"):
    table.add_column(name, justify="right")
  table.add_row(*(f"{size:,.0f}" for size in floors["sizes"].values()), f"{floors['dead']:,}")
  console.print(table)

  train = floors["splits"]["train"]
  total = train["tokens"] * train["token_bias" if floors["token_bias"] else "uniform"]["nats"]
  table = Table("token", title="Training tokens with the largest cost", title_justify="left")
  for column in ("id", "count", "code", "tokens of the code", "nats, sum", "of the floor"):
    table.add_column(column, justify="right")
  for row in floors["worst"]:
    numbers = (f"{row[key]:,}" for key in ("token", "count", "code", "shared"))
    fraction = f"{row['nats'] / total:.1%}"
    table.add_row(escape(repr(row["text"])), *numbers, f"{row['nats']:,.0f}", fraction)
  console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command; return its exit code: 2 for a wrong call."""
  parser = config_parser(
    "floor",
    "Compute before any training which perplexity the codes of a config rule out.",
    EXAMPLES,
  )
  option(parser, "--json", "write the floors to FILE", OutputFile)
  return with_config(parser, arguments, _floor)


def _floor(experiment: Experiment, options: argparse.Namespace) -> None:
  floors = measured_floors(experiment)
  _show_floors(floors, Console())
  if options.json:
    records.write(options.json, floors)
