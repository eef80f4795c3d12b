"""How does a set of runs become kept results, and go on where it was stopped?"""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from experiments.console import exit_code, speak_plainly
from vqjax.config import Experiment, config_hash
from vqjax.training import NotFiniteError, fit
from vqjax.training.provenance import provenance
from vqjax.training.run import read_json, write_json

Results = Mapping[str, Mapping[str, Any]]
"""Name of a work -> what is kept of it."""

DOCS = pathlib.Path(__file__).parents[1] / "docs"


@dataclasses.dataclass(frozen=True)
class Work:
  """One result of a study.

  Attributes:
    name: "setting/row", and the seed where it is not 0.
    label: what tables call it.
    identity: () -> a hash of all that the result depends on.
    make: () -> what is kept: {"result": {"status", "config_hash": the identity, ...}, ...}. It goes
      on where an earlier call was stopped.
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
    config = read_json(folder / "config.json")["config"]
    more = beside(experiment, folder) if result["status"] == "finished" else {}
    return {"result": result, "config": config, **more}

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
  """Works at several scales, one JSON file each, and the tables that are made of them.

  Attributes:
    name: of the folder of results: docs/results/NAME, of runs: runs/NAME.
    module: `python -m` this.
    description: what --help says.
    scales: their names; results of "smoke" lie beside the runs, so that nobody commits them.
    works: scale -> works, each after those that it needs.
    render: (console, results, scale) prints the tables and writes the page.
    options: of the command beside those of every study; the caller reads them by itself.
  """

  name: str
  module: str
  description: str
  scales: Sequence[str]
  works: Callable[[str], list[Work]]
  render: Callable[[Console, Results, str], None]
  options: Sequence[argparse.ArgumentParser] = ()

  def main(self, arguments: Sequence[str] | None = None) -> int:
    """Works and renders; returns the exit code: 2 for a wrong call, 128 + n for signal n."""
    options = self._parser().parse_args(arguments)
    speak_plainly()
    return exit_code(lambda: self._act(options))

  def folder(self, scale: str) -> pathlib.Path:
    """Where the results of a scale are kept."""
    if scale == "smoke":
      return pathlib.Path("runs", self.name, scale, "kept")
    return DOCS / "results" / self.name / scale

  def is_done(self, scale: str, work: Work) -> bool:
    """Whether there is a result of exactly this work."""
    found = read_json(self.path(scale, work.name))
    return found is not None and found["result"]["config_hash"] == work.identity()

  def do(self, scale: str, work: Work) -> None:
    """Makes and keeps what has no result; what starts from a run that failed is left out."""
    if self.is_done(scale, work):
      return
    lost = [name for name in work.needs if not self._is_finished(scale, name)]
    if lost:
      print(
        f"{work.name} is left out: it starts from {lost[0]}, which has no model", file=sys.stderr
      )
      return
    kept = work.make()
    path = self.path(scale, work.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"name": work.name, **kept})

  def _is_finished(self, scale: str, name: str) -> bool:
    """Whether there is a result, of a run that did not fail."""
    found = read_json(self.path(scale, name))
    return found is not None and found["result"]["status"] == "finished"

  def read(self, scale: str) -> dict[str, dict[str, Any]]:
    """Every kept result of a scale by the name of its work."""
    found = (json.loads(path.read_text()) for path in sorted(self.folder(scale).glob("*.json")))
    return {kept["name"]: kept for kept in found}

  def current(self, scale: str) -> dict[str, dict[str, Any]]:
    """`read` without the results of works that are now configured otherwise, which it names."""
    every = {work.name: work for work in self.works(scale)}
    found = {}
    for name, kept in self.read(scale).items():
      if name in every and self.is_done(scale, every[name]):
        found[name] = kept
      else:
        print(f"{name} is left out: its result is of another configuration", file=sys.stderr)
    return found

  def path(self, scale: str, name: str) -> pathlib.Path:
    """The file that the result of a work is kept in."""
    return self.folder(scale) / f"{name.replace('/', '-')}.json"

  def _act(self, options: argparse.Namespace) -> None:
    console = Console()
    if not options.render:
      chosen = self.chosen(options.scale, options.only)
      if options.list:
        for work in chosen:
          done = self.is_done(options.scale, work)
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
      prog=f"python -m {self.module}",
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
