"""Command that shows what a model would predict after each of its blocks.

vqjax lens gemma-3-270m-q4_k_m.gguf --prompt "The capital of France is"
vqjax lens gemma-3-270m-q4_k_m.gguf --fit article.txt --out lens.safetensors
vqjax lens gemma-3-270m-q4_k_m.gguf --prompt "..." --lens lens.safetensors --page lens.html
"""

import argparse
import dataclasses
import json
import math
import pathlib

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vqjax.commands.console import OutputFile, flag, new_parser, option, run
from vqjax.commands.models import add_arguments, chosen_model
from vqjax.lab.exits import say
from vqjax.lm.generation.text_stream import visible
from vqjax.lm.lenses import lens_readings, load_lens
from vqjax.lm.lenses.fitting import LensJob, fit_lens
from vqjax.lm.lenses.reading_page import Reading, write_reading_page
from vqjax.lm.lenses.tuned import blocks_read
from vqjax.lm.records import one_line
from vqjax.lm.texts import data_path, read_text

__all__ = []

CELL = 11
"""Characters of a cell of the terminal's table."""

READING = ("lens", "k", "blocks", "page")
"""Options that only read a text."""

FITTING = {
  "positions": "positions of the text that are used",
  "steps": "steps of descent; 0: least squares alone",
  "batch": "positions of a step",
  "window": "tokens of a window",
  "rate": "learning rate of the first step; a few positions a step, or a stream of large numbers,"
  " need a smaller one",
  "identity": "begin with the logit lens, not with least squares",
}
"""Options that only fit a lens, a field of `LensJob` each."""

SHADES = ("on #124b2d", "on #2f4a1c", "on #4d4415", "on #5a3313", "on #5c2120")
"""Grounds of cells from a small divergence to a large one."""


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call or a damaged model."""
  parser = new_parser(
    "lens",
    "Show what a model would predict after each of its blocks, by the logit lens or a tuned lens,"
    " or fit a tuned lens.",
    "The same command again resumes an interrupted fit.",
  )
  add_arguments(parser)
  what = parser.add_mutually_exclusive_group(required=True)
  option(what, "--prompt", "text to read", metavar="TEXT")
  option(what, "--fit", "text to fit a lens on", pathlib.Path)
  flag(parser, "--json", "print JSON")
  reading = parser.add_argument_group("with --prompt")
  option(reading, "--lens", "a fitted lens", pathlib.Path)
  option(reading, "--k", "best tokens of a cell (default: 5)", int)
  option(
    reading,
    "--blocks",
    "read after so many blocks only, and after the last (default: after each)",
    int,
    nargs="+",
  )
  option(reading, "--page", "write a page of HTML", OutputFile)
  fit = parser.add_argument_group("with --fit")
  option(fit, "--out", "the lens to be written", pathlib.Path)
  defaults = {field.name: field.default for field in dataclasses.fields(LensJob)}
  for name, text in FITTING.items():
    kind = type(defaults[name])
    if kind is bool:
      fit.add_argument(f"--{name}", action="store_const", const=True, help=text)
    else:
      option(fit, f"--{name}", f"{text} (default: {defaults[name]})", kind)
  return run(
    parser,
    arguments,
    lambda options: (_show if options.fit is None else _fit)(options),
    _misplaced,
  )


def _misplaced(options: argparse.Namespace) -> str | None:
  """What is wrong with the options: one of the other use would be ignored."""
  if options.fit is not None and options.out is None:
    return "`--fit` needs `--out FILE`, the lens to be written"
  use, others = ("--fit", ("out", *FITTING)) if options.fit is None else ("--prompt", READING)
  given = [name for name in others if getattr(options, name) is not None]
  return f"`--{given[0]}` needs `{use}`. Leave it out." if given else None


def _fit(options: argparse.Namespace) -> None:
  text = read_text(data_path(str(options.fit), kind="--fit"))
  given = {name: getattr(options, name) for name in FITTING if getattr(options, name) is not None}
  job = LensJob(data_path(options.model, kind="model"), text, options.out, **given)
  found = fit_lens(job, chosen_model(options), say)
  if options.json:
    print(json.dumps(found, indent=2))
    return
  table = Table("blocks before")
  for column in ("logit lens", "tuned lens", "logit, bits/byte", "tuned, bits/byte"):
    table.add_column(column, justify="right")
  per_byte = found["positions"] / found["bytes"] / math.log(2)
  for number, pair in enumerate(zip(found["logit"], found["tuned"])):
    cells = [f"{kl:.4f}" for kl in pair] + [f"{kl * per_byte:.4f}" for kl in pair]
    table.add_row(str(number), *cells)
  print(
    f"KL in nats a token on {found['positions']:,} held-out positions; fitted on"
    f" {found['fitted']:,}"
  )
  Console().print(table)
  print(f"lens: {one_line(options.out)}")


def _show(options: argparse.Namespace) -> None:
  model, variables, tokenizer = chosen_model(options)
  tokens = list(tokenizer.encode(options.prompt))
  if not 1 <= len(tokens) <= model.context:
    raise ValueError(
      f"`--prompt` must have 1 to {model.context} tokens, the context; got {len(tokens)}. Give a"
      f" {'longer' if not tokens else 'shorter'} text."
    )
  lens = None if options.lens is None else load_lens(options.lens, model, variables)
  k = 5 if options.k is None else min(options.k, model.head.vocab)
  row, blocks = np.asarray([tokens]), options.blocks
  found = lens_readings(model, variables, row, lens, k=k, blocks=blocks)
  reading = Reading.of(found, blocks_read(model, blocks), tokens, tokenizer)
  if options.json:
    print(json.dumps(reading.rows(), indent=2, allow_nan=False))
  else:
    show_reading(reading, Console())
  if options.page is not None:
    title = f"{pathlib.Path(options.model).name}: {'tuned' if lens else 'logit'} lens"
    divergences = {}
    if lens is not None:
      plain = lens_readings(model, variables, row, k=1, blocks=blocks)
      divergences["logit lens"] = plain.kl.mean(axis=(1, 2)).tolist()
    name = "tuned lens" if lens is not None else "logit lens"
    divergences[name] = found.kl.mean(axis=(1, 2)).tolist()
    write_reading_page(reading, options.page, title, divergences)
    say(f"page: {options.page}")


def show_reading(reading: Reading, console: Console) -> None:
  """Print layers x positions, as many positions side by side as fit."""
  count = len(reading.texts)
  columns = max(1, (console.width - 7) // (CELL + 1))
  for first in range(0, count, columns):
    part = range(first, min(count, first + columns))
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=True)
    table.add_column("block", justify="right")
    for at in part:
      table.add_column(Text(_cut(reading.texts[at])), width=CELL, no_wrap=True)
    for layer, blocks in reversed([*enumerate(reading.blocks)]):
      cells = [Text(str(blocks))]
      for at in part:
        best = set_cell_size(_cut(reading.best[layer][at][0]), CELL - 4)
        share = math.exp(reading.found.log_probs[layer, at, 0])
        # From a hundredth of a nat to ten; what is not a number is far from everything.
        kl = np.nan_to_num(reading.found.kl[layer, at], nan=np.inf)
        shade = np.clip((np.log10(max(kl, 1e-9)) + 2) / 3, 0, 0.999)
        ground = SHADES[int(shade * len(SHADES))]
        cells.append(Text(f"{best}{100 * share:3.0f}%", style=f"white {ground}"))
      table.add_row(*cells)
    console.print(table)
  console.print(
    "Columns: the token that is read. Cells: the likeliest next token, and its probability; ground:"
    " KL from the last block, 0.01 nats (green) to 10 (red).",
    highlight=False,
  )


def _cut(text: str) -> str:
  shown = visible(text)
  # Some characters are two cells wide.
  return shown if cell_len(shown) <= CELL - 5 else set_cell_size(shown, CELL - 6) + "…"
