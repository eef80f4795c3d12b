"""Studies: sets of runs with results in one file, resumed where they stopped."""

import argparse
import dataclasses
import difflib
import fcntl
import fnmatch
import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Console

from experiments.studies import study_page
from experiments.studies.study_page import Results
from vqjax.commands.console import configure_warnings
from vqjax.commands.run_folders import exit_code_of_run
from vqjax.lab.config import Experiment, config_hash
from vqjax.lab.exits import LESS_OF_A_STEP
from vqjax.lab.training import NotFiniteError, fit
from vqjax.lab.training.provenance import provenance
from vqjax.lab.training.run_folder import read_result
from vqjax.lm import records
from vqjax.outputs import write_text


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
    name: "setting/row", with the suffix "-s1" for seed 1; seed 0 has no suffix.
    label: the row's label in tables.
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


Beside = Callable[[Experiment, pathlib.Path], dict[str, Any]]
"""(experiment, run folder) -> further measurements, kept beside the result of a finished run."""


def training_job(
  name: str,
  label: str,
  experiment: Experiment,
  folder: str | pathlib.Path,
  beside: Beside = lambda experiment, folder: {},
  needs: tuple[str, ...] = (),
) -> StudyJob:
  """A job that trains an experiment in its run folder."""
  folder = pathlib.Path(folder)

  def make() -> dict[str, Any]:
    try:
      fit(experiment, folder)
    except NotFiniteError as error:
      # The result says that it failed; the other jobs of the study still run.
      print(f"{name} failed: {error}", file=sys.stderr)
    result = read_result(folder)
    measurements = beside(experiment, folder) if result["status"] == "finished" else {}
    return {"result": result, **measurements}

  return StudyJob(name, label, lambda: config_hash(experiment), make, needs)


def derived(
  name: str,
  label: str,
  source: StudyJob,
  settings: Mapping[str, Any],
  measure: Callable[[], dict[str, Any]],
) -> StudyJob:
  """A job that measures something of another job's run.

  Args:
    name: name of this job.
    label: the row's label in tables.
    source: the job whose run is measured.
    settings: how it is measured, as values that JSON has; part of the identity.
    measure: () -> {"result": ..., further measurements}.
  """

  def identity() -> str:
    return values_identity([source.identity(), settings])

  def make() -> dict[str, Any]:
    measured = measure()
    origin = {"status": "finished", "config_hash": identity(), **provenance()}
    return {**measured, "result": origin | measured["result"], "settings": dict(settings)}

  return StudyJob(name, label, identity, make, (source.name,))


def values_identity(values: Any) -> str:
  """A short hash of values that JSON has."""
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Study:
  """Jobs at several scales, one file of their results, and the page made of them.

  Each line of `results.jsonl` in the study's folder is one result: {"name", "scale", "result",
  further measurements}. Results of the scale "smoke" go to runs/NAME/smoke instead, which git
  ignores.

  Attributes:
    name: name of the study's folder, and of its runs in runs/NAME.
    description: the text of --help.
    scales: the names of the scales.
    jobs: scale -> jobs, each after the jobs that it needs.
    tables: (results, scale) -> the tables of the terminal by their titles.
    update: rewrites the page and its figures from the results of the scale "cpu"; returns paths.
    options: parsers of further options, which the caller reads from the arguments itself.
  """

  name: str
  description: str
  scales: Sequence[str]
  jobs: Callable[[str], list[StudyJob]]
  tables: Callable[[Results, str], Mapping[str, pd.DataFrame]]
  update: Callable[[Results], list[pathlib.Path]]
  options: Sequence[argparse.ArgumentParser] = ()

  def main(self, arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 2 for a wrong call, 128 + n for signal n."""
    parser = argparse.ArgumentParser(
      prog=f"python -m experiments.studies.{self.name}.run",
      description=self.description,
      parents=list(self.options),
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--scale", choices=self.scales, default="cpu", help="(default: %(default)s)")
    add(
      "--only",
      metavar="NAMES",
      help="these jobs and those that they need: names or patterns like 'ptb/*', comma-separated",
    )
    add("--list", action="store_true", help="print the jobs and which are done")
    add("--render", action="store_true", help="run nothing; print the tables, update the page")
    options = parser.parse_args(arguments)
    configure_warnings()
    return exit_code_of_run(lambda: self._act(options), out_of_memory=LESS_OF_A_STEP)

  def path(self, scale: str) -> pathlib.Path:
    """The file that holds the results of a scale."""
    if scale == "smoke":
      return pathlib.Path("runs", self.name, scale, "results.jsonl")
    return pathlib.Path(__file__).parent / self.name / "results.jsonl"

  def read(self, scale: str) -> dict[str, dict[str, Any]]:
    """All results of a scale by the names of their jobs.

    Raises:
      ValueError: a line of the file is not a result; the message names file and line.
    """
    return {row["name"]: row for row in self._rows(scale) if row["scale"] == scale}

  def _rows(self, scale: str) -> list[dict[str, Any]]:
    # Without checksums: the files are in the repository, which has its own.
    kept = records.read_json_rows(
      self.path(scale), ResultLine, "Restore or remove the line.", seal=False
    )
    if kept.problem:
      raise kept.problem
    return kept.rows

  def keep(self, scale: str, row: Mapping[str, Any]) -> None:
    """Write a result in place of an earlier one; safe beside other processes."""
    path = self.path(scale)
    lock = pathlib.Path("runs", f".{self.name}.lock")
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as handle:
      fcntl.flock(handle, fcntl.LOCK_EX)
      rows = {(other["scale"], other["name"]): other for other in self._rows(scale)}
      rows[scale, row["name"]] = {"name": row["name"], "scale": scale, **row}
      lines = (json.dumps(rows[key], ensure_ascii=False) for key in sorted(rows))
      write_text(path, "".join(f"{line}\n" for line in lines))

  def is_done(self, scale: str, job: StudyJob) -> bool:
    """Whether a result of exactly this job is kept."""
    kept = self.read(scale).get(job.name)
    return kept is not None and kept["result"]["config_hash"] == job.identity()

  def do(self, scale: str, job: StudyJob) -> None:
    """Make and keep a missing result, unless a job that it needs has no model."""
    if self.is_done(scale, job):
      return
    kept = self.read(scale)
    for name in job.needs:
      if name not in kept or kept[name]["result"]["status"] != "finished":
        print(f"{job.name} is skipped: it starts from {name}, which has no model", file=sys.stderr)
        return
    self.keep(scale, {"name": job.name, **job.make()})

  def current(self, scale: str) -> dict[str, dict[str, Any]]:
    """`read` without results of another configuration; their names go to stderr."""
    identities = {job.name: job.identity() for job in self.jobs(scale)}
    current = {}
    for name, kept in self.read(scale).items():
      if kept["result"]["config_hash"] == identities.get(name):
        current[name] = kept
      else:
        print(f"{name} is left out: its result is of another configuration", file=sys.stderr)
    return current

  def _act(self, options: argparse.Namespace) -> None:
    console = Console()
    if not options.render:
      chosen = self.chosen(options.scale, options.only)
      if options.list:
        kept = self.current(options.scale)
        for job in chosen:
          done = job.name in kept
          console.print(f"{'done' if done else '    '}  {job.name}  {job.label}", highlight=False)
        return
      for job in chosen:
        self.do(options.scale, job)
    results = self.current(options.scale)
    for title, table in self.tables(results, options.scale).items():
      study_page.show_frame(console, title, table)
    if options.scale == "cpu":
      for path in self.update(results):
        console.print(f"wrote {path}", highlight=False)

  def chosen(self, scale: str, only: str | None) -> list[StudyJob]:
    """The jobs named by `only` (None for all), after those that they need.

    Args:
      scale: the scale whose jobs they are.
      only: names, or patterns as of a shell, comma-separated.

    Raises:
      ValueError: `only` names a job that the scale does not have.
    """
    jobs = {job.name: job for job in self.jobs(scale)}
    wanted = ["*"] if only is None else only.split(",")
    matches = {pattern: fnmatch.filter(jobs, pattern) for pattern in wanted}
    names = [name for found in matches.values() for name in found]
    unknown = [pattern for pattern, found in matches.items() if not found]
    if unknown:
      near = [match for name in unknown for match in difflib.get_close_matches(name, jobs, 3)]
      hint = f"Did you mean {', '.join(near)}?" if near else "--list prints all names."
      raise ValueError(
        f"`--only` must name jobs of the scale {scale}; got {', '.join(unknown)}. {hint}"
      )
    chosen: dict[str, StudyJob] = {}

    def add(name: str) -> None:
      for needed in jobs[name].needs:
        add(needed)
      chosen.setdefault(name, jobs[name])

    for name in names:
      add(name)
    return list(chosen.values())
