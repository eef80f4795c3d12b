"""The jobs of a declared study: costs of a step, tunings, and the runs of each seed."""

import dataclasses
import pathlib
import subprocess
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from vqjax.lab.config import config_hash
from vqjax.lab.study.costs import measure_costs, run_seconds, tuning_seconds
from vqjax.lab.study.declaration import TUNING_SEED, Study
from vqjax.lab.study.jobs import (
  JobList,
  ResultsFile,
  StudyJob,
  origin,
  training_job,
  values_identity,
)
from vqjax.lab.study.tuning import tuned, tuning

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
    names = [*self.study.rows]
    first = [job for name in names for job in (self._tuning(name), self._run(name, 0))]
    others = [self._run(name, seed) for seed in range(1, self.study.seeds) for name in names]
    return JobList([*map(self._costs, names), *first, *others], self.results)

  def _costs(self, name: str) -> StudyJob:
    experiment = self.study.experiment(name, scale=self.scale)
    identity = lambda: values_identity(["costs", config_hash(experiment)])
    make = lambda: {"result": origin(identity()), "costs": measure_costs(experiment)}
    return StudyJob(f"{name}/costs", "time of a step", identity, make)

  def _tuning(self, name: str) -> StudyJob:
    experiment = self.study.experiment(name, TUNING_SEED, self.scale)
    folder = self.folder / "tuning" / name
    return tuning(f"{name}/tuning", "tuning", experiment, self.study.space(name), folder)

  def _run(self, name: str, seed: int) -> StudyJob:
    before, suffix = self._tuning(name), f"-s{seed}" if seed else ""
    label, folder = f"seed {seed}", self.folder / "runs" / f"{name}{suffix}"
    code = lambda experiment, folder: {"code": code_of(self.file)}
    job = lambda experiment: training_job(f"{name}/run{suffix}", label, experiment, folder, code)

    def chosen() -> Mapping[str, Any] | None:
      kept = self.results.read().get(before.name)
      is_current = kept is not None and kept["result"]["config_hash"] == before.identity()
      return kept["chosen"] if is_current else None

    return tuned(job, self.study.experiment(name, seed, self.scale), before, chosen)

  def seconds(self, job: StudyJob) -> float | None:
    """The seconds that a job will take; None before the costs of its row are measured."""
    name, kind = job.name.split("/")
    kept = self.results.read().get(f"{name}/costs")
    if kind == "costs" or kept is None:
      return None
    train = self.study.experiment(name, scale=self.scale).train
    if kind == "tuning":
      candidates = len(self.study.space(name).candidates())
      return tuning_seconds(kept["costs"], train.steps, candidates)
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
