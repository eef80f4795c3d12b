"""How does the page of the VQ-Logits tables read?"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.studies.page import failures, known, save
from experiments.studies.study import DOCS, Results
from experiments.studies.vq_logits import findings as vq_findings
from experiments.studies.vq_logits import plots as vq_plots
from experiments.studies.vq_logits import speed as vq_speed
from experiments.studies.vq_logits.measured import vocab
from experiments.studies.vq_logits.notes import notes
from experiments.studies.vq_logits.paper import BODIES, PAPER
from experiments.studies.vq_logits.results import CLUSTERED
from experiments.studies.vq_logits.rows import COLUMNS, Table, tables
from experiments.studies.vq_logits.settings import SCALES, Setting
from vqjax.lab import report
from vqjax.lab.report import units
from vqjax.lab.report.page import write_whole

__all__ = ["PAPER", "tables", "write"]

_INTRODUCTION = """\
# VQ-Logits: the paper's tables, measured

Each row is a head on the same decoder, text and budget; only the head differs. A head with codes is
made from a trained full softmax and fine-tuned, as the paper does it, and the full softmax gets the
same further steps. `python -m experiments.studies.vq_logits.run --scale cpu` runs what is here and
`--scale paper` has the paper's own settings. This is a small body on two cores: the perplexities
are not the paper's; what can be compared is how far a head is from the full softmax beside it, and
what its codes rule out.

"""

_FLOORS = """\
Tokens that share a code are equally likely (Eq. 3-5 of the paper), so a word on a code of n tokens
has at most the probability 1/n, whatever the body is. The measured perplexity of a codebook without
a bias is a product, exactly: the floor, which is inside the codes, times the perplexity of the
code.
"""

_TEXTS = {
  "ptb": "the paper's text, perplexity of a word",
  "wikitext": "WikiText-2 in place of WikiText-103, perplexity of a word",
  "web": "the lines of WikiText-2 of at least 512 characters in place of C4, perplexity of a piece"
  " of SentencePiece",
}
"""What stands for the paper's text, and what its tokens are."""


def write(results: Results, docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Writes results/vq_logits.md and its plots under images/; returns what was written."""
  settings = SCALES["cpu"]
  *paper, heads = tables(results)
  speed = vq_speed.read(docs / "results" / "vq" / "speed.json")
  plots = {
    "vq-bytes.png": vq_plots.bytes_against_perplexity(heads.lines),
    "vq-codes.png": vq_plots.codes_against_perplexity(results, settings),
    "vq-speed.png": vq_speed.figure(speed),
  }
  drawn = {name: figure for name, figure in plots.items() if figure is not None}
  page = docs / "results" / "vq_logits.md"
  write_whole(page, "\n".join(_page(results, settings, paper, heads, speed, set(drawn))))
  return [page, *save(drawn, docs)]


def _page(
  results: Results,
  settings: Mapping[str, Setting],
  paper: list[Table],
  heads: Table,
  speed: vq_speed.Speed | None,
  drawn: set[str],
) -> Iterator[str]:
  """The sections, in their order."""
  picture = lambda name, says: f"![{says}](../images/{name})\n" if name in drawn else ""
  found = vq_findings.as_published(paper), vq_findings.best(heads.lines)
  yield _INTRODUCTION + "".join(f"- {say}\n" for say in (*found, vq_findings.better(heads.lines)))
  yield "## The settings\n"
  yield "".join(f"- {_setting(results, s)}\n" for s in settings.values())
  yield "## The columns\n\n" + _FLOORS
  yield "".join(f"- {column.title}: {column.meaning}\n" for column in COLUMNS)
  for table in paper:
    yield _section(table, results)
    if table.name == "Table 1":
      yield picture("vq-codes.png", "Figure 2a: codes against perplexity, with the floors")
    if table.name == "Table 2":
      yield vq_speed.section(speed)
      yield picture("vq-speed.png", "Figure 2b: codes against the speed of the logits")
  yield _shared_words(results)
  yield "## Beyond the paper\n\n" + vq_findings.bias(heads.lines) + "\n"
  yield f"{found[1]}\n\nAll that was tried, by test perplexity, numbered as in the plot:\n"
  yield picture("vq-bytes.png", "Head bytes against test perplexity, all heads on Penn Treebank")
  yield heads.markdown()
  yield _origin(results)


def _section(table: Table, results: Results) -> str:
  """A table of the paper's, and why its rows differ."""
  told = "".join(f"- {say}\n" for say in notes(table, results))
  return f"## {table.title}\n\n{table.markdown()}\nWhy the rows differ:\n\n{told}"


def _setting(results: Results, s: Setting) -> str:
  """Text, body and budget, and the paper's beside them."""
  body, theirs = BODIES[s.name], SCALES["paper"][s.name]
  tokens, their_tokens = s.train.batch * s.context, theirs.train.batch * theirs.context
  size = vocab(results, s.name)
  return (
    f"**{s.name}**: {_TEXTS[s.name]}, V = {f'{size:,}' if size else units.MISSING};"
    f" {s.layers} layers of width {s.dim}, {s.heads} attention heads, windows of {s.context};"
    f" {s.train.steps:,} steps of {tokens:,} tokens at a rate of {s.train.learning_rate:g}, then"
    f" {s.fine_tune.steps:,} at {s.fine_tune.learning_rate:g} for the full softmax and all that is"
    f" converted; {s.whole.steps:,} for what is trained from scratch. Seeds of the headline rows:"
    f" {s.seeds}. The paper: {body.text}, V = {body.vocab:,}; {body.layers} layers of width"
    f" {body.dim}, windows of {theirs.context:,}; {theirs.train.steps:,} steps of {their_tokens:,}"
    " tokens."
  )


def _shared_words(results: Results) -> str:
  """Table 8."""
  rows = results.get(CLUSTERED, {}).get("clusters")
  title = "## Table 8: words on one code\n"
  if rows is None:
    return f"{title}\n{units.MISSING}\n"
  runs = [report.Run(pathlib.Path(), {}, None, (), _words(row)) for row in rows]
  column = lambda name: report.Column(name, lambda run: run.get(name), str, "")
  names = ("code", "of these on it", "its most frequent other tokens", "its tokens")
  return (
    f"{title}\nOf the words that the paper shows on one code, the code of {CLUSTERED} that most are"
    f" on. Words that are not one token here are left out.\n\n"
    + report.markdown_table([column(name) for name in names], runs)
  )


def _words(row: Mapping[str, Any]) -> dict[str, Any]:
  shown = {"name": ", ".join(f"`{word}`" for word in row["known"] or row["words"])}
  if row["known"]:
    shown |= {
      "code": row["code"],
      "of these on it": f"{len(row['held'])} of {len(row['known'])}",
      "its most frequent other tokens": ", ".join(f"`{word}`" for word in row["others"]),
      "its tokens": row["size"],
    }
  return shown


def _origin(results: Results) -> str:
  """Where the numbers come from, and what failed."""
  every = [kept["result"] for kept in results.values()]
  dates = sorted(row["date"][:10] for row in every)
  days = f"{dates[0]} to {dates[-1]}" if dates else units.MISSING
  device, commits = known(results, "device"), known(results, "commit")
  return (
    f"## Where the numbers come from\n\n{len(every)} runs, {days}, on {device}; each with"
    " its config, seed, versions and commit in results/vq/cpu/. Commits (+: with changes):"
    f" {commits}.\n\n" + failures(results)
  )
