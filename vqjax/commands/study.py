"""Command that compares the rows of a study: tunes each, trains its seeds, and writes a page.

vqjax study study.py
"""

import argparse
import math
import pathlib
import sys
import time
from collections.abc import Callable
from fractions import Fraction

from rich.console import Console
from rich.table import Table

from vqjax.commands.console import configure_warnings, flag, option
from vqjax.commands.run_folders import exit_code_of_run
from vqjax.lab import exits
from vqjax.lab.config.experiment import errors_with_lines
from vqjax.lab.report import units
from vqjax.lab.study import load_study
from vqjax.lab.study.jobs import JobList, StudyJob
from vqjax.lab.study.launchers import LAUNCHERS
from vqjax.lab.study.work import Work
from vqjax.lab.training.provenance import device
from vqjax.lm.records import one_line

__all__ = []

PAGE_SECONDS = 30
"""Seconds between pages that are written while a study runs."""

EXAMPLES = """\
examples:
  vqjax study study.py --scale 0.1     a tenth of the steps, in a folder of its own
  vqjax study study.py --only dense,mine
  vqjax study study.py --render        writes the pages again, without a run
  vqjax study study.py --launcher slurm --submit gpus_per_node=1 slurm_partition=gpu

The same command again goes on where it stopped; several may run at once, with rows
that do not begin from those of another process."""


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call, 128 + n for signal n."""
  parser = argparse.ArgumentParser(
    prog="vqjax study",
    description="Compare the rows of a study on equal terms. FILE defines study() -> Study, or the"
    " function that is named.",
    epilog=EXAMPLES,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("file", metavar="FILE[:FUNCTION]", help="file that defines study()")
  option(parser, "--out", "folder of results (default: runs/FILE)", pathlib.Path, metavar="DIR")
  option(parser, "--only", "rows, or jobs such as 'dense/run*', comma-separated", metavar="ROWS")
  option(parser, "--scale", "how often the study's steps are trained", _scale, 1, metavar="X")
  text = "what runs the jobs: this process, a Ray cluster, or SLURM"
  option(parser, "--launcher", text, str, "local", choices=LAUNCHERS)
  option(
    parser,
    "--submit",
    "parameters of submitit for SLURM, such as timeout_min=600",
    default=[],
    nargs="+",
    metavar="NAME=VALUE",
  )
  flag(parser, "--list", "print the jobs, and which are done")
  flag(parser, "--render", "run nothing; write the pages")
  flag(parser, "--traceback", "show the traceback of an error")
  options, further = parser.parse_known_args(arguments)
  if further:
    hint = "; `--only` takes names with commas between them: --only dense,mine"
    parser.error(f"unrecognized arguments: {' '.join(further)}{hint if options.only else ''}")
  if options.submit and options.launcher != "slurm":
    parser.error("`--submit` needs `--launcher slurm`")
  if wrong := [each for each in options.submit if "=" not in each]:
    parser.error(f"`--submit` must have NAME=VALUE; got {wrong[0]}")
  configure_warnings()
  return exit_code_of_run(
    lambda: _study(options),
    show_traceback=options.traceback,
    out_of_memory=exits.LESS_OF_A_STEP,
  )


def _scale(text: str) -> Fraction:
  try:
    scale = Fraction(text)
  except ZeroDivisionError:
    scale = Fraction(0)
  if scale <= 0:
    raise argparse.ArgumentTypeError(f"it must be above 0; got {text}. Give one such as 0.1")
  return scale


_scale.__name__ = "number"


def _study(options: argparse.Namespace) -> None:
  scale = Fraction(options.scale)
  path, _, function = options.file.rpartition(":")
  if not path or not function.isidentifier():
    path, function = options.file, "study"
  file = pathlib.Path(path)
  stem = file.stem + (f"-{function}" if function != "study" else "")
  stem += "" if scale == 1 else f"-x{float(scale):g}"
  out = options.out or pathlib.Path("runs") / stem
  work = Work(load_study(file, function), out, file, scale, function)
  jobs = work.job_list()
  chosen = jobs.chosen(options.only)
  if options.list:
    print("\n".join(jobs.listing(chosen)))
    return
  if not options.render:
    launch = LAUNCHERS[options.launcher]
    parameters = dict(each.split("=", 1) for each in options.submit)
    elsewhere = launch and (lambda jobs: launch(work, work.in_parts(jobs), **parameters))
    _run(work, jobs, chosen, elsewhere)
  _write(work, jobs)


def _run(
  work: Work,
  jobs: JobList,
  chosen: list[StudyJob],
  elsewhere: Callable[[list[StudyJob]], None] | None,
) -> None:
  """Make what is missing, after the costs of every row are measured and printed.

  Args:
    work: the study.
    jobs: its jobs.
    chosen: those to run.
    elsewhere: jobs -> None, which runs them in other processes; None: they run in this one.
  """
  from vqjax.lab.study.page import write_pages

  # A run needs no costs, but what is printed does.
  rows = dict.fromkeys(job.name.partition("/")[0] for job in chosen)
  costs = [job for job in jobs.jobs if job.name in {f"{row}/costs" for row in rows}]
  rest = [job for job in chosen if not job.name.endswith("/costs")]
  costs = [job for job in costs if not jobs.is_done(job)]
  if elsewhere:
    elsewhere(costs)
  for job in () if elsewhere else costs:
    exits.say(f"{job.name}: measuring a step")
    with errors_with_lines(work.file, line=None):
      jobs.do(job)
  left = [job for job in rest if not jobs.is_done(job)]
  seconds = {job.name: work.seconds(job) for job in left}
  _print_plan(work, rest, seconds)
  if elsewhere:
    elsewhere(left)
    return
  written = -math.inf
  for at, job in enumerate(left):
    to_go = sum(work.seconds(other) for other in left[at:])
    exits.say(f"[{at + 1}/{len(left)}] {job.name}: about {_duration(to_go)} left")
    jobs.do(job)
    # Of short runs the pages would take a part of the time that is seen.
    if "/run" in job.name and time.monotonic() > written + PAGE_SECONDS:
      write_pages(work, jobs.current())
      written = time.monotonic()


def _print_plan(work: Work, chosen: list[StudyJob], seconds: dict[str, float]) -> None:
  """Print what runs, and how long it takes by the measured step of each row."""
  kept = work.results.read()
  table = Table(title=f"{one_line(work.title)} on {device()}", title_justify="left")
  table.add_column("row", overflow="fold")
  for column in ("seeds", "candidates", "steps", "ms a step", "done", "about"):
    table.add_column(column, justify="right")
  for name in dict.fromkeys(job.name.partition("/")[0] for job in chosen):
    jobs = [job.name for job in chosen if job.name.partition("/")[0] == name]
    own = [seconds[job] for job in jobs if job in seconds]
    trained = ("-", "-", "-")
    if name in work.study.trained:
      trained = (
        str(len(work.study.space(name).candidates())),
        f"{work.study.experiment(name, scale=work.scale).train.steps:,}",
        units.milliseconds(kept[f"{name}/costs"]["costs"]["step_seconds"]),
      )
    table.add_row(
      name,
      str(sum("/run" in job for job in jobs)),
      *trained,
      f"{len(jobs) - len(own)} of {len(jobs)}",
      _duration(sum(own)) if own else "-",
    )
  Console().print(table, highlight=False)
  together = f"together about {_duration(sum(seconds.values()))}"
  left = [job for job in chosen if job.name in seconds]
  if more := sum(work.seconds(job, extended=True) for job in left) - sum(seconds.values()):
    together += f", and up to {_duration(more)} for values beyond the edges of grids"
  trained = work.study.trained
  derived = [one for job, one in seconds.items() if job.partition("/")[0] not in trained]
  if derived and not any(derived):
    together += "; what is derived from runs is not counted before the first one is made"
  print(together, flush=True)


def _duration(seconds: float) -> str:
  """A time in the largest fitting unit."""
  for unit, size in (("h", 3600), ("min", 60)):
    if seconds >= size:
      return f"{seconds / size:.1f} {unit}"
  return f"{seconds:.0f} s"


def _write(work: Work, jobs: JobList) -> None:
  """Print the table and write the pages."""
  # Not at the top: pandas and matplotlib take a second, and --list needs neither.
  from vqjax.lab.report.frames import show_frame
  from vqjax.lab.study.page import shown_table, write_pages

  results = jobs.current()
  table = shown_table(work.study, results)
  if table.empty:
    print("no run has finished yet", file=sys.stderr)
  else:
    show_frame(Console(), "", table)
  for path in write_pages(work, results):
    print(f"wrote {one_line(path)}")
