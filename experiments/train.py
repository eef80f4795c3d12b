"""How do I train one experiment from the command line, and go on when it was stopped?"""

import argparse
import pathlib
import signal
import sys

from rich.console import Console

from experiments.console import speak_plainly
from vqjax.config import config_hash, help_text, load, override
from vqjax.training import Interrupted, NotFiniteError, fit

USAGE = """\
examples:
  python -m experiments.train configs/lm_codebook.py
  python -m experiments.train configs/lm_codebook.py data.path=/some/folder model.head.codes=512
  python -m experiments.train configs/lm_codebook.py --help   every field, its type and default

The same command again resumes; a finished run prints its result."""


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code: 2 for a wrong call, 128 + n for signal n."""
  parser = _parser()
  options = parser.parse_intermixed_args(arguments)
  speak_plainly()
  if options.config is None:
    parser.print_help()
    return 0 if options.help else 2
  try:
    experiment = override(load(options.config), options.overrides)
    if options.help:
      Console().print(help_text(experiment))
      return 0
    folder = options.run or pathlib.Path("runs") / f"{experiment.name}-{config_hash(experiment)}"
    return _run(experiment, folder)
  except (ValueError, TypeError, AttributeError, OSError) as error:
    if options.traceback:
      raise
    print(f"error: {error}", file=sys.stderr)
    return 2


def _run(experiment, folder: pathlib.Path) -> int:
  print(f"run folder: {folder}", file=sys.stderr)
  try:
    result = fit(experiment, folder)
  except Interrupted as stop:
    print(f"{stop}. Run the same command again to resume.", file=sys.stderr)
    return 128 + stop.signum
  except KeyboardInterrupt:
    print("stopped at once; run the same command again to resume.", file=sys.stderr)
    return 128 + signal.SIGINT
  except NotFiniteError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  for name in ("valid", "test"):
    score = result[name]
    print(
      f"{name}: {score['nats_per_token']:.4f} nats/token, perplexity {score['perplexity']:.2f},"
      f" {score['bits_per_byte']:.4f} bits/byte over {score['tokens']:,} tokens"
    )
  print(f"result: {folder / 'result.json'}")
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.train",
    description="Train one experiment.",
    epilog=USAGE,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    add_help=False,
  )
  parser.add_argument("config", nargs="?", help="a file configs/NAME.py")
  parser.add_argument("overrides", nargs="*", metavar="FIELD=VALUE", help="fields to change")
  parser.add_argument(
    "--run", type=pathlib.Path, metavar="DIR", help="run folder (default: runs/NAME-HASH)"
  )
  parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
  parser.add_argument("-h", "--help", action="store_true", help="this, or a config's fields")
  return parser


if __name__ == "__main__":
  sys.exit(main())
