"""Benchmarks on a GPU: losses against PyTorch peers, and decoding with a certified first pass."""

import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.bench import losses, measure
from experiments.bench.losses import LossShape
from experiments.bench.measure import Call, Unavailable, compare
from experiments.plan.isolated import isolated
from vqjax import (
  CertifiedHead,
  CodebookHead,
  DenseHead,
  GroupedHead,
  ProductHead,
  linear_cross_entropy,
  linear_log_prob,
)
from vqjax.heads.workload import loss_and_gradient
from vqjax.lab.plan import compiling
from vqjax.lab.report.units import MISSING
from vqjax.sharding import MeshShape, make_mesh

PACKAGES = ("torch", "triton", "cut-cross-entropy", "liger-kernel")


class LossCost(NamedTuple):
  """Cost of loss and gradient.

  Attributes:
    seconds: median time of a call.
    temporaries: bytes beside arguments and results.
  """

  seconds: float
  temporaries: int


SHAPES = (
  LossShape(16384, 4096, 128_256),
  LossShape(16384, 640, 262_144),
  LossShape(16384, 768, 50_304),
  LossShape(8192, 4096, 151_936),
  LossShape(32768, 2560, 262_144),
)
STORED, MASKED = "stored logits (XLA)", "mean, half of the tokens masked"
SCRATCH = 2**31, 4 * 2**30
CODES = 1024
CALLS = 5
DECODED = ((262_144, 640), (262_144, 2048))
BATCHES = 1, 16, 256
NOTE = (
  "bfloat16 hidden and weight; median of {calls} calls after a warm-up, all programs of XLA of a"
  " shape in one process. TFLOP/s is 6NDV over the time in every row; for a compressed head it"
  " counts the dense work that it replaces. Temporaries are GiB as the compiler plans them; of"
  " PyTorch, the peak of the device without arguments and gradients."
)


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Measure losses of large vocabularies, each row in a process of its own."""
  here = gpu_machine(quick)
  calls = 1 if quick else CALLS
  measure.say(NOTE.format(calls=calls))
  tables = []
  for shape in (LossShape(64, 16, 1031),) if quick else SHAPES:
    tables.append(loss_table(shape, here["device"], calls))
    yield here | {"note": NOTE.format(calls=calls), "tables": tables}


def loss_table(shape: LossShape, device: str, calls: int) -> dict:
  """Measure and print the rows of a shape; failed rows keep their errors."""
  measure.log(f"measuring XLA's programs, {shape}")
  found, work = isolated(xla_costs, shape, calls), 6 * shape.tokens * shape.dim * shape.vocab
  for name, cost in {
    "Liger": partial(liger, shape, calls, False),
    "Liger, float32 sums": partial(liger, shape, calls, True),
    "CCE, all gradients": partial(cut_cross_entropy, shape, calls, None),
    "CCE, large gradients": partial(cut_cross_entropy, shape, calls, "high"),
  }.items():
    measure.log(f"measuring {name}, {shape}")
    try:
      found[name] = isolated(cost)._asdict()
    except Exception as error:  # out of memory, a dead process, a peer that is not there
      found[name] = {"error": _line(error)}
  for row in found.values():
    if "error" not in row:
      row["tflops"] = work / row["seconds"] / 1e12
      row["times_stored"] = row["seconds"] / found[STORED].get("seconds", math.nan)
  measure.show_rows(
    f"loss and gradient, {shape}, {device}",
    ("", "ms", "times stored", "TFLOP/s", "temporaries, GiB"),
    [_cells(name, row) for name, row in found.items()],
  )
  for name, row in found.items():
    if "error" in row:
      measure.say(f"{name}: {row['error']}")
  return {"shape": shape._asdict(), "rows": found}


def _line(error):
  return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _cells(name: str, row: dict) -> list[str]:
  if "error" in row:
    return [name, "failed", MISSING, MISSING, MISSING]
  times = f"{row['seconds'] * 1e3:.1f}", f"{row['times_stored']:.2f}", f"{row['tflops']:.3g}"
  return [name, *times, f"{row['temporaries'] / 2**30:.2f}"]


def dense_losses() -> dict[str, Callable]:
  """Loss and gradient of (hidden, weight, tokens) by the programs of XLA, by name."""
  mean = partial(linear_cross_entropy, reduction="mean")
  log_prob = lambda scratch: lambda *x: -linear_log_prob(*x, scratch=scratch).mean()
  found = {
    STORED: losses.materialised_loss,
    "mean": mean,
    MASKED: partial(mean, ignore_index=-1),
    "log_prob": log_prob(None),
  } | {f"log_prob, scratch of {size / 2**30:.0f} GiB": log_prob(size) for size in SCRATCH}
  return {name: losses.gradient(loss) for name, loss in found.items()}


def plan(quick: bool) -> Iterator[dict[str, Any]]:
  """Compile the losses for an H100, without one, and print their temporaries."""
  if not compiling.has_gpu_compiler():
    raise Unavailable("The compiler of GPUs is in the extra `plan-gpu`")
  mesh = make_mesh(MeshShape(), compiling.gpu_devices("H100", 1))
  place = NamedSharding(mesh, P())
  rows: dict[str, dict[str, float]] = {}
  for shape in (LossShape(64, 16, 1031),) if quick else SHAPES:
    sizes = (shape.tokens, shape.dim), (shape.vocab, shape.dim), (shape.tokens,)
    dtypes = jnp.bfloat16, jnp.bfloat16, jnp.int32
    arguments = [jax.ShapeDtypeStruct(*x, sharding=place) for x in zip(sizes, dtypes, strict=True)]
    for name, function in dense_losses().items():
      with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(*arguments).compile()
      rows.setdefault(name, {})[str(shape)] = measure.temp_bytes(compiled)
    yield {"temp_bytes": rows}
  shapes = list(rows[STORED])
  measure.show_rows(
    "temporaries of loss and gradient, bfloat16, compiled for an H100, GiB",
    ("", *shapes),
    [[name, *(f"{row[shape] / 2**30:.2f}" for shape in shapes)] for name, row in rows.items()],
  )


def xla_costs(shape: LossShape, calls: int) -> dict[str, dict]:
  """Costs of the programs of XLA, by name."""
  data = losses.arrays(shape, jnp.bfloat16)
  masked = *data[:2], jnp.where(jnp.arange(shape.tokens) % 2 == 0, data[2], -1)
  programs = {
    name: (loss, masked if name == MASKED else data) for name, loss in dense_losses().items()
  }
  sizes = shape.vocab, shape.dim
  for name, head in {
    f"codebook K={CODES}": CodebookHead(*sizes, CODES, param_dtype=jnp.bfloat16),
    "grouped": GroupedHead(*sizes, param_dtype=jnp.bfloat16),
  }.items():
    programs[name] = loss_and_gradient(head, shape.tokens, jnp.bfloat16)
  found = {}
  for name, program in programs.items():
    try:
      # One after another: the results of two fill the memory.
      timed = compare({name: program}, calls)[name]
    except Exception as error:  # out of memory
      found[name] = {"error": _line(error)}
    else:
      found[name] = LossCost(timed.seconds, timed.temp_bytes)._asdict()
  return found


def decoding(quick: bool) -> Iterator[dict[str, Any]]:
  """Time the best token, the 50 best and a draw of dense, certified and compressed heads."""
  here = gpu_machine(quick)
  figures: dict[str, Any] = dict(here)
  for vocab, dim in ((1031, 16),) if quick else DECODED:
    name = f"V={vocab} D={dim}"
    figures[name] = {}
    for rows in (1,) if quick else BATCHES:
      # In a process of its own: the tables of one shape leave no room for those of the next.
      found = isolated(timed_steps, vocab, dim, rows, 1 if quick else CALLS)
      measure.show_rows(
        f"a decoding step of the head, {name}, batch {rows}, {here['device']}",
        ("", "ms", "times faster than bfloat16", "in doubt"),
        [_step_cells(name, row) for name, row in found.items()],
      )
      figures[name][f"batch {rows}"] = found
      yield figures


def _step_cells(name: str, row: dict) -> list[str]:
  doubt = MISSING if row["in_doubt"] is None else f"{row['in_doubt']:.0f}"
  return [name, f"{row['seconds'] * 1e3:.3f}", f"{row['times_faster']:.2f}", doubt]


def timed_steps(vocab: int, dim: int, rows: int, calls: int) -> dict[str, dict]:
  """Times of decoding steps of one shape, each beside the same step of the bfloat16 table."""
  best = min(50, vocab)
  hidden, key = jax.random.normal(jax.random.key(1), (rows, dim)), jax.random.key(2)
  dense = DenseHead(vocab, dim)
  init = jax.jit(lambda head: head.init(jax.random.key(0), hidden), static_argnums=0)
  variables = init(dense)
  narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), variables)
  certified, certified_variables = CertifiedHead.from_dense(dense, variables)
  heads = {
    "bfloat16": (dense, narrow, hidden.astype(jnp.bfloat16)),
    "float32": (dense, variables, hidden),
    "certified": (certified, certified_variables, hidden),
    **{
      name: (head, init(head), hidden)
      for name, head in {
        "codebook K=1024 + bias": CodebookHead(vocab, dim, 1024, token_bias=True),
        "product K=256": ProductHead(vocab, dim, 256, dim // 16),
        "grouped": GroupedHead(vocab, dim),
      }.items()
    },
  }
  wide = heads["float32"][1]["params"]["weight"]
  programs: dict[str, Call] = {
    "arg max of a product, bfloat16": (_argmax, (wide.astype(jnp.bfloat16), heads["bfloat16"][2])),
    "arg max of a product, float32": (_argmax, (wide, hidden)),
  }
  for name, (head, own, vectors) in heads.items():
    greedy = partial(head.apply, method="sample", temperature=0.0)
    draw = partial(head.apply, method="sample")
    top = lambda v, h, head=head: head.apply(v, h, best, method="top_k")
    if name == "certified":
      top = lambda v, h: certified.apply(v, h, best, method="best")
    programs[f"{name}: best"] = greedy, (own, vectors, key)
    programs[f"{name}: {best} best"] = top, (own, vectors)
    programs[f"{name}: draw"] = draw, (own, vectors, key)
  timed = compare(programs, calls)
  doubt = certified.apply(certified_variables, hidden, method="best").survivors.mean()
  found = {}
  for name, one in timed.items():
    rival = name.replace(name.partition(":")[0], "bfloat16") if ":" in name else next(iter(timed))
    found[name] = {
      "seconds": one.seconds,
      "times_faster": timed[rival].seconds / one.seconds,
      "in_doubt": float(doubt) if name == "certified: best" else None,
    }
  return found


def _argmax(weight, hidden):
  return jnp.argmax(hidden @ weight.T, axis=-1)


def gpu_machine(quick: bool) -> dict:
  """`machine`; Unavailable without a GPU, unless sizes are tiny."""
  here = isolated(machine)
  if here["platform"] != "gpu" and not quick:
    raise Unavailable(f"JAX must see a GPU; it sees {here['device']}. Use --quick to try it here")
  return here


def machine() -> dict:
  """Platform and kind of the first device, and the versions of the PyTorch peers."""
  first = jax.devices()[0]
  return {"platform": first.platform, "device": first.device_kind, "versions": versions()}


def versions() -> dict[str, str]:
  """Versions of the installed PyTorch peers."""
  found = {}
  for name in PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


def cut_cross_entropy(shape: LossShape, calls: int, filter_eps: str | None) -> LossCost:
  """Cost of Apple's `linear_cross_entropy`.

  Its default `filter_eps`, "high", skips gradients of small probabilities. On random logits over a
  large vocabulary all probabilities are small, so that almost nothing is left to compute. None
  skips nothing.
  """
  from cut_cross_entropy import linear_cross_entropy

  loss = lambda hidden, weight, t: linear_cross_entropy(hidden, weight, t, filter_eps=filter_eps)
  return _cost(shape, calls, loss)


def liger(shape: LossShape, calls: int, wide: bool) -> LossCost:
  """Cost of Liger's fused linear cross-entropy (gradient in the forward pass).

  `wide` sums the gradient of the weight in float32, as the other programs here do.
  """
  import torch
  from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

  loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32 if wide else None)
  return _cost(shape, calls, lambda hidden, weight, t: loss(weight, hidden, t))


def _cost(shape: LossShape, calls: int, loss: Callable) -> LossCost:
  import torch

  if not torch.cuda.is_available():
    raise Unavailable("torch must see a CUDA device; got none. Install its build with CUDA.")
  make = lambda *dims: torch.randn(*dims, device="cuda", dtype=torch.bfloat16)
  hidden, weight = make(shape.tokens, shape.dim), make(shape.vocab, shape.dim)
  weight.mul_(shape.dim**-0.5)
  tokens = torch.randint(shape.vocab, (shape.tokens,), device="cuda")
  hidden.requires_grad_()
  weight.requires_grad_()
  # Arguments and gradients are not temporaries.
  kept = 2 * torch.cuda.memory_allocated()
  torch.cuda.reset_peak_memory_stats()
  times = []
  # The first calls compile kernels and choose among them.
  for _ in range(3 + calls):
    start = time.perf_counter()
    torch.autograd.grad(loss(hidden, weight, tokens), (hidden, weight))
    torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
  peak = torch.cuda.max_memory_allocated()
  return LossCost(statistics.median(times[3:]), max(0, peak - kept))
