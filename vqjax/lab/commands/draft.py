"""Command that trains a drafter of a model for speculative decoding.

vqjax draft stories260K.bin --text stories.txt --out drafter.safetensors
vqjax generate stories260K.bin --draft drafter.safetensors --prompt "Once upon a time"
"""

import argparse
import dataclasses
import json
import pathlib

from rich.console import Console
from rich.table import Table

from vqjax.lab.compression import read_texts
from vqjax.lab.console import configure_warnings, exit_code
from vqjax.lab.data.files import data_path
from vqjax.lab.drafters import DrafterJob, Settings, train_drafter
from vqjax.lab.exits import say
from vqjax.lab.trained import add_arguments, load_trained


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call or a damaged model."""
  options = _parser().parse_intermixed_args(arguments)
  configure_warnings()
  return exit_code(lambda: _draft(options), show_traceback=options.traceback)


def _draft(options: argparse.Namespace) -> None:
  texts = read_texts([data_path(str(path), kind="--text") for path in options.text])
  settings = {f.name: getattr(options, f.name) for f in dataclasses.fields(Settings)}
  job = DrafterJob(
    data_path(options.model, kind="model"),
    "\n\n".join(texts.values()),
    options.out,
    Settings(**settings),
    positions=options.positions,
    window=options.window,
  )
  loaded = load_trained(options.model, options.config, options.overrides, options.dtype)
  found = train_drafter(job, loaded, say)
  if options.json:
    print(json.dumps(found, indent=2))
    return
  table = Table("predictions deep", title=f"{found['positions']:,} held-out positions")
  for column in ("KL, nats", "same best token"):
    table.add_column(column, justify="right")
  for depth, (kl, agreement) in enumerate(zip(found["kl"], found["agreement"]), 1):
    table.add_row(str(depth), f"{kl:.4f}", f"{100 * agreement:.1f} %")
  Console().print(table)
  print("times as long as a token without a drafter that a round with k draft tokens takes:")
  for way, times in found["rounds"].items():
    print(f"  {way}: {1 + times['overhead']:.2f} + {times['cost']:.3f} · k")
  print(f"drafter: {options.out}")


SIZES = {
  "positions": "positions of the text that are used",
  "steps": "steps of training",
  "batch": "windows of a step",
  "window": "tokens of a window",
  "depth": "predictions deep that the drafter is trained",
  "length": "most draft tokens of a round",
}


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="vqjax draft",
    description="Train a drafter of one block on the final hidden vectors of a model, as EAGLE's,"
    " with which `vqjax generate --draft` decodes faster. What is generated has the model's"
    " distribution all the same.",
    epilog="The same command again resumes an interrupted training.",
  )
  add_arguments(parser)
  parser.add_argument(
    "--text",
    type=pathlib.Path,
    nargs="+",
    required=True,
    metavar="FILE",
    help="text like that to be generated; its end is held out",
  )
  parser.add_argument(
    "--out", type=pathlib.Path, required=True, metavar="FILE", help="the drafter to be written"
  )
  parser.add_argument(
    "--vocab",
    type=int,
    metavar="N",
    help="draft the N most frequent tokens of the text only (default: all); a large vocabulary"
    " costs most of the time of a draft",
  )
  for name, text in SIZES.items():
    default = getattr(DrafterJob, name, None) or getattr(Settings, name)
    parser.add_argument(
      f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default %(default)s)"
    )
  parser.add_argument(
    "--rate",
    type=float,
    default=Settings.rate,
    metavar="R",
    help="largest learning rate (default %(default)g)",
  )
  parser.add_argument("--json", action="store_true", help="print JSON")
  return parser
