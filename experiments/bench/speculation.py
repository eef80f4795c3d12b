"""Benchmark of speculative decoding of Gemma 3 270M with a small drafter trained on stories.

The drafter has two blocks and the most frequent tokens of the stories, so that a draft token costs
a few percent of one of the target. It starts from the target's table, reduced to its width, and is
trained on the stories' text.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from experiments import gemma as texts
from experiments.bench import gemma, measure
from experiments.bench.generation import QUICK as QUICK_DECODER
from experiments.bench.generation import decoder
from vqjax import DenseEmbedding, DenseHead, checkpoints
from vqjax.inference import GREEDY, Draft, Drafter, Sampling, generate, unstacked
from vqjax.inference.cache import Variables, extend, prefill
from vqjax.lab.data import Stories
from vqjax.lab.training.provenance import device
from vqjax.models import MLP, Attention, RMSNorm, Rotary, Transformer


class Sizes(NamedTuple):
  """Sizes of the drafter, its training and the comparison.

  Attributes:
    vocab: tokens of the drafter.
    dim: its width.
    inner: its inner width.
    steps: training steps.
    batch: rows of a training step.
    width: tokens of a training row.
    length: most draft tokens of a round.
    prompt: tokens of a prompt.
    tokens: tokens of a continuation.
    prompts: prompts of a domain.
  """

  vocab: int
  dim: int
  inner: int
  steps: int
  batch: int
  width: int
  length: int
  prompt: int
  tokens: int
  prompts: int


GEMMA = Sizes(4096, 192, 512, 1600, 16, 96, length=4, prompt=32, tokens=64, prompts=5)
QUICK = Sizes(23, 8, 16, 2, 2, 8, length=2, prompt=4, tokens=9, prompts=1)
DOMAINS = "stories", "wikipedia", "python"
"""The domain of the drafter, and others."""

SAMPLINGS = {"greedy": GREEDY, "temperature 1": Sampling(), "top-p 0.9": Sampling(top_p=0.9)}
RATE = 4e-3


class Target(NamedTuple):
  """The model, its unstacked variables, its training tokens and prompts of each domain."""

  model: Transformer
  variables: Variables
  tokens: Int[np.ndarray, "N"]
  prompts: dict[str, list[list[int]]]


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Train a drafter, then time generation with and without it, prompt by prompt."""
  sizes = QUICK if quick else GEMMA
  target = random_target(sizes) if quick else gemma_target(sizes)
  start = time.perf_counter()
  draft, losses = trained(target, sizes)
  figures: dict[str, Any] = {
    "sizes": sizes._asdict(),
    "training": {"seconds": time.perf_counter() - start, "nats_per_token": losses},
  }
  figures["parts"] = parts(target, draft, sizes.length)
  yield figures
  drafter = Draft(
    *draft, length=sizes.length, tokens=draft_tokens(target, sizes), cost=figures["parts"]["cost"]
  )
  for domain, (name, sampling) in itertools.product(target.prompts, SAMPLINGS.items()):
    rows = [
      compared(target, drafter, prompt, sampling, sizes.tokens) for prompt in target.prompts[domain]
    ]
    mean = lambda key, rows=rows: statistics.fmean(row[key] for row in rows)
    figures.setdefault(domain, {})[name] = {
      "tokens_per_pass": mean("tokens_per_pass"),
      "plain_tokens_per_second": mean("plain_tokens_per_second"),
      "tokens_per_second": mean("tokens_per_second"),
      "speed_ratio": statistics.median(row["speed_ratio"] for row in rows),
    }
    yield figures
  measure.show(
    f"with a drafter of {sizes.length} tokens, batch 1, {sizes.tokens} new tokens, {device()}",
    ("", "tokens a pass", "tokens/s without", "tokens/s", "ratio (median)"),
    [
      [
        f"{domain}, {name}",
        f"{row['tokens_per_pass']:.3g}",
        f"{row['plain_tokens_per_second']:.4g}",
        f"{row['tokens_per_second']:.4g}",
        f"{row['speed_ratio']:.3g}x",
      ]
      for domain in target.prompts
      for name, row in figures[domain].items()
    ],
  )


def compared(
  target: Target, drafter: Drafter, prompt: list[int], sampling: Sampling, tokens: int
) -> dict[str, float]:
  """Speed without and with the drafter; the median of three interleaved rounds."""
  times: dict[bool, list[float]] = {False: [], True: []}
  passes = 0
  for number, drafts in itertools.product(range(4), times):
    start = time.perf_counter()
    result = generate(
      *(target.model, target.variables, [prompt], jax.random.key(7), sampling),
      max_tokens=tokens,
      log_probs=False,
      drafter=drafter if drafts else None,
    )
    if number:  # the first round compiles
      times[drafts].append(time.perf_counter() - start)
    passes = int(result.passes[0]) if drafts else passes
  plain, speculative = (statistics.median(each) for each in times.values())
  return {
    "tokens_per_pass": tokens / passes,
    "plain_tokens_per_second": tokens / plain,
    "tokens_per_second": tokens / speculative,
    "speed_ratio": plain / speculative,
  }


def parts(target: Target, draft: tuple[Transformer, Variables], length: int) -> dict[str, float]:
  """Seconds of the parts of a round, and the cost of a draft token that they imply."""
  prompt = jnp.array([target.prompts[DOMAINS[0]][0]])
  longest, step = jnp.array([prompt.shape[1]]), jnp.zeros(1, jnp.int32)

  def part(model, variables, positions, body=True, head=True):
    slots = prompt.shape[1] + length + 1
    rings = jax.jit(lambda v: prefill(model, v, 0 * prompt, longest, slots, length)[1])(variables)
    hidden = jnp.ones((1, positions, model.dim))
    tokens = jnp.zeros((1, positions), jnp.int32)

    def call(variables, rings, hidden):
      if body:
        hidden, rings = extend(model, variables, rings, tokens, longest, step)
      best = lambda model, hidden: model.head.top_k(hidden, 1)
      return model.apply(variables, hidden, method=best) if head else hidden

    return call, (variables, rings, hidden)

  given, own = (target.model, target.variables), (draft[0], unstacked(draft[1]))
  timed = measure.compare(
    {
      "a token": part(*given, 1),
      "its head": part(*given, 1, body=False),
      f"{length + 1} positions": part(*given, length + 1),
      "their head": part(*given, length + 1, body=False),
      "a draft token": part(*own, 1),
      "its draft head": part(*own, 1, body=False),
    }
  )
  seconds = {name: one.seconds for name, one in timed.items()}
  measure.show(
    f"parts of a greedy round, batch 1, float32, {device()}",
    ("", "ms", "of a token"),
    [
      [name, f"{1e3 * each:.4g}", f"{each / seconds['a token']:.3g}"]
      for name, each in seconds.items()
    ],
  )
  round_ = seconds[f"{length + 1} positions"] + length * seconds["a draft token"]
  cost = (round_ / seconds["a token"] - 1) / length
  return seconds | {"cost": min(0.99, max(0.0, cost))}


def draft_tokens(target: Target, sizes: Sizes) -> Int[np.ndarray, "U"]:
  """The most frequent tokens of the text, rising."""
  count = np.bincount(target.tokens, minlength=target.model.head.vocab)
  return np.sort(np.argsort(-count, kind="stable")[: sizes.vocab]).astype(np.int32)


def trained(target: Target, sizes: Sizes) -> tuple[tuple[Transformer, Variables], list[float]]:
  """The drafter, and its mean loss in each twentieth of the training, in nats a token."""
  kept = draft_tokens(target, sizes)
  number = np.full(target.model.head.vocab, -1, np.int32)
  number[kept] = np.arange(len(kept))
  text = number[target.tokens]
  model = Transformer(
    DenseEmbedding(sizes.vocab, sizes.dim),
    DenseHead(sizes.vocab, sizes.dim),
    sizes.dim,
    layers=2,
    heads=4,
    context=target.model.context,
    norm=RMSNorm(),
    attention=Attention(kv_heads=4, qkv_bias=False, out_bias=False),
    mlp=MLP(sizes.inner, gated=True, use_bias=False),
    rotary=Rotary(),
  )
  one = jnp.zeros((1, 1), jnp.int32)
  variables = jax.jit(functools.partial(model.init, method="loss_terms"))(KEY, one, one)
  rows = np.asarray(target.variables["params"]["embedding"]["weight"], np.float32)[kept]
  left, size, _ = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
  reduced = left[:, : sizes.dim] * size[: sizes.dim]
  reduced /= reduced.std()
  params = variables["params"]
  params |= {"embedding": {"weight": 0.3 * reduced}, "head": {"weight": sizes.dim**-0.5 * reduced}}
  schedule = optax.warmup_cosine_decay_schedule(0, RATE, sizes.steps // 25, sizes.steps, RATE / 20)
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05)
  )
  update = _update(model, optimizer)
  state, rng, losses = optimizer.init(params), np.random.default_rng(0), []
  for _ in range(sizes.steps):
    starts = rng.integers(0, len(text) - sizes.width, sizes.batch)
    row = np.stack([text[start : start + sizes.width + 1] for start in starts])
    params, state, loss = update(params, state, row)
    losses.append(float(loss))
    if len(losses) % 100 == 0:
      measure.log(f"step {len(losses)}: {statistics.fmean(losses[-100:]):.3f} nats a token")
  parts = [float(part.mean()) for part in np.array_split(losses, min(20, len(losses)))]
  return (model, {"params": params}), parts


KEY = jax.random.key(0)


def _update(model, optimizer):
  def loss(params, row):
    # A token that the drafter does not have is read as its first, and is not a target.
    tokens, targets = jnp.maximum(row[:, :-1], 0), row[:, 1:]

    def log_prob(model):
      hidden = model.hidden(tokens, deterministic=False)
      return model.head.loss_terms(hidden, targets, ignore_index=-1)[0]

    log_prob_BT = model.apply({"params": params}, method=log_prob)
    return -log_prob_BT.sum() / jnp.maximum(1, (targets >= 0).sum())

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def update(params, state, row):
    value, gradient = jax.value_and_grad(loss)(params, row)
    changes, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, changes), state, value

  return update


def gemma_target(sizes: Sizes) -> Target:
  """Gemma 3 270M, the stories, and prompts of all domains."""
  model, variables, tokenizer = checkpoints.load(gemma.weights())
  stories = Stories()
  tokens = [token for text in stories.documents("train") for token in tokenizer.encode(text)]
  prompts = {}
  for domain in DOMAINS:
    documents = stories.documents("test") if domain == "stories" else texts.documents(domain)
    encoded = (list(tokenizer.encode(text[:2000])) for text in documents)
    long = (row[: sizes.prompt] for row in encoded if len(row) >= sizes.prompt)
    prompts[domain] = list(itertools.islice(long, sizes.prompts))
  return Target(model, unstacked(variables), np.array(tokens, np.int32), prompts)


def random_target(sizes: Sizes) -> Target:
  """A small decoder and tokens, both random."""
  model, one = decoder(QUICK_DECODER), jnp.zeros((1, 1), jnp.int32)
  variables = jax.jit(functools.partial(model.init, method="loss_terms"))(KEY, one, one)
  tokens = np.random.default_rng(0).integers(0, model.head.vocab, 97)
  prompts = {DOMAINS[0]: [tokens[: sizes.prompt].tolist()]}
  return Target(model, unstacked(variables), tokens.astype(np.int32), prompts)
