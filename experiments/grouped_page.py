"""How does the page of the grouped head's tables read?"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from configs.grouped_lm import grouped
from experiments import grouped_asked, grouped_findings, grouped_notes, grouped_plots
from experiments.grouped_report import tables
from experiments.grouped_settings import SCALES
from experiments.study import DOCS, Results
from vqjax import report
from vqjax.report import units
from vqjax.report.page import write_whole
from vqjax.training.run import read_json

_INTRODUCTION = """\
# The grouped head: the paper's tables, measured

`python -m experiments.grouped_tables --scale cpu` trains what is here, and `--scale paper` has the
paper's own settings: TinyStories whole, an epoch, all classes of pictures. Memory and speed are of
`python -m experiments.bench_grouped`. What has no number was not run.

What two cores can train in an hour is little: 8 layers and the paper's vocabulary, {tokens:,}
tokens of the slices of TinyStories at hand, 128 at a time, GPT-Neo's window half of them as in the
paper. The rows of a setting differ in the head alone, so that their order says something; their
perplexities do not compare with the paper's models, and it prints none. One seed each. `lm-128` and
`lm-64` are 128 and 64 wide; `wide` has 262,144 tokens, for exact decoding. Grades need
`--judge-url` and `--judge-model`, an OpenAI-compatible endpoint; without them they are dashes.
"""


def write(results: Results, docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Writes results/grouped.md and its plots under images/; returns what was written."""
  cost = read_json(docs / "results" / "grouped" / "cost.json")
  plots = grouped_plots.figures(results, SCALES["cpu"], cost)
  page = docs / "results" / "grouped.md"
  write_whole(page, "\n".join(_page(results, cost, plots)))
  return [page, *(_save(figure, docs / "images" / name) for name, figure in plots.items())]


def _save(figure: Figure, path: pathlib.Path) -> pathlib.Path:
  path.parent.mkdir(parents=True, exist_ok=True)
  report.save_png(figure, path)
  return path


def _page(
  results: Results, cost: Mapping[str, Any] | None, plots: Mapping[str, Figure]
) -> Iterator[str]:
  """The sections, in their order."""
  run = SCALES["cpu"]["lm-128"].experiment("grouped", grouped)
  tokens = run.train.steps * run.train.batch * run.model.context
  yield _INTRODUCTION.format(tokens=tokens)
  yield grouped_asked.section(results, cost)
  for table in tables(results, "cpu", cost or {}):
    meanings = "".join(f"- {c.title}: {c.meaning}\n" for c in table.used() if c.meaning)
    yield f"## {table.title}\n\n{table.markdown()}\n{meanings}"
  for name in plots:
    caption = grouped_plots.CAPTIONS[name]
    yield f"## {caption}\n\n![{caption}](../images/{name})\n"
  yield grouped_findings.section(results, cost)
  yield grouped_notes.notes()
  yield _origin(results, cost)


def _origin(results: Results, cost: Mapping[str, Any] | None) -> str:
  """Where the numbers come from, and what failed."""
  every = [kept["result"] for kept in results.values()]
  failed = [
    f"- {name} failed: {kept['result']['error']}\n"
    for name, kept in results.items()
    if kept["result"]["status"] == "failed"
  ]
  origins = every + list((cost or {}).get("provenance", {}).values())
  known = lambda key: ", ".join(sorted({str(row[key]) for row in origins})) or units.MISSING
  return (
    f"## Where the numbers come from\n\n{len(every)} results and the bench on {known('device')};"
    " each with its config, seed, versions and commit in results/grouped/. Commits (+: with"
    f" changes): {known('commit')}.\n\n" + "".join(failed)
  )
