"""The jobs of a declared study: costs of a step, tunings, and the runs of each seed."""

import dataclasses
import pathlib
import subprocess
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from vqjax.lab.config import Experiment, config_hash, with_fields
from vqjax.lab.study.compressed import measure_compressed
from vqjax.lab.study.costs import measure_costs, run_seconds, tuning_seconds
from vqjax.lab.study.declaration import TUNING_SEED, Study
from vqjax.lab.study.jobs import (
  JobList,
  ResultsFile,
  StudyJob,
  check_same,
  derived,
  origin,
  training_job,
  values_identity,
)
from vqjax.lab.study.tuning import EXTENSIONS, Tuning, tuned

__all__ = ["Work"]


@dataclasses.dataclass(frozen=True)
class Work:
  """A study in its folder.

  The jobs of a row are ROW/costs, ROW/tuning, ROW/run for the first seed and ROW/run-s1 and so on
  for the others.

  Attributes:
    study: the study.
    folder: the folder of its results, pages and runs.
    file: the file that declares it, whose commit is kept with each run.
    scale: how often the steps of the base are trained.
  """

  study: Study
  folder: pathlib.Path
  file: pathlib.Path
  scale: Fraction = Fraction(1)

  @property
  def results(self) -> ResultsFile:
    """The file of the results."""
    path = self.folder / "results.jsonl"
    return ResultsFile(path, str(float(self.scale)), path.with_suffix(".lock"))

  def job_list(self) -> JobList:
    """All jobs: costs, then each row's tuning and first seed, then the other seeds."""
    trained = self.study.trained
    after = [name for name in self.study.rows if name not in trained]
    jobs = [*map(self._costs, trained)]
    jobs += [job for name in trained for job in (self._tuning(name).job(), self._run(name, 0))]
    jobs += [self._compressed(name, 0) for name in after]
    for seed in range(1, self.study.seeds):
      jobs += [self._run(name, seed) for name in trained]
      jobs += [self._compressed(name, seed) for name in after]
    return JobList(jobs, self.results)

  def in_parts(self, jobs: Sequence[StudyJob]) -> list[StudyJob]:
    """The jobs with the trials of tunings before them, for processes that run side by side.

    A round waits for the whole round before it, so that what is chosen depends on no process's
    speed.
    """
    parts = []
    for job in jobs:
      name, kind = job.name.split("/")
      if kind == "tuning":
        trials = self._tuning(name).trials()
        parts += trials
        job = dataclasses.replace(job, needs=tuple(trial.name for trial in trials))
      parts.append(job)
    return parts

  def _costs(self, name: str) -> StudyJob:
    experiment = self.study.experiment(name, scale=self.scale)
    identity = lambda: values_identity(["costs", config_hash(experiment)])
    make = lambda: {"result": origin(identity()), "costs": measure_costs(experiment)}
    return StudyJob(f"{name}/costs", "time of a step", identity, make)

  def _tuning(self, name: str) -> Tuning:
    experiment = self.study.experiment(name, TUNING_SEED, self.scale)
    folder = self.folder / "tuning" / name
    space = self.study.space(name)
    return Tuning(f"{name}/tuning", "tuning", experiment, space, folder, EXTENSIONS)

  def _run(self, name: str, seed: int) -> StudyJob:
    def job(experiment: Experiment) -> StudyJob:
      return training_job(
        self._name(name, seed),
        f"seed {seed}",
        experiment,
        self._folder(name, seed, experiment),
        lambda experiment, folder: {"code": code_of(self.file)},
        source={
          "study": str(self.file.resolve()),
          "row": name,
          "seed": seed,
          "scale": str(self.scale),
          "fields": self._chosen(name),
        },
      )

    experiment = self.study.experiment(name, seed, self.scale)
    return tuned(job, experiment, self._tuning(name).job(), lambda: self._chosen(name))

  def _compressed(self, name: str, seed: int) -> StudyJob:
    row = self.study.row(name)
    source = self._run(row.of, seed)

    def measure() -> dict[str, Any]:
      # A run whose folder is gone is trained again.
      check_same(source.make(), self.results.read().get(source.name))
      experiment = self.study.experiment(row.of, seed, self.scale)
      experiment = with_fields(experiment, self._chosen(row.of))
      measured = measure_compressed(experiment, self._folder(row.of, seed, experiment), row)
      return {**measured, "code": code_of(self.file)}

    label = f"seed {seed} of {row.of}, compressed"
    return derived(self._name(name, seed), label, source, row.settings(), measure)

  def _name(self, name: str, seed: int) -> str:
    return f"{name}/run" + (f"-s{seed}" if seed else "")

  def _folder(self, name: str, seed: int, experiment: Experiment) -> pathlib.Path:
    # By its identity too: a study that is edited goes on in new folders.
    suffix = f"-s{seed}" if seed else ""
    return self.folder / "runs" / f"{name}{suffix}-{config_hash(experiment)}"

  def _chosen(self, name: str) -> Mapping[str, Any] | None:
    """What the tuning of a row chose; None before it has a result."""
    before = self._tuning(name).job()
    kept = self.results.read().get(before.name)
    is_current = kept is not None and kept["result"]["config_hash"] == before.identity()
    return kept["chosen"] if is_current else None

  def seconds(self, job: StudyJob, *, extended: bool = False) -> float:
    """The seconds that a job will take by the costs of its row, which are measured.

    A compression counts as nothing: what it costs is not known. With `extended` a tuning tries all
    the values that it may try beyond the edges of its grid.
    """
    name, kind = job.name.split("/")
    kept = self.results.read().get(f"{name}/costs")
    if kept is None:
      return 0.0
    train = self.study.experiment(name, scale=self.scale).train
    if kind == "tuning":
      space = self.study.space(name)
      further = EXTENSIONS * len(space.edged()) if extended else 0
      return tuning_seconds(kept["costs"], train.steps, len(space.candidates()), further)
    evaluations = -(-train.steps // train.eval_every)
    return run_seconds(kept["costs"], train.steps, evaluations)


def code_of(file: pathlib.Path) -> str | None:
  """The commit of a file's repository, with + for uncommitted code; None outside of one."""
  git = ["git", "-C", str(file.resolve().parent)]
  found = subprocess.run(
    [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
  )
  if found.returncode:
    return None
  same = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False)
  listed = [*git, "ls-files", "--error-unmatch", file.name]
  known = subprocess.run(listed, capture_output=True, check=False)
  return found.stdout.strip() + ("+" if same.returncode or known.returncode else "")
