"""Studies: sets of runs whose results are kept in one file and resumed where they stopped."""

import argparse
import dataclasses
import fcntl
import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from vqjax.lab.config import Experiment, config_hash
from vqjax.lab.console import exit_code, speak_plainly
from vqjax.lab.training import NotFiniteError, fit
from vqjax.lab.training.provenance import provenance
from vqjax.lab.training.run import read_json

Results = Mapping[str, Mapping[str, Any]]
"""Name of a work -> what is kept of it."""

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@dataclasses.dataclass(frozen=True)
class Work:
  """One run or measurement of a study, whose result is kept.

  Attributes:
    name: "setting/row", and the seed where it is not 0.
    label: the row's label in tables.
    identity: () -> a hash of all that the result depends on.
    make: () -> the result, {"result": {"status", "config_hash": the identity, ...}, ...}. It
      resumes where an earlier call was stopped.
    needs: names of the works that it starts from.
  """

  name: str
  label: str
  identity: Callable[[], str]
  make: Callable[[], dict[str, Any]]
  needs: tuple[str, ...] = ()


Beside = Callable[[Experiment, pathlib.Path], dict[str, Any]]
"""(experiment, its run folder) -> what is kept beside the result of a finished run."""


def trained(
  name: str,
  label: str,
  experiment: Experiment,
  folder: str | pathlib.Path,
  beside: Beside = lambda experiment, folder: {},
  needs: tuple[str, ...] = (),
) -> Work:
  """The work of training an experiment in its run folder."""
  folder = pathlib.Path(folder)

  def make() -> dict[str, Any]:
    try:
      fit(experiment, folder)
    except NotFiniteError as error:
      # Its row says so, and the others go on.
      print(f"{name} failed: {error}", file=sys.stderr)
    result = read_json(folder / "result.json")
    more = beside(experiment, folder) if result["status"] == "finished" else {}
    return {"result": result, **more}

  return Work(name, label, lambda: config_hash(experiment), make, needs)


def derived(
  name: str,
  label: str,
  source: Work,
  settings: Mapping[str, Any],
  measure: Callable[[], dict[str, Any]],
) -> Work:
  """The work of measuring something of another work's run; `settings` is how, as JSON has it.

  `measure` returns {"result": ..., and what is kept beside it}.
  """

  def identity() -> str:
    told = json.dumps([source.identity(), settings], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:12]

  def make() -> dict[str, Any]:
    found = measure()
    origin = {"status": "finished", "config_hash": identity(), **provenance()}
    return {**found, "result": origin | found["result"], "settings": dict(settings)}

  return Work(name, label, identity, make, (source.name,))


@dataclasses.dataclass(frozen=True)
class Study:
  """Works at several scales, their results in one file, and the page made of them.

  Each line of `results.jsonl` beside the study's module is one result: {"name", "scale", "result",
  and whatever else was measured}. Results of the scale "smoke" go to runs/NAME/smoke instead, so
  that nobody commits them.

  Attributes:
    name: of the study's folder and of its runs, runs/NAME.
    description: what --help says.
    scales: the names of the scales.
    works: scale -> works, each after the works that it needs.
    render: (console, results, scale) prints the tables and updates the page.
    options: further options of the command; the caller reads them.
  """

  name: str
  description: str
  scales: Sequence[str]
  works: Callable[[str], list[Work]]
  render: Callable[[Console, Results, str], None]
  options: Sequence[argparse.ArgumentParser] = ()

  def main(self, arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 2 for a wrong call, 128 + n for signal n."""
    options = self._parser().parse_args(arguments)
    speak_plainly()
    return exit_code(lambda: self._act(options))

  def path(self, scale: str) -> pathlib.Path:
    """The file that holds the results of a scale."""
    if scale == "smoke":
      return pathlib.Path("runs", self.name, scale, "results.jsonl")
    return pathlib.Path(__file__).parent / self.name / "results.jsonl"

  def read(self, scale: str) -> dict[str, dict[str, Any]]:
    """All results of a scale by the names of their works.

    Raises:
      ValueError: a line of the file is not a result; the message names file and line.
    """
    return {row["name"]: row for row in self._rows(scale) if row["scale"] == scale}

  def _rows(self, scale: str) -> list[dict[str, Any]]:
    path = self.path(scale)
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
      try:
        row = json.loads(line)
        row["name"], row["scale"], row["result"]["status"], row["result"]["config_hash"]
      except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
          f"line {number} of {path} is not a result ({error}); restore or remove it"
        ) from error
      rows.append(row)
    return rows

  def keep(self, scale: str, row: Mapping[str, Any]) -> None:
    """Writes a result, in place of an earlier one of its name; safe beside other processes."""
    path = self.path(scale)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = pathlib.Path("runs", f".{self.name}.lock")
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as handle:
      fcntl.flock(handle, fcntl.LOCK_EX)
      every = {(other["scale"], other["name"]): other for other in self._rows(scale)}
      every[scale, row["name"]] = {"name": row["name"], "scale": scale, **row}
      lines = (json.dumps(every[key], ensure_ascii=False) for key in sorted(every))
      partial = path.with_suffix(".partial")
      partial.write_text("".join(f"{line}\n" for line in lines))
      partial.replace(path)

  def is_done(self, scale: str, work: Work) -> bool:
    """Whether there is a result of exactly this work."""
    found = self.read(scale).get(work.name)
    return found is not None and found["result"]["config_hash"] == work.identity()

  def do(self, scale: str, work: Work) -> None:
    """Makes and keeps a missing result; a work that starts from a failed run is left out."""
    if self.is_done(scale, work):
      return
    kept = self.read(scale)
    is_finished = lambda name: name in kept and kept[name]["result"]["status"] == "finished"
    lost = [name for name in work.needs if not is_finished(name)]
    if lost:
      print(
        f"{work.name} is left out: it starts from {lost[0]}, which has no model", file=sys.stderr
      )
      return
    self.keep(scale, {"name": work.name, **work.make()})

  def current(self, scale: str) -> dict[str, dict[str, Any]]:
    """`read` without the results of works that are now configured otherwise, which it names."""
    works = {work.name: work for work in self.works(scale)}
    found = {}
    for name, kept in self.read(scale).items():
      if name in works and kept["result"]["config_hash"] == works[name].identity():
        found[name] = kept
      else:
        print(f"{name} is left out: its result is of another configuration", file=sys.stderr)
    return found

  def _act(self, options: argparse.Namespace) -> None:
    console = Console()
    if not options.render:
      chosen = self.chosen(options.scale, options.only)
      if options.list:
        kept = self.current(options.scale)
        for work in chosen:
          done = work.name in kept
          console.print(f"{'done' if done else '    '}  {work.name}  {work.label}", highlight=False)
        return
      for work in chosen:
        self.do(options.scale, work)
    self.render(console, self.current(options.scale), options.scale)

  def chosen(self, scale: str, only: str | None) -> list[Work]:
    """The works that were asked for by their names, with those that they need, in their order.

    Raises:
      ValueError: there is none of a name.
    """
    every = {work.name: work for work in self.works(scale)}
    names = list(every) if only is None else only.split(",")
    unknown = [name for name in names if name not in every]
    if unknown:
      raise ValueError(
        f"no run {', '.join(unknown)} at scale {scale}; there are {', '.join(every)}"
      )
    wanted: dict[str, Work] = {}

    def add(name: str) -> None:
      for needed in every[name].needs:
        add(needed)
      wanted.setdefault(name, every[name])

    for name in names:
      add(name)
    return list(wanted.values())

  def _parser(self) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
      prog=f"python -m experiments.studies.{self.name}.run",
      description=self.description,
      parents=list(self.options),
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
      "--scale", choices=self.scales, default="cpu", help="(default: %(default)s)"
    )
    parser.add_argument("--only", metavar="NAMES", help="these runs, and what they start from")
    parser.add_argument("--list", action="store_true", help="print the runs and which are done")
    parser.add_argument("--render", action="store_true", help="train nothing")
    return parser
