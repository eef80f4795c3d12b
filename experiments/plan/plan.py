"""Plan of a training step: memory, communication and a lower bound of its time.

python -m experiments.plan configs/lm_1b.py --topology v5p:4x4x4
python -m experiments.plan configs/lm_1b.py --devices 64 --device-kind H100 train.mesh.model=8
"""

import argparse
import dataclasses
import importlib.metadata
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from experiments.plan import chips, collectives, compiling, flops, hlo, loops
from experiments.plan import report as plan_report
from vqjax.lab.config import FROM_TOKENIZER, Experiment, config_hash
from vqjax.lab.config.tree import fields_of, rebuild, walk
from vqjax.lab.console import add_config, with_config
from vqjax.lab.training.program import Program
from vqjax.lab.training.provenance import provenance
from vqjax.lab.training.run import write_json
from vqjax.sharding import make_mesh

USAGE = """\
examples:
  python -m experiments.plan configs/lm_1b.py --topology v5e:4x4
  python -m experiments.plan configs/lm_1b.py --topology v5p:4x4x4 train.mesh.fsdp=8
  python -m experiments.plan configs/lm_8b.py --devices 64 --device-kind H100 --vocab 131072
  python -m experiments.plan configs/lm_1b.py --help   every field, its type and default

No TPU or GPU is needed. The step of a TPU is compiled by its own compiler. That of a GPU is
partitioned for simulated devices: what it computes and sends is exact before the GPU's compiler
joins or moves anything, its temporaries are those of a CPU's compiler."""


def plan(experiment: Experiment, mesh: Mesh, chip: chips.Chip) -> dict[str, Any]:
  """Plan a training step: what each chip of a mesh holds, compute and send.

  Bytes are of one chip, times in seconds. `bytes.params`, `.opt_state`, `.tables` and `.batch` are
  exact, from the shardings; `.temporaries` are the compiler's; `.embedding` and `.head` are parts
  of the first three. `fits` is None where another device's compiler made the program and
  the memory suffices without its temporaries.

  Raises:
    ValueError: the batch does not fit the mesh.
  """
  program = Program(experiment, mesh)
  compiled = compiling.compile_step(program)
  module = hlo.parse(compiled.text)
  runs = loops.runs(module)
  sent = collectives.collectives(module, runs, dict(mesh.shape))
  sizes = held_bytes(program) | {"temporaries": compiled.temporaries, "code": compiled.code}
  work = flops.matmul_flops(module, runs)
  roofline = chips.roofline(chip, work, _traffic(sizes), sent)
  tokens = experiment.train.batch * experiment.model.context
  return {
    "name": experiment.name,
    "config": config_hash(experiment),
    "chip": dataclasses.asdict(chip) | {"network": chip.network if chip.node else None},
    "chips": mesh.size,
    "mesh": dict(mesh.shape),
    "vocab": experiment.model.head.vocab,
    "batch": experiment.train.batch,
    "tokens": tokens,
    "bytes": sizes | {"total": total_bytes(sizes)},
    "fits": fits(sizes, chip, compiled),
    "refused": compiled.refused and compiled.refused.splitlines()[0],
    "flops": work,
    "collectives": summed(sent),
    "sent": sum(one.sent for one in sent),
    "roofline": dataclasses.asdict(roofline)
    | {"seconds": roofline.seconds, "limit": roofline.limit},
    "stage": compiled.stage,
    "loops_counted_once": list(runs.unknown),
    "compile_seconds": round(compiled.seconds, 1),
    "provenance": provenance() | {"libtpu": _version("libtpu")},
  }


def held_bytes(program: Program) -> dict[str, int]:
  """Bytes on one device of each part of the state and of a batch, exact."""
  state = program.abstract_state
  parts = {"params": state.params, "opt_state": state.opt_state, "tables": state.model_state}
  found = {name: _bytes(jax.tree.leaves(tree)) for name, tree in parts.items()}
  every = jax.tree.leaves_with_path(tuple(parts.values()))
  for layer in ("embedding", "head"):
    own = [leaf for path, leaf in every if layer in {getattr(key, "key", None) for key in path}]
    found[layer] = _bytes(own)
  return found | {"batch": _bytes(jax.tree.leaves(program.abstract_batch))}


def _bytes(arrays: Sequence[jax.ShapeDtypeStruct]) -> int:
  part = lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
  return sum(part(x).size * x.dtype.itemsize for x in arrays)


def total_bytes(sizes: dict[str, int | None]) -> int:
  """Bytes on a device at once, without the unknown ones."""
  parts = ("params", "opt_state", "tables", "batch", "temporaries", "code")
  return sum(sizes[name] or 0 for name in parts)


def fits(
  sizes: dict[str, int | None], chip: chips.Chip, compiled: compiling.Compiled
) -> bool | None:
  """Whether memory suffices; None if only the device's own compiler can tell."""
  if compiled.refused or total_bytes(sizes | {"temporaries": 0}) > chip.memory:
    return False
  return total_bytes(sizes) <= chip.memory if compiled.stage == "optimised" else None


def _traffic(sizes: dict[str, int | None]) -> int:
  """Lower bound of bytes between a chip and its memory.

  The state and the temporaries are read and written once.
  """
  changed = sizes["params"] + sizes["opt_state"] + (sizes["temporaries"] or 0)
  return 2 * changed + sizes["tables"] + sizes["batch"]


def summed(found: Sequence[collectives.Collective]) -> list[dict[str, Any]]:
  """Sums of the collectives of each kind and axes, largest first."""
  groups: dict[tuple, list[collectives.Collective]] = {}
  for one in found:
    groups.setdefault((one.kind, one.axes, one.group), []).append(one)
  rows = [
    {
      "kind": kind,
      "axes": list(axes),
      "group": group,
      "count": sum(one.times for one in some),
      "bytes": sum(one.bytes * one.times for one in some),
      "sent": sum(one.sent for one in some),
    }
    for (kind, axes, group), some in groups.items()
  ]
  return sorted(rows, key=lambda row: -row["sent"])


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def with_vocab(experiment: Experiment, vocab: int | None) -> Experiment:
  """The experiment with this vocabulary in every module; None keeps its own.

  Raises:
    ValueError: no number is given and the config leaves it to its tokenizer, or it is below 1.
  """
  if vocab is None:
    if FROM_TOKENIZER in (experiment.model.head.vocab, experiment.model.embedding.vocab):
      raise ValueError(
        "`--vocab` must be given where the tokenizer sets the vocabulary; got none. Give --vocab N."
      )
    return experiment
  if vocab < 1:
    raise ValueError(f"`--vocab` must be at least 1; got {vocab}. Give the number of tokens.")
  nodes = [node for _, node in walk(experiment.model) if "vocab" in fields_of(node)]
  changes = {id(node): {"vocab": vocab} for node in nodes}
  return dataclasses.replace(experiment, model=rebuild(experiment.model, changes))


def main(arguments: Sequence[str] | None = None) -> int:
  """Print the plan and write its JSON; return 2 for a wrong call."""
  return with_config(_parser(), arguments, _plan)


def _plan(experiment: Experiment, options: argparse.Namespace) -> None:
  found = _planned(with_vocab(experiment, options.vocab), options)
  plan_report.show(found, Console())
  if options.json:
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.json, found)


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
    chip, devices = chips.gpu(options.device_kind), compiling.simulated_devices(options.devices)
  mesh = make_mesh(experiment.train.mesh, devices)
  return {"topology": options.topology} | plan(experiment, mesh, chip)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.plan",
    description="Compile a training step ahead of time, without the accelerator, and print what it"
    " needs.",
    epilog=USAGE,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    add_help=False,
  )
  add_config(parser)
  parser.add_argument("--topology", metavar="KIND:SIZE", help="TPUs, such as v5e:4x4")
  parser.add_argument("--devices", type=int, metavar="N", help="this many GPUs")
  parser.add_argument("--device-kind", default="H100", help="of --devices: A100, H100 or H200")
  parser.add_argument("--vocab", type=int, metavar="V", help="tokens, whatever the config says")
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the plan to FILE")
  return parser


if __name__ == "__main__":
  sys.exit(main())
