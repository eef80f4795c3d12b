"""How do I turn the run of a dense model into one with a codebook head?

python -m experiments.compress configs/lm_dense.py runs/demo/dense --codes 512
python -m experiments.compress configs/lm_dense.py runs/demo/dense --codes 512 --scope head
python -m experiments.compress configs/lm_dense.py runs/demo/dense --distillation 1 --out runs/small
"""

import argparse
import pathlib
import sys

from vqjax.convert import KMeans
from vqjax.lab.config import config_hash, load, override
from vqjax.lab.console import exit_code, speak_plainly
from vqjax.lab.conversion import CODEBOOK, FULL, HEAD, compress
from vqjax.lab.training import fit

SCOPES = {"full": FULL, "head": HEAD, "codebook": CODEBOOK}


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code: 2 for a wrong call, 128 + n for signal n."""
  options = _parser().parse_intermixed_args(arguments)
  speak_plainly()
  return exit_code(lambda: _compress(options), show_traceback=options.traceback)


def _compress(options: argparse.Namespace) -> None:
  dense = override(load(options.config), options.overrides)
  experiment = compress(
    *(dense, options.folder),
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
  for name in ("valid", "test"):
    score = result[name]
    print(f"{name}: {score['nats_per_token']:.4f} nats/token, perplexity {score['perplexity']:.2f}")
  print(f"result: {folder / 'result.json'}")


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.compress",
    description="Turn the run of a dense model into one with a codebook head: k-means on its output"
    " rows, then fine-tuning.",
    epilog="The same command again resumes; a finished run prints its result.",
  )
  parser.add_argument("config", help="the config file of the dense run")
  parser.add_argument("folder", type=pathlib.Path, help="its run folder")
  parser.add_argument("overrides", nargs="*", help="field=value: those the dense run was given")
  parser.add_argument("--codes", type=int, default=1024, help="K (default: %(default)s)")
  parser.add_argument(
    "--power",
    type=float,
    default=1.0,
    help="k-means weighs a token by (count + 1)^POWER; 0 is the paper's (default: %(default)g)",
  )
  parser.add_argument(
    "--alone",
    type=float,
    default=0.0,
    metavar="PART",
    help="part of the codes that one frequent token each has (default: %(default)g)",
  )
  parser.add_argument("--no-token-bias", action="store_true", help="as in the paper")
  parser.add_argument("--tied", action="store_true", help="the codebook embeds the input too")
  parser.add_argument(
    "--scope", choices=SCOPES, default="full", help="what is fine-tuned (default: %(default)s)"
  )
  parser.add_argument(
    "--distillation",
    type=float,
    default=0.0,
    metavar="WEIGHT",
    help="coefficient of the divergence from the dense model (default: none)",
  )
  parser.add_argument("--temperature", type=float, default=1.0, help="of the distillation")
  parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="run folder")
  parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
  return parser


if __name__ == "__main__":
  sys.exit(main())
