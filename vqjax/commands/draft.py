"""Command that trains a drafter of a model for speculative decoding.

vqjax draft stories260K.bin --text stories.txt --out drafter.safetensors
vqjax draft stories260K.bin --medusa --text stories.txt --out drafter.safetensors
vqjax generate stories260K.bin --draft drafter.safetensors --prompt "Once upon a time"
"""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from vqjax.commands.console import flag, new_parser, option, run
from vqjax.commands.models import add_arguments, chosen_model
from vqjax.lab.exits import say
from vqjax.lm.drafting import eagle_training, medusa_training
from vqjax.lm.records import one_line
from vqjax.lm.texts import data_path, read_texts

__all__ = []


class _Kind(NamedTuple):
  """A kind of drafter.

  Attributes:
    job: what `train` does.
    settings: how it trains.
    train: writes a drafter and returns its figures.
    show: prints the figures.
  """

  job: type
  settings: type
  train: Callable[..., dict[str, Any]]
  show: Callable[[dict[str, Any]], None]

  def defaults(self) -> dict[str, Any]:
    """The options that the kind has, and their defaults."""
    fields = (*dataclasses.fields(self.job), *dataclasses.fields(self.settings))
    return {field.name: field.default for field in fields if field.name in OPTIONS}


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call or a damaged model."""
  parser = new_parser(
    "draft",
    "Train a drafter on the final hidden vectors of a model, of one block as EAGLE's or of Medusa's"
    " blocks, with which `vqjax generate --draft` decodes faster. What is generated has the model's"
    " distribution all the same.",
    "The same command again resumes an interrupted training.",
  )
  add_arguments(parser)
  required = {"required": True}
  text = "text like that to be generated; its end is held out"
  option(parser, "--text", text, pathlib.Path, nargs="+", **required)
  option(parser, "--out", "the drafter to be written", pathlib.Path, **required)
  flag(
    parser,
    "--medusa",
    "train Medusa's blocks, which draft a tree of tokens at once, instead of one block that drafts"
    " one token after another",
  )
  for name, text in OPTIONS.items():
    kind = float if name == "rate" else int
    option(parser, f"--{name}", f"{text} ({_default(name)})", kind)
  flag(parser, "--json", "print JSON")
  return run(parser, arguments, _draft)


def _draft(options: argparse.Namespace) -> None:
  kind = MEDUSA if options.medusa else EAGLE
  given = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
  for name, value in given.items():
    if name not in kind.defaults():
      raise ValueError(
        f"`--{name}` must be left out {'with' if options.medusa else 'without'} `--medusa`; got"
        f" {value}. It is an option of the other kind of drafter."
      )
  texts = read_texts([data_path(str(path), kind="--text") for path in options.text])
  own = {field.name for field in dataclasses.fields(kind.settings)}
  job = kind.job(
    data_path(options.model, kind="model"),
    "\n\n".join(texts.values()),
    options.out,
    settings=kind.settings(**{name: x for name, x in given.items() if name in own}),
    **{name: x for name, x in given.items() if name not in own},
  )
  loaded = chosen_model(options)
  found = kind.train(job, loaded, say)
  if options.json:
    print(json.dumps(found, indent=2))
    return
  kind.show(found)
  print("times as long as a token without a drafter that a round with k draft tokens takes:")
  for way, times in found["rounds"].items():
    print(f"  {way}: {1 + times['overhead']:.2f} + {times['cost']:.3f} · k")
  print(f"drafter: {one_line(options.out)}")


def _show_eagle(found: dict[str, Any]) -> None:
  rows = zip((f"{kl:.4f}" for kl in found["kl"]), map(_percent, found["agreement"]))
  _show(found, ("predictions deep", "KL, nats", "same best token"), rows)


def _show_medusa(found: dict[str, Any]) -> None:
  rows = zip(map(_percent, found["accuracy"]), map(_percent, found["among"]))
  _show(found, ("block", "its best token", f"among its best {medusa_training.CANDIDATES}"), rows)
  print(
    f"tokens a pass: {found['chain']:.2f} with each block's best token alone, {found['tree']:.2f}"
    f" with a tree of k = {found['size']}"
  )


def _show(found, columns, rows):
  table = Table(title=f"{found['positions']:,} held-out positions")
  for number, column in enumerate(columns):
    table.add_column(column, justify="right" if number else "left")
  for number, row in enumerate(rows, 1):
    table.add_row(str(number), *row)
  Console().print(table)


def _percent(part: float) -> str:
  return f"{100 * part:.1f} %"


OPTIONS = {
  "positions": "positions of the text that are used",
  "vocab": "draft only the N most frequent tokens of the text, or all with an N that is as large as"
  " the vocabulary, which costs most of the time of a draft",
  "steps": "steps of training",
  "batch": "windows of a step; with --medusa its positions",
  "rate": "largest learning rate",
  "window": "tokens of a window",
  "depth": "predictions deep that the drafter is trained",
  "length": "most draft tokens of a round",
  "blocks": "blocks, each of which drafts one token further",
  "size": "draft tokens of the tree",
}

EAGLE = _Kind(
  eagle_training.DrafterJob, eagle_training.EagleTraining, eagle_training.train_drafter, _show_eagle
)
MEDUSA = _Kind(
  medusa_training.MedusaJob,
  medusa_training.MedusaTraining,
  medusa_training.fit_medusa,
  _show_medusa,
)


def _default(name: str) -> str:
  """The default of an option with each kind that has it."""
  kinds = {"default": EAGLE, "with --medusa": MEDUSA}
  found = {way: kind.defaults()[name] for way, kind in kinds.items() if name in kind.defaults()}
  return ", ".join(f"{way} {'all' if x is None else x}" for way, x in found.items())
