"""Shared parts of the commands that train, and of those that read a config."""

import argparse
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from vqjax.commands import console
from vqjax.commands.console import configure_warnings, flag
from vqjax.lab import exits, signals
from vqjax.lab.config import Experiment, help_text, load_config, override
from vqjax.lab.training import Interrupted, distributed
from vqjax.lm.records import one_line

__all__ = ["exit_code_of_run"]

SEPARATOR = "text between documents: the field data.separator, such as '<|endoftext|>' or '\\n'"
"""Help of an option of commands that read a text."""


def exit_code_of_run(work: Callable[[], None], **options: Any) -> int:
  """Call `work` and return the exit code of its command, in each process of a run.

  A run that a signal stops after a step ends with 128 + n. The options are those of
  `console.exit_code`.
  """

  def joined() -> int:
    code = 0
    try:
      work()
    except Interrupted as stop:
      if distributed.is_main():
        exits.say(f"{stop}. {signals.RESUME}")
      code = 128 + stop.signum
    distributed.finish()
    return code

  # When another process dies, collectives fail here, before jax ends this process with the reason.
  return console.exit_code(
    joined, await_cause=distributed.await_verdict, fail=distributed.fail, **options
  )


def config_parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
  """Return the parser of a command that reads a config, for `with_config`.

  Its option --separator, if the command adds one, is the field data.separator.
  """
  parser = argparse.ArgumentParser(
    prog=f"vqjax {command}",
    description=description,
    epilog=examples,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    add_help=False,
  )
  parser.add_argument("config", nargs="?", help="config file, such as configs/lm_codebook.py")
  parser.add_argument(
    "overrides", nargs="*", metavar="FIELD=VALUE", help="fields to change, such as model.dim=64"
  )
  flag(parser, "--traceback", "show the traceback of an error")
  parser.add_argument(
    "-h", "--help", action="store_true", help="show this text, and after a config its fields"
  )
  return parser


def with_config(
  parser: argparse.ArgumentParser,
  arguments: Sequence[str] | None,
  act: Callable[[Experiment, argparse.Namespace], None],
  before: Callable[[argparse.Namespace], None] = lambda options: None,
  out_of_memory: str = exits.MORE_MEMORY,
) -> int:
  """Run a command of `config_parser` and return its exit code.

  Calls `before(options)`, reads the config with its overrides, and calls
  `act(experiment, options)`. With --help it only prints the options and the fields of the config.
  """
  # `parse_args` would refuse overrides that follow an option.
  options = parser.parse_intermixed_args(arguments)
  configure_warnings()
  if options.help or options.config is None:
    parser.print_help()
  if options.config is None:
    return 0 if options.help else 2

  def work() -> None:
    # With --help one process must not wait for others.
    if not options.help:
      console.check_outputs(options)
      before(options)
    if getattr(options, "separator", None) is not None:
      options.overrides = [*options.overrides, f"data.separator={options.separator}"]
    experiment = override(load_config(options.config), options.overrides)
    if options.help:
      Console().print(f"\nfields of {options.config}:\n", help_text(experiment), highlight=False)
    else:
      act(experiment, options)

  return exit_code_of_run(work, show_traceback=options.traceback, out_of_memory=out_of_memory)


def print_result(result: Mapping[str, Any], folder: pathlib.Path) -> None:
  """Print the scores of a finished run and the path of its result."""
  for split in ("valid", "test"):
    score = result[split]
    parts = [f"{score['nats_per_token']:.4f} nats/token", f"perplexity {score['perplexity']:.2f}"]
    if "bits_per_byte" in score:
      parts.append(f"{score['bits_per_byte']:.4f} bits/byte")
    rates = [name for name in score if name.endswith("accuracy")]
    parts += [f"{name.replace('_', ' of ')} {100 * score[name]:.2f} %" for name in rates]
    print(f"{split}: {', '.join(parts)} over {score['tokens']:,} tokens")
  print(f"result: {one_line(folder / 'result.json')}")
