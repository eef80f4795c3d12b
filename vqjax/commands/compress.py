"""Command that compresses the vocabulary tables of a pretrained model, nearly without loss.

vqjax compress gemma-3-270m-q4_k_m.gguf --kl 0.01 --text news.txt code.txt --out small
vqjax compress gemma-3-270m-q4_k_m.gguf --bytes 45MB --text news.txt code.txt --out smaller
vqjax compress medium --kl 0.01 --moments moments.safetensors --text news.txt --out small
vqjax compress large --bytes 1GB --table model.embed_tokens.weight moments.safetensors --out small
"""

import argparse
import pathlib
import re

from vqjax.commands.console import new_parser, option, run
from vqjax.commands.models import DTYPES, PRETRAINED, load_model
from vqjax.lab.exits import say
from vqjax.lm.checkpoints import RUNTIMES
from vqjax.lm.compression.folders import (
  CompressionJob,
  TensorJob,
  check_paths,
  compress_model,
  compress_tensors,
)
from vqjax.lm.records import one_line
from vqjax.lm.texts import check_different, data_path, read_texts
from vqjax.tables.container import UNPACKED

__all__ = ["main"]

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_of(text: str) -> int:
  """The bytes of a size such as 65MB.

  Raises:
    argparse.ArgumentTypeError: it is not a size.
  """
  match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
  try:
    size = float(match[1]) * UNITS[match[2].upper()]
    if not 1 <= size < 2**63:
      raise ValueError("no file has so many bytes")
    return int(size)
  except (TypeError, KeyError, ValueError):
    raise argparse.ArgumentTypeError(
      f"`--bytes` must be a number of bytes such as 65MB; got {text!r}. Use KB, MB or GB."
    ) from None


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call, 128 + n for signal n."""
  parser = new_parser(
    "compress",
    "Compress the vocabulary tables of a pretrained model to a divergence from it, or to a size.",
    "The same command again resumes an interrupted one.",
  )
  parser.add_argument("model", help=PRETRAINED)
  bound = parser.add_mutually_exclusive_group(required=True)
  option(bound, "--kl", "mean divergence, nats a token, such as 0.01", float, metavar="NATS")
  option(bound, "--bytes", "bytes of the tables: 65MB", size_of, metavar="SIZE")
  option(
    parser,
    "--text",
    "text of each domain that matters, in UTF-8: counts, calibration, and without --held-out the"
    " last fifth to report on",
    pathlib.Path,
    [],
    nargs="+",
  )
  option(parser, "--held-out", "text to report on", pathlib.Path, [], nargs="+")
  option(parser, "--out", "new folder", pathlib.Path, required=True, metavar="FOLDER")
  option(
    parser,
    "--moments",
    "moments that were collected elsewhere, with their counts beside those of --text",
    pathlib.Path,
  )
  option(
    parser,
    "--table",
    "compress a tensor [V, D] of safetensors of any architecture by a file of moments, without"
    " running the model; may be given several times",
    default=[],
    nargs=2,
    action="append",
    metavar=("TENSOR", "MOMENTS"),
  )
  option(parser, "--tokens", "calibration tokens", int, 2**14)
  option(parser, "--window", "tokens of a window", int, 256)
  option(
    parser, "--dtype", "number format of the rest of the model", default="float32", choices=DTYPES
  )
  option(
    parser,
    "--runtime",
    "form of the tables in memory when the folder is loaded: dense rows (unpacked), groups of 8-bit"
    " integers (int8), whole bits that are scored where they lie (packed), or, for the input table"
    " of a model that is not tied, rows decoded from the file when they are looked up (rows)",
    default=UNPACKED,
    choices=RUNTIMES,
  )
  work = lambda options: (_compress_tensors if options.table else _compress)(options)
  return run(parser, arguments, work, _misplaced)


def _misplaced(options: argparse.Namespace) -> str | None:
  """What is wrong with options that are given together."""
  texts = options.text or options.held_out
  if options.table and (options.bytes is None or texts or options.moments):
    return (
      "`--table` needs `--bytes`, and no `--text`, `--held-out` or `--moments`: the model is not"
      " run"
    )
  if len(dict(options.table)) < len(options.table):
    return "`--table` must name different tensors, each with its file of moments"
  if options.table and options.runtime != UNPACKED:
    return "`--table` needs no `--runtime`: the model is not one that this library loads"
  if not options.table and not options.text:
    return "`--text` must be given, or `--table` for a model that is not run"
  return None


def _compress_tensors(options: argparse.Namespace) -> None:
  moments = {name: pathlib.Path(path) for name, path in options.table}
  model = data_path(options.model, kind="model")
  made = compress_tensors(TensorJob(model, options.out, options.bytes, moments), say)
  report = made["report"]
  for name, table in made["tables"].items():
    print(f"{one_line(name)}: {table['bytes']:,} bytes")
  print(
    f"compressing took {report['seconds']:.0f} s and {report['peak_bytes'] / 1e9:.2f} GB of"
    f" memory\nresult: {one_line(options.out)}"
  )


def _compress(options: argparse.Namespace) -> None:
  given = {"--text": options.text, "--held-out": options.held_out}
  found = [data_path(str(p), kind=kind) for kind, paths in given.items() for p in paths]
  check_different([path.resolve() for path in found], "--text` and `--held-out")
  job = CompressionJob(
    model=data_path(options.model, kind="model"),
    texts=read_texts(options.text),
    held_out=read_texts(options.held_out, "--held-out"),
    out=options.out,
    kl=options.kl,
    size=options.bytes,
    moments=options.moments,
    hidden_tokens=options.tokens,
    search_tokens=max(1, options.tokens // 8),
    held_out_tokens=max(1, options.tokens // 4),
    window=options.window,
    dtype=options.dtype,
    runtime=options.runtime,
  )
  # Before the minutes that loading may take.
  check_paths(job)
  result = compress_model(job, load_model(options.model, dtype=options.dtype), say)
  held = result["held_out"]
  print(
    f"tables: {result['bytes']:,} bytes; held-out text: KL {held['kl']:.5f} nats/token, 99th"
    f" percentile {held['kl_p99']:.4f}, same best token {100 * held['top1']:.2f} %,"
    f" {held['nats']:.4f} nats/token, before {held['nats_before']:.4f}, over {held['tokens']:,}"
    f" tokens\ncompressing took {result['seconds']:.0f} s and"
    f" {result['peak_bytes'] / 1e9:.2f} GB of memory\nresult: {one_line(options.out)},"
    " with report.md"
  )
