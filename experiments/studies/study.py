"""Studies of papers: their jobs at several scales, the command that runs them, and their pages."""

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Console

from vqjax.commands.console import configure_warnings
from vqjax.commands.run_folders import exit_code_of_run
from vqjax.lab.exits import LESS_OF_A_STEP
from vqjax.lab.report.frames import show_frame
from vqjax.lab.study.jobs import JobList, ResultsFile, StudyJob
from vqjax.lab.study.seeds import Results


@dataclasses.dataclass(frozen=True)
class PaperStudy:
  """Jobs at several scales, one file of their results, and the page made of them.

  Results of the scale "smoke" go to runs/NAME/smoke, which git ignores, and not to the study's
  folder.

  Attributes:
    name: name of the study's folder, and of its runs in runs/NAME.
    description: the text of --help.
    scales: the names of the scales.
    jobs: scale -> jobs, each after the jobs that it needs.
    tables: (results, scale) -> the tables of the terminal by their titles.
    update: rewrites the page and its figures from the results of the scale "cpu"; returns paths.
  """

  name: str
  description: str
  scales: Sequence[str]
  jobs: Callable[[str], list[StudyJob]]
  tables: Callable[[Results, str], Mapping[str, pd.DataFrame]]
  update: Callable[[Results], list[pathlib.Path]]

  def main(self, arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 2 for a wrong call, 128 + n for signal n."""
    parser = argparse.ArgumentParser(
      prog=f"python -m experiments.studies.{self.name}.run",
      description=self.description,
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

  def results(self, scale: str) -> ResultsFile:
    """The file that holds the results of a scale."""
    folder = pathlib.Path(__file__).parent / self.name
    if scale == "smoke":
      folder = pathlib.Path("runs", self.name, scale)
    return ResultsFile(folder / "results.jsonl", scale, pathlib.Path("runs", f".{self.name}.lock"))

  def read(self, scale: str) -> dict[str, dict[str, Any]]:
    """All results of a scale by the names of their jobs."""
    return self.results(scale).read()

  def job_list(self, scale: str) -> JobList:
    """The jobs of a scale, with the file of their results."""
    return JobList(self.jobs(scale), self.results(scale))

  def _act(self, options: argparse.Namespace) -> None:
    console, every = Console(), self.job_list(options.scale)
    if not options.render:
      chosen = every.chosen(options.only)
      if options.list:
        for line in every.listing(chosen):
          console.print(line, highlight=False)
        return
      for job in chosen:
        every.do(job)
    results = every.current()
    for title, table in self.tables(results, options.scale).items():
      show_frame(console, title, table)
    if options.scale == "cpu":
      for path in self.update(results):
        console.print(f"wrote {path}", highlight=False)
