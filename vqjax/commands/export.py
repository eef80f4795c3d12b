"""Command that writes a pretrained model with quantised vocabulary tables for other runtimes.

vqjax export gemma-3-270m-q4_k_m.gguf --to Q4_0 --text news.txt code.txt --out gemma-q4.gguf
vqjax export gemma-3-270m --to int4 --moments moments.safetensors --out gemma-int4
"""

import argparse
import pathlib

from vqjax.commands.console import new_parser, option, run
from vqjax.commands.models import load_model
from vqjax.lm.compression.calibration import collect
from vqjax.lm.compression.exports import (
  WIDTHS,
  export_compressed_tensors,
  export_gguf,
  gguf_source,
  integer_source,
)
from vqjax.lm.compression.folders import read_moments
from vqjax.lm.jobs import ProgressBars
from vqjax.lm.records import one_line
from vqjax.lm.texts import (
  WINDOW,
  check_tokens,
  counts_of,
  data_path,
  encode_texts,
  read_texts,
  text_windows,
)
from vqjax.outputs import check_output
from vqjax.tables import Moments
from vqjax.tables.gguf_types import TYPES

__all__ = []

INTEGERS = {f"int{bits}": bits for bits in WIDTHS}
"""Formats of compressed-tensors' layout."""


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call, 128 + n for signal n."""
  parser = new_parser(
    "export",
    "Write a pretrained model again with its vocabulary tables in a block type of GGUF, or as"
    " integers in the layout of compressed-tensors. With `--text` or `--moments` the values are"
    " fitted to what the model does; without, each number is rounded by itself.",
  )
  parser.add_argument("model", help="a GGUF; for int8 and int4 also a folder of safetensors")
  option(parser, "--to", "format of the tables", choices=(*TYPES, *INTEGERS), required=True)
  option(parser, "--head-to", "block type of an untied head (default: that of --to)", choices=TYPES)
  option(
    parser,
    "--group",
    "columns that share a scale in int8 and int4 (default: whole rows for int8, 32 for int4)",
    int,
  )
  option(parser, "--out", "new GGUF, or new folder", pathlib.Path, required=True, metavar="PATH")
  source = parser.add_mutually_exclusive_group()
  option(source, "--text", "texts in UTF-8", pathlib.Path, [], nargs="+")
  option(source, "--moments", "moments that were collected elsewhere", pathlib.Path)
  option(parser, "--tokens", "tokens of the texts", int, 2**14)
  return run(parser, arguments, _export)


def _export(options: argparse.Namespace) -> None:
  path = data_path(options.model, kind="model")
  # What may be refused comes before the minutes of calibration.
  check_output(options.out, "--out", folder=options.to in INTEGERS)
  check_tokens(options.tokens)
  if options.to in INTEGERS:
    integer_source(path, INTEGERS[options.to], options.group)
  else:
    gguf_source(path, options.to, options.head_to)
  moments = _moments(options, path)
  if options.to in INTEGERS:
    sizes = export_compressed_tensors(
      path, options.out, INTEGERS[options.to], group=options.group, moments=moments
    )
  else:
    sizes = export_gguf(path, options.out, options.to, head_kind=options.head_to, moments=moments)
  for name, size in sizes.items():
    print(f"{one_line(name)}: {size:,} bytes")
  print(f"result: {one_line(options.out)}")


def _moments(options: argparse.Namespace, path: pathlib.Path) -> Moments | None:
  """The moments of a file or of texts; None without either."""
  if options.moments is not None:
    return read_moments(options.moments)
  if not options.text:
    return None
  texts = read_texts(options.text)
  model, variables, tokenizer = load_model(str(path))
  length = min(WINDOW, model.context)
  begin, encoded = encode_texts(texts, tokenizer, length, lambda own: own, "--text")
  of = text_windows(encoded, begin, length)
  with ProgressBars() as bars:
    return collect(
      model,
      variables,
      of.take(len(of.tokens)).tokens,
      counts_of(encoded, begin, model.head.vocab, length),
      hidden_tokens=options.tokens,
      expected_tokens=0,
      fisher_tokens=max(1, options.tokens // 16),
      progress=bars("calibration"),
    )
