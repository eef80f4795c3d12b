"""Which rows do the VQ-Logits tables have, and how does each compare with the paper's?"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from experiments.studies.study import Results
from experiments.studies.vq_logits.heads import Row, all_rows, paper_rows
from experiments.studies.vq_logits.measured import Measured, measured
from experiments.studies.vq_logits.paper import BODIES, PAPER, TITLES, Published
from experiments.studies.vq_logits.settings import SCALES, Setting
from vqjax.lab import report
from vqjax.lab.report import Column, Run, units


@dataclasses.dataclass(frozen=True)
class Line:
  """A row of a table: its label, what the paper prints and what was measured.

  Attributes:
    name: of the row at the scale, such as "vq-1024".
    label: what the table calls it.
    measured: over its seeds.
    paper: what the paper prints, if anything.
    paper_full: what it prints for its full softmax.
  """

  name: str
  label: str
  measured: Measured
  paper: Published | None = None
  paper_full: Published | None = None

  @property
  def run(self) -> Run:
    """As the tables of `vqjax.lab.report` read it."""
    return Run(pathlib.Path(self.name), {}, None, (), self._fields())

  def _fields(self) -> dict:
    m, paper, full = self.measured, self.paper, self.paper_full
    one_decimal = lambda spread, sign="": spread and spread.show(1, sign)
    return dataclasses.asdict(m) | {
      "name": self.label,
      "paper": f"{paper.perplexity:g}" if paper else units.MISSING,
      "paper_over": _over(paper, full),
      "paper_of_full": _part(paper, full),
      "perplexity": one_decimal(m.perplexity),
      "over_full": one_decimal(m.over_full, "+"),
      "seeds": f"{m.perplexity.seeds if m.perplexity else 0}"
      + (f", {m.failed} failed" if m.failed else ""),
    }


def _over(paper: Published | None, full: Published | None) -> str:
  if paper is None or full is None:
    return units.MISSING
  return f"{100 * (paper.perplexity / full.perplexity - 1):+.1f}"


def _part(paper: Published | None, full: Published | None) -> str:
  if paper is None or full is None or paper.params is None:
    return units.MISSING
  return units.ratio(paper.params / full.params)


def _column(title: str, key: str, show=str, meaning: str = "") -> Column:
  return Column(title, lambda run: run.get(key), show, meaning)


COLUMNS = (
  _column("paper", "paper", meaning="Test perplexity that the paper prints."),
  _column("paper, % over full", "paper_over", meaning="... and how far above its full softmax."),
  _column(
    "measured", "perplexity", meaning="Test perplexity here: the mean over seeds ± deviation."
  ),
  _column("seeds", "seeds", meaning="How many seeds there are."),
  _column(
    "% over full",
    "over_full",
    meaning="How far it is above the full softmax of the same seed and as many steps: a row that is"
    " trained from scratch above the one from scratch, if its text has one (Penn Treebank), all"
    " others above the fine-tuned one.",
  ),
  _column(
    "paper, of full",
    "paper_of_full",
    meaning="Output parameters by the paper's count, relative to its full softmax; its table of"
    " codes is not counted.",
  ),
  _column(
    "head bytes",
    "head_bytes",
    units.size,
    "All that the head owns: parameters and codes; where they are learned, of the head"
    " that they are fixed in.",
  ),
  _column("of full", "of_full", units.ratio, "... relative to the full softmax here."),
  _column(
    "floor",
    "floor",
    units.fixed(1),
    "The least test perplexity of any body with these codes: exp of the mean of log n over the test"
    " tokens, where n tokens share a token's code and are equally likely.",
  ),
  _column(
    "floor, best bias",
    "floor_bias",
    units.fixed(1),
    "The same where tokens have the best fixed frequencies inside their code: exp H(token | code).",
  ),
  _column("largest code", "largest", units.fixed(0), "Tokens on the fullest code."),
)


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of one setting side by side.

  Attributes:
    name: "Table 1" or what else the paper calls it; "All heads" for those of a setting.
    about: what the table compares.
    setting: its text and body.
    lines: its rows.
  """

  name: str
  about: str
  setting: Setting
  lines: Sequence[Line]

  @property
  def title(self) -> str:
    """Its name and what it compares."""
    return f"{self.name}: {self.about}"

  def rich(self) -> Group:
    """For a console of 80 columns."""
    heading = Text(f"\n{self.title}", style="bold")
    return Group(heading, report.console_table(_used(self.lines), self._runs()))

  def markdown(self) -> str:
    """For the page, without its title."""
    return report.markdown_table(_used(self.lines), self._runs())

  def _runs(self) -> list[Run]:
    return [line.run for line in self.lines]


def tables(results: Results, scale: str = "cpu") -> list[Table]:
  """The paper's tables of perplexities at a scale, and all heads on Penn Treebank."""
  settings = SCALES[scale]
  found = [_paper_table(results, settings[TITLES[name][0]], name) for name in PAPER]
  return [*found, everything(results, settings["ptb"])]


MAIN = {"wikitext": "Table 1", "web": "Table 9", "ptb": "Table 10"}
"""The table of a setting that has all its methods; the others are ablations."""


def _paper_table(results: Results, setting: Setting, name: str) -> Table:
  printed = {_local(row, setting): numbers for row, numbers in PAPER[name].items()}
  full = PAPER[MAIN[setting.name]]["full"]
  rows = {row.name: row for row in paper_rows(setting)}
  methods = [row for row in rows if not re.match(r"vq-\d+-", row)]
  wanted = methods if name == MAIN[setting.name] else printed
  lines = [_line(results, setting, rows[row], printed.get(row), full) for row in wanted]
  return Table(name, TITLES[name][1], setting, lines)


def _line(
  results: Results,
  setting: Setting,
  row: Row,
  paper: Published | None = None,
  full: Published | None = None,
) -> Line:
  scratch = setting.beyond and not row.needs and row.name != "dense"
  found = measured(results, f"{setting.name}/{row.name}", scratch)
  return Line(row.name, row.label, found, paper, full)


def _local(row: str, setting: Setting) -> str:
  """The row that stands for the paper's: its codebook may have another size."""
  sizes = dict(zip(BODIES[setting.name].codes, setting.codes, strict=True))
  return re.sub(r"(?<=^vq-)\d+", lambda match: str(sizes[int(match[0])]), row)


def everything(results: Results, setting: Setting) -> Table:
  """All heads of a setting with a number each, from the lowest perplexity to the highest."""
  lines = [_line(results, setting, row) for row in all_rows(setting)]
  score = lambda line: line.measured.perplexity
  lines.sort(key=lambda line: score(line).mean if score(line) else math.inf)
  numbered = [
    dataclasses.replace(line, label=f"{at}. {line.label}") for at, line in enumerate(lines, 1)
  ]
  return Table("All heads", BODIES[setting.name].text, setting, numbered)


def _used(lines: Sequence[Line]) -> list[Column]:
  """Columns that at least one row fills, and those that ask for a number."""
  asked = {"measured", "seeds", "% over full"}
  runs = [line.run for line in lines]
  empty = (None, units.MISSING)
  return [c for c in COLUMNS if c.title in asked or any(c.get(run) not in empty for run in runs)]
