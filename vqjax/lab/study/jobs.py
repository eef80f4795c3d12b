"""Jobs of a study: runs and measurements with results in one file, resumed where they stopped."""

import dataclasses
import difflib
import fcntl
import fnmatch
import functools
import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vqjax.lab.config import Experiment
from vqjax.lab.run_files import read_result
from vqjax.lab.training import NotFiniteError, fit
from vqjax.lab.training.provenance import provenance
from vqjax.lm import records
from vqjax.outputs import write_text

__all__ = [
  "JobList",
  "ResultsFile",
  "StudyJob",
  "check_same",
  "origin",
  "train_run",
  "values_identity",
]


@dataclasses.dataclass
class KeptResult:
  """Schema of the result of a job."""

  status: str
  config_hash: str


@dataclasses.dataclass
class ResultLine:
  """Schema of a line of a file of results."""

  name: str
  scale: str
  result: KeptResult


@dataclasses.dataclass(frozen=True)
class StudyJob:
  """One run or measurement of a study, whose result is kept.

  Attributes:
    name: "ROW/run", with the suffix "-s1" for seed 1; seed 0 has no suffix.
    label: what it is, in lists.
    identity: () -> a hash of all values that the result depends on.
    make: () -> {"result": {"status", "config_hash": the identity, ...}, further measurements}. It
      resumes where an earlier call was stopped.
    needs: names of the jobs that it starts from.
  """

  name: str
  label: str
  identity: Callable[[], str]
  make: Callable[[], dict[str, Any]]
  needs: tuple[str, ...] = ()


def train_run(
  name: str,
  experiment: Experiment,
  folder: pathlib.Path,
  source: Mapping[str, Any],
  identified: Experiment,
) -> dict[str, Any]:
  """The result of an experiment that `fit` trains in its run folder."""
  try:
    fit(experiment, folder, source=source, identified=identified)
  except NotFiniteError as error:
    # The result says that it failed; the other jobs of the study still run.
    print(f"{name} failed: {error}", file=sys.stderr)
  return read_result(folder)


def origin(identity: str) -> dict[str, Any]:
  """The "result" of a finished job that trains nothing."""
  return {"status": "finished", "config_hash": identity, **provenance()}


def check_same(made: dict[str, Any], kept: dict[str, Any] | None) -> None:
  """Check that the run in a source's folder is the one whose result is kept.

  A run whose folder is gone is trained again, and another machine rounds otherwise: a run of one
  seed may end 1 % from itself.

  Raises:
    ValueError: their losses differ.
  """
  if kept is None:
    return
  found, known = (one["result"].get("test") for one in (made, kept))
  found, known = (test and test["nats_per_token"] for test in (found, known))
  if found != known:
    raise ValueError(
      f"The run in the folder must be the kept one of {kept['name']}; got {found} and {known} nats."
      " Remove its line from results.jsonl, and those of what was made of it, and run them again."
    )


def values_identity(values: Any) -> str:
  """A short hash of values that JSON has."""
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class ResultsFile:
  """The results of one scale in a file; each line is one of them.

  A line is {"name", "scale", "result", further measurements}. Files may hold several scales.

  Attributes:
    path: the file.
    scale: the name of the scale.
    lock: file that one process at a time holds while it writes.
  """

  path: pathlib.Path
  scale: str
  lock: pathlib.Path

  def read(self) -> dict[str, dict[str, Any]]:
    """All results of the scale by the names of their jobs.

    Raises:
      ValueError: a line of the file is not a result; the message names file and line.
    """
    return {row["name"]: row for row in self._rows() if row["scale"] == self.scale}

  def _rows(self) -> list[dict[str, Any]]:
    try:
      state = self.path.stat()
    except FileNotFoundError:
      return []
    return _rows_of(self.path, (state.st_ino, state.st_mtime_ns, state.st_size))

  def keep(self, row: Mapping[str, Any]) -> None:
    """Write a result in place of an earlier one; safe beside other processes."""
    self.lock.parent.mkdir(parents=True, exist_ok=True)
    with self.lock.open("w") as handle:
      fcntl.flock(handle, fcntl.LOCK_EX)
      rows = {(other["scale"], other["name"]): other for other in self._rows()}
      rows[self.scale, row["name"]] = {"name": row["name"], "scale": self.scale, **row}
      lines = (json.dumps(rows[key], ensure_ascii=False) for key in sorted(rows))
      write_text(self.path, "".join(f"{line}\n" for line in lines))


@functools.lru_cache(maxsize=8)
def _rows_of(path: pathlib.Path, state: tuple[int, ...]) -> list[dict[str, Any]]:
  """The lines of a file in a state; every job asks for them."""
  del state
  # Without checksums: the files may be in a repository, which has its own.
  kept = records.read_json_rows(path, ResultLine, "Restore or remove the line.", seal=False)
  if kept.problem:
    raise kept.problem
  return kept.rows


@dataclasses.dataclass(frozen=True)
class JobList:
  """Jobs of a scale and the file of their results.

  Attributes:
    jobs: the jobs, each after those that it needs.
    results: the file.
  """

  jobs: Sequence[StudyJob]
  results: ResultsFile

  def is_done(self, job: StudyJob) -> bool:
    """Whether a result of exactly this job is kept."""
    kept = self.results.read().get(job.name)
    return kept is not None and kept["result"]["config_hash"] == job.identity()

  def do(self, job: StudyJob) -> None:
    """Make and keep a missing result, unless a job that it needs has no model."""
    if self.is_done(job) or self.lacks(job):
      return
    self.results.keep({"name": job.name, **job.make()})

  def lacks(self, job: StudyJob) -> bool:
    """Whether a job that it needs has no current model, which is said."""
    kept, jobs = self.results.read(), {each.name: each for each in self.jobs}
    for name in job.needs:
      # What is not among the jobs keeps no result.
      if name not in jobs:
        continue
      if not self.is_done(jobs[name]) or kept[name]["result"]["status"] != "finished":
        print(f"{job.name} is skipped: it starts from {name}, which has no model", file=sys.stderr)
        return True
    return False

  def current(self) -> dict[str, dict[str, Any]]:
    """The results without those of another configuration, whose names go to stderr."""
    identities = {job.name: job.identity() for job in self.jobs}
    current = {}
    for name, kept in self.results.read().items():
      if kept["result"]["config_hash"] == identities.get(name):
        current[name] = kept
      else:
        print(f"{name} is left out: its result is of another configuration", file=sys.stderr)
    return current

  def listing(self, chosen: Sequence[StudyJob]) -> Iterator[str]:
    """A line for each of the jobs, which says whether it is done."""
    kept = self.current()
    for job in chosen:
      yield f"{'done' if job.name in kept else '    '}  {job.name}  {job.label}"

  def chosen(self, only: str | None) -> list[StudyJob]:
    """The jobs named by `only` (None for all), after those that they need.

    Args:
      only: names, folders of names, or patterns as of a shell, comma-separated.

    Raises:
      ValueError: `only` names a job that the scale does not have.
    """
    jobs = {job.name: job for job in self.jobs}
    wanted = ["*"] if only is None else only.split(",")
    matching = lambda one: fnmatch.filter(jobs, one) + fnmatch.filter(jobs, f"{one}/*")
    matches = {pattern: matching(pattern) for pattern in wanted}
    names = [name for found in matches.values() for name in found]
    unknown = [pattern for pattern, found in matches.items() if not found]
    if unknown:
      known = [*dict.fromkeys(name.partition("/")[0] for name in jobs), *jobs]
      near = [match for name in unknown for match in difflib.get_close_matches(name, known, 3)]
      hint = f"Did you mean {', '.join(near)}?" if near else "--list prints all names."
      raise ValueError(
        f"`--only` must name jobs of the scale {self.results.scale}; got {', '.join(unknown)}."
        f" {hint}"
      )
    chosen: dict[str, StudyJob] = {}

    def add(name: str) -> None:
      for needed in jobs[name].needs:
        add(needed)
      chosen.setdefault(name, jobs[name])

    for name in names:
      add(name)
    return list(chosen.values())
