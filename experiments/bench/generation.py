"""Benchmark of generation against its bare decoding step, called token by token."""

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from experiments.bench import measure
from vqjax import DenseEmbedding, DenseHead
from vqjax.lab.training.provenance import device
from vqjax.lm.generation import GREEDY, generate, unstacked
from vqjax.lm.generation.kv_cache import Variables, decode, prefill
from vqjax.lm.models import MLP, Attention, RMSNorm, Rotary, Transformer


class GenerationSizes(NamedTuple):
  """Sizes of the decoder and of the generated text."""

  vocab: int
  dim: int
  inner: int
  layers: int
  tokens: int
  rounds: int


DECODER = GenerationSizes(vocab=32_003, dim=640, inner=2048, layers=12, tokens=64, rounds=5)
QUICK = GenerationSizes(vocab=97, dim=16, inner=32, layers=2, tokens=9, rounds=1)
PROMPT = list(range(1, 17))


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Time greedy generation, prompts included, and as many calls of a step without anything else."""
  sizes = QUICK if quick else DECODER
  model = llama_decoder(sizes)
  tokens = jnp.zeros((1, len(PROMPT)), jnp.int32)
  init = functools.partial(model.init, method="loss_terms")
  variables = unstacked(jax.jit(init)(jax.random.key(0), tokens, tokens))
  figures: dict[str, Any] = {"sizes": sizes._asdict()}
  for batch in (3,) if quick else (1, 8):
    ways = {
      "bare step": lambda batch=batch: bare(model, variables, PROMPT, batch, sizes.tokens)[0],
      "generate": functools.partial(library, model, variables, batch, sizes.tokens),
      "generate, without log-probabilities": functools.partial(
        library, model, variables, batch, sizes.tokens, log_probs=False
      ),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(sizes.rounds + 1):
      for name, way in ways.items():
        seconds = way()
        if number:  # the first round compiles
          times[name].append(seconds)
    medians = {name: statistics.median(each) for name, each in times.items()}
    figures[f"batch {batch}"] = {
      name: {
        "tokens_per_second": batch * sizes.tokens / seconds,
        "speed_ratio": medians["bare step"] / seconds,
      }
      for name, seconds in medians.items()
    }
    measure.show_rows(
      f"greedy generation, batch {batch}, float32, {device()}",
      ("", "tokens/s", "of the bare step"),
      [
        [name, f"{row['tokens_per_second']:.4g}", f"{row['speed_ratio']:.3g}x"]
        for name, row in figures[f"batch {batch}"].items()
      ],
    )
    yield figures


def llama_decoder(sizes: GenerationSizes) -> Transformer:
  """A decoder of the kind of Llama, with the width and the blocks of Gemma 3 270M."""
  embedding = DenseEmbedding(sizes.vocab, sizes.dim)
  return Transformer(
    *(embedding, DenseHead(sizes.vocab, sizes.dim, embedding=embedding), sizes.dim),
    layers=sizes.layers,
    heads=4,
    context=512,
    norm=RMSNorm(),
    attention=Attention(kv_heads=1, qkv_bias=False, out_bias=False),
    mlp=MLP(sizes.inner, gated=True, use_bias=False),
    rotary=Rotary(),
  )


def library(
  model: Transformer, variables: Variables, batch: int, tokens: int, log_probs: bool = True
) -> float:
  """Seconds of a call of `generate`."""
  prompts = [PROMPT] * batch
  start = time.perf_counter()
  generate(
    *(model, variables, prompts, jax.random.key(0), GREEDY), max_tokens=tokens, log_probs=log_probs
  )
  return time.perf_counter() - start


def bare(
  model: Transformer, variables: Variables, prompt: list[int], batch: int, tokens: int
) -> tuple[float, list[int]]:
  """Seconds of a pass over copies of a prompt and of `tokens` - 1 steps, and the last row."""
  prompts, length = jnp.array([prompt] * batch), jnp.full(batch, len(prompt))
  start = time.perf_counter()
  token, rings = _first(variables, prompts, length, model=model, capacity=len(prompt) + tokens)
  found = [token]
  for step in range(tokens - 1):
    token, rings = _next(variables, rings, token, length, jnp.int32(step), model=model)
    found.append(token)
  jax.block_until_ready(token)
  return time.perf_counter() - start, [int(token[-1]) for token in found]


@functools.partial(jax.jit, static_argnames=("model", "capacity"))
def _first(variables, tokens, length, *, model, capacity):
  hidden, rings = prefill(model, variables, tokens, length, capacity)
  return _best(variables, hidden), rings


@functools.partial(jax.jit, static_argnames="model", donate_argnames="rings")
def _next(variables, rings, token, length, step, *, model):
  hidden, rings = decode(model, variables, rings, token, length, step)
  return _best(variables, hidden), rings


def _best(variables, hidden):
  # The product that reads the table along its rows, as in the benchmark of decoding.
  table = variables["params"]["embedding"]["weight"]
  if len(hidden) == 1:
    return jnp.argmax(table @ hidden[0])[None]
  return jnp.argmax(lax.dot_general(table, hidden, (((1,), (1,)), ((), ()))), axis=0)
