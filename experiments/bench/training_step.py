"""What do training steps of the grouped paper's models cost, by the compiler and by the clock?"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import optax

from experiments.bench.stepping import Stepping
from vqjax import CodebookHead, DenseEmbedding, DenseHead, GroupedHead, Head
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import Windows
from vqjax.models import Transformer

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


DENSE = "gpt-2"
CONTENDERS = {
  DENSE: Contender(_materialised),
  "gpt-neo": Contender(_materialised, window=256),
  "tiled": Contender(lambda vocab, dim, embedding: DenseHead(vocab, dim, embedding=embedding)),
  "grouped": Contender(lambda vocab, dim, _: GroupedHead(vocab, dim)),
  "codebook": Contender(lambda vocab, dim, _: CodebookHead(vocab, dim, min(CODES, vocab // 2))),
}
"""Dense heads are tied to the embedding and there are 512 positions: so do the paper's counts come
about, 8.1 M and 506.8 M (its "659 M")."""


def experiment(decoder: Decoder, contender: Contender, remat: bool = True) -> Experiment:
  """The run whose step is measured: AdamW in float32, without a text."""
  embedding = DenseEmbedding(decoder.vocab, decoder.dim)
  model = Transformer(
    embedding=embedding,
    head=contender.head(decoder.vocab, decoder.dim, embedding),
    dim=decoder.dim,
    layers=decoder.layers,
    heads=decoder.heads,
    context=decoder.context,
    window=contender.window,
    remat=remat,
  )
  return Experiment("step", model, None, None, Windows(), Train(batch=decoder.batch))


def macs(decoder: Decoder, head: Head) -> dict[str, int]:
  """Multiply-accumulates of a forward pass of one row: with weights, and of the attention.

  The latter are the products of queries with keys and of their weights with values, of every pair
  of positions. The paper counts them for its GPT-Neo alone: 4.64 G at a width of 128, beside 4.10 G
  for GPT-2.
  """
  blocks = 12 * decoder.layers * decoder.dim**2
  of_weights = decoder.context * (blocks + head.size().flops_per_token // 2)
  of_attention = 2 * decoder.layers * decoder.context**2 * decoder.dim
  return {"weights": of_weights, "attention": of_attention}


def tables_2_and_3(
  decoders: Sequence[Decoder], budget_seconds: float
) -> Iterator[dict[str, dict[str, Any]]]:
  """The rows by width and contender, once more after each width.

  All are compiled, with blocks recomputed in the backward pass, the first width also without. Their
  steps are timed where they fit the device, as long as those of a width are likely to end within
  what is left of the budget.
  """
  found, left, a_mac = {}, budget_seconds, 0.0
  for decoder in decoders:
    rows, steps = _compiled(decoder, plain_too=not found)
    found[str(decoder.dim)] = rows
    work = sum(sum(rows[name]["macs"].values()) for name in steps)
    if steps and a_mac * work <= left:
      start = time.perf_counter()
      _time(decoder, rows, steps)
      spent = time.perf_counter() - start
      left, a_mac = left - spent, spent / work
    yield found


def _compiled(decoder, plain_too):
  rows, steps = {}, {}
  for name, contender in CONTENDERS.items():
    say(f"compiling {name}, width {decoder.dim}")
    run = experiment(decoder, contender)
    rows[name] = {"macs": macs(decoder, run.model.head)}
    try:
      step = Stepping(run)
      rows[name] |= {"params": step.params} | memory(step)
      if step.peak_bytes <= device_bytes():
        steps[name] = step
      if plain_too:
        rows[name]["without_remat"] = memory(Stepping(experiment(decoder, contender, False)))
    except jax.errors.JaxRuntimeError as error:  # a GPU's compiler refuses what cannot fit
      rows[name]["error"] = str(error).splitlines()[0][:300]
  return rows, steps


def memory(step: Stepping) -> dict[str, int]:
  """The compiler's account."""
  return {"peak_bytes": step.peak_bytes, "temp_bytes": step.temp_bytes}


def _time(decoder, rows, steps):
  """In turn, since a noisy machine is not as noisy all the time; one model at a time in memory."""
  times = {name: [] for name in steps}
  for turn in range(ROUNDS):
    say(f"timing steps of width {decoder.dim}, round {turn + 1} of {ROUNDS}")
    for name, step in steps.items():
      times[name].append(settled(step))
      step.end()
  for name, seconds in times.items():
    rows[name]["step_seconds"] = statistics.median(seconds)
    rows[name]["tokens_per_s"] = decoder.batch * decoder.context / rows[name]["step_seconds"]


def settled(call: Callable[[], float]) -> float:
  """Median of the seconds that a call returns, over some time and one call at least.

  The first is not counted: it meets the caches and the heap as another program left them.
  """
  most = min(LEAST_SECONDS, 10 * call())
  times = [call()]
  while sum(times) < most:
    times.append(call())
  return statistics.median(times)


def device_bytes() -> int:
  """Memory of the first device, or of this machine."""
  stats = jax.local_devices()[0].memory_stats() or {}
  return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def say(text: str) -> None:
  """Tells the progress."""
  print(text, file=sys.stderr, flush=True)
