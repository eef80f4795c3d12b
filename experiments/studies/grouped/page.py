"""How does the page of the grouped head's tables read?"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from configs.grouped_lm import grouped
from configs.grouped_shapes import REDUCED
from experiments.studies.grouped import asked as grouped_asked
from experiments.studies.grouped import findings as grouped_findings
from experiments.studies.grouped import notes as grouped_notes
from experiments.studies.grouped import plots as grouped_plots
from experiments.studies.grouped import report as grouped_report
from experiments.studies.grouped.settings import SCALES, WIDE
from experiments.studies.page import failures, known, save
from experiments.studies.study import DOCS, Results
from vqjax.lab.report import write_whole

_INTRODUCTION = """\
# The grouped head: the paper's tables, measured

`python -m experiments.studies.grouped.run --scale cpu` trains what is here, and `--scale paper` has the
paper's own settings: TinyStories whole, an epoch, all classes of pictures. Memory and speed are of
`python -m experiments.bench.grouped`. What has no number was not run.

What two cores can train while somebody waits is little: 8 layers and the vocabulary are the
paper's, but there are {tokens:,} tokens, of the slices of TinyStories at hand, {context} at a time,
with half of them for GPT-Neo's window as in the paper. The rows of a setting differ in the head, in
what they begin with, and GPT-Neo in its window, so that their order says something; their
perplexities do not compare with the paper's models, and it prints none. One seed each. `lm-128` and
`lm-64` are 128 and 64 wide; `wide` has {wide:,} tokens, for exact decoding. Pictures are of
{classes:,} of the paper's 184,320 classes. Grades need `--judge-url` and `--judge-model`, an
OpenAI-compatible endpoint; without them they are dashes.

[Figure 1: pictures of the classes](../images/grouped-shapes.png), by
`python -m experiments.studies.grouped.shapes_sheet --out docs/images/grouped-shapes.png`.
"""


def write(results: Results, docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Writes results/grouped.md and its plots under images/; returns what was written."""
  cost = grouped_report.read_cost(docs)
  plots = grouped_plots.figures(results, SCALES["cpu"], cost)
  page = docs / "results" / "grouped.md"
  write_whole(page, "\n".join(_page(results, cost, plots)))
  return [page, *save(plots, docs)]


def _page(
  results: Results, cost: Mapping[str, Any] | None, plots: Mapping[str, Figure]
) -> Iterator[str]:
  """The sections, in their order."""
  run = SCALES["cpu"]["lm-128"].experiment("grouped", grouped)
  context, classes = run.model.context, REDUCED.num_classes
  tokens = run.train.steps * run.train.batch * context
  yield _INTRODUCTION.format(tokens=tokens, context=context, wide=WIDE, classes=classes)
  yield grouped_asked.section(results, cost)
  for table in grouped_report.tables(results, "cpu", cost or {}):
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
  device, commits = known(results, "device"), known(results, "commit")
  return (
    f"## Where the numbers come from\n\n{len(results)} results on {device}; each with its"
    " config, seed, versions and commit in results/grouped/, as the parts of the bench in its"
    f" cost.json. Commits (+: with changes): {commits}.\n\n"
    + "".join([*_bench(cost or {}), *_judges(results)])
    + failures(results)
  )


def _bench(cost: Mapping[str, Any]) -> list[str]:
  """Where each part of the bench ran, and which steps no compiler made."""
  parts = [
    f"- the bench's {part}: {origin['device']}, commit {origin['commit']}\n"
    for part, origin in cost.get("provenance", {}).items()
  ]
  return parts + [
    f"- the bench's width {dim}, {name}, failed: {row['error']}\n"
    for dim, rows in cost.get("steps", {}).items()
    for name, row in rows.items()
    if "error" in row
  ]


def _judges(results: Results) -> list[str]:
  """Who graded the stories, and how many could not be graded."""
  judged = {
    f"- grades: by {kept['settings']['model']}, of {kept['settings']['stories']} stories a model\n"
    for name, kept in results.items()
    if "grades" in kept
  }
  unread = [
    f"- {name}: of {kept['failed']} stories no grade could be read, they are left out\n"
    for name, kept in results.items()
    if kept.get("failed")
  ]
  return [*sorted(judged), *unread]
