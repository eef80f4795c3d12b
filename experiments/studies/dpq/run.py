"""What do the tables of DPQ say, measured: its two quantisers, its baselines, what they cost?

python -m experiments.studies.dpq.run --scale smoke
python -m experiments.studies.dpq.run --scale cpu            runs what has no result yet, then renders
python -m experiments.studies.dpq.run --scale cpu --list     what there is, and what is done
python -m experiments.studies.dpq.run --scale cpu --only ptb-small/sx,ptb-small/full
python -m experiments.studies.dpq.run --render               the page, from the committed results

A run that was stopped goes on; each result is copied to docs/results/dpq/SCALE/, which is all that
the page is made of.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from experiments.studies.dpq import codes as dpq_codes
from experiments.studies.dpq import page as dpq_page
from experiments.studies.dpq import report as dpq_report
from experiments.studies.dpq.replaced import replaced
from experiments.studies.dpq.rows import Afterwards, Row, afterwards, full, trained_rows
from experiments.studies.dpq.setting import Setting
from experiments.studies.dpq.settings import COLUMN, SCALES
from experiments.studies.study import Results, Study, Work, derived, trained
from vqjax.lab import conversion
from vqjax.lab.training import FromPart


def works(scale: str) -> list[Work]:
  """All works of a scale, each after those that it starts from."""
  found = []
  for setting in SCALES[scale].values():
    found += _of_setting(setting)
  return found


def _of_setting(s: Setting) -> Iterator[Work]:
  rows = trained_rows(s)
  for seed in range(s.seeds):
    for row in rows:
      if seed == 0 or row.name in COLUMN:
        yield _trained(s, row, seed)
  for row in afterwards(s):
    yield _afterwards(s, row, _trained(s, rows[0]))


def _trained(s: Setting, row: Row, seed: int = 0) -> Work:
  name = f"{s.name}/{row.name}" + (f"-s{seed}" if seed else "")
  experiment, needs = s.make(row.name, row.embedding(s), seed), ()
  if row.fill is not None:
    start = conversion.FromTable(s.path("full", seed), row.fill(s))
    experiment, needs = dataclasses.replace(experiment, init_from=start), (f"{s.name}/full",)
  if s.before is not None:
    start = FromPart(f"{s.folder}/{s.before}/{row.name}-{seed}", "encoder")
    experiment, needs = (
      dataclasses.replace(experiment, init_from=start),
      (f"{s.before}/{row.name}",),
    )
  return trained(name, row.label, experiment, s.path(row.name, seed), dpq_codes.beside, needs)


def _afterwards(s: Setting, row: Afterwards, source: Work) -> Work:
  experiment, folder = s.make("full", full(s), 0), pathlib.Path(s.path("full"))
  embedding = row.embedding(s)
  measure = lambda: replaced(experiment, folder, embedding, row.fill)
  return derived(f"{s.name}/{row.name}", row.label, source, {"embedding": repr(embedding)}, measure)


def _render(console: Console, results: Results, scale: str) -> None:
  for table in dpq_report.tables(results, scale):
    console.print(table.rich())
  if scale == "cpu":
    for path in dpq_page.write(results):
      console.print(f"wrote {path}", highlight=False)


STUDY = Study(
  name="dpq",
  description=__doc__,
  scales=tuple(SCALES),
  works=works,
  render=_render,
)


def main(arguments: Sequence[str] | None = None) -> int:
  """`STUDY.main`."""
  return STUDY.main(arguments)


if __name__ == "__main__":
  sys.exit(main())
