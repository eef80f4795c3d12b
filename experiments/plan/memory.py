"""Memory of the loss and gradient of every head and operation, by three compilers.

python -m experiments.plan.memory                every program, with the compilers found here
python -m experiments.plan.memory --compilers cuda --programs "mixture head"
python -m experiments.plan.memory --render       the tables of the page alone

TPUs need the extra `plan` and GPUs the extra `plan-gpu`; nothing is run.
"""

# The contract, for 65,536 tokens of a vocabulary of 2^20, whose scores would be 256 GiB:
#
#   temporaries <= tiles x scratch of the compiler + copies x one array of all hidden vectors
#
# on one device, and on each of eight that share the vocabulary and have all tokens.

import argparse
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pandas as pd
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import vqjax
from experiments.studies import study_page
from vqjax.lab import exits
from vqjax.lab.plan import compiling
from vqjax.lab.report.frames import markdown
from vqjax.ops import distillation
from vqjax.ops.scores import ScoreOptions
from vqjax.outputs import write_text
from vqjax.sharding import MeshShape, make_mesh, shardings

RESULTS = pathlib.Path("docs/results/memory.json")
PAGE = pathlib.Path("docs/results/memory.md")
TOKENS, VOCAB, DIM = 65_536, 2**20, 256
HIDDEN = 4 * TOKENS * DIM
"""Bytes of all hidden vectors, 64 MiB."""

SCRATCH = {"cpu": 2**25, "tpu": 640 * 2**20, "cuda": 620 * 2**20}
"""Compiler -> bytes of tiles of scores (`ops.device`); on TPUs also the weight in bfloat16."""

DEVICES = (1, 8)


class Case(NamedTuple):
  """A loss, and its bound.

  Attributes:
    make: vocabulary axis -> (loss(params, hidden, tokens, tables), abstract variables, logical axes
      of the variables).
    copies: number of arrays as large as all hidden vectors that it may hold beside the scratch.
    why: what they are.
    tiles: number of scratches, for losses with two distributions or a budget of scores.
    padded: number of further such arrays on TPUs, which hold 128 numbers where an axis has few.
  """

  make: Callable[[str | None], tuple]
  copies: int
  why: str
  tiles: int = 1
  padded: int = 0


def _head(kind: type, copies: int, why: str, *args: Any, **fields: Any) -> Case:
  def make(axis):
    head = kind(VOCAB, DIM, *args, **fields, vocab_axis=axis)
    keys = lambda: {"params": jax.random.key(0), "sample": jax.random.key(1)}
    variables = jax.eval_shape(lambda: head.init(keys(), jnp.zeros((1, DIM))))

    def loss(params, hidden, tokens, tables):
      # As in a training step: with a random stream, and tables that may be written.
      (log_prob, terms), _ = head.apply(
        {"params": params, **tables},
        hidden,
        tokens,
        method="loss_terms",
        mutable=list(tables),
        rngs={"sample": jax.random.key(0)},
      )
      return sum(terms.values(), -log_prob.mean())

    return loss, variables, head.logical_axes()

  return Case(make, copies, why)


def _operation(
  loss: Callable, copies: int, why: str, teacher: bool = False, tiles: int = 1
) -> Case:
  """A loss(weight, hidden, tokens, teacher weight, vocabulary axis) of a dense student."""

  def make(axis):
    table = jax.ShapeDtypeStruct((VOCAB, DIM), jnp.float32)
    variables, axes = {"params": {"weight": table}}, {"params": {"weight": ("vocab", "embed")}}
    if teacher:
      variables["teacher"], axes["teacher"] = variables["params"], axes["params"]

    def of(params, hidden, tokens, tables):
      given = tables["teacher"]["weight"] if teacher else None
      return loss(params["weight"], hidden, tokens, given, axis)

    return of, variables, axes

  return Case(make, copies, why, tiles)


def _soft_targets(weight, hidden, tokens, teacher, axis):
  del tokens
  options = ScoreOptions(vocab_axis=axis)
  given = vqjax.linear_soft_target_loss(hidden, weight, hidden, teacher, options=options)
  return given.kl.mean()


def _divergence(weight, hidden, tokens, teacher, axis):
  del tokens
  options = ScoreOptions(vocab_axis=axis)
  return vqjax.linear_divergence(hidden, weight, hidden, teacher, options=options).mean()


def _top_k_divergence(weight, hidden, tokens, teacher, axis):
  del tokens
  options = ScoreOptions(vocab_axis=axis)
  return vqjax.linear_top_k_divergence(hidden, weight, hidden, teacher, k=8, options=options).mean()


def _sparse_targets(weight, hidden, tokens, teacher, axis):
  del teacher
  few = jnp.stack([tokens, (tokens + 1) % VOCAB], axis=-1)
  probs = jnp.full(few.shape, 0.5)
  options = ScoreOptions(vocab_axis=axis)
  return vqjax.linear_sparse_target_loss(hidden, weight, few, probs, options=options).kl.mean()


def _statistics(weight, hidden, tokens, teacher, axis):
  del teacher
  found = vqjax.linear_softmax(
    hidden, weight, tokens, entropy=True, mean=True, top_k=4, vocab_axis=axis
  )
  return (found.entropy - found.log_prob - found.mean_log_prob).mean()


def _from_blocks(axis):
  head = vqjax.DenseHead(VOCAB, DIM, vocab_axis=axis)
  variables = jax.eval_shape(lambda: head.init(jax.random.key(0), jnp.zeros((1, DIM))))

  def loss(params, hidden, tokens, tables):
    del tokens
    teacher = tables["teacher"]["weight"]
    body = lambda blocks, h, w: distillation.block_soft_target_loss(blocks, h, w).kl
    return head.apply(
      {"params": params}, body, hidden, hidden, teacher, method="over_blocks"
    ).mean()

  table = jax.ShapeDtypeStruct((VOCAB, DIM), jnp.float32)
  # Its teacher is on every device.
  variables = {**variables, "teacher": {"weight": table}}
  return loss, variables, head.logical_axes() | {"teacher": {"weight": (None, None)}}


_SORTED = "hidden vectors sorted by group, and their gradient"
_TILE = "none but the gradient's sum over devices"
_BOTH = "gradients of student and teacher"

CASES = {
  "dense head": _head(vqjax.DenseHead, 1, _TILE, use_bias=True, z_loss=1e-4),
  "packed head": _head(vqjax.PackedHead, 2, "unpacked hidden vectors"),
  "certified head": _head(vqjax.CertifiedHead, 1, _TILE),
  "low-rank head": _head(vqjax.LowRankHead, 1, _TILE, 32),
  "mixture head": _head(
    vqjax.MixtureHead, 13, "three times the hidden vectors of each of 4 components", 4
  ),
  "codebook head": _head(vqjax.CodebookHead, 1, _TILE, 1024, token_bias=True),
  "learned codebook head": _head(
    vqjax.LearnedCodebookHead, 2, "scores of candidates", 1024, 4
  )._replace(padded=2),
  "residual codebook head": _head(vqjax.ResidualCodebookHead, 1, _TILE, 1024, 16),
  "product head": _head(vqjax.ProductHead, 1, _TILE, 256, 32, token_bias=True),
  "learned product head": _head(
    vqjax.LearnedProductHead, 5, "rows and latent rows of targets, for the commitment", 256, 32
  ),
  "DPQ-SX head": _head(vqjax.DPQHead, 2, "rows of targets", vqjax.SoftmaxQuantizer(256, 32)),
  "DPQ-VQ head": _head(
    vqjax.DPQHead, 5, "rows and queries of targets", vqjax.CentroidQuantizer(256, 32)
  ),
  "grouped head": _head(vqjax.GroupedHead, 3, _SORTED),
  "unshared grouped head": _head(vqjax.UnsharedGroupedHead, 5, _SORTED),
  "adaptive head": _head(vqjax.AdaptiveHead, 3, _SORTED, (20_000, 200_000)),
  "class-based head": _head(vqjax.ClassBasedHead, 3, _SORTED, 1024),
  "hierarchical head": _head(vqjax.HierarchicalHead, 2, "nodes of one level"),
  "sampled head": _head(vqjax.SampledSoftmaxHead, 4, "rows of targets", samples=8192),
  "routed head": _head(
    vqjax.RoutedHead,
    32,
    "scores of 2,048 clusters, 8 arrays each: a head for drafts",
    clusters=2048,
    budget=32,
  ),
  "linear_log_prob": _operation(
    lambda w, h, t, _, axis: -vqjax.linear_log_prob(h, w, t, vocab_axis=axis).mean(), 1, _TILE
  ),
  "linear_cross_entropy, mean": _operation(
    lambda w, h, t, _, axis: vqjax.linear_cross_entropy(h, w, t, reduction="mean", vocab_axis=axis),
    1,
    _TILE,
    tiles=4,
  ),
  "linear_softmax, all statistics": _operation(_statistics, 2, "cotangents of the 4 best"),
  "linear_soft_target_loss": _operation(_soft_targets, 3, _BOTH, teacher=True, tiles=2),
  "linear_divergence": _operation(_divergence, 3, _BOTH, teacher=True, tiles=4),
  "linear_top_k_divergence": _operation(_top_k_divergence, 3, _BOTH, teacher=True, tiles=2),
  "linear_sparse_target_loss": _operation(_sparse_targets, 2, _TILE),
  "block_soft_target_loss": Case(_from_blocks, 2, _TILE, tiles=2),
}


def bound(name: str, compiler: str) -> int:
  """Largest number of bytes of temporaries on a device."""
  case = CASES[name]
  copies = case.copies + (case.padded if compiler == "tpu" else 0)
  return case.tiles * SCRATCH[compiler] + copies * HIDDEN


def missing(compiler: str) -> str | None:
  """The extra that must be installed for a compiler; None where it is."""
  if compiler == "tpu" and importlib.util.find_spec("libtpu") is None:
    return "plan"
  return "plan-gpu" if compiler == "cuda" and not compiling.has_gpu_compiler() else None


def _mesh(compiler: str, count: int) -> Mesh:
  if compiler == "tpu":
    devices = compiling.tpu_devices("v5e:2x4")[:count]
  elif compiler == "cuda":
    devices = compiling.gpu_devices("H100", count)
  else:
    devices = compiling.simulated_devices(max(DEVICES))[:count]
  return make_mesh(MeshShape(model=count), devices)


def temporaries(name: str, compiler: str, devices: int) -> int:
  """Bytes of a device for a program's loss and gradient, beside arguments and results."""
  mesh = _mesh(compiler, devices)
  loss, variables, axes = CASES[name].make("model" if devices > 1 else None)
  places, everywhere = shardings(axes, variables, mesh), NamedSharding(mesh, P())
  place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
  variables = jax.tree.map(place, variables, places)
  hidden = jax.ShapeDtypeStruct((TOKENS, DIM), jnp.float32, sharding=everywhere)
  tokens = jax.ShapeDtypeStruct((TOKENS,), jnp.int32, sharding=everywhere)

  def both(variables, hidden, tokens):
    tables = {kind: tree for kind, tree in variables.items() if kind != "params"}
    found = jax.value_and_grad(loss, (0, 1))
    return found(variables["params"], hidden, tokens, tables)

  results = everywhere, (places["params"], everywhere)
  with jax.set_mesh(mesh):
    program = jax.jit(both, out_shardings=results).lower(variables, hidden, tokens)
    return program.compile().memory_analysis().temp_size_in_bytes


Found = dict[str, dict[str, list[int | None]]]
"""Compiler -> program -> bytes on one device and on each of eight; None: compilation failed."""


def measured(name: str, compiler: str) -> list[int | None]:
  """Temporaries of a program by a compiler, for every number of devices."""
  found = []
  for devices in DEVICES:
    try:
      found.append(temporaries(name, compiler, devices))
    except Exception as error:  # a compiler's failures have no type of their own
      print(f"{name}, {compiler} x {devices}: {error}"[:300], file=sys.stderr)
      found.append(None)
  return found


def table(found: Found) -> pd.DataFrame:
  """MiB of every program, with a column for each compiler and number of devices."""
  shown = []
  for name, case in CASES.items():
    sizes = {
      f"{compiler}, {count}": None if size is None else f"{size / 2**20:,.0f}"
      for compiler in SCRATCH
      for count, size in zip(DEVICES, found.get(compiler, {}).get(name, [None] * len(DEVICES)))
    }
    shown.append({"program": name} | sizes | {"tiles": case.tiles, "hidden": case.copies})
  return pd.DataFrame(shown)


def too_large(found: Found) -> list[str]:
  """The programs that exceed their bounds or failed, with their compilers."""
  return [
    f"{name}, {compiler}: more than {CASES[name].copies} arrays ({CASES[name].why})"
    for compiler, rows in found.items()
    for name, sizes in rows.items()
    if any(size is None or size > bound(name, compiler) for size in sizes)
  ]


def main(arguments: Sequence[str] | None = None) -> int:
  """Compile what is missing and render; return 1 where a program exceeds its bound or failed."""
  options = _parser().parse_args(arguments)
  jax.config.update("jax_platforms", "cpu")
  found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
  compilers = options.compilers or [name for name in SCRATCH if not missing(name)]
  for compiler in [] if options.render else compilers:
    if extra := missing(compiler):
      print(f"error: {compiler} needs the extra `{extra}`", file=sys.stderr)
      return 2
    rows = found.setdefault(compiler, {})
    for name in options.programs:
      if None in rows.get(name, [None]):
        rows[name] = measured(name, compiler)
        print(compiler, name, *rows[name], file=sys.stderr, flush=True)
        write_text(RESULTS, json.dumps(found, indent=1) + "\n")
  every = table(found)
  study_page.save_table(PAGE.with_suffix(".csv"), every)
  shared = [name for name in every if name.endswith(f", {DEVICES[-1]}")]
  shown = every.drop(columns=shared).rename(columns=lambda name: name.removesuffix(", 1"))
  study_page.update_page(PAGE, {"memory": markdown(shown)})
  print("\n".join(too_large(found)), end="")
  return int(bool(too_large(found)))


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.plan.memory",
    description=__doc__.splitlines()[0],
    epilog=f"Rows are kept in {RESULTS}; what has one is not compiled again.",
  )
  parser.add_argument("--compilers", nargs="+", choices=SCRATCH)
  parser.add_argument("--programs", nargs="+", choices=CASES, default=list(CASES))
  parser.add_argument("--render", action="store_true", help="compile nothing, render what there is")
  return parser


if __name__ == "__main__":
  exits.run_main(main)
