"""The console command `vqjax`, which imports the module of a command when it is called.

Neither JAX nor a package of the lab is loaded before a command is known, so that `vqjax --help` is
quick and an installation without the lab names what it lacks. From a checkout that is not
installed, `python -m vqjax.cli` is the same.
"""

import sys
from collections.abc import Sequence

import vqjax
from vqjax.lab import signals

__all__ = []

COMMANDS = {
  "train": "train one experiment, or resume it",
  "table": "compare the runs below a folder",
  "new": "write a small project: a head, a config, a study and a test",
  "study": "compare heads: tune each, train seeds, write a page of paired differences",
  "cluster": "replace the dense head of a trained run by a codebook head, and fine-tune",
  "floor": "compute the perplexity that the codes of a config rule out",
  "corpus": "count the documents and tokens of a config's corpus",
  "inspect": "print the parts, sizes and vocabulary tables of a pretrained model",
  "draft": "train a drafter of a model, for faster generation",
  "generate": "continue prompts with a pretrained model or that of a run",
  "compress": "write a pretrained model with tables of entropy-coded integers",
  "export": "write quantised vocabulary tables for llama.cpp or transformers",
  "grow": "add tokens to a pretrained model",
  "trim": "remove the tokens of a pretrained model that a text does not use",
  "lens": "show what a model would predict after each of its blocks",
  "score": "print the nats a token and a byte of a text",
  "plan": "compile a training step for accelerators, without having them",
}
"""Module of `vqjax.commands` -> what its `main` does."""


def run() -> None:
  """Run the console command and end the process."""
  signals.take_over()  # before anything that takes time to import
  from vqjax.lab import exits

  exits.run_module("vqjax.cli", sys.argv[1:])


def main(arguments: Sequence[str] | None = None) -> int:
  """Run `vqjax COMMAND ...`; return the command's exit code, or 2 for a wrong call."""
  import importlib

  arguments = sys.argv[1:] if arguments is None else list(arguments)
  parser = _parser()
  if not arguments:
    parser.print_help()
    return 2
  # What follows the name is for the command, also --help.
  name = parser.parse_args(arguments[:1]).command
  try:
    command = importlib.import_module(f"vqjax.commands.{name}")
  except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "vqjax":
      raise
    print(
      f"error: the package {error.name} must be installed for `vqjax {name}`; got no such package."
      " Call pip install 'vqjax[lab]'.",
      file=sys.stderr,
    )
    return 2
  return command.main(arguments[1:])


def _parser():
  import argparse

  lines = (f"  {name:<10}{purpose}" for name, purpose in COMMANDS.items())
  parser = argparse.ArgumentParser(
    prog="vqjax",
    usage="vqjax COMMAND ...",
    description="Train, compare and convert models with compressed vocabulary layers.",
    epilog="\n".join(("commands:", *lines, "", "vqjax COMMAND --help explains a command.")),
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
  parser.add_argument("--version", action="version", version=f"vqjax {vqjax.__version__}")
  return parser


if __name__ == "__main__":
  run()
