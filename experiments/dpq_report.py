"""How do the tables of DPQ and their page read?"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Group
from rich.text import Text

from experiments import dpq_plots
from experiments.dpq_measured import Measured, measured
from experiments.dpq_paper import PAPER, TEXTS, TITLES, Published
from experiments.dpq_rows import label
from experiments.dpq_settings import SCALES, STAND_INS
from experiments.study import DOCS, Results
from vqjax import report
from vqjax.report import Column, Run, units
from vqjax.report.page import write_whole
from vqjax.training.run import read_json

_INTRODUCTION = """\
# DPQ: the paper's tables, measured

Each row is an embedding in the same model, text and budget; only the embedding differs.
`python -m experiments.dpq_tables --scale cpu` runs what is here and `--scale paper` has the paper's
own settings. Rows without a number were not run here.

"""


@dataclasses.dataclass(frozen=True)
class Line:
  """A row of a table: its label, what was measured and what the paper prints."""

  label: str
  measured: Measured
  paper: Published | None

  @property
  def run(self) -> Run:
    """As the tables of `vqjax.report` read it."""
    return Run(pathlib.Path(), {}, None, (), self._fields())

  def _fields(self) -> dict[str, Any]:
    m, paper = self.measured, self.paper
    shown = lambda spread, sign="": spread and spread.show(2, sign)
    return {
      "name": self.label,
      "status": "failed" if m.score is None and m.failed else "finished",
      "paper": f"{paper.score:g}" if paper else None,
      "paper_ratio": paper.ratio if paper else None,
      "score": shown(m.score),
      "over": shown(m.over_full, "+"),
      "seeds": f"{m.score.seeds if m.score else 0}" + (f", {m.failed} failed" if m.failed else ""),
      "ratio": m.ratio,
      "formula": m.formula,
      "bytes": m.file_bytes or m.shipped_bytes,
    }


def _column(title: str, key: str, show=str, meaning: str = "") -> Column:
  return Column(title, lambda run: run.get(key), show, meaning)


_times = units.fixed(1)

COLUMNS = (
  _column("paper", "paper", meaning="What the paper prints: perplexity, accuracy in %, or BLEU."),
  _column("its ratio", "paper_ratio", _times, "The compression ratio that it prints."),
  _column("measured", "score", meaning="The same here, on the test split: mean ± deviation."),
  _column("seeds", "seeds", meaning="How many seeds there are."),
  _column("- full", "over", meaning="The score minus the full embedding's of the same seed."),
  _column("ratio", "ratio", _times, "Bytes of the full float32 table over those that ship."),
  _column("formula", "formula", _times, "The ratio by the paper's formula, in bits (Section 3)."),
  _column("bytes", "bytes", units.size, "What ships; of codes, the saved file with its header."),
)


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows side by side.

  Attributes:
    title: "Table 4: ...".
    lines: its rows.
  """

  title: str
  lines: Sequence[Line]

  def rich(self) -> Group:
    """For a console of 80 columns."""
    runs = [line.run for line in self.lines]
    return Group(Text(f"\n{self.title}", style="bold"), report.console_table(_used(runs), runs))

  def markdown(self) -> str:
    """For the page, without its title."""
    runs = [line.run for line in self.lines]
    return report.markdown_table(_used(runs), runs)


def _used(runs: Sequence[Run]) -> list[Column]:
  """Columns that at least one row fills, and those that ask for a number."""
  asked = {"measured", "seeds"}
  return [c for c in COLUMNS if c.title in asked or any(c.get(r) is not None for r in runs)]


def tables(results: Results, scale: str = "cpu") -> list[Table]:
  """The paper's tables at a scale; what is not run there has the paper's number alone."""
  return [_table(results, scale, name) for name in PAPER]


def _table(results: Results, scale: str, name: str) -> Table:
  lines = []
  for theirs, rows in PAPER[name].items():
    setting = SCALES[scale].get(STAND_INS[scale].get((name, theirs), theirs))
    for row, published in rows.items():
      own = f"{setting.name}/{row}" if setting else ""
      said = f"{TEXTS[theirs]}: {label(setting, row)}"
      lines.append(Line(said, measured(results, own), published))
  return Table(f"{name}: {TITLES[name]}", lines)


def write(results: Results, docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Writes results/dpq.md and its plots under images/; returns what was written."""
  cost = read_json(docs / "results" / "dpq" / "cost.json")
  plots = dpq_plots.figures(results, SCALES["cpu"], cost)
  page = docs / "results" / "dpq.md"
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
  yield _INTRODUCTION
  yield _stand_ins()
  yield "## The columns\n"
  yield "".join(f"- {column.title}: {column.meaning}\n" for column in COLUMNS)
  for table in tables(results):
    yield f"## {table.title}\n\n{table.markdown()}"
  for name in plots:
    caption = dpq_plots.CAPTIONS[name]
    yield f"## {caption}\n\n![{caption}](../images/{name})\n"
  yield _costs(cost)
  yield _words(results)
  yield _origin(results)


def _costs(cost: Mapping[str, Any] | None) -> str:
  """What a look-up and an export cost."""
  title = "## What ships: look-up and export\n\n"
  if cost is None:
    return f"{title}`python -m experiments.bench_dpq` has not been run.\n"
  export, opened = cost["export"]["export"], cost["export"]["open and look up"]
  peak = export["memory_bytes"]
  look_up = cost["look_up"]["time"]
  lines = (
    f"V = 267,735, d = 768, K = 256, M = 96 ({cost['provenance']['device']}):\n",
    f"- A jitted look-up of 16,384 tokens from packed codes takes {look_up:.2f} times the time of a",
    "gather from the dense table.",
    f"- The file has {export['file_bytes']:,} bytes, {export['formula_bytes']:,} of them codes and",
    f"values. The dense table has {export['formula_ratio']:.2f} times the bits by the paper's",
    f"formula, {export['file_ratio']:.2f} times the bytes of the file.",
    f"- To export it takes {export['seconds']:.0f} s and, beyond the trained table, at most",
    f"{units.MISSING if peak is None else units.size(peak)}; to open it and look up 100 tokens, in",
    f"NumPy by memory map, {1e3 * opened['seconds']:.1f} ms.",
  )
  return title + "\n".join(lines) + "\n"


_WORDS_OF = "ptb-small"


def _words(results: Results) -> str:
  """Tables 5 to 8: neighbours of words and their codes."""
  found = ["## Tables 5 to 8: words, their neighbours and codes\n"]
  kinds = {"full": "full", "sx": "DPQ-SX", "vq": "DPQ-VQ"}
  kept = {kind: results.get(f"{_WORDS_OF}/{kind}", {}) for kind in kinds}
  for word in kept["full"].get("neighbours", {}):
    found.append(f"Nearest to `{word}` by the cosine of their vectors, Penn Treebank:\n")
    for kind, said in kinds.items():
      near = kept[kind].get("neighbours", {}).get(word, [])
      found.append(f"- {said}: " + ", ".join(f"`{w}` {c:.2f}" for w, c in near[1:]))
    found.append("")
  for kind in ("sx", "vq"):
    words = kept[kind].get("codes", {}).get("words", {})
    if words:
      found.append(f"The first twelve codes of words, {kinds[kind]}:\n\n```")
      found += [
        f"{word:>10} " + " ".join(f"{c:2d}" for c in code[:12]) for word, code in words.items()
      ]
      found.append("```\n")
  return "\n".join(found) if len(found) > 1 else f"{found[0]}\n{units.MISSING}\n"


def _origin(results: Results) -> str:
  """Where the numbers come from, and what failed."""
  every = [kept["result"] for kept in results.values()]
  failed = [
    f"- {name} failed: {kept['result']['error']}\n"
    for name, kept in results.items()
    if kept["result"]["status"] == "failed"
  ]
  known = lambda key: ", ".join(sorted({str(row[key]) for row in every})) or units.MISSING
  return (
    f"## Where the numbers come from\n\n{len(every)} results on {known('device')}; each with its"
    " config, seed, versions and commit in results/dpq/cpu/. Commits (+: with changes):"
    f" {known('commit')}.\n\n" + "".join(failed)
  )


def _stand_ins() -> str:
  """Which of our settings stand in for the paper's."""
  lines = [
    f"- {table}: {TEXTS[ours]} in place of {TEXTS[theirs]}\n"
    for (table, theirs), ours in STAND_INS["cpu"].items()
  ]
  return "On two cores, smaller settings stand in for some of the paper's:\n\n" + "".join(lines)
