"""What does a training step of the grouped paper's models cost, by the compiler and by the clock?"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.timing import peak_bytes, temp_bytes
from vqjax import CodebookHead, DenseEmbedding, DenseHead, GroupedHead, Head
from vqjax.config import Experiment, Train
from vqjax.data import Windows
from vqjax.models import Transformer
from vqjax.sharding import MeshShape, make_mesh
from vqjax.training.program import Program

CODES = 1024
ROUNDS = 3
LEAST_SECONDS = 0.5
"""A timing goes on for so long: steps of a GPU take milliseconds."""


class Decoder(NamedTuple):
  """A decoder and its batch: by default all but the width of the paper's Tables 2 and 3."""

  dim: int
  layers: int = 8
  heads: int = 8
  vocab: int = 50_257
  batch: int = 32
  context: int = 512


class MaterialisedHead(DenseHead):
  """A dense head with the loss that everybody writes first: all logits at once."""

  def log_prob(self, hidden, tokens):
    """Log-probability of `tokens` in nats; it and its gradient hold [*B, V]."""
    return -optax.softmax_cross_entropy_with_integer_labels(self.logits(hidden), tokens)


class Contender(NamedTuple):
  """A row of Tables 2 and 3.

  Attributes:
    head: given vocab, dim and the embedding, which a tied head shares.
    window: positions that every second block looks back; None: all.
  """

  head: Callable[[int, int, DenseEmbedding], Head]
  window: int | None = None


def _materialised(vocab: int, dim: int, embedding: DenseEmbedding) -> Head:
  return MaterialisedHead(vocab, dim, embedding=embedding)


CONTENDERS = {
  "gpt-2": Contender(_materialised),
  "tiled": Contender(lambda vocab, dim, embedding: DenseHead(vocab, dim, embedding=embedding)),
  "grouped": Contender(lambda vocab, dim, _: GroupedHead(vocab, dim)),
  "codebook": Contender(lambda vocab, dim, _: CodebookHead(vocab, dim, min(CODES, vocab // 2))),
}
"""The dense heads are tied, as the paper's counts say: V·D + 12·L·D² is 8.1 M at D=128."""


class Step:
  """A training step, compiled from shapes alone: no array of the model is made before `seconds`.

  Attributes:
    peak_bytes: arguments, results and temporaries of the step, by the compiler's account.
    temp_bytes: its temporaries alone.
  """

  def __init__(self, decoder: Decoder, contender: Contender, remat: bool = True):
    self._program = Program(experiment(decoder, contender, remat), _one_device())
    lowered = self._program.step.lower(self._program.abstract_state, self._program.abstract_batch)
    self._step = lowered.compile()
    self.peak_bytes, self.temp_bytes = peak_bytes(self._step), temp_bytes(self._step)
    self.params = _count(self._program.abstract_state.params)

  def memory(self) -> dict[str, int]:
    """The two accounts, by name."""
    return {"peak_bytes": self.peak_bytes, "temp_bytes": self.temp_bytes}

  def seconds(self) -> float:
    """Time of a step, of a run that begins anew; its first step is not counted."""
    state, batch = self._program.init(jax.random.key(0)), self._batch()
    state, first = self._timed(state, batch)
    times = []
    while sum(times) < min(LEAST_SECONDS, 10 * first) or not times:
      state, seconds = self._timed(state, batch)
      times.append(seconds)
    return statistics.median(times)

  def _timed(self, state, batch):
    start = time.perf_counter()
    state, _ = jax.block_until_ready(self._step(state, batch))
    return state, time.perf_counter() - start

  def _batch(self):
    shapes, vocab = self._program.abstract_batch, self._program.model.head.vocab
    rows = jax.random.randint(jax.random.key(1), (2, *shapes["inputs"].shape), 0, vocab)
    reset = jnp.zeros(shapes["reset"].shape, bool)
    batch = {"inputs": rows[0], "targets": rows[1], "reset": reset}
    return jax.tree.map(lambda x, shape: jax.device_put(x, shape.sharding), batch, shapes)


def experiment(decoder: Decoder, contender: Contender, remat: bool) -> Experiment:
  """The run whose step is measured: AdamW, float32, random tokens in place of a text."""
  embedding = DenseEmbedding(decoder.vocab, decoder.dim)
  model = Transformer(
    embedding=embedding,
    head=contender.head(decoder.vocab, decoder.dim, embedding),
    dim=decoder.dim,
    layers=decoder.layers,
    heads=decoder.heads,
    context=decoder.context,
    remat=remat,
  )
  return Experiment(
    name="step",
    model=model,
    data=None,
    tokenizer=None,
    loader=Windows(),
    train=Train(batch=decoder.batch),
  )


def _one_device() -> jax.sharding.Mesh:
  return make_mesh(MeshShape(data=1), jax.devices()[:1])


def _count(tree: Any) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


def macs(decoder: Decoder, contender: Contender) -> dict[str, int]:
  """Multiply-accumulates of a forward pass of one row: of the weights, and of the attention.

  The paper's GPT-2 and its own model are counted without the attention's products of two
  activations, its GPT-Neo with them.
  """
  head = experiment(decoder, contender, False).model.head
  blocks = 12 * decoder.layers * decoder.dim**2
  of_weights = decoder.context * (blocks + head.size().flops_per_token // 2)
  return {
    "weights": of_weights,
    "attention": 2 * decoder.layers * decoder.context**2 * decoder.dim,
  }


def tables_2_and_3(
  decoders: list[Decoder],
  budget_seconds: float,
  contenders: Mapping[str, Contender] = CONTENDERS,
) -> Iterator[dict[str, Any]]:
  """The rows by width and contender, once more after each width.

  All are compiled; tokens a second are measured where the step fits the device, as long as the
  steps of a width are likely to end within what is left of the budget.
  """
  found, left, spent = {}, budget_seconds, None
  for decoder in decoders:
    rows, steps = _compiled(decoder, contenders, keep_too=not found)
    found[str(decoder.dim)] = rows
    work = sum(rows[name]["macs"]["weights"] for name in steps)
    likely = 0 if spent is None else spent[0] * work / spent[1]
    if likely <= left:
      start = time.perf_counter()
      _measure(decoder, rows, steps)
      spent = time.perf_counter() - start, max(work, 1)
      left -= spent[0]
    yield found


def _compiled(decoder, contenders, keep_too):
  rows, steps = {}, {}
  for name, contender in contenders.items():
    say(f"compiling {name} of width {decoder.dim}")
    rows[name] = {"macs": macs(decoder, contender)}
    try:
      step = Step(decoder, contender)
      rows[name] |= step.memory() | {"params": step.params}
      if step.peak_bytes <= device_bytes():
        steps[name] = step
      if keep_too:
        rows[name]["without_remat"] = Step(decoder, contender, remat=False).memory()
    except jax.errors.JaxRuntimeError as error:  # a device's compiler refuses what cannot fit
      rows[name]["error"] = str(error).splitlines()[0][:300]
  return rows, steps


def _measure(decoder, rows, steps):
  """In turn, since a noisy machine is not as noisy all the time."""
  times = {name: [] for name in steps}
  for turn in range(ROUNDS):
    say(f"timing steps of width {decoder.dim}, round {turn + 1} of {ROUNDS}")
    for name, step in steps.items():
      times[name].append(step.seconds())
  for name, seconds in times.items():
    rows[name]["step_seconds"] = statistics.median(seconds)
    rows[name]["tokens_per_s"] = decoder.batch * decoder.context / rows[name]["step_seconds"]


def device_bytes() -> int:
  """Memory of the first device, or of this machine."""
  stats = jax.local_devices()[0].memory_stats() or {}
  return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def say(text: str) -> None:
  """Tells the progress."""
  print(text, file=sys.stderr, flush=True)
