"""Run the comparison of heads: a tuning of each row, then its seeds.

python -m experiments.studies.comparison.run --scale smoke
python -m experiments.studies.comparison.run --scale cpu            runs what is missing, renders
python -m experiments.studies.comparison.run --scale cpu --list     lists the jobs that are done
python -m experiments.studies.comparison.run --scale cpu --only 'ptb/dense*,ptb/product'
python -m experiments.studies.comparison.run --render               renders the kept results

A stopped run is resumed. Rows are independent: several processes may each run some of them with
--only. Results are kept in results.jsonl; the page docs/results/comparison.md is prose with
generated tables and figures, which --scale cpu and --render rewrite.
"""

import dataclasses
import pathlib
from typing import Any

from experiments.studies.comparison import compressed, report
from experiments.studies.comparison.manuals import Manuals
from experiments.studies.comparison.rows import (
  SCALES,
  ComparisonRow,
  ComparisonSetting,
  rows,
  run_name,
)
from experiments.studies.study import PaperStudy
from vqjax.lab import exits
from vqjax.lab.config import Experiment, config_hash, with_fields
from vqjax.lab.study.compressed import held_out_scores
from vqjax.lab.study.jobs import StudyJob, check_same, derived, training_job, values_identity
from vqjax.lab.study.tuning import Tuning, tuned
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.provenance import provenance
from vqjax.lab.training.run_folder import load_text
from vqjax.sharding import make_mesh

TUNING_SEED = 100
"""Seed of the tunings, which is not that of a row."""


def jobs(scale: str) -> list[StudyJob]:
  """All jobs of a scale, each row's tuning before its runs; headline rows first."""
  every = []
  for setting in SCALES[scale]:
    every.append(_starts(setting))
    for row in sorted(rows(setting), key=lambda row: row.name not in setting.headline):
      every += _jobs(scale, setting, row)
  return every


def _starts(setting: ComparisonSetting) -> StudyJob:
  """The validation loss of each row before its first step; a distilled row begins as another."""
  trained = [row for row in rows(setting) if row.teacher is None and row.source is None]
  runs = {row.name: row.experiment(setting, 0) for row in trained}

  def nats(experiment: Experiment) -> float:
    text = load_text(experiment)
    program = Program(text.experiment, make_mesh(experiment.train.mesh))
    variables = program.init(keys(experiment.seed)[0]).variables
    if experiment.init_from is not None:
      variables = experiment.init_from(text, program.model, variables)
    return held_out_scores(program.model, variables, text)["valid"]["nats_per_token"]

  def identity() -> str:
    return values_identity({name: config_hash(run) for name, run in runs.items()})

  def make() -> dict[str, Any]:
    origin = {"status": "finished", "config_hash": identity(), **provenance()}
    return {"result": origin, "nats": {name: nats(run) for name, run in runs.items()}}

  return StudyJob(f"{setting.name}/starts", "loss before training", identity, make)


def _jobs(scale: str, setting: ComparisonSetting, row: ComparisonRow) -> list[StudyJob]:
  if row.source is not None:
    return _compressed(scale, setting, row)
  runs = _runs(scale, setting, row)
  return runs if row.name in setting.tuned_as else [_tuning(scale, setting, row), *runs]


def _tuning(scale: str, setting: ComparisonSetting, row: ComparisonRow) -> StudyJob:
  """The tuning of a row, or of the row whose tuning it has."""
  if row.name in setting.tuned_as:
    by_name = {other.name: other for other in rows(setting)}
    return _tuning(scale, setting, by_name[setting.tuned_as[row.name]])
  job = Tuning(
    f"{setting.name}/{row.name}-tuning",
    f"tuning of {row.label}",
    # The teacher of a tuning is that of the first seed.
    row.experiment(setting, TUNING_SEED, teacher_seed=0),
    setting.space,
    pathlib.Path(setting.folder, "tuning", row.name),
  ).job()
  return job if row.teacher is None else _taught(job, _runs(scale, setting, row.teacher)[0])


def _runs(scale: str, setting: ComparisonSetting, row: ComparisonRow) -> list[StudyJob]:
  """The runs of a row that is trained, one for each seed."""
  before = _tuning(scale, setting, row)
  chosen = lambda: _chosen(scale, before)

  def measured(seed: int) -> StudyJob:
    name, folder = f"{setting.name}/{run_name(row.name, seed)}", setting.path(row.name, seed)
    job = lambda experiment: training_job(name, row.label, experiment, folder, _text)
    return tuned(job, row.experiment(setting, seed), before, chosen)

  runs = [measured(seed) for seed in range(setting.seeds if row.name in setting.headline else 1)]
  if row.teacher is None:
    return runs
  # A row of one seed may have a teacher of more.
  teachers = _runs(scale, setting, row.teacher)[: len(runs)]
  return [_taught(*both) for both in zip(runs, teachers, strict=True)]


def _text(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """What the text was, where it differs between machines."""
  data = experiment.data
  if not isinstance(data, Manuals):
    return {}
  tokens = {name: len(split.tokens) for name, split in load_text(experiment).splits.items()}
  return {"text": {"checksum": data.fingerprint(), "pages": data.pages(), "tokens": tokens}}


def _chosen(scale: str, before: StudyJob) -> dict[str, float] | None:
  """What a tuning chose; None before it has a result."""
  kept = STUDY.read(scale).get(before.name)
  current = kept is not None and kept["result"]["config_hash"] == before.identity()
  return kept["chosen"] if current else None


def _compressed(scale: str, setting: ComparisonSetting, row: ComparisonRow) -> list[StudyJob]:
  """Measurements of the compressed heads of the runs of the row's source, one for each seed."""
  before, sources = _tuning(scale, setting, row.source), _runs(scale, setting, row.source)
  settings = {"method": repr(row.method), "divisor": setting.divisor}

  def measured(seed: int, source: StudyJob) -> StudyJob:
    def make() -> dict[str, Any]:
      check_same(source.make(), STUDY.read(scale).get(source.name))
      experiment = with_fields(row.source.experiment(setting, seed), _chosen(scale, before))
      folder = setting.path(row.source.name, seed)
      return compressed.measure_compressed(experiment, folder, row.method, setting.divisor)

    name = f"{setting.name}/{run_name(row.name, seed)}"
    return derived(name, row.label, source, settings, make)

  return [measured(seed, source) for seed, source in enumerate(sources)]


def _taught(job: StudyJob, teacher: StudyJob) -> StudyJob:
  """The job after its teacher's, which runs again where its folder is gone."""

  def make() -> dict[str, Any]:
    of = teacher.make()["result"]
    return {**job.make(), "teacher": {key: of[key] for key in ("commit", "device", "test")}}

  return dataclasses.replace(job, make=make, needs=(*job.needs, teacher.name))


STUDY = PaperStudy(
  name="comparison",
  description=__doc__,
  scales=tuple(SCALES),
  jobs=jobs,
  tables=report.shown_tables,
  update=report.update,
)

if __name__ == "__main__":
  exits.run_main(STUDY.main)
