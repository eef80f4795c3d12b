"""Command that prints the parts of a pretrained model, and what its vocabulary tables look like.

vqjax inspect Llama-3.2-1B
vqjax inspect gemma-3-270m-q4_k_m.gguf --json
vqjax inspect gemma-3-270m-q4_k_m.gguf --vocabulary --text news.txt --nearest " Paris" --page v.html
"""

import argparse
import dataclasses
import json
import pathlib

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vqjax.commands.console import OutputFile, flag, new_parser, option, run
from vqjax.lab.exits import say
from vqjax.lm.checkpoints.inspection import Inspection, Tensors, inspect, inspect_tensors, is_known
from vqjax.lm.records import one_line

__all__ = []


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call or a damaged model."""
  parser = new_parser(
    "inspect",
    "Print the parts of a pretrained model, their sizes and number formats, whether the head is"
    " tied, and the share of the vocabulary tables. The weights are read with --vocabulary only.",
  )
  parser.add_argument(
    "model", help="folder or file of safetensors, a GGUF, or a .bin file of llama2.c"
  )
  flag(parser, "--json", "print JSON")
  tables = parser.add_argument_group("vocabulary tables")
  flag(
    tables,
    "--vocabulary",
    "print the norms of the rows, their effective dimension, and tokens that were never trained",
  )
  option(tables, "--text", "text to count tokens in", pathlib.Path)
  option(
    tables,
    "--nearest",
    "print the nearest tokens of it",
    default=[],
    action="append",
    metavar="WORD",
  )
  option(
    tables,
    "--unused",
    'tokens that no text has (default: those with names such as "<unused7>", or the rows of'
    " padding)",
    int,
    [],
    nargs="+",
    metavar="TOKEN",
  )
  option(tables, "--page", "write a page of HTML", OutputFile)
  return run(
    parser,
    arguments,
    lambda options: (_vocabulary if options.vocabulary else _parts)(options),
    lambda options: (
      "`--text`, `--nearest`, `--unused` and `--page` need `--vocabulary`"
      if not options.vocabulary
      and (options.text or options.nearest or options.unused or options.page)
      else None
    ),
  )


def _parts(options: argparse.Namespace) -> None:
  from vqjax.lm.texts import data_path

  path = data_path(options.model, kind="model")
  if not is_known(path):
    _show_tensors(inspect_tensors(path), options.json)
    return
  found = inspect(path)
  if options.json:
    totals = {name: getattr(found, name) for name in ("params", "bytes", "vocabulary_share")}
    print(json.dumps(dataclasses.asdict(found) | totals, indent=2))
  else:
    _show_inspection(found, Console())


def _vocabulary(options: argparse.Namespace) -> None:
  # The package of scientific plots is slow to load, and inspecting parts does not need it.
  from vqjax.commands.models import load_model
  from vqjax.lm.checkpoints import RUNTIMES
  from vqjax.lm.table_readings import sections, table_readings, write_table_page
  from vqjax.lm.texts import data_path, read_text
  from vqjax.tables.container import UNPACKED

  text = None
  if options.text is not None:
    text = read_text(data_path(str(options.text), kind="--text"))
  inspect(data_path(options.model, kind="model"))  # refuses a run folder, which has no tables here
  trained = load_model(options.model, runtime=RUNTIMES[UNPACKED])
  found = table_readings(trained, text=text, words=options.nearest, unused=options.unused)
  if options.json:
    print(json.dumps(found, indent=2))
  else:
    console = Console()
    for title, columns, rows in sections(found):
      # Not as the title of a table, which wraps it to the width of the rows.
      console.print(title, style="bold", markup=False, highlight=False)
      table = Table(*columns)
      for row in rows:
        table.add_row(*map(escape, row))
      console.print(table)
  if options.page is not None:
    write_table_page(found, options.page, pathlib.Path(options.model).name)
    say(f"page: {options.page}")


def _show_tensors(found: Tensors, as_json: bool) -> None:
  """Print the tables of a file whose architecture is not known."""
  if as_json:
    print(json.dumps(dataclasses.asdict(found), indent=2))
    return
  console = Console()
  kind = "no architecture of this library"
  if found.architecture is not None:
    kind = f"{one_line(found.architecture)}, {kind}"
  console.print(f"[bold]{escape(one_line(found.path))}[/]: {escape(kind)}", highlight=False)
  table = Table("table", "shape", "format")
  for column in ("bytes", "share"):
    table.add_column(column, justify="right")
  for row in found.tables:
    share = f"{100 * row.bytes / max(1, found.bytes):.1f} %"
    shape = " x ".join(f"{size:,}" for size in row.shape)
    table.add_row(escape(one_line(row.name)), shape, row.format, f"{row.bytes:,}", share)
  table.add_section()
  table.add_row(f"all {found.tensors:,} tensors", "", "", f"{found.bytes:,}", "100.0 %")
  console.print(table)
  if found.tables and found.tables[0].format != "rANS":
    name = escape(one_line(found.tables[0].name))
    console.print(
      f"Compress a table: vqjax compress {escape(one_line(found.path))} --bytes 1/8 --table {name}"
      " --out small",
      highlight=False,
      soft_wrap=True,
    )


def _show_inspection(found: Inspection, console: Console) -> None:
  """Print an inspection as a table."""
  console.print(
    f"[bold]{escape(one_line(found.path))}[/]: {found.architecture}, {found.kind}\n"
    f"V = {found.vocab:,}, D = {found.dim:,}, {found.layers} blocks, {found.heads} heads,"
    f" {found.kv_heads} key-value heads, context {found.context:,}",
    highlight=False,
  )
  table = Table("part", "formats")
  for column in ("parameters", "bytes", "share"):
    table.add_column(column, justify="right")
  for part in found.parts:
    share = f"{100 * part.bytes / found.bytes:.1f} %"
    formats = ", ".join(part.formats)
    table.add_row(part.name, formats, f"{part.params:,}", f"{part.bytes:,}", share)
  table.add_section()
  table.add_row("all", "", f"{found.params:,}", f"{found.bytes:,}", "100.0 %")
  console.print(table)
  tied = "tied to the embedding" if found.tied else "not tied"
  share = f"{100 * found.vocabulary_share:.1f} %"
  console.print(
    f"The head is {tied}; the vocabulary tables take {share} of the bytes.", highlight=False
  )
