"""How do I train one experiment from the command line, and go on when it was stopped?"""

import argparse
import pathlib
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console

from vqjax.lab.config import config_hash, help_text, load, override
from vqjax.lab.console import WRONG_CALL, add_config, speak_plainly
from vqjax.lab.training import Interrupted, NotFiniteError, distributed, fit

USAGE = """\
examples:
  python -m experiments.train configs/lm_codebook.py
  python -m experiments.train configs/lm_codebook.py data.path=/some/folder model.head.codes=512
  python -m experiments.train configs/lm_codebook.py --help   every field, its type and default

The same command again resumes; a finished run prints its result.

Several processes share a run and its folder. Under Slurm, Open MPI, Kubernetes and on TPU pods they
find each other; elsewhere start the same command on each:
  ... --coordinator 10.0.0.1:1234 --num-processes 2 --process-id 0   on the machine 10.0.0.1
  ... --coordinator 10.0.0.1:1234 --num-processes 2 --process-id 1   on another"""


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code: 2 for a wrong call, 128 + n for signal n."""
  parser = _parser()
  options = parser.parse_intermixed_args(arguments)
  speak_plainly()
  if options.config is None:
    parser.print_help()
    return 0 if options.help else 2
  if options.help:
    return _explain(options)
  try:
    code = _joined(options)
    distributed.finish()
    return code
  except WRONG_CALL as error:
    return _failed(2, error, options.traceback)
  except NotFiniteError as error:
    return _failed(1, error, options.traceback)
  except KeyboardInterrupt:
    return distributed.fail(128 + signal.SIGINT, "stopped at once; run the same command to resume")
  except Exception as error:
    if not distributed.is_joined():
      raise
    distributed.await_verdict(error)
    return _failed(1, error, show=True)


def _explain(options: argparse.Namespace) -> int:
  try:
    Console().print(help_text(override(load(options.config), options.overrides)))
    return 0
  except WRONG_CALL as error:
    return _failed(2, error, options.traceback)


def _failed(code: int, error: Exception, show: bool) -> int:
  if show:
    traceback.print_exception(error)
  return distributed.fail(code, str(error))


def _joined(options: argparse.Namespace) -> int:
  """Joins the other processes, trains, and prints the result."""
  distributed.start(
    options.coordinator,
    options.num_processes,
    options.process_id,
    patience=options.patience,
    silence=options.silence,
  )
  experiment = override(load(options.config), options.overrides)
  folder = options.run or pathlib.Path("runs") / f"{experiment.name}-{config_hash(experiment)}"
  _say(f"run folder: {folder}", sys.stderr)
  try:
    result = fit(experiment, folder)
  except Interrupted as stop:
    _say(f"{stop}. Run the same command again to resume.", sys.stderr)
    return 128 + stop.signum
  for name in ("valid", "test"):
    _say(f"{name}: {_told(result[name])}")
  _say(f"result: {folder / 'result.json'}")
  return 0


def _told(score: Mapping[str, float]) -> str:
  parts = [f"{score['nats_per_token']:.4f} nats/token", f"perplexity {score['perplexity']:.2f}"]
  if "bits_per_byte" in score:
    parts.append(f"{score['bits_per_byte']:.4f} bits/byte")
  rates = [name for name in score if name.endswith("accuracy")]
  parts += [f"{name.replace('_', ' of ')} {100 * score[name]:.2f} %" for name in rates]
  return f"{', '.join(parts)} over {score['tokens']:,} tokens"


def _say(text: str, stream: TextIO | None = None) -> None:
  if distributed.is_main():
    print(text, file=stream or sys.stdout)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.train",
    description="Train one experiment.",
    epilog=USAGE,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    add_help=False,
  )
  add_config(parser)
  parser.add_argument(
    "--run", type=pathlib.Path, metavar="DIR", help="run folder (default: runs/NAME-HASH)"
  )
  several = parser.add_argument_group("several processes")
  several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
  several.add_argument("--num-processes", type=int, metavar="N", help="how many; 1: no others")
  several.add_argument("--process-id", type=int, metavar="I", help="which of them this is, from 0")
  several.add_argument(
    "--patience",
    type=float,
    default=distributed.PATIENCE,
    metavar="SECONDS",
    help="how long to wait for the others to come (default: %(default)g)",
  )
  several.add_argument(
    "--silence",
    type=float,
    default=distributed.SILENCE,
    metavar="SECONDS",
    help="how long without a sign of life a process counts as alive (default: %(default)g)",
  )
  return parser


if __name__ == "__main__":
  sys.exit(main())
