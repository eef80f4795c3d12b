"""Command that compresses the vocabulary tables of a model, or one table, nearly without loss.

vqjax compress gemma-3-270m-q4_k_m.gguf --bytes 65MB --out small
vqjax compress gemma-3-270m-q4_k_m.gguf --kl 0.01 --text news.txt code.txt --out small
vqjax compress model.safetensors:lm_head.weight --bytes 1/16 --out head.safetensors
vqjax compress table.npy --bytes 1/8 --counts counts.npy --hidden hidden.npy --out table.safetensors
vqjax compress table.npy --pages --bits 0.5 --counts counts.npy --out ngrams.small
vqjax compress qwen:model.layers.1.ple.ple_embedding.ngram_embedding --pages --bits 0.5 \
  --text news.txt --out layer1.small
vqjax compress large --bytes 1GB --table model.embed_tokens.weight moments.safetensors --out small
"""

import argparse
import pathlib
from typing import Any

import numpy as np

from vqjax.commands.console import flag, new_parser, option, run
from vqjax.commands.models import DTYPES, PRETRAINED, load_model
from vqjax.lab.exits import say
from vqjax.lm import checkpoints
from vqjax.lm.checkpoints import RUNTIMES, Loaded, inspect
from vqjax.lm.checkpoints.loading import variable_sources
from vqjax.lm.compression.calibration import zipf_counts
from vqjax.lm.compression.folders import (
  CompressionJob,
  TensorJob,
  check_paths,
  compress_model,
  compress_tensors,
  read_moments,
)
from vqjax.lm.compression.judging import TABLES
from vqjax.lm.records import one_line
from vqjax.lm.sources.readers import open_source
from vqjax.lm.texts import check_different, data_path, encode_text, read_texts
from vqjax.lm.tokenizers.reading import check_size, find_tokenizer, load_tokenizer
from vqjax.ops.ngrams import count_rows
from vqjax.outputs import check_output
from vqjax.tables import byte_budget, compress
from vqjax.tables.container import UNPACKED
from vqjax.tables.paged import RowsReport, compress_rows
from vqjax.tables.tensor_files import open_rows

__all__ = ["main"]


def bound_of(text: str) -> str:
  """A bound of bytes such as 1/16 or 65MB, as it was given.

  Raises:
    argparse.ArgumentTypeError: it is not one.
  """
  try:
    byte_budget(text, 1)
  except ValueError as error:
    raise argparse.ArgumentTypeError(str(error)) from None
  return text


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call, 128 + n for signal n."""
  parser = new_parser(
    "compress",
    "Compress the vocabulary tables of a pretrained model to a divergence from it, or to a size.",
    "The same command again resumes an interrupted one.",
  )
  parser.add_argument(
    "model", help=f"{PRETRAINED}; FILE.safetensors:TENSOR, or ARRAY.npy, for one table"
  )
  bound = parser.add_mutually_exclusive_group(required=True)
  option(bound, "--kl", "mean divergence, nats a token, such as 0.01", float, metavar="NATS")
  option(
    bound,
    "--bytes",
    "bytes of the tables: 65MB, or 1/8 of what they take now",
    bound_of,
    metavar="SIZE",
  )
  option(bound, "--bits", "bits of a number of one table, such as 0.5", float)
  option(
    parser,
    "--text",
    "text of each domain that matters, in UTF-8: counts, calibration, and without --held-out the"
    " last fifth to report on. Without any the model writes its own",
    pathlib.Path,
    [],
    nargs="+",
  )
  option(parser, "--held-out", "text to report on", pathlib.Path, [], nargs="+")
  option(parser, "--out", "new folder, or file of one table", pathlib.Path, required=True)
  option(
    parser,
    "--moments",
    "moments that were collected elsewhere, with their counts beside those of --text",
    pathlib.Path,
  )
  option(
    parser,
    "--table",
    "compress a tensor [V, D] of a folder of any architecture without running it, by a file of"
    " moments where there is one; may be given several times",
    default=[],
    nargs="+",
    action="append",
    metavar=("TENSOR", "MOMENTS"),
  )
  option(
    parser,
    "--counts",
    "occurrences of tokens for a table whose model is not run: a file .npy, or zipf for ids that"
    " fall with frequency (default: all alike)",
    metavar="FILE",
  )
  option(parser, "--hidden", "sample of the hidden states that one table scores: a file .npy")
  flag(
    parser,
    "--pages",
    "write one table of any size in small blocks that are read at random, with memory that does not"
    " grow with it; steps are by `--counts` of its rows, or by how often `--text` reads them, where"
    " the table is one of n-grams in the folder of its decoder",
  )
  flag(parser, "--drop", "with `--pages`: rows that have a count of 0 become the mean row")
  option(parser, "--block", "with `--pages`: rows that are decoded together", int)
  flag(parser, "--compare", "compare with block types of GGUF, which takes minutes")
  option(parser, "--tokens", "calibration tokens", int, 2**14)
  option(parser, "--window", "tokens of a window", int, 256)
  option(parser, "--dtype", "number format the model is run in", default="float32", choices=DTYPES)
  option(
    parser,
    "--runtime",
    "form of the tables in memory when the folder is loaded: dense rows (unpacked), groups of 8-bit"
    " integers (int8), whole bits that are scored where they lie (packed), or, for the input table"
    " of a model that is not tied, rows decoded from the file when they are looked up (rows)",
    default=UNPACKED,
    choices=RUNTIMES,
  )
  return run(parser, arguments, _run, _misplaced)


def _run(options: argparse.Namespace) -> None:
  if _array_of(options.model) is not None:
    _compress_array(options)
  elif options.table:
    _compress_tensors(options)
  else:
    _compress(options)


def _array_of(model: str) -> tuple[str, str | None] | None:
  """The file of one table, and the name of its tensor in safetensors; None for a model."""
  if model.endswith(".npy"):
    return model, None
  path, colon, tensor = model.rpartition(":")
  is_file = path.endswith(".safetensors") or (colon and pathlib.Path(path).is_dir())
  return (path, tensor) if colon and is_file and not pathlib.Path(model).exists() else None


def _misplaced(options: argparse.Namespace) -> str | None:
  """What is wrong with options that are given together."""
  texts = options.text or options.held_out
  if (options.drop or options.block is not None) and not options.pages:
    return "`--drop` and `--block` are for `--pages`"
  if (options.pages or options.bits is not None) and _array_of(options.model) is None:
    return "`--pages` and `--bits` are for one table: give FILE.safetensors:TENSOR or ARRAY.npy"
  if options.pages and (bool(options.counts) == bool(options.text) or options.kl is not None):
    return "`--pages` needs `--counts` or `--text`, and `--bytes` or `--bits`"
  if options.pages and (options.hidden or options.moments):
    return "`--pages` needs no `--hidden` or `--moments`: a table of n-grams is only read"
  if _array_of(options.model) is not None:
    has_text = options.held_out or (options.text and not options.pages)
    if has_text or options.table or options.compare or options.runtime != UNPACKED:
      return "one table needs no `--text`, `--table`, `--compare` or `--runtime`: nothing is run"
    if options.moments and (options.counts or options.hidden):
      return "`--moments` has the counts and hidden states: leave out `--counts` and `--hidden`"
    return None
  if options.table and (options.bytes is None or texts or options.moments):
    return (
      "`--table` needs `--bytes`, and no `--text`, `--held-out` or `--moments`: the model is not"
      " run"
    )
  if any(len(table) > 2 for table in options.table):
    return "`--table` takes a tensor and a file of moments, and may be given several times"
  if len({table[0] for table in options.table}) < len(options.table):
    return "`--table` must name different tensors, each with its file of moments"
  if options.table and options.runtime != UNPACKED:
    return "`--table` needs no `--runtime`: the model is not one that this library loads"
  if options.hidden or (options.counts and not options.table):
    return "`--counts` and `--hidden` are for tables whose model is not run"
  if options.held_out and not options.text:
    return "`--held-out` needs `--text`"
  return None


def _counts(options: argparse.Namespace, vocab: int) -> np.ndarray | None:
  if options.counts == "zipf":
    return zipf_counts(vocab)
  return None if options.counts is None else _array(options.counts, "--counts")


def _array(path: str, kind: str) -> np.ndarray:
  """The array of a file .npy, mapped; `kind` is what the caller calls it."""
  file = data_path(path, kind=kind)
  try:
    found = np.load(file, mmap_mode="r", allow_pickle=False)
    if not isinstance(found, np.ndarray):
      raise ValueError("several arrays")
  except OSError:
    raise
  except Exception as error:  # a dozen types, of zip files among them
    raise ValueError(
      f"`{kind}` must be a file .npy of numbers; got {file} ({one_line(error)}). Write it"
      " with numpy.save."
    ) from None
  if found.dtype.kind == "V":
    raise ValueError(
      f"`{kind}` must be a file .npy of numbers; got {file} of {found.dtype}, as NumPy writes"
      " bfloat16. Write float32, or a safetensors file and FILE:TENSOR."
    )
  return found


def _compress_array(options: argparse.Namespace) -> None:
  path, tensor = _array_of(options.model)
  file = data_path(path, kind="model")
  check_output(options.out, "--out", folder=False)
  table = _array(path, "model") if tensor is None else open_rows(file, tensor)
  if len(table.shape) != 2:
    raise ValueError(
      f"`model` must be a table [V, D]; got shape {tuple(table.shape)}. Give a row for each token."
    )
  if options.pages:
    print(f"{_paged(options, table)}\nresult: {one_line(options.out)}")
    return
  given = {"bytes": options.bytes, "kl": options.kl}
  if options.bits is not None:
    given["bytes"] = _bytes_at(options.bits, table)
  if options.moments:
    given["moments"] = read_moments(options.moments)
  else:
    given["counts"] = _counts(options, len(table))
    if options.hidden:
      given["hidden"] = _array(options.hidden, "--hidden")
  small = compress(table, **given)
  small.save(options.out)
  print(f"{small.report}\nresult: {one_line(options.out)}")


def _bytes_at(bits: float, table: Any) -> int:
  """The bytes of a table at so many bits a number."""
  if not 0 < bits <= 32:
    raise ValueError(f"`--bits` must be in (0, 32]; got {bits}. Give 0.5.")
  return max(2, int(bits * table.shape[0] * table.shape[1] / 8))


def _paged(options: argparse.Namespace, table: Any) -> RowsReport:
  if options.bits is not None:
    size = _bytes_at(options.bits, table)
  else:
    size = byte_budget(options.bytes, table.shape[0] * table.shape[1] * table.dtype.itemsize)
  counts = _counted(options, table.shape[0]) if options.text else _counts(options, table.shape[0])
  given = {"size": size, "drop": options.drop, "rows_of_block": options.block}
  budget = "--bytes" if options.bits is None else "--bits"
  try:
    return compress_rows(table, counts, options.out, **given)
  except ValueError as error:
    text = str(error).replace("`rows_of_block`", "`--block`").replace("`size`", f"`{budget}`")
    raise ValueError(text) from None


def _counted(options: argparse.Namespace, rows: int) -> np.ndarray:
  """How often the texts read each row, by the hash that the table has in its decoder."""
  path, tensor = _array_of(options.model)
  if tensor is None:
    raise ValueError(
      f"`--text` needs FOLDER:TENSOR, the table in the folder of its decoder; got {path}. Give"
      " `--counts`."
    )
  tensor = tensor.removesuffix(".weight")
  source = open_source(data_path(path, kind="model"))
  model = source.decoder()
  variable_sources(source, model)  # of which the hashes are those of the config
  names = [f"layers.{n}.ple.ple_embedding.ngram_embedding" for n in model.memory_blocks]
  memories = [m for name, m in zip(names, model.memories) if f".{tensor}".endswith(f".{name}")]
  if not memories:
    raise ValueError(
      f"`--text` needs a table of n-grams of {path}: {', '.join(names) or 'there is none'}; got"
      f" {tensor!r}. Give `--counts`."
    )
  tokenizer = load_tokenizer(source.path)
  check_size(tokenizer, model.head.vocab, source.path)
  encoded = (encode_text(tokenizer, text) for text in read_texts(options.text).values())
  tokens = (np.array(begin + own, np.int64) for begin, own in encoded)
  return count_rows(memories[0].lookup.ngrams, tokens, rows=rows)


def _compress_tensors(options: argparse.Namespace) -> None:
  moments = {name: pathlib.Path(paths[0]) if paths else None for name, *paths in options.table}
  model = data_path(options.model, kind="model")
  counts = None
  if options.counts:
    name = next(iter(moments))
    counts = _counts(options, open_source(model).tensors[name].shape[0])
  made = compress_tensors(TensorJob(model, options.out, options.bytes, moments, counts), say)
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
  model = data_path(options.model, kind="model")
  size = None
  if options.bytes is not None:
    parts = inspect(model).parts
    size = byte_budget(options.bytes, sum(p.bytes for p in parts if p.name in TABLES))
  job = CompressionJob(
    model=model,
    texts=read_texts(options.text) if options.text else {},
    held_out=read_texts(options.held_out, "--held-out"),
    out=options.out,
    kl=options.kl,
    size=size,
    moments=options.moments,
    hidden_tokens=options.tokens,
    search_tokens=max(1, options.tokens // 8),
    held_out_tokens=max(1, options.tokens // 4),
    window=options.window,
    dtype=options.dtype,
    runtime=options.runtime,
    compares=options.compare,
  )
  # Before the minutes that loading may take.
  check_paths(job)
  result = compress_model(job, _loaded(options), say)
  held = result["held_out"]
  of = "held-out text" if options.text else "text that the model wrote itself"
  print(
    f"tables: {result['bytes']:,} bytes, before {result['bytes_before']:,}"
    f" ({', '.join(result['formats_before'])}); {of}: KL {held['kl']:.5f} nats/token, 99th"
    f" percentile {held['kl_p99']:.4f}, same best token {100 * held['top1']:.2f} %,"
    f" {held['nats']:.4f} nats/token, before {held['nats_before']:.4f}, over {held['tokens']:,}"
    f" tokens\ncompressing took {result['seconds']:.0f} s and"
    f" {result['peak_bytes'] / 1e9:.2f} GB of memory\nresult: {one_line(options.out)},"
    " with report.md"
  )
  if options.kl is not None and held["kl"] > options.kl:
    print(
      f"the bound of {options.kl} nats holds on the text of the search"
      f" ({result['calibration_kl']:.5f}): for this {of}, give --kl"
      f" {options.kl**2 / held['kl']:.2g}, or more tokens"
    )


def _loaded(options: argparse.Namespace) -> Loaded:
  """The model; without a text it needs no tokenizer."""
  if options.text:
    return load_model(options.model, dtype=options.dtype)
  path = data_path(options.model, kind="model")
  try:
    tokenizer = find_tokenizer(open_source(path))
  except ValueError as error:
    say(f"without its tokenizer: {error}")
    tokenizer = None
  loaded = checkpoints.load(path, dtype=DTYPES[options.dtype], tokenizer=False)
  return loaded._replace(tokenizer=tokenizer)
