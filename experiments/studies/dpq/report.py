"""Which rows do the tables of DPQ have, and how does each compare with the paper's?"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from experiments.studies.dpq.measured import Measured, measured
from experiments.studies.dpq.paper import PAPER, TEXTS, TITLES, Published
from experiments.studies.dpq.rows import label
from experiments.studies.dpq.settings import SCALES, STAND_INS
from experiments.studies.study import Results
from vqjax.lab import report
from vqjax.lab.report import Column, Run, units


@dataclasses.dataclass(frozen=True)
class Line:
  """A row of a table: its label, what was measured and what the paper prints."""

  label: str
  measured: Measured
  paper: Published | None

  @property
  def run(self) -> Run:
    """As the tables of `vqjax.lab.report` read it."""
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
      "lost": m.lost,
      "ratio": m.ratio,
      "formula": m.formula,
      "bytes": m.file_bytes or m.shipped_bytes,
    }


def _column(title: str, key: str, show=str, meaning: str = "") -> Column:
  return Column(title, lambda run: run.get(key), show, meaning)


_times = units.fixed(1)
_percent = lambda part: f"{100 * part:.1f} %"

COLUMNS = (
  _column("paper", "paper", meaning="What the paper prints: perplexity, accuracy in %, or BLEU."),
  _column("its ratio", "paper_ratio", _times, "The compression ratio that it prints."),
  _column("measured", "score", meaning="The same here, on the test split: mean ± deviation."),
  _column("seeds", "seeds", meaning="How many seeds there are."),
  _column("- full", "over", meaning="The score minus the full embedding's of the same seed."),
  _column("lost", "lost", _percent, "Part of the trained table's squares that it misses."),
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
    ours = STAND_INS[scale].get((name, theirs), theirs)
    setting = SCALES[scale].get(ours)
    text = TEXTS[theirs] if ours == theirs else f"{TEXTS[ours]} (paper: {TEXTS[theirs]})"
    for row, published in rows.items():
      own = f"{setting.name}/{row}" if setting else ""
      said = f"{text}: {label(setting, row)}"
      lines.append(Line(said, measured(results, own), published))
  return Table(f"{name}: {TITLES[name]}", lines)
