"""Second moments of a decoder over text, by which errors of its tables are weighed."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from vqjax.convert.trained_variables import Variables
from vqjax.embeddings import DenseEmbedding
from vqjax.lm.generation import generate, unstacked
from vqjax.lm.models import Transformer
from vqjax.outputs import atomic_file
from vqjax.tables.moments import Moments

__all__ = ["SEED", "collect", "memory_counts", "own_text", "zipf_counts"]

ROWS = 64
"""Texts that a model writes side by side."""

HIDDEN_TOKENS = 2**14
"""Hidden states of which H is the mean."""

EXPECTED_TOKENS = 2**12
"""Hidden states of which the predicted distributions are counted."""

FISHER_TOKENS = 2**10
"""Input vectors of which F is the mean."""

SEED = 0
"""Seed of the tokens that are drawn for F."""

EVERY = 30.0
"""Seconds after which the sums so far are kept."""


@dataclasses.dataclass
class _Sums:
  hidden: np.ndarray
  inputs: np.ndarray
  expected: np.ndarray
  done: int = 0
  hidden_tokens: int = 0
  input_tokens: int = 0
  expected_tokens: int = 0


def collect(
  model: Transformer,
  variables: Variables,
  windows: Sequence[Int[np.ndarray, "T"]],
  counts: np.ndarray,
  *,
  hidden_tokens: int = HIDDEN_TOKENS,
  expected_tokens: int = EXPECTED_TOKENS,
  fisher_tokens: int = FISHER_TOKENS,
  cache: str | os.PathLike | None = None,
  progress: Callable[[float], None] = lambda part: None,
  seed: int = SEED,
) -> Moments:
  """The moments of a decoder over windows of tokens, all of one length.

  Half of the mass of the counts is that of the text, half that of the distributions that the model
  predicts in it, which know tokens that happen not to occur.

  Args:
    model: the decoder.
    variables: its variables.
    windows: rows of tokens of one length, in an order that mixes the texts.
    counts: occurrences of each token in all texts, [V].
    hidden_tokens: number of hidden states for H.
    expected_tokens: number of predicted distributions.
    fisher_tokens: number of input vectors for F.
    cache: file that keeps the sums of an interrupted call, for the next one. It is left: remove it
      when the moments are saved.
    progress: is called with the part that is done.
    seed: seed of the tokens that are drawn for F.
  """
  dim, vocab = model.dim, model.head.vocab
  sums = _Sums(np.zeros((dim, dim)), np.zeros((dim, dim)), np.zeros(vocab))
  if cache is not None and os.path.exists(cache):
    with np.load(cache) as file:
      sums = _Sums(**{name: _number(file[name]) for name in file.files})
  saved = time.monotonic()
  needed = min(len(windows), -(-hidden_tokens // max(1, len(windows[0]) - 1)))
  while sums.done < needed:
    window = jnp.asarray(windows[sums.done])[None]
    hidden = _hidden(variables, window, model=model)[0, 1:]
    sums.hidden += np.asarray(hidden.T @ hidden, np.float64)
    sums.hidden_tokens += len(hidden)
    # Chosen evenly among the windows, so that no text is left out.
    if sums.expected_tokens * needed < expected_tokens * sums.done + 1:
      sums.expected += np.asarray(_expected(variables, hidden, model=model), np.float64)
      sums.expected_tokens += len(hidden)
    if sums.input_tokens * needed < fisher_tokens * sums.done + 1:
      key = jax.random.fold_in(jax.random.key(seed), sums.done)
      gradient = _gradient(variables, window, key, model=model)[0, 1:]
      sums.inputs += np.asarray(gradient.T @ gradient, np.float64)
      sums.input_tokens += len(gradient)
    sums.done += 1
    progress(sums.done / needed)
    if cache is not None and time.monotonic() - saved > EVERY:
      saved = time.monotonic()
      _keep(pathlib.Path(cache), sums)
  counts = np.asarray(counts, np.float64)
  expected = sums.expected * (counts.sum() / max(1, sums.expected_tokens))
  return Moments(
    hidden=sums.hidden / max(1, sums.hidden_tokens),
    counts=(counts + expected) / 2,
    tokens=sums.hidden_tokens,
    inputs=sums.inputs / max(1, sums.input_tokens),
  )


def memory_counts(
  model: Transformer,
  variables: Variables,
  windows: Sequence[Int[np.ndarray, "T"]],
  counts: np.ndarray,
  *,
  number: int = 0,
  seed: int = SEED,
) -> Float[np.ndarray, "R"]:
  """The counts of the rows of a memory's table, weighed by what an error of their head costs.

  The weight of a head is the mean of g · g, of the gradients g of the log-probability of tokens
  that the model draws by the vectors that the head reads. The mean weight is 1. Heads of pairs
  often cost several times what heads of triples do.

  Args:
    model: the decoder.
    variables: its variables, with the memory's table in any form.
    windows: rows of tokens of one length.
    counts: how often a text reads each row, of `vqjax.ops.ngrams.count_rows`.
    number: number of the memory in `model.memories`.
    seed: seed of the tokens that are drawn.

  Raises:
    ValueError: there is no such memory or no window, or the counts are of another table.
  """
  if not 0 <= number < len(model.memories) or not len(windows):
    raise ValueError(
      f"`number` must be that of one of {len(model.memories)} memories, with windows of tokens; got"
      f" {number} and {len(windows)} windows. 0 is the first."
    )
  lookup = model.memories[number].lookup
  sizes = lookup.ngrams.sizes
  if np.shape(counts) not in {(sum(sizes),), (lookup.table.vocab,)}:
    raise ValueError(
      f"`counts` must have a number for each of {sum(sizes)} rows; got shape {np.shape(counts)}."
      " Count with the hash of this memory."
    )
  total = np.zeros(len(sizes))
  for i, window in enumerate(windows):
    key = jax.random.fold_in(jax.random.key(seed), i)
    total += _squares(variables, jnp.asarray(window)[None], key, model=model, number=number)
  # Rows behind those of the hash are not read.
  weight = np.repeat(total / total.mean(), sizes)
  return counts * np.pad(weight, (0, len(counts) - len(weight)))


def zipf_counts(vocab: int) -> np.ndarray:
  """Counts by rank, [V], for tokenizers whose ids fall with frequency: in 1 / (id + 2.7).

  Source: Mandelbrot, An informational theory of the statistical structure of language, 1953.
  """
  return np.rint(2**24 / (np.arange(vocab) + 2.7)).astype(np.int64)


def own_text(
  model: Transformer,
  variables: Variables,
  begin: Sequence[int],
  count: int,
  length: int,
  *,
  tokenizer: Any = None,
  seed: int = SEED,
  progress: Callable[[float], None] = lambda part: None,
) -> Int[np.ndarray, "N T"]:
  """Windows of text that a model writes itself, at temperature 1.

  Args:
    model: the decoder.
    variables: its variables.
    begin: tokens that begin every text; without any, a text begins with a token drawn by rank.
    count: tokens in all, about.
    length: tokens of a window.
    tokenizer: rows of the table for which it has no token are not drawn.
    seed: seed of the draws.
    progress: is called with the part that is done.
  """
  rng = np.random.default_rng(seed)
  share = zipf_counts(model.head.vocab)
  windows = -(-count // length)
  rows, flat, found = min(ROWS, windows), unstacked(variables), []
  for first in range(0, windows, rows):
    drawn = rng.choice(len(share), size=(rows, 1), p=share / share.sum())
    prompts = [list(begin) or [int(token)] for (token,) in drawn]
    made = generate(
      model,
      flat,
      prompts,
      jax.random.fold_in(jax.random.key(seed), first),
      max_tokens=length - len(prompts[0]),
      stop=(),
      tokenizer=tokenizer,
      log_probs=False,
    )
    found.append(np.concatenate([np.asarray(prompts), made.tokens], axis=1))
    progress(min(1.0, (first + rows) / windows))
  return np.concatenate(found)[:windows].astype(np.int32)


def _number(value):
  return value if value.ndim else int(value)


def _keep(path, sums):
  with atomic_file(path) as file:
    np.savez(file, **dataclasses.asdict(sums))


@functools.partial(jax.jit, static_argnames="model")
def _hidden(variables, tokens_BT, *, model):
  return model.apply(variables, tokens_BT, method="hidden").astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="model")
def _expected(variables, hidden_ND, *, model):
  """Sum of the predicted distributions, a few tokens at a time, so that no [N, V] exists."""
  size = max(1, min(32, len(hidden_ND)))
  hidden = jnp.pad(hidden_ND, ((0, -len(hidden_ND) % size), (0, 0))).reshape(-1, size, model.dim)
  counted = (jnp.arange(hidden.shape[0] * size) < len(hidden_ND)).reshape(-1, size)

  def add(total, tile):
    vectors, is_counted = tile
    scores = model.apply(variables, vectors, method=lambda m, h: m.head.logits(h))
    mass = jax.nn.softmax(scores.astype(jnp.float32))
    return total + is_counted.astype(jnp.float32) @ mass, None

  start = jnp.zeros(model.head.vocab, jnp.float32)
  return jax.lax.scan(add, start, (hidden, counted))[0]


@functools.partial(jax.jit, static_argnames="model")
def _gradient(variables, tokens_BT, key, *, model):
  """Gradients, by the input vectors, of the log-probability of tokens that the model draws."""
  apply = lambda method, *args: model.apply(variables, *args, method=method)
  vectors = apply(lambda m, tokens: m.embedding(tokens), tokens_BT)
  body = lambda m, vectors: m.body_of_tokens(tokens_BT, vectors, True)[0]
  hidden = apply(body, vectors)
  drawn = apply(lambda m, h, k: m.head.sample(h, k), hidden, key)

  def log_prob(vectors):
    return apply(lambda m, e: m.head.log_prob(body(m, e), drawn).sum(), vectors)

  return jax.grad(log_prob)(vectors.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class _Places:
  """In place of a hash: a row of its own for each place of a text, so that a table is a gradient.

  Attributes:
    vocab: number of tokens, V.
    order: length of the longest n-gram, n.
    sizes: number of tokens of the text, for each head.
    pad: the token before a text.
  """

  vocab: int
  order: int
  sizes: tuple[int, ...]
  pad: int

  @property
  def heads(self) -> int:
    return len(self.sizes)

  @property
  def rows(self) -> int:
    return sum(self.sizes)

  def __call__(self, tokens, previous=None):
    del previous
    shape = *tokens.shape, self.heads
    return jnp.broadcast_to(jnp.arange(self.rows).reshape(-1, self.heads), shape)


@functools.partial(jax.jit, static_argnames=("model", "number"))
def _squares(variables, tokens_BT, key, *, model, number):
  """Sum of the squared gradients of each head of a memory, by the vectors that it reads, [H]."""
  memory, name = model.memories[number], f"memories_{number}"
  of, width = memory.lookup.ngrams, memory.lookup.table.dim
  vectors = model.apply(variables, tokens_BT, method=lambda m, t: m.memories[number].lookup(t))
  places = _Places(of.vocab, of.order, (tokens_BT.shape[1],) * of.heads, of.pad)
  memories = list(model.memories)
  lookup = memory.lookup.clone(ngrams=places, table=DenseEmbedding(places.rows, width))
  memories[number] = memory.clone(lookup=lookup)
  by_place = model.clone(memories=tuple(memories))
  own = {kind: dict(tree[name]) for kind, tree in variables.items() if name in tree}
  for tree in own.values():
    tree.pop("lookup", None)
  others = dict(variables) | {kind: variables[kind] | {name: tree} for kind, tree in own.items()}

  def apply(rows, method, *args):
    given = own["params"] | {"lookup": {"table": {"weight": rows}}}
    params = others["params"] | {name: given}
    return by_place.apply(others | {"params": params}, *args, method=method)

  rows = vectors.reshape(-1, width).astype(jnp.float32)
  drawn = apply(rows, lambda m, t, k: m.head.sample(m.hidden(t), k), tokens_BT, key)
  log_prob = lambda rows: apply(rows, lambda m: m.log_prob(tokens_BT, drawn).sum())
  return jnp.square(jax.grad(log_prob)(rows)).reshape(-1, of.heads, width).sum((0, 2))
