"""Benchmark of decoding steps against the plain product with the weight."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from experiments.bench import measure
from experiments.bench.measure import Call, Timed, compare
from vqjax import (
  CodebookHead,
  DenseHead,
  GroupedHead,
  Head,
  ProductHead,
  assign,
  linear_sample,
  linear_top_k,
)
from vqjax.lab.training.provenance import device

PLAIN = "plain product"
"""The fastest product of XLA's with a weight [V, D]; of one row also its arg max."""
TRANSPOSED = "hidden @ weight.T"
"""The product as it is usually written."""


class DecodingSizes(NamedTuple):
  """Sizes of the heads.

  Attributes:
    vocab: number of tokens.
    dim: width of the hidden vectors.
    codes: codes of the codebook.
    product: codes and subspaces of the product head.
    best: number of best tokens.
    rounds: rounds of calls.
  """

  vocab: int
  dim: int
  codes: int = 1024
  product: tuple[int, int] = (256, 128)
  best: int = 50
  rounds: int = 5


LLAMA = DecodingSizes(128_256, 4096)
WIKITEXT = DecodingSizes(267_735, 768, product=(256, 96))
QUICK = DecodingSizes(509, 16, codes=16, product=(16, 4), best=3, rounds=1)
BATCHES = 1, 16, 64


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Time top-k and samples of each head at several batches, float32."""
  figures: dict[str, Any] = {}
  for sizes in (QUICK,) if quick else (LLAMA, WIKITEXT):
    name = f"D={sizes.dim} V={sizes.vocab}"
    figures[name] = {"sizes": sizes._asdict()}
    heads = heads_of(sizes)
    variables = {
      n: jax.jit(head.init)(jax.random.key(1), jnp.zeros((1, sizes.dim)))
      for n, head in heads.items()
    }
    for rows in (3,) if quick else BATCHES:
      timed = compare(programs(heads, variables, rows, sizes.best), sizes.rounds)
      figures[name][f"batch {rows}"] = _shown(f"batch {rows}, {name}", timed)
      yield figures


def heads_of(sizes: DecodingSizes) -> dict[str, Head]:
  """The heads; codes are random, as those of neighbours are after clustering."""
  vocab, dim = sizes.vocab, sizes.dim
  codes, subspaces = sizes.product
  return {
    "dense": DenseHead(vocab, dim),
    f"codebook K={sizes.codes} + bias": CodebookHead(
      vocab, dim, sizes.codes, assign.Random(), token_bias=True
    ),
    f"product K={codes} M={subspaces}": ProductHead(vocab, dim, codes, subspaces),
    "grouped": GroupedHead(vocab, dim),
  }


def programs(
  heads: dict[str, Head], variables: dict[str, Any], rows: int, best: int
) -> dict[str, Call]:
  """A decoding step of each head, and the product that is the least of a dense one."""
  dim = heads["dense"].dim
  hidden, key = jax.random.normal(jax.random.key(0), (rows, dim)), jax.random.key(1)
  weight = variables["dense"]["params"]["weight"]
  found: dict[str, Call] = {
    PLAIN: (_plain, (weight, hidden)),
    TRANSPOSED: (lambda weight, hidden: hidden @ weight.T, (weight, hidden)),
    "linear_top_k": (lambda h, w: linear_top_k(h, w, best), (hidden, weight)),
    "linear_sample": (lambda h, k, w: linear_sample(h, k, w), (hidden, key, weight)),
  }
  for name, head in heads.items():
    found[f"{name}: top 1"] = _top(head, 1), (variables[name], hidden)
    found[f"{name}: top {best}"] = _top(head, best), (variables[name], hidden)
    found[f"{name}: sample"] = _sample(head), (variables[name], hidden, key)
  return found


def _top(head: Head, k: int) -> Callable:
  return lambda variables, hidden: head.apply(variables, hidden, k, method="top_k")


def _sample(head: Head) -> Callable:
  return lambda variables, hidden, key: head.apply(variables, hidden, key, method="sample")


def _plain(weight, hidden):
  # Of one row `hidden @ weight.T` may be many times slower than this product of a vector.
  if hidden.shape[0] == 1:
    return jnp.argmax(weight @ hidden[0])
  return lax.dot_general(weight, hidden, (((1,), (1,)), ((), ())))


def _shown(title: str, timed: dict[str, Timed]) -> dict[str, Any]:
  """Print and return milliseconds, and times relative to the plain product."""
  rows = {
    name: {
      "seconds": one.seconds,
      "time_ratio": one.seconds / timed[PLAIN].seconds,
      "times_faster_than_dense": _dense(name, timed).seconds / one.seconds,
      "temp_bytes": one.temp_bytes,
    }
    for name, one in timed.items()
  }
  measure.show_rows(
    f"a decoding step, {title} float32, {device()}",
    ("", "ms", "of the plain product", "times faster than dense", "temp MiB"),
    [
      [
        name,
        f"{row['seconds'] * 1e3:.4g}",
        f"{row['time_ratio']:.3g}",
        f"{row['times_faster_than_dense']:.3g}x",
        measure.mib(row["temp_bytes"]),
      ]
      for name, row in rows.items()
    ],
  )
  return rows


def _dense(name: str, timed: dict[str, Timed]) -> Timed:
  """The dense head's same step; the plain product for what is not a head's step."""
  step = name.partition(": ")[2]
  return timed[f"dense: {step}" if step else PLAIN]
