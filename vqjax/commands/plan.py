"""Command that plans a training step for accelerators, without having them.

vqjax plan configs/lm_1b.py --topology v5p:4x4x4
vqjax plan configs/lm_1b.py --devices 64 --device-kind H100 train.mesh.model=8
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console

from vqjax.commands.console import OutputFile, option
from vqjax.commands.run_folders import config_parser, with_config
from vqjax.lab import chips
from vqjax.lab.config import Experiment
from vqjax.lab.plan import compiling, printing
from vqjax.lab.plan.step_plan import step_plan, with_vocab_everywhere
from vqjax.lm import records
from vqjax.sharding import make_mesh

__all__ = []

USAGE = """\
examples:
  vqjax plan configs/lm_1b.py --topology v5e:4x4
  vqjax plan configs/lm_1b.py --topology v5p:4x4x4 train.mesh.fsdp=8
  vqjax plan configs/lm_8b.py --devices 64 --device-kind H100 --vocab 131072
  vqjax plan configs/lm_1b.py --help   every field, its type and default

No TPU or GPU is needed. The step of a TPU is compiled by its own compiler, and so is that of a GPU
where jax[cuda13] is installed: pip install '.[plan-gpu]'. Without it the step of a GPU is
partitioned for simulated devices, and its temporaries are those of a CPU's compiler. What a GPU
computes and sends is counted before its compiler joins or moves anything."""


def main(arguments: Sequence[str] | None = None) -> int:
  """Print the plan and write its JSON; return 2 for a wrong call."""
  parser = config_parser(
    "plan",
    "Compile a training step ahead of time, without the accelerator, and print what it needs.",
    USAGE,
  )
  option(parser, "--topology", "TPUs, such as v5e:4x4", metavar="KIND:SIZE")
  option(parser, "--devices", "this many GPUs", int)
  option(parser, "--device-kind", "of --devices: A100, H100, H200 or B200", default="H100")
  option(parser, "--vocab", "tokens, whatever the config says", int, metavar="V")
  option(parser, "--json", "write the plan to FILE", OutputFile)
  return with_config(parser, arguments, _plan)


def _plan(experiment: Experiment, options: argparse.Namespace) -> None:
  found = _planned(with_vocab_everywhere(experiment, options.vocab), options)
  printing.show_plan(found, Console())
  if options.json:
    records.write(options.json, found)


def _planned(experiment: Experiment, options: argparse.Namespace) -> dict[str, Any]:
  # Whatever this machine has, nothing runs on it.
  jax.config.update("jax_platforms", "cpu")
  if (options.topology is None) == (options.devices is None):
    given = "neither" if options.devices is None else "both"
    raise ValueError(
      f"one of `--topology` and `--devices` must be given; got {given}. Give --topology for TPUs or"
      " --devices for GPUs."
    )
  if options.topology is not None:
    chip, devices = chips.tpu(options.topology), compiling.tpu_devices(options.topology)
  else:
    chip, devices = (
      chips.gpu(options.device_kind),
      compiling.gpu_devices(options.device_kind, options.devices),
    )
  mesh = make_mesh(experiment.train.mesh, devices)
  return {"topology": options.topology} | step_plan(experiment, mesh, chip)
