"""Command that trains one experiment, and resumes it.

vqjax train configs/lm_codebook.py
"""

import argparse
import pathlib
import sys

from vqjax.commands.console import option
from vqjax.commands.run_folders import SEPARATOR, config_parser, print_result, with_config
from vqjax.lab.config import Experiment, config_hash
from vqjax.lab.exits import LESS_OF_A_STEP
from vqjax.lab.training import distributed, fit
from vqjax.lm.records import one_line

__all__ = []

EXAMPLES = """\
examples:
  vqjax train configs/lm_codebook.py
  vqjax train configs/lm_codebook.py data.path=/some/folder model.head.codes=512
  vqjax train configs/lm_codebook.py --help   every field, its type and default

The same command again resumes the run; a finished run prints its result.

Several processes can share a run and its folder. Under Slurm, Open MPI, Kubernetes and on TPU pods
they find each other; elsewhere, start the same command on each machine:
  ... --coordinator 10.0.0.1:1234 --num-processes 2 --process-id 0   on the machine 10.0.0.1
  ... --coordinator 10.0.0.1:1234 --num-processes 2 --process-id 1   on another machine"""


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call, 128 + n for signal n."""
  parser = config_parser("train", "Train one experiment.", EXAMPLES)
  option(parser, "--run", "run folder (default: runs/NAME-HASH)", pathlib.Path, metavar="DIR")
  option(parser, "--separator", SEPARATOR, metavar="TEXT")
  several = parser.add_argument_group("several processes")
  option(several, "--coordinator", "address of process 0", metavar="HOST:PORT")
  option(several, "--num-processes", "number of processes; 1 runs alone", int)
  option(several, "--process-id", "number of this process, from 0", int, metavar="I")
  seconds = {"metavar": "SECONDS"}
  text = "time to wait for the other processes"
  option(several, "--patience", text, float, distributed.PATIENCE, **seconds)
  text = "time without a heartbeat after which a process counts as dead"
  option(several, "--silence", text, float, distributed.SILENCE, **seconds)
  return with_config(parser, arguments, _train, before=_join, out_of_memory=LESS_OF_A_STEP)


def _join(options: argparse.Namespace) -> None:
  """Connect the processes before anything can fail in one of them."""
  distributed.start(
    options.coordinator,
    options.num_processes,
    options.process_id,
    patience=options.patience,
    silence=options.silence,
  )


def _train(experiment: Experiment, options: argparse.Namespace) -> None:
  """Train an experiment in its run folder and print the result."""
  folder = options.run or pathlib.Path("runs") / f"{experiment.name}-{config_hash(experiment)}"
  if distributed.is_main():
    print(f"run folder: {one_line(folder)}", file=sys.stderr)
  source = {"config": str(pathlib.Path(options.config).resolve()), "overrides": options.overrides}
  result = fit(experiment, folder, source=source)
  if distributed.is_main():
    print_result(result, folder)
