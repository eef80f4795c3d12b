"""Which perplexity can no training of this config go below, because tokens share a code?

python -m experiments.floor configs/lm_codebook.py
python -m experiments.floor configs/lm_codebook.py model.head.codes=512 --json floor.json
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vqjax import CodebookHead, assign
from vqjax.lab.config import Experiment, config_hash
from vqjax.lab.console import add_config, with_config
from vqjax.lab.data import fit_encoder
from vqjax.lab.data.counts import count_tokens
from vqjax.lab.training.program import keys
from vqjax.lab.training.run import Text, load_text, write_json
from vqjax.lab.training.step import init_state

QUANTILES = {"least": 0, "10%": 0.1, "half": 0.5, "90%": 0.9, "most": 1}

USAGE = """\
examples:
  python -m experiments.floor configs/lm_codebook.py
  python -m experiments.floor configs/lm_codebook.py model.head.assignment_init.fraction=0.5

Nothing is trained. The floor is the perplexity of a model that predicts the code of every token
with certainty. The best token bias is that of each split's own frequencies: none is better."""


def measure(experiment: Experiment) -> dict[str, Any]:
  """The floors of the assignment that an experiment begins with, on its own text, as JSON.

  `splits` has, for each split, its tokens and the floor as nats a token and as perplexity, both
  without and with a token bias; `worst` are the tokens of the training text that cost most without
  one, or with one where the head has it.

  Raises:
    ValueError: the head has no codes, or its assignment does not suit the vocabulary.
    FileNotFoundError: the experiment starts from a run that is not there.
  """
  _check_head(experiment)
  text = load_text(experiment)
  head = text.experiment.model.head
  encoder = fit_encoder(experiment.data, experiment.tokenizer)
  table = assign.checked(_assignment(text), head.vocab, head.codes)
  counts = {name: count_tokens(split, encoder).counts for name, split in text.splits.items()}

  def floor(name: str, token_bias: bool) -> assign.Floor:
    return assign.floor(table, counts[name], codes=head.codes, token_bias=token_bias)

  own = floor("train", head.token_bias)
  return {
    "name": experiment.name,
    "config": config_hash(text.experiment),
    "tokenizer": encoder.fingerprint(),
    "vocab": head.vocab,
    "codes": head.codes,
    "token_bias": head.token_bias,
    "splits": {
      name: {
        "tokens": int(counts[name].sum()),
        "uniform": _scores(floor(name, token_bias=False)),
        "token_bias": _scores(floor(name, token_bias=True)),
      }
      for name in counts
    },
    "sizes": {name: float(np.quantile(own.sizes, at)) for name, at in QUANTILES.items()},
    "dead": len(own.dead),
    "worst": [row._asdict() | {"text": encoder.decode([row.token])} for row in own.worst],
  }


def _assignment(text: Text) -> np.ndarray:
  """The code of each token where the run begins: that of the head, or of the experiment's start."""
  experiment, model = text.experiment, text.experiment.model
  head = model.head
  if experiment.init_from is None:
    return (head.embedding or head).assignment_init(head.vocab, head.codes)
  key, _ = keys(experiment.seed)
  fresh = init_state(model, optax.identity(), key).variables
  codes = experiment.init_from(text, model, jax.device_get(fresh))["codes"]
  # The student of a distillation is a model of its own.
  codes = codes.get("student", codes)
  return codes["head" if head.embedding is None else "embedding"]["assignment"]


def _scores(floor: assign.Floor) -> dict[str, float]:
  return {"nats": floor.nats, "perplexity": floor.perplexity}


def _check_head(experiment: Experiment) -> None:
  head = experiment.model.head
  if not isinstance(head, CodebookHead):
    raise ValueError(
      f"the head of {experiment.name!r} is a {type(head).__name__}: no code alone scores its"
      " tokens, and nothing forces its perplexity above 1; give a config with a CodebookHead, such"
      " as configs/lm_codebook.py"
    )


def show(found: dict[str, Any], console: Console) -> None:
  """Prints what was measured for a person."""
  bias = "with" if found["token_bias"] else "without"
  console.print(
    f"[bold]{escape(found['name'])}[/], V = {found['vocab']:,}, K = {found['codes']:,}; its head is"
    f" {bias} a token bias"
  )
  console.print(_floor_table(found), _size_table(found), _worst_table(found))


def _floor_table(found: dict[str, Any]) -> Table:
  table = Table("split", title="Least perplexity of any body", title_justify="left")
  for column in ("tokens", "without token bias", "with the best one"):
    table.add_column(column, justify="right")
  for name, row in found["splits"].items():
    floors = (f"{row[kind]['perplexity']:,.2f}" for kind in ("uniform", "token_bias"))
    table.add_row(name, f"{row['tokens']:,}", *floors)
  return table


def _size_table(found: dict[str, Any]) -> Table:
  table = Table(title="Tokens on a code", title_justify="left")
  for name in (*found["sizes"], "codes without a token"):
    table.add_column(name, justify="right")
  table.add_row(*(f"{size:,.0f}" for size in found["sizes"].values()), f"{found['dead']:,}")
  return table


def _worst_table(found: dict[str, Any]) -> Table:
  everything = found["splits"]["train"]
  kind = "token_bias" if found["token_bias"] else "uniform"
  total = everything["tokens"] * everything[kind]["nats"]
  table = Table("token", title="Tokens of the training text that cost most", title_justify="left")
  for column in ("number", "count", "code", "tokens on it", "nats in all", "of the floor"):
    table.add_column(column, justify="right")
  for row in found["worst"]:
    numbers = (f"{row[key]:,}" for key in ("token", "count", "code", "shared"))
    part = f"{row['nats'] / total:.1%}"
    table.add_row(escape(repr(row["text"])), *numbers, f"{row['nats']:,.0f}", part)
  return table


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the floors, writes their JSON where asked; returns the exit code, 2 for a wrong call."""
  return with_config(_parser(), arguments, _floor)


def _floor(experiment: Experiment, options: argparse.Namespace) -> None:
  found = measure(experiment)
  show(found, Console())
  if options.json:
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.json, found)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.floor",
    description="Says before any training which perplexity the codes of a config rule out.",
    epilog=USAGE,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    add_help=False,
  )
  add_config(parser)
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the floors to FILE")
  return parser


if __name__ == "__main__":
  sys.exit(main())
