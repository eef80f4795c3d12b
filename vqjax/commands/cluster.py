"""Command that replaces the dense head of a trained model by a codebook head.

vqjax cluster configs/lm_dense.py runs/demo/dense --codes 512
vqjax cluster configs/lm_dense.py runs/demo/dense --codes 512 --scope head
vqjax cluster configs/lm_dense.py runs/demo/dense --distillation 1 --out runs/small
"""

import argparse
import functools
import pathlib
import sys

from vqjax.commands.console import flag, new_parser, option, run
from vqjax.commands.run_folders import exit_code_of_run, print_result
from vqjax.convert import KMeans
from vqjax.lab.config import config_hash, load_config, override
from vqjax.lab.exits import LESS_OF_A_STEP
from vqjax.lab.starting_points import CODEBOOK, FULL, HEAD, fine_tuned_codebook
from vqjax.lab.training import fit
from vqjax.lm.records import one_line

__all__ = []

SCOPES = {"full": FULL, "head": HEAD, "codebook": CODEBOOK}


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call, 128 + n for signal n."""
  parser = new_parser(
    "cluster",
    "Replace the dense head of a trained model by a codebook head: k-means on the rows of its"
    " output table, then fine-tuning.",
    "The same command again resumes the run; a finished run prints its result. `vqjax compress`"
    " compresses the tables of a pretrained model.",
  )
  parser.add_argument("config", help="config file of the dense run")
  parser.add_argument("folder", type=pathlib.Path, help="run folder of the dense run")
  parser.add_argument(
    "overrides", nargs="*", metavar="FIELD=VALUE", help="the overrides of the dense run"
  )
  option(parser, "--codes", "number of codes K", int, 1024)
  option(
    parser, "--power", "weight of a token in k-means is (count + 1)^X; the paper has 0", float, 1.0
  )
  option(parser, "--alone", "fraction of the codes that hold one frequent token each", float, 0.0)
  flag(parser, "--no-token-bias", "leave out the token bias, as the paper does")
  flag(parser, "--tied", "use the codebook as input embedding too")
  option(parser, "--scope", "parameters that are fine-tuned", default="full", choices=SCOPES)
  option(parser, "--distillation", "coefficient of the divergence from the dense model", float, 0.0)
  option(parser, "--temperature", "temperature of the distillation", float, 1.0)
  option(parser, "--out", "run folder (default: runs/NAME-HASH)", pathlib.Path, metavar="DIR")
  ending = functools.partial(exit_code_of_run, out_of_memory=LESS_OF_A_STEP)
  return run(parser, arguments, _compress, ending=ending)


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
  print(f"run folder: {one_line(folder)}", file=sys.stderr)
  result = fit(experiment, folder)
  head = result["head"]
  print(f"head: {head['params']:,} parameters, {head['state_bytes']:,} bytes")
  print_result(result, folder)
