"""Command that removes the tokens of a pretrained model that a text does not use.

vqjax trim gemma-3-270m-q4_k_m.gguf --keep-tokens 32768 --text english.txt --out gemma-english
"""

import argparse
import dataclasses
import json
import pathlib

from vqjax.commands.console import configure_warnings, exit_code
from vqjax.commands.models import DTYPES
from vqjax.lm.compression.trimming import SCORED, Trimmed, trim
from vqjax.lm.texts import data_path, read_text

__all__ = []


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call or a damaged model."""
  parser = argparse.ArgumentParser(
    prog="vqjax trim",
    description="Remove the rows of all but the most frequent tokens of a text from a pretrained"
    " model, and rebuild its tokenizer with those that are left. Special tokens and bytes stay.",
    epilog="The first nine tenths of each text are counted; the report is measured on the rest.",
  )
  parser.add_argument("model", help="folder of safetensors, a GGUF, or a .bin file of llama2.c")
  parser.add_argument(
    "--keep-tokens", type=int, required=True, metavar="N", help="tokens that are kept"
  )
  parser.add_argument(
    "--text", type=pathlib.Path, required=True, nargs="+", metavar="FILE", help="texts in UTF-8"
  )
  parser.add_argument(
    "--out", type=pathlib.Path, required=True, metavar="FOLDER", help="folder of the new model"
  )
  parser.add_argument(
    "--dtype",
    choices=DTYPES,
    default="float32",
    help="number format in which the model is loaded and scored (default: %(default)s)",
  )
  parser.add_argument(
    "--scored",
    type=int,
    default=SCORED,
    metavar="N",
    help="characters that are scored before and after; 0: none (default: %(default)s)",
  )
  parser.add_argument("--json", action="store_true", help="print JSON")
  parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
  options = parser.parse_args(arguments)
  configure_warnings()
  return exit_code(lambda: _trim(options), show_traceback=options.traceback)


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
