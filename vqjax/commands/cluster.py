"""Command that replaces the dense head of a trained model by a codebook head.

vqjax cluster configs/lm_dense.py runs/demo/dense --codes 512
vqjax cluster configs/lm_dense.py runs/demo/dense --codes 512 --scope head
vqjax cluster configs/lm_dense.py runs/demo/dense --distillation 1 --out runs/small
"""

import argparse
import pathlib
import sys

from vqjax.commands.console import configure_warnings
from vqjax.commands.run_folders import exit_code_of_run, print_result
from vqjax.convert import KMeans
from vqjax.lab.config import config_hash, load_config, override
from vqjax.lab.exits import LESS_OF_A_STEP
from vqjax.lab.starting_points import CODEBOOK, FULL, HEAD, fine_tuned_codebook
from vqjax.lab.training import fit

__all__ = []

SCOPES = {"full": FULL, "head": HEAD, "codebook": CODEBOOK}


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call, 128 + n for signal n."""
  options = _parser().parse_intermixed_args(arguments)
  configure_warnings()
  return exit_code_of_run(
    lambda: _compress(options),
    show_traceback=options.traceback,
    out_of_memory=LESS_OF_A_STEP,
  )


def _compress(options: argparse.Namespace) -> None:
  dense = override(load_config(options.config), options.overrides)
  experiment = fine_tuned_codebook(
    dense,
    options.folder,
    codes=options.codes,
    mapping=KMeans(power=options.power, alone=options.alone),
    token_bias=not options.no_token_bias,
    tied=options.tied,
    scope=SCOPES[options.scope],
    distillation=options.distillation,
    temperature=options.temperature,
  )
  folder = options.out or pathlib.Path("runs") / f"{experiment.name}-{config_hash(experiment)}"
  print(f"run folder: {folder}", file=sys.stderr)
  result = fit(experiment, folder)
  head = result["head"]
  print(f"head: {head['params']:,} parameters, {head['state_bytes']:,} bytes")
  print_result(result, folder)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="vqjax cluster",
    description="Replace the dense head of a trained model by a codebook head: k-means on the rows"
    " of its output table, then fine-tuning.",
    epilog="The same command again resumes the run; a finished run prints its result. `vqjax"
    " compress` compresses the tables of a pretrained model.",
  )
  parser.add_argument("config", help="config file of the dense run")
  parser.add_argument("folder", type=pathlib.Path, help="run folder of the dense run")
  parser.add_argument(
    "overrides", nargs="*", metavar="FIELD=VALUE", help="the overrides of the dense run"
  )
  parser.add_argument(
    "--codes", type=int, default=1024, help="number of codes K (default: %(default)s)"
  )
  parser.add_argument(
    "--power",
    type=float,
    default=1.0,
    help="weight of a token in k-means is (count + 1)^POWER; the paper has 0 (default %(default)g)",
  )
  parser.add_argument(
    "--alone",
    type=float,
    default=0.0,
    metavar="FRACTION",
    help="fraction of the codes that hold one frequent token each (default: %(default)g)",
  )
  parser.add_argument(
    "--no-token-bias", action="store_true", help="leave out the token bias, as the paper does"
  )
  parser.add_argument("--tied", action="store_true", help="use the codebook as input embedding too")
  parser.add_argument(
    "--scope",
    choices=SCOPES,
    default="full",
    help="parameters that are fine-tuned (default: %(default)s)",
  )
  parser.add_argument(
    "--distillation",
    type=float,
    default=0.0,
    metavar="WEIGHT",
    help="coefficient of the divergence from the dense model (default: %(default)g)",
  )
  parser.add_argument(
    "--temperature",
    type=float,
    default=1.0,
    help="temperature of the distillation (default: %(default)g)",
  )
  parser.add_argument(
    "--out", type=pathlib.Path, metavar="DIR", help="run folder (default: runs/NAME-HASH)"
  )
  parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
  return parser
