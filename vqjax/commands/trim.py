"""Command that removes the tokens of a pretrained model that a text does not use.

vqjax trim gemma-3-270m-q4_k_m.gguf --keep-tokens 32768 --text english.txt --out gemma-english
"""

import argparse
import dataclasses
import json
import pathlib

from vqjax.commands.console import flag, new_parser, option, run
from vqjax.commands.models import DTYPES, PRETRAINED
from vqjax.lm.compression.trimming import SCORED, Trimmed, trim
from vqjax.lm.texts import data_path, read_text

__all__ = []


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call or a damaged model."""
  parser = new_parser(
    "trim",
    "Remove the rows of all but the most frequent tokens of a text from a pretrained model, and"
    " rebuild its tokenizer with those that are left. Special tokens and bytes stay.",
    "The first nine tenths of each text are counted; the report is measured on the rest.",
  )
  parser.add_argument("model", help=PRETRAINED)
  option(parser, "--keep-tokens", "tokens that are kept", int, required=True)
  option(parser, "--text", "texts in UTF-8", pathlib.Path, required=True, nargs="+")
  option(parser, "--out", "folder of the new model", pathlib.Path, required=True, metavar="FOLDER")
  option(
    parser,
    "--dtype",
    "number format in which the model is loaded and scored",
    default="float32",
    choices=DTYPES,
  )
  option(parser, "--scored", "characters that are scored before and after; 0: none", int, SCORED)
  flag(parser, "--json", "print JSON")
  return run(parser, arguments, _trim)


def _trim(options: argparse.Namespace) -> None:
  texts = [read_text(data_path(str(path), kind="text")) for path in options.text]
  report = trim(
    data_path(options.model, kind="model"),
    options.out,
    options.keep_tokens,
    texts,
    dtype=DTYPES[options.dtype],
    scored=options.scored,
  )
  print(json.dumps(dataclasses.asdict(report), indent=2) if options.json else _report_lines(report))


def _report_lines(report: Trimmed) -> str:
  """A report as lines of text."""
  lines = [
    f"tokens of the vocabulary  {report.vocab:,} -> {report.kept:,}, of which {report.required:,}"
    " must stay",
    f"vocabulary tables         {report.table_bytes:,} -> {report.table_bytes_after:,} bytes",
    f"tokens of the text        {report.tokens:,} -> {report.tokens_after:,}; {report.coverage:.2%}"
    f" of them kept, {report.spelled:.2%} now spelled in bytes",
    f"lines restored            {report.restored:,} -> {report.restored_after:,} of"
    f" {report.lines:,}",
  ]
  if report.nats_per_byte is not None:
    lines.append(
      f"nats a byte               {report.nats_per_byte:.4f} -> {report.nats_per_byte_after:.4f}"
    )
  return "\n".join(lines)
