"""Command that prints the parts of a pretrained model, without reading its weights.

vqjax inspect Llama-3.2-1B
vqjax inspect gemma-3-270m-q4_k_m.gguf --json
"""

import argparse
import dataclasses
import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vqjax.checkpoints import Inspection, inspect
from vqjax.lab.console import configure_warnings, exit_code


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call or a damaged model."""
  parser = argparse.ArgumentParser(
    prog="vqjax inspect",
    description="Print the parts of a pretrained model, their sizes and number formats, whether the"
    " head is tied, and the share of the vocabulary tables.",
  )
  parser.add_argument("model", help="folder of safetensors, a GGUF, or a .bin file of llama2.c")
  parser.add_argument("--json", action="store_true", help="print JSON")
  options = parser.parse_args(arguments)
  configure_warnings()

  def work() -> None:
    found = inspect(options.model)
    if options.json:
      totals = {name: getattr(found, name) for name in ("params", "bytes", "vocabulary_share")}
      print(json.dumps(dataclasses.asdict(found) | totals, indent=2))
    else:
      show(found, Console())

  return exit_code(work)


def show(found: Inspection, console: Console) -> None:
  """Print an inspection as a table."""
  console.print(
    f"[bold]{escape(found.path)}[/]: {found.architecture}, {found.kind}\n"
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
