"""Command that adds tokens to a pretrained model, or gives it the tokenizer of another.

vqjax grow SmolLM2-135M-Instruct.gguf --tokens names.txt --text stories.txt --out larger
"""

import argparse
import dataclasses
import json
import pathlib

from vqjax.commands.console import flag, new_parser, option, run
from vqjax.commands.models import DTYPES, PRETRAINED
from vqjax.lm import checkpoints
from vqjax.lm.compression.growing import Grown, grow
from vqjax.lm.compression.transplanting import transplant
from vqjax.lm.compression.trimming import SCORED
from vqjax.lm.texts import data_path, read_text

__all__ = []

ROWS = {
  "subtokens": checkpoints.mean_of_parts,
  "match": checkpoints.mean_of_parts_at_length,
  "mean": checkpoints.mean_of_all,
  "covariance": checkpoints.sampled(),
}
"""Rows of new tokens by their names on the command line."""


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call or a damaged model."""
  parser = new_parser(
    "grow",
    "Add tokens to a pretrained model: to its tokenizer, its input and its output table. Rows of"
    " padding are used first. Or give it the tokenizer of another model, as a drafter needs it."
    " Train the model on, so that it learns the new tokens.",
    "Without training, new tokens cost a text nats: the report says how many.",
  )
  parser.add_argument("model", help=PRETRAINED)
  given = parser.add_mutually_exclusive_group(required=True)
  option(given, "--tokens", "file with a new token a line, in UTF-8", pathlib.Path)
  option(given, "--tokenizer", "model whose tokenizer it gets", metavar="MODEL")
  option(
    parser,
    "--init",
    "rows of a new token: the mean of its subtokens' rows, that mean at their length (match), the"
    " mean of all rows, or draws with the covariance of all rows",
    default="subtokens",
    choices=ROWS,
  )
  option(parser, "--text", "texts to score before and after", pathlib.Path, [], nargs="+")
  option(parser, "--out", "folder of the new model", pathlib.Path, required=True, metavar="FOLDER")
  option(parser, "--multiple", "the tables get a multiple of so many rows", int, 1)
  option(parser, "--dtype", "number format of the model", default="float32", choices=DTYPES)
  option(parser, "--scored", "characters that are scored", int, SCORED)
  flag(parser, "--json", "print JSON")
  return run(parser, arguments, _grow, _problem)


def _problem(options: argparse.Namespace) -> str | None:
  if options.multiple != 1 and options.tokenizer is not None:
    return "`--multiple` must not be given with `--tokenizer`, whose model has the number of rows"
  return None


def _grow(options: argparse.Namespace) -> None:
  places = data_path(options.model, kind="model"), options.out
  given = {
    "row": ROWS[options.init],
    "texts": [read_text(data_path(str(path), kind="text")) for path in options.text],
    "dtype": DTYPES[options.dtype],
    "scored": options.scored,
  }
  if options.tokenizer is not None:
    report = transplant(*places, data_path(options.tokenizer, kind="--tokenizer"), **given)
  else:
    lines = read_text(data_path(str(options.tokens), kind="list of tokens")).split("\n")
    tokens = [line.removesuffix("\r") for line in lines if line.strip()]
    report = grow(*places, tokens, multiple=options.multiple, **given)
  print(json.dumps(dataclasses.asdict(report), indent=2) if options.json else _report_lines(report))


def _report_lines(report: Grown) -> str:
  """A report as lines of text."""
  begin = f" from {min(report.ids.values()):,} on" if report.ids else ""
  lines = [
    f"rows of the tables    {report.vocab:,} -> {report.vocab_after:,}, with"
    f" {len(report.ids):,} new tokens{begin}"
  ]
  if unmatched := [token for token, parts in report.parts.items() if not parts]:
    lines.append(
      f"without old tokens    {len(unmatched):,}, such as {', '.join(map(repr, unmatched[:5]))}"
    )
  if report.nats_per_byte is not None:
    of_new = "" if report.new_token_nats is None else f", {report.new_token_nats:.2f} nats each"
    lines += [
      f"tokens of the text    {report.tokens:,} -> {report.tokens_after:,}, {report.new_tokens:,}"
      f" of them new{of_new}",
      f"nats a byte           {report.nats_per_byte:.4f} -> {report.nats_per_byte_after:.4f}",
    ]
  return "\n".join(lines)
