"""Plan of a training step: memory, communication and a lower bound of its time."""

import dataclasses
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from vqjax.lab import chips
from vqjax.lab.config import FROM_TOKENIZER, Experiment, config_hash
from vqjax.lab.config.experiment_tree import fields_of, rebuild, walk
from vqjax.lab.plan import collectives, compiling, flops, hlo, loops
from vqjax.lab.plan.roofline import roofline
from vqjax.lab.training.program import Program
from vqjax.lab.training.provenance import provenance
from vqjax.ngrams import NGramEmbedding

__all__ = ["step_plan"]


def step_plan(experiment: Experiment, mesh: Mesh, chip: chips.Chip) -> dict[str, Any]:
  """Plan a training step: what each chip of a mesh holds, computes and sends.

  Bytes are of one chip, times in seconds. `bytes.params`, `.opt_state`, `.tables` and `.batch` are
  exact, from the shardings; `.temporaries` are the compiler's; `.embedding` and `.head` are parts
  of the first three. `_fits` is None where another device's compiler made the program and
  the memory suffices without its temporaries.

  Raises:
    ValueError: the batch does not fit the mesh.
  """
  program = Program(experiment, mesh)
  compiled = compiling.compile_step(program)
  module = hlo.parse_hlo(compiled.text)
  runs = loops.runs(module)
  sent = collectives.collectives(module, runs, dict(mesh.shape))
  sizes = held_bytes(program) | {"temporaries": compiled.temporaries, "code": compiled.code}
  work = flops.matmul_flops(module, runs)
  least = roofline(chip, work, _traffic(sizes), sent)
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
    "bytes": sizes | {"total": _total_bytes(sizes)},
    "fits": _fits(sizes, chip, compiled),
    "refused": compiled.refused and compiled.refused.splitlines()[0],
    "flops": work,
    "collectives": _collective_sums(sent),
    "sent": sum(one.sent for one in sent),
    "roofline": dataclasses.asdict(least) | {"seconds": least.seconds, "limit": least.limit},
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


def _total_bytes(sizes: dict[str, int | None]) -> int:
  """Bytes on a device at once, without the unknown ones."""
  parts = ("params", "opt_state", "tables", "batch", "temporaries", "code")
  return sum(sizes[name] or 0 for name in parts)


def _fits(
  sizes: dict[str, int | None], chip: chips.Chip, compiled: compiling.Compiled
) -> bool | None:
  """Whether memory suffices; None if only the device's own compiler can tell."""
  if compiled.refused or _total_bytes(sizes | {"temporaries": 0}) > chip.memory:
    return False
  return _total_bytes(sizes) <= chip.memory if compiled.own else None


def _traffic(sizes: dict[str, int | None]) -> int:
  """Lower bound of bytes between a chip and its memory.

  The state and the temporaries are read and written once.
  """
  changed = sizes["params"] + sizes["opt_state"] + (sizes["temporaries"] or 0)
  return 2 * changed + sizes["tables"] + sizes["batch"]


def _collective_sums(found: Sequence[collectives.Collective]) -> list[dict[str, Any]]:
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


def with_vocab_everywhere(experiment: Experiment, vocab: int | None) -> Experiment:
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
  nodes = [node for _, node in walk(experiment.model)]
  of_ngrams = {id(node.table) for node in nodes if isinstance(node, NGramEmbedding)}
  nodes = [node for node in nodes if "vocab" in fields_of(node) and id(node) not in of_ngrams]
  changes = {id(node): {"vocab": vocab} for node in nodes}
  return dataclasses.replace(experiment, model=rebuild(experiment.model, changes))
