"""What do the tables of VQ-Logits say, measured: its methods, its baselines, and what goes beyond?

python -m experiments.studies.vq_logits.run --scale smoke
python -m experiments.studies.vq_logits.run --scale cpu            runs what has no result yet, then renders
python -m experiments.studies.vq_logits.run --scale cpu --list     what there is, and what is done
python -m experiments.studies.vq_logits.run --scale cpu --only ptb/vq-1024,ptb/full
python -m experiments.studies.vq_logits.run --render               the page, from the committed results

A run that was stopped goes on; each result is copied to docs/results/vq/SCALE/, which is all that
the page is made of.
"""

import dataclasses
import sys
from collections.abc import Sequence

from rich.console import Console

from experiments.studies.study import Results, Study, Work, trained
from experiments.studies.vq_logits import report as vq_report
from experiments.studies.vq_logits import results as vq_results
from experiments.studies.vq_logits.heads import Row, all_rows
from experiments.studies.vq_logits.settings import SCALES, Setting
from vqjax.lab.config import Experiment


@dataclasses.dataclass(frozen=True)
class Run:
  """A row of some tables, with a seed.

  Attributes:
    setting: its text and body.
    row: its head.
    seed: of everything.
  """

  setting: Setting
  row: Row
  seed: int

  @property
  def name(self) -> str:
    """setting/row, and the seed where it is not 0."""
    return self._named(self.row.name)

  def _named(self, row: str) -> str:
    return f"{self.setting.name}/{row}" + (f"-s{self.seed}" if self.seed else "")

  @property
  def experiment(self) -> Experiment:
    """What is run."""
    return self.row.make(self.setting, self.seed)

  @property
  def work(self) -> Work:
    """What the study does of it."""
    clustered = self.name == vq_results.CLUSTERED
    return trained(
      self.name,
      self.row.label,
      self.experiment,
      self.setting.path(self.row.name, self.seed),
      vq_results.with_clusters if clustered else vq_results.with_floors,
      tuple(map(self._named, self.row.needs)),
    )


def runs(scale: str) -> dict[str, Run]:
  """All runs of a scale by name, each after those that it starts from."""
  found = []
  for setting in SCALES[scale].values():
    rows = all_rows(setting)
    for seed in range(setting.seeds):
      found += [Run(setting, row, seed) for row in rows if seed == 0 or row.headline]
  return {run.name: run for run in found}


RUNS = {scale: {name: run.experiment for name, run in runs(scale).items()} for scale in SCALES}
"""Scale -> name -> experiment."""

PAPER = vq_report.PAPER
"""Table -> row -> the paper's numbers."""


def _render(console: Console, results: Results, scale: str) -> None:
  for table in vq_report.tables(results, scale):
    console.print(table.rich())
  if scale == "cpu":
    for path in vq_report.write(results):
      console.print(f"wrote {path}", highlight=False)


STUDY = Study(
  name="vq_logits",
  description=__doc__,
  scales=tuple(SCALES),
  works=lambda scale: [run.work for run in runs(scale).values()],
  render=_render,
)


def main(arguments: Sequence[str] | None = None) -> int:
  """`STUDY.main`."""
  return STUDY.main(arguments)


if __name__ == "__main__":
  sys.exit(main())
