"""Benchmark of what heads begin with: the default without data, frequencies, and a text.

A decoder of one layer is trained for a few hundred steps on the docstrings of the standard library
in a byte-pair encoding, once for each head and start. The figures are nats per token of the
validation text, before the first step and after the last one.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from experiments.bench import measure
from vqjax import assign, embeddings, heads
from vqjax.lab.data import BPETokenizer, Text
from vqjax.lab.data.token_cache import encode_split, fit_tokenizer
from vqjax.lm.models import Transformer

CONTEXT, BATCH, DIM = 64, 8, 64

Layers = tuple[heads.Head, embeddings.Embedding]


def layers(vocab: int, text: assign.TextStats) -> Iterator[tuple[str, str, Callable[[], Layers]]]:
  """The names of a head and of a start, and what makes both layers."""
  size, codes = (vocab, DIM), max(2, vocab // 16)
  by_id = {"assignment_init": assign.contiguous}
  of_text = {
    "frequencies": functools.partial(_from_counts, text.counts, *size),
    "text": lambda kind, **fields: kind.from_tokens(text, *size, **fields),
  }
  free = lambda kind, **fields: kind(*size, **fields)
  rows = {
    "dense": (heads.DenseHead, {}),
    "codebook": (heads.CodebookHead, {"codes": codes, "token_bias": True}),
    "codebook without bias": (heads.CodebookHead, {"codes": codes, "token_bias": False}),
    "grouped": (heads.GroupedHead, {}),
    "unshared groups": (heads.UnsharedGroupedHead, {"use_bias": True}),
    "product": (heads.ProductHead, {"codes": min(256, vocab // 4), "subspaces": 8}),
    "low rank": (heads.LowRankHead, {"rank": 8}),
    "class-based": (heads.ClassBasedHead, {"classes": max(2, round(vocab**0.5))}),
    "tree": (heads.HierarchicalHead, {}),
    "adaptive": (heads.AdaptiveHead, {}),
  }
  for name, (kind, fields) in rows.items():
    starts = {"default": free, **of_text}
    if kind is heads.CodebookHead:
      starts = {"by id": functools.partial(free, **by_id)} | starts
    for start, make in starts.items():
      pair = lambda make=make, kind=kind, fields=fields: (
        make(kind, **fields),
        embeddings.DenseEmbedding(*size),
      )
      yield name, start, pair
  for start, make in {"default": free, "text": of_text["text"]}.items():
    yield "tied", start, functools.partial(_tied, make)
  for name in ("dense", "codebook", "class-based"):
    kind, fields = rows[name]
    yield (
      name,
      "text for the embedding too",
      lambda kind=kind, fields=fields: (
        of_text["text"](kind, **fields),
        of_text["text"](embeddings.DenseEmbedding),
      ),
    )


def _from_counts(counts, vocab, dim, kind, **fields):
  return kind.from_counts(counts, vocab, dim, **fields)


def _tied(make):
  table = make(embeddings.DenseEmbedding)
  return make(heads.DenseHead, embedding=table), table


def trained(pair: Layers, train: np.ndarray, valid: np.ndarray, steps: int) -> dict[str, float]:
  """Nats per token of the validation text before and after the steps."""
  head, embedding = pair
  model = Transformer(embedding=embedding, head=head, dim=DIM, layers=1, heads=2, context=CONTEXT)
  rng, seen = np.random.default_rng(0), np.random.default_rng(1)

  def batch(tokens, rows, rng):
    starts = rng.integers(0, len(tokens) - CONTEXT, rows)
    return tokens[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)

  held = batch(valid, 512, seen)
  variables = jax.jit(model.init)(jax.random.key(0), held[:1, :-1])
  params, rest = variables["params"], {k: v for k, v in variables.items() if k != "params"}
  rate = optax.warmup_cosine_decay_schedule(0, 3e-3, max(1, steps // 10), steps, 3e-4)
  rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
  moments = rule.init(params)

  def nats(params, rest, rows):
    given = {**rest, "params": params}
    return -model.apply(given, rows[:, :-1], rows[:, 1:], method="log_prob").mean()

  @jax.jit
  def step(params, moments, rest, rows):
    updates, moments = rule.update(jax.grad(nats)(params, rest, rows), moments, params)
    return optax.apply_updates(params, updates), moments

  score = jax.jit(nats)
  scored = lambda params: float(np.mean([score(params, rest, x) for x in np.split(held, 8)]))
  first = scored(params)
  for _ in range(steps):
    params, moments = step(params, moments, rest, batch(train, BATCH, rng))
  return {"first_nats": first, "last_nats": scored(params)}


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Print nats for each head and start."""
  vocab, steps = (300, 2) if quick else (4096, 400)
  source = Text(valid_fraction=0.001, test_fraction=0.001) if quick else Text()
  tokenizer = fit_tokenizer(source, BPETokenizer(vocab=vocab))
  train, valid = (
    np.asarray(encode_split(source, tokenizer, split).tokens) for split in ("train", "valid")
  )
  text = assign.TextStats.of(train, vocab)
  figures: dict[str, Any] = {"vocab": vocab, "steps": steps, "tokens": len(train), "nats": {}}
  # Each program of a head takes seconds to compile.
  for name, start, make in itertools.islice(layers(vocab, text), 5 if quick else None):
    began = time.perf_counter()
    pair = make()
    seconds = time.perf_counter() - began
    found = trained(pair, train, valid, steps) | {"start_time": seconds}
    figures["nats"].setdefault(name, {})[start] = found
    measure.say(
      f"{name}, {start}: {found['first_nats']:.3f} nats, after {steps} steps"
      f" {found['last_nats']:.3f} ({seconds:.1f} s to begin)"
    )
    yield figures
