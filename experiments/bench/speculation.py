"""Bake-off of heads of an EAGLE-style drafter, in and off its domain.

The model is Gemma 3 270M or a decoder that is trained here. One drafter is trained on text of one
domain, with its most frequent tokens, and kept in the cache. Its predicted hidden vectors are read
by several heads. Prompts of that domain and of others are continued without a drafter, with a draft
of the same length in each round by each head, and with the length that adapts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments import gemma_compression as texts
from experiments.bench import gemma, measure
from experiments.bench.generation import QUICK as QUICK_DECODER
from experiments.bench.generation import llama_decoder
from vqjax import DenseHead, LowRankHead, RoutedHead, assign
from vqjax.commands.models import load_model
from vqjax.convert import likely_tokens, train_routes
from vqjax.heads import Head
from vqjax.lab.config import load_config, override
from vqjax.lab.data import Stories
from vqjax.lab.training import fit
from vqjax.lab.training.provenance import device
from vqjax.lm import checkpoints
from vqjax.lm.drafting import Eagle, load_eagle, save_eagle
from vqjax.lm.drafting.eagle_training import EagleTraining, drafter_of_rows, spread_rows, timed
from vqjax.lm.generation import GREEDY, Drafter, EarlyExit, Sampling, generate, unstacked
from vqjax.lm.generation.kv_cache import Variables, extend, prefill
from vqjax.lm.jobs import ProgressBars, open_work
from vqjax.lm.lenses.tuned import model_mark
from vqjax.lm.models import Transformer


class SpeculationSizes(NamedTuple):
  """Sizes of the drafter, its training and the comparison.

  Attributes:
    settings: those of the training.
    positions: positions of text on which the drafter is trained.
    written: rows of text that the model writes, on which it is trained too; half of them greedily.
    width: tokens of a training row.
    rank: rank of the low-rank head.
    clusters: clusters of the routed head.
    budget: clusters whose rows it scores.
    prompt: tokens of a prompt.
    tokens: tokens of a continuation.
    prompts: prompts of the drafter's domain.
    foreign: prompts of each other domain.
    states: hidden states of the stories to which the low-rank and the routed head are fitted.
    blocks: blocks of the model after which its early exit is.
  """

  settings: EagleTraining
  positions: int
  written: int
  width: int
  rank: int
  clusters: int
  budget: int
  prompt: int
  tokens: int
  prompts: int
  foreign: int
  states: int
  blocks: int


GEMMA = SpeculationSizes(
  EagleTraining(steps=2400, batch=2, depth=2, length=3, vocab=4096),
  positions=48_000,
  written=768,
  width=128,
  rank=96,
  clusters=2048,
  budget=32,
  prompt=32,
  tokens=64,
  prompts=6,
  foreign=2,
  states=16_384,
  blocks=6,
)
QUICK = SpeculationSizes(
  EagleTraining(steps=2, batch=2, depth=2, length=2, vocab=23),
  positions=80,
  written=2,
  width=8,
  rank=4,
  clusters=8,
  budget=2,
  prompt=4,
  tokens=9,
  prompts=1,
  foreign=1,
  states=24,
  blocks=1,
)
RUN = SpeculationSizes(
  EagleTraining(steps=1500, batch=8, depth=2, length=3, vocab=1024),
  positions=100_000,
  written=256,
  width=64,
  rank=32,
  clusters=256,
  budget=16,
  prompt=16,
  tokens=48,
  prompts=8,
  foreign=3,
  states=16_384,
  blocks=2,
)
"""Those of a decoder of eight blocks."""

DOMAINS = "stories", "wikipedia", "python", "german"
"""The domain of the drafter of Gemma, and others."""

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "lm_dense.py"
"""Config of the run, a decoder of docstrings."""

LONGER = "model.layers=8", "train.steps=2400"
"""One more block for drafting would be half of the config's two, and 800 steps teach it little."""

SAMPLINGS = {"greedy": GREEDY, "temperature 1": Sampling()}
PLAIN = "no drafter"
FREQUENT = "frequent"
"""The head of the training."""

ADAPTIVE = "frequent, adaptive"
"""That head, and a length that adapts."""

ROUNDS = 2


class Target(NamedTuple):
  """The model, its unstacked variables, its training tokens and prompts of each domain.

  The first domain is that of the drafter.
  """

  model: Transformer
  variables: Variables
  tokens: Int[np.ndarray, "N"]
  prompts: dict[str, list[list[int]]]


class Candidate(NamedTuple):
  """A drafter, and the bytes that a draft token reads."""

  drafter: Drafter
  bytes: int


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Compare the heads of a drafter of Gemma."""
  sizes = QUICK if quick else GEMMA
  target = random_target(sizes) if quick else gemma_target(sizes)
  return bake_off(target, sizes, quick)


def of_run(quick: bool) -> Iterator[dict[str, Any]]:
  """Compare the heads of a drafter of a decoder that is trained here."""
  sizes = QUICK if quick else RUN
  return bake_off(run_target(sizes, quick), sizes, quick)


def bake_off(target: Target, sizes: SpeculationSizes, quick: bool) -> Iterator[dict[str, Any]]:
  """Train a drafter, then time generation with each of its heads and without it."""
  start = time.perf_counter()
  eagle, held_out = trained_drafter(target, sizes, quick)
  own = next(iter(target.prompts))
  figures: dict[str, Any] = {
    "sizes": sizes._asdict() | {"settings": dataclasses.asdict(sizes.settings)},
    "training": held_out | {"seconds": time.perf_counter() - start},
  }
  found = candidates(target, eagle, sizes)
  measure.log("heads are made")
  if quick:  # each head has programs of its own
    found = {name: found[name] for name in (FREQUENT, "routed")}
  prompt = target.prompts[own][0]
  figures["parts"] = round_seconds(target, found, sizes.settings.length)
  adaptive = timed(found[FREQUENT].drafter, target.model, target.variables, prompt)
  figures["rounds"] = {
    name: adaptive.times(sampling)._asdict() for name, sampling in SAMPLINGS.items()
  }
  figures["bytes"] = {PLAIN: read_bytes(target)} | {
    name: each.bytes for name, each in found.items()
  }
  figures["bandwidth"] = table_bytes(target) / figures["parts"][TABLE]
  yield figures
  fixed = {name: dataclasses.replace(each.drafter, cost=0) for name, each in found.items()}
  for (name, sampling), domain in itertools.product(SAMPLINGS.items(), target.prompts):
    ways: dict[str, Drafter | None] = {PLAIN: None, ADAPTIVE: adaptive}
    ways |= fixed if sampling.is_greedy else {FREQUENT: fixed[FREQUENT]}
    is_compiled = domain != own
    rows = compared(target, ways, domain, sampling, sizes.tokens, is_compiled)
    for way, row in rows.items():
      if way != ADAPTIVE:  # how often it drafted is not known
        drafted = 0 if way == PLAIN else sizes.settings.length * found[way].bytes
        row["bytes_per_token"] = (read_bytes(target) + drafted) / row["tokens_per_pass"]
        row["bound"] = figures["bandwidth"] / row["bytes_per_token"]
    figures.setdefault(domain, {})[name] = rows
    yield figures
  measure.show_rows(
    f"drafts of {sizes.settings.length} tokens, batch 1, {sizes.tokens} new tokens, {device()}",
    ("", "tokens a pass", "tokens/s", "ratio (median)", "MB read a token", "tokens/s, bound"),
    [
      [
        f"{domain}, {name}, {way}",
        f"{row['tokens_per_pass']:.3g}",
        f"{row['tokens_per_second']:.4g}",
        f"{row['speed_ratio']:.3g}x",
        f"{row['bytes_per_token'] / 1e6:.4g}" if "bytes_per_token" in row else measure.MISSING,
        f"{row['bound']:.3g}" if "bound" in row else measure.MISSING,
      ]
      for domain in target.prompts
      for name, table in figures[domain].items()
      for way, row in table.items()
    ],
  )


LONG = 256
"""Tokens of a long continuation."""


def long(quick: bool) -> Iterator[dict[str, Any]]:
  """Time long continuations off the domain, with the length that adapts and without a drafter."""
  sizes = QUICK if quick else GEMMA
  sizes = sizes._replace(foreign=1)
  target = random_target(sizes) if quick else gemma_target(sizes)
  eagle, _ = trained_drafter(target, sizes, quick)
  tokens = 2 * sizes.tokens if quick else LONG
  adaptive = timed(eagle, target.model, target.variables, target.prompts[DOMAINS[0]][0])
  figures: dict[str, Any] = {"tokens": tokens}
  lines = []
  domains = DOMAINS[:1] if quick else DOMAINS[1:]
  for (name, sampling), domain in itertools.product(SAMPLINGS.items(), domains):
    row = compared(target, {PLAIN: None, ADAPTIVE: adaptive}, domain, sampling, tokens)[ADAPTIVE]
    figures.setdefault(domain, {})[name] = row
    passes, ratio = f"{row['tokens_per_pass']:.3g}", f"{row['speed_ratio']:.3g}x"
    lines.append([f"{domain}, {name}", passes, ratio])
    yield figures
  title = f"{tokens} new tokens off the domain, {ADAPTIVE}, {device()}"
  measure.show_rows(title, ("", "tokens a pass", "ratio"), lines)


def trained_drafter(
  target: Target, sizes: SpeculationSizes, quick: bool
) -> tuple[Eagle, dict[str, Any]]:
  """The drafter, and its figures on held-out rows; an interrupted training goes on."""
  model, variables = target.model, target.variables
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary) if quick else gemma.CACHE
    # How many tokens are drafted does not matter to the training.
    settings = dataclasses.replace(sizes.settings, length=1)
    mark = f"{model_mark(variables).sum():.6e}"
    identity = f"{settings} {sizes[1:4]} {mark}"
    work = folder / f"eagle-bench-{model.head.vocab}"
    count = len(target.tokens) // sizes.width
    rows = target.tokens[: count * sizes.width].reshape(count, sizes.width)
    with open_work(work, identity), ProgressBars() as bars:
      file, record = work / "drafter.safetensors", work / "held_out.json"
      if record.is_file():
        eagle = load_eagle(file, model, variables)
        eagle = dataclasses.replace(eagle, length=sizes.settings.length)
        return eagle, json.loads(record.read_text())
      counts = np.bincount(target.tokens, minlength=model.head.vocab)
      rows = np.concatenate(
        (written_rows(work, target, rows, sizes), spread_rows(rows, sizes.positions))
      )
      given = rows, counts, sizes.settings, bars, measure.log
      eagle, held_out = drafter_of_rows(work, model, variables, *given)
      save_eagle(file, eagle, variables)
      record.write_text(json.dumps(held_out))
      return eagle, held_out


WRITERS = 64
"""Rows that the model writes at a time."""


def written_rows(
  work: pathlib.Path, target: Target, rows: Int[np.ndarray, "N T"], sizes: SpeculationSizes
) -> Int[np.ndarray, "W T"]:
  """Beginnings of stories, and how the model goes on: what it will be asked to verify."""
  begin = rows[np.linspace(0, len(rows) - 1, sizes.written).astype(int), : sizes.prompt].tolist()
  written = []
  for first in range(0, sizes.written, WRITERS):
    file = work / f"written-{first}.npy"
    if not file.is_file():
      prompts = begin[first : first + WRITERS]
      sampling = GREEDY if 2 * first < sizes.written else Sampling()
      given = target.model, target.variables, prompts, jax.random.key(first), sampling
      result = generate(*given, max_tokens=sizes.width - sizes.prompt, log_probs=False)
      np.save(file, np.concatenate((prompts, result.tokens), axis=1).astype(np.int32))
    written.append(np.load(file))
  return np.concatenate(written)


def candidates(target: Target, eagle: Eagle, sizes: SpeculationSizes) -> dict[str, Candidate]:
  """The drafter with each head, and the model's early exit, by name."""
  model, variables = target.model, target.variables
  rows = model.apply(variables, method=_rows)
  vocab, dim = rows.shape
  hidden = training_hidden_states(target, sizes)
  second = hidden.T.astype(np.float64) @ hidden / len(hidden)
  # As far as there are fewer states than dimensions.
  second += 1e-3 * np.trace(second) / dim * np.eye(dim)
  low_rank = low_rank_rows(rows, second, np.bincount(target.tokens, minlength=vocab), sizes.rank)
  dense, own = DenseHead(vocab, dim, softcap=model.head.softcap), {"params": {"weight": rows}}
  centred = np.asarray(rows - rows.mean(axis=0), np.float32)
  order = assign.bisected(centred, sizes.clusters, metric=second)
  routed, start = RoutedHead.from_dense(dense, own, order, sizes.clusters, sizes.budget)
  measure.log("the routed head has its clusters")
  likely = likely_tokens(dense, own, hidden)
  batch = min(512, len(hidden))
  trained_routes = train_routes(routed, start, hidden, likely, key=jax.random.key(0), batch=batch)
  size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
  with_head = functools.partial(dataclasses.replace, eagle, tokens=None)
  frequent = {"head": eagle.head, "variables": eagle.variables, "tokens": eagle.tokens}
  early = EarlyExit(sizes.blocks, **frequent, length=sizes.settings.length)
  blocks = size(variables["params"]["blocks"][: sizes.blocks])
  routed_rows = sizes.clusters + sizes.budget * -(-vocab // sizes.clusters)
  return {
    FREQUENT: Candidate(eagle, size(eagle.params) + 4 * len(eagle.tokens) * dim),
    "low rank": Candidate(
      with_head(head=LowRankHead(vocab, dim, sizes.rank), variables=low_rank),
      size(eagle.params) + 4 * sizes.rank * (vocab + dim),
    ),
    "routed": Candidate(
      with_head(head=routed, variables=trained_routes), size(eagle.params) + 4 * routed_rows * dim
    ),
    "whole": Candidate(with_head(head=None, variables=None), size(eagle.params) + 4 * vocab * dim),
    "early exit": Candidate(early, blocks + 4 * len(eagle.tokens) * dim),
  }


def training_hidden_states(target: Target, sizes: SpeculationSizes) -> Float[np.ndarray, "N D"]:
  """Hidden states of the model on its training tokens, from all parts of them."""
  count = len(target.tokens) // sizes.width
  rows = target.tokens[: count * sizes.width].reshape(count, sizes.width)
  length = jnp.array([sizes.width])
  states = jax.jit(
    lambda own, row: prefill(target.model, own, row, length, 1, all_positions=True)[0][0]
  )
  chosen = spread_rows(rows, sizes.states)
  found = [np.asarray(states(target.variables, row[None])) for row in chosen]
  return np.concatenate(found)[: sizes.states]


def low_rank_rows(
  rows: Float[Array, "V D"],
  second: Float[np.ndarray, "D D"],
  counts: Int[np.ndarray, "V"],
  rank: int,
) -> Variables:
  """Rows of a rank whose scores err least, weighted by the roots of counts, where states are.

  The mean row is left out, which changes all scores alike.
  """
  weight = np.sqrt(counts + 1.0)
  rows = np.asarray(rows, np.float64)
  rows = rows - weight @ rows / weight.sum()
  values, vectors = np.linalg.eigh(second)
  root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
  turned = rows @ root
  directions = np.linalg.eigh((turned * weight[:, None]).T @ turned)[1][:, ::-1][:, :rank]
  pair = {"weight": turned @ directions, "down": directions.T @ inverse}
  return {"params": {name: jnp.asarray(x, jnp.float32) for name, x in pair.items()}}


def compared(
  target: Target,
  ways: dict[str, Drafter | None],
  domain: str,
  sampling: Sampling,
  tokens: int,
  is_compiled: bool = False,
) -> dict[str, dict[str, float]]:
  """Speed without a drafter and with each, in turn; `is_compiled` after an earlier domain.

  A row has the median of the ratios of all prompts and the least one, and the part of the tokens
  that are those without a drafter, up to the first that differs; draws are expected to differ.
  """
  times: dict[str, list[list[float]]] = {name: [] for name in ways}
  cpu: dict[str, list[float]] = {name: [] for name in ways}
  passes = dict.fromkeys(ways, 0)
  equal = dict.fromkeys(ways, 0)
  prompts = target.prompts[domain]
  for number, prompt in enumerate(prompts):
    plain = None
    for each in times.values():
      each.append([])
    for round_, name in itertools.product(range(ROUNDS + 1), ways):
      # Compiled; the length that adapts may be another one with each prompt, and so the program.
      if round_ == 0 and (number or is_compiled) and name != ADAPTIVE:
        continue
      # The other heads are timed once.
      if 0 < round_ < ROUNDS and name not in (PLAIN, ADAPTIVE, FREQUENT):
        continue
      if name == ADAPTIVE:
        measure.log(f"{domain}, prompt {number}: round {round_} of {ROUNDS}")
      start, busy = time.perf_counter(), time.process_time()
      result = generate(
        *(target.model, target.variables, [prompt], jax.random.key(7), sampling),
        max_tokens=tokens,
        log_probs=False,
        drafter=ways[name],
      )
      if round_ == 0:
        continue
      times[name][-1].append(time.perf_counter() - start)
      cpu[name].append(time.process_time() - busy)
      plain = result.tokens[0] if name == PLAIN else plain
      if round_ == ROUNDS:
        passes[name] += tokens if ways[name] is None else int(result.passes[0])
        equal[name] += int(np.cumprod(result.tokens[0] == plain).sum())
  best = {name: [statistics.median(one) for one in each] for name, each in times.items()}
  ratios = {name: [a / b for a, b in zip(best[PLAIN], each)] for name, each in best.items()}
  return {
    name: {
      "tokens_per_pass": tokens * len(prompts) / passes[name],
      "tokens_per_second": tokens * len(prompts) / sum(seconds),
      "speed_ratio": statistics.median(ratios[name]),
      "least_ratio": min(ratios[name]),
      "equal_tokens": equal[name] / (tokens * len(prompts)),
      "cpu_ratio": statistics.mean(cpu[PLAIN]) / max(1e-9, statistics.mean(cpu[name])),
    }
    for name, seconds in best.items()
  }


def read_bytes(target: Target) -> int:
  """Bytes of the weights that a pass of the model reads: its blocks and its head."""
  params = target.variables["params"]
  return sum(x.nbytes for x in jax.tree.leaves(params["blocks"])) + table_bytes(target)


def table_bytes(target: Target) -> int:
  """Bytes of the rows of the model's head."""
  return target.model.head.vocab * target.model.dim * 4


def _rows(model):
  return model.head.linear()[0].all()


TABLE = "sum of the head's rows"
"""It reads memory and does hardly anything else: the bandwidth is the bytes over the time."""


def round_seconds(target: Target, found: dict[str, Candidate], length: int) -> dict[str, float]:
  """Seconds of the parts of a greedy round."""
  prompt = jnp.array([next(iter(target.prompts.values()))[0]])
  longest, step = jnp.array([prompt.shape[1]]), jnp.zeros(1, jnp.int32)
  model, variables = target.model, target.variables

  def body(positions):
    slots = prompt.shape[1] + length + 1
    rings = jax.jit(lambda v: prefill(model, v, 0 * prompt, longest, slots, length)[1])(variables)
    tokens = jnp.zeros((1, positions), jnp.int32)
    call = lambda variables, rings: extend(model, variables, rings, tokens, longest, step)
    return call, (variables, rings)

  best = lambda head, hidden: head.top_k(hidden, 1)

  def of_model(positions):
    call = lambda variables, hidden: model.apply(
      variables, hidden, method=lambda m, x: best(m.head, x)
    )
    return call, (variables, jnp.ones((1, positions, model.dim)))

  def of_head(head: Head, own):
    call = lambda own, hidden: head.apply(own, hidden, method=best)
    return call, (own, jnp.ones((1, model.dim)))

  programs = {
    "a token": body(1),
    "its head": of_model(1),
    f"{length + 1} positions": body(length + 1),
    "their head": of_model(length + 1),
    TABLE: (lambda rows: rows.sum(), (model.apply(variables, method=_rows),)),
  }
  for name, (drafter, _) in found.items():
    if drafter.head is not None:
      programs[f"draft head, {name}"] = of_head(drafter.head, drafter.variables)
  seconds = {name: one.seconds for name, one in measure.compare(programs, rounds=3).items()}
  token = seconds["a token"] + seconds["its head"]
  measure.show_rows(
    f"parts of a greedy round, batch 1, float32, {device()}",
    ("", "ms", "of a token"),
    [[name, f"{1e3 * each:.4g}", f"{each / token:.3g}"] for name, each in seconds.items()],
  )
  return seconds


def gemma_target(sizes: SpeculationSizes) -> Target:
  """Gemma 3 270M, the stories, and prompts of all domains."""
  model, variables, tokenizer = checkpoints.load(gemma.weights())
  stories = Stories()
  tokens = [token for text in stories.documents("train") for token in tokenizer.encode(text)]
  prompts = {}
  for domain in DOMAINS:
    documents = stories.documents("test") if domain == "stories" else texts.documents(domain)
    encoded = (list(tokenizer.encode(text[:2000])) for text in documents)
    long = (row[: sizes.prompt] for row in encoded if len(row) >= sizes.prompt)
    wanted = sizes.prompts if domain == DOMAINS[0] else sizes.foreign
    prompts[domain] = list(itertools.islice(long, wanted))
  return Target(model, unstacked(variables), np.array(tokens, np.int32), prompts)


def run_target(sizes: SpeculationSizes, quick: bool) -> Target:
  """A decoder that is trained on docstrings and kept in the cache, and prompts of three domains."""
  fields = list(LONGER)
  if quick:
    fields = ["model.layers=2", "model.dim=16", "train.steps=2", "train.warmup=1"]
  experiment = override(load_config(CONFIG), fields)
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary) if quick else gemma.CACHE / "speculation-run"
    fit(experiment, folder)
    model, variables, tokenizer = load_model(str(folder), str(CONFIG), fields)
  encoded = lambda texts: (list(tokenizer.encode(text)) for text in texts)
  of = experiment.data.documents
  texts_of = {"docstrings": of("test")}
  if not quick:  # these need data
    texts_of |= {"stories": Stories().documents("test"), "wikipedia": texts.documents("wikipedia")}
  prompts = {}
  for number, (domain, documents) in enumerate(texts_of.items()):
    long = (row[: sizes.prompt] for row in encoded(documents) if len(row) >= 2 * sizes.prompt)
    prompts[domain] = list(itertools.islice(long, sizes.foreign if number else sizes.prompts))
  tokens = np.array([token for row in encoded(of("train")) for token in row], np.int32)
  return Target(model, unstacked(variables), tokens, prompts)


def random_target(sizes: SpeculationSizes) -> Target:
  """A small decoder and tokens, both random."""
  model, one = llama_decoder(QUICK_DECODER), jnp.zeros((1, 1), jnp.int32)
  init = jax.jit(functools.partial(model.init, method="loss_terms"))
  variables = init(jax.random.key(0), one, one)
  tokens = np.random.default_rng(0).integers(0, model.head.vocab, 97)
  prompts = {DOMAINS[0]: [tokens[: sizes.prompt].tolist()]}
  return Target(model, unstacked(variables), tokens.astype(np.int32), prompts)
