"""The jobs of a declared study: costs of a step, tunings, and the runs of each seed."""

import dataclasses
import math
import pathlib
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from vqjax.lab.config import Experiment, config_hash, with_fields
from vqjax.lab.run_files import read_result
from vqjax.lab.study.costs import measure_costs, run_seconds, tuning_seconds
from vqjax.lab.study.declaration import TUNING_SEED, Run, Runs, Study
from vqjax.lab.study.jobs import (
  JobList,
  ResultsFile,
  StudyJob,
  check_same,
  origin,
  train_run,
  values_identity,
)
from vqjax.lab.study.tuning import Tuning
from vqjax.lab.training.provenance import commit_of

__all__ = ["Work"]


@dataclasses.dataclass(frozen=True)
class Work:
  """A study in its folder.

  The jobs of a row are ROW/costs, ROW/tuning where there is something to choose, ROW/run for the
  first seed and ROW/run-s1 and so on for the others.

  Attributes:
    study: the study.
    folder: the folder of its results, pages and runs.
    file: the file that declares it, whose commit is kept with each run.
    scale: how often the steps of the base are trained.
    function: the function of the file that returns it.
  """

  study: Study
  folder: pathlib.Path
  file: pathlib.Path
  scale: Fraction = Fraction(1)
  function: str = "study"

  @property
  def title(self) -> str:
    """The file, and the function if it is not `study`."""
    return self.file.name + (f":{self.function}" if self.function != "study" else "")

  @property
  def results(self) -> ResultsFile:
    """The file of the results."""
    path = self.folder / "results.jsonl"
    return ResultsFile(path, str(float(self.scale)), path.with_suffix(".lock"))

  def job_list(self) -> JobList:
    """All jobs: costs, then each row's tuning and first seed, then the other seeds."""
    study, trained = self.study, self.study.trained
    derived = [name for name in study.rows if name not in trained]
    jobs = [*map(self._costs, trained)]
    for name in trained:
      jobs += [] if study.row(name).tuned_as or not self._tuned(name) else [self._tuning_job(name)]
      jobs.append(self._run(name, 0))
    jobs += [self._derived(name, 0) for name in derived]
    for seed in range(1, study.seeds):
      jobs += [self._run(name, seed) for name in trained if seed < study.seeds_of(name)]
      jobs += [self._derived(name, seed) for name in derived if seed < study.seeds_of(name)]
    return JobList(jobs, self.results)

  def in_parts(self, jobs: Sequence[StudyJob]) -> list[StudyJob]:
    """The jobs with the trials of tunings before them, for processes that run side by side.

    A round waits for the whole round before it, so that what is chosen depends on no process's
    speed.
    """
    parts = []
    for job in jobs:
      name, kind = job.name.split("/")
      # Nothing is known of a row before those that it begins from are tuned.
      tuning = self._tuning(name) if kind == "tuning" else None
      if tuning is not None:
        trials = tuning.trials()
        parts += [dataclasses.replace(trial, needs=(*job.needs, *trial.needs)) for trial in trials]
        job = dataclasses.replace(job, needs=(*job.needs, *(trial.name for trial in trials)))
      parts.append(job)
    return parts

  def _costs(self, name: str) -> StudyJob:
    experiment = self.study.experiment(name, scale=self.scale)
    if self.study.begins_from(name):
      experiment = dataclasses.replace(experiment, init_from=None)
    identity = lambda: values_identity(["costs", config_hash(experiment)])
    make = lambda: {"result": origin(identity()), "costs": measure_costs(experiment)}
    return StudyJob(f"{name}/costs", "time of a step", identity, make)

  def _tuned(self, name: str) -> bool:
    """Whether there is something to choose for a row: one candidate needs no tuning."""
    return len(self.study.space(name).candidates()) > 1

  def _tuning(self, name: str) -> Tuning | None:
    """The tuning of a row; None before the rows that it begins from are tuned."""
    both = self._sources(name, 0), self._sources(name, 0, in_folders=True)
    if None in both:
      return None
    made = [self.study.experiment(name, TUNING_SEED, self.scale, each) for each in both]
    folder, space = self.folder / "tuning" / name, self.study.space(name)
    limits = self.study.extensions, self.study.rounds
    return Tuning(f"{name}/tuning", "tuning", made[1], space, folder, *limits, identified=made[0])

  def _tuning_job(self, name: str) -> StudyJob:
    # Made late: what the rows that it begins from have chosen is part of it.
    now = lambda: self._tuning(name)
    identity = lambda: "" if now() is None else now().job().identity()
    needs = tuple(self._name(row, 0) for row in self.study.begins_from(name))

    def make() -> dict[str, Any]:
      self._restore(name, 0)
      return now().job().make()

    return StudyJob(f"{name}/tuning", "tuning", identity, make, needs)

  def _restore(self, name: str, seed: int) -> None:
    """Train the runs that a row begins from again where their folders are gone."""
    for row in self.study.begins_from(name):
      self._model_of(row, seed)

  def _model_of(self, name: str, seed: int) -> pathlib.Path:
    """The folder of a kept run, which is trained again where it is gone."""
    folder, job = self._folder(name, seed), self._run(name, seed)
    result = read_result(folder)
    is_there = result is not None and result["status"] == "finished"
    made = {"result": result} if is_there else job.make()
    check_same(made, self.results.read().get(job.name))
    return folder

  def _chosen(self, name: str) -> Mapping[str, Any] | None:
    """What the tuning of a row chose; None before it has a result."""
    owner = self.study.row(name).tuned_as or name
    if not self._tuned(name):
      return self.study.space(name).candidates()[0]
    kept, tuning = self.results.read().get(f"{owner}/tuning"), self._tuning(owner)
    if kept is None or tuning is None or kept["result"]["status"] != "finished":
      return None
    if kept["result"]["config_hash"] != tuning.job().identity():
      return None
    return kept["chosen"]

  def _experiment(
    self, name: str, seed: int, in_folders: bool = False, scale: Fraction | None = None
  ) -> Experiment | None:
    """The experiment of a run; None before all tunings that it depends on.

    Args:
      name: the row.
      seed: number of the seed.
      in_folders: it begins from the folders of other runs; otherwise from their identities, of
        which its own is made: results are those of a study wherever its folder is.
      scale: how often the steps of the base are trained; None: as often as the study's are.
    """
    chosen, sources = self._chosen(name), self._sources(name, seed, in_folders)
    if chosen is None or sources is None:
      return None
    scale = self.scale if scale is None else scale
    return with_fields(self.study.experiment(name, seed, scale, sources), chosen)

  def _sources(self, name: str, seed: int, in_folders: bool = False) -> Runs | None:
    """The runs that a row begins from; None before all of their tunings."""
    found = {}
    for row in self.study.begins_from(name):
      # What is made of its steps is stretched later.
      experiment = self._experiment(row, seed, in_folders, Fraction(1))
      if experiment is None:
        return None
      folder = str(self._folder(row, seed)) if in_folders else self._identity(row, seed)
      found[row] = Run.of(experiment, folder)

    def run(row: str) -> Run:
      if row not in found:
        raise ValueError(
          f"`run` must name the same rows for every seed; row {name} begins from {row!r} with seed"
          f" {seed}, and from {', '.join(found) or 'none'} with seed 0. Make a row of each."
        )
      return found[row]

    return run

  def _identity(self, name: str, seed: int) -> str:
    experiment = self._experiment(name, seed)
    return "" if experiment is None else config_hash(experiment)

  def _run(self, name: str, seed: int) -> StudyJob:
    needs = [self._name(row, seed) for row in self.study.begins_from(name)]
    if self._tuned(name):
      needs.append(f"{self.study.row(name).tuned_as or name}/tuning")
    identity = lambda: self._identity(name, seed)

    def make() -> dict[str, Any]:
      self._restore(name, seed)
      experiment, folder = self._experiment(name, seed, in_folders=True), self._folder(name, seed)
      source = {"study": str(self.file.resolve()), "seed": seed, "scale": str(self.scale)}
      source |= {"function": self.function, "row": name, "runs": self._lineage(name, seed)}
      identified = self._experiment(name, seed)
      result = train_run(self._name(name, seed), experiment, folder, source, identified)
      further = self._measured(identified, folder) if result["status"] == "finished" else {}
      return {"result": result, **further}

    return StudyJob(self._name(name, seed), f"seed {seed}", identity, make, tuple(needs))

  def _measured(self, experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
    """What is kept beside the result of a finished run."""
    further = {} if self.study.measure is None else self.study.measure(experiment, folder)
    if taken := sorted(further.keys() & {"code", "name", "result", "scale"}):
      raise ValueError(
        f"`measure` must return names of its own; got {taken[0]}, which a result has. Rename it."
      )
    return {"code": code_of(self.file), **further}

  def _lineage(self, name: str, seed: int) -> dict[str, Any]:
    """The identities and tuned fields of a row's run and of those that it begins from, by rows."""
    runs = {}
    for row in (*self.study.begins_from(name), name):
      runs |= {} if row == name else self._lineage(row, seed)
      runs[row] = {"identity": self._identity(row, seed), "fields": self._chosen(row)}
    return runs

  def _derived(self, name: str, seed: int) -> StudyJob:
    row = self.study.row(name)
    identity = lambda: values_identity([self._identity(row.of, seed), row.settings()])

    def make() -> dict[str, Any]:
      folder, began = self._model_of(row.of, seed), time.perf_counter()
      measured = row.measure(self._experiment(row.of, seed), folder)
      result = origin(identity()) | measured["result"]
      loss = result["test"]["nats_per_token"]
      if not math.isfinite(loss):
        result = origin(identity()) | {"status": "failed", "error": f"the test loss is {loss}"}
        measured = {}
      kept = {"result": result, "code": code_of(self.file), "settings": row.settings()}
      return {**measured, **kept, "seconds": time.perf_counter() - began}

    label, needs = f"of {row.of}, seed {seed}", (self._name(row.of, seed),)
    return StudyJob(self._name(name, seed), label, identity, make, needs)

  def _name(self, name: str, seed: int) -> str:
    return f"{name}/run" + (f"-s{seed}" if seed else "")

  def _folder(self, name: str, seed: int) -> pathlib.Path:
    # By its identity too: a study that is edited goes on in new folders.
    suffix = f"-s{seed}" if seed else ""
    return self.folder / "runs" / f"{name}{suffix}-{self._identity(name, seed)}"

  def seconds(self, job: StudyJob, *, extended: bool = False) -> float:
    """The seconds that a job will take by the costs of its row, which are measured.

    What is derived from a run takes as long as that of another seed, or on average as long as such
    rows have taken; the first one counts as nothing. With `extended` a tuning tries all the values
    that it may try beyond the edges of its grid.
    """
    name, kind = job.name.split("/")
    results = self.results.read()
    if name not in self.study.trained:
      times = {other: one["seconds"] for other, one in results.items() if _is_timed(one)}
      own = [each for other, each in times.items() if other.startswith(f"{name}/")]
      return statistics.fmean(own or times.values() or [0.0])
    kept = results.get(f"{name}/costs")
    if kept is None:
      return 0.0
    train = self.study.experiment(name, scale=self.scale).train
    if kind == "tuning":
      space = self.study.space(name)
      further = self.study.extensions * len(space.edged()) if extended else 0
      count = len(space.candidates())
      return tuning_seconds(kept["costs"], train.steps, count, self.study.rounds, further)
    evaluations = -(-train.steps // train.eval_every)
    return run_seconds(kept["costs"], train.steps, evaluations)


def _is_timed(kept: Mapping[str, Any]) -> bool:
  """Whether it is the result of a derived row that says how long it took."""
  return "settings" in kept and "seconds" in kept


def code_of(file: pathlib.Path) -> str | None:
  """The commit of a file's repository, with + for uncommitted code; None outside of one."""
  folder = file.resolve().parent
  commit = commit_of(folder)
  if commit is None or commit.endswith("+"):
    return commit
  # Modules that the file may import, and the file itself where git ignores it.
  listed = ["git", "-C", str(folder), "ls-files", "--others"]
  for paths in (["--exclude-standard", "*.py"], [file.name]):
    if subprocess.run([*listed, *paths], capture_output=True, check=False).stdout:
      return f"{commit}+"
  return commit
