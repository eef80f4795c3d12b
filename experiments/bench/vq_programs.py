"""Which programs does the speed bench of VQ-Logits compare, and on which arrays?"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from experiments.bench.losses import Shape
from experiments.bench.timing import Program
from vqjax import (
  AdaptiveHead,
  CodebookHead,
  DenseHead,
  GroupedHead,
  Head,
  LowRankHead,
  ProductHead,
  assign,
)

FULL = "full, in slices"
TILED = "full, tiled"
GATHER = "gather, in slices"
SLICE_SCORES = 2**28
"""Scores, 1 GiB of them, that a slice of tokens may have."""


class Sizes(NamedTuple):
  """What the heads are made of.

  Attributes:
    shape: tokens of a batch, width, vocabulary.
    codes: of the codebooks, the first of which is also gathered.
    cutoffs: of the adaptive softmax.
    rank: of the low-rank head.
    product: codes and subspaces of the product head.
    batches: rows of a decoding step.
    best: how many of the best tokens are asked for.
  """

  shape: Shape
  codes: tuple[int, ...]
  cutoffs: tuple[int, ...]
  rank: int
  product: tuple[int, int]
  batches: tuple[int, ...]
  best: tuple[int, ...]


class Contender(NamedTuple):
  """A head and how its log-probabilities are computed.

  Attributes:
    head: whose variables are used.
    log_prob: (variables, hidden, tokens) -> [N].
    sliced: whether it makes all scores of its tokens, so that it takes some tokens at a time.
  """

  head: Head
  log_prob: Callable
  sliced: bool = False


def contenders(sizes: Sizes) -> dict[str, Contender]:
  """The rows of Table 3, with the baselines of Table 1.

  The codes are random: as with clusters, neighbours in the vocabulary have different ones.
  """
  vocab, dim = sizes.shape.vocab, sizes.shape.dim
  dense = DenseHead(vocab, dim)
  codebooks = {k: CodebookHead(vocab, dim, k, assign.Random()) for k in sizes.codes}
  return {
    FULL: Contender(dense, _materialised, sliced=True),
    TILED: _own(dense),
    GATHER: Contender(codebooks[sizes.codes[0]], _gathered, sliced=True),
    **{codebook_name(k): _own(head) for k, head in codebooks.items()},
    "adaptive": _own(AdaptiveHead(vocab, dim, sizes.cutoffs)),
    f"low rank {sizes.rank}": _own(LowRankHead(vocab, dim, sizes.rank)),
  }


def codebook_name(codes: int) -> str:
  """What tables call a codebook whose normaliser is computed over its codes."""
  return f"codebook K={codes}"


def decoders(sizes: Sizes) -> dict[str, Head]:
  """The heads whose decoding is timed, the dense one first."""
  vocab, dim = sizes.shape.vocab, sizes.shape.dim
  codes, (sub_codes, subspaces) = sizes.codes[0], sizes.product
  codebook = lambda bias: CodebookHead(vocab, dim, codes, assign.Random(), token_bias=bias)
  return {
    "dense": DenseHead(vocab, dim),
    codebook_name(codes): codebook(False),
    f"{codebook_name(codes)} + bias": codebook(True),
    "adaptive": AdaptiveHead(vocab, dim, sizes.cutoffs),
    f"low rank {sizes.rank}": LowRankHead(vocab, dim, sizes.rank),
    f"product K={sub_codes} M={subspaces}": ProductHead(vocab, dim, sub_codes, subspaces),
    "grouped": GroupedHead(vocab, dim),
  }


def variables_of(heads: list[Head]) -> dict[Head, dict]:
  """Fresh variables of each head; equal heads share theirs."""
  start = lambda head: jax.jit(head.init)(jax.random.key(1), jnp.zeros((1, head.dim)))
  return {head: start(head) for head in dict.fromkeys(heads)}


def batch(shape: Shape) -> tuple[jax.Array, jax.Array]:
  """Hidden vectors, and tokens by Zipf's law: token v as often as 1 / (v + 1)."""
  share = 1 / np.arange(1, shape.vocab + 1)
  tokens = np.random.default_rng(0).choice(shape.vocab, shape.tokens, p=share / share.sum())
  hidden = jax.random.normal(jax.random.key(0), (shape.tokens, shape.dim))
  return hidden, jnp.asarray(tokens, jnp.int32)


def slice_of(tokens: int, vocab: int) -> int:
  """The largest divisor of the tokens whose scores are at most `SLICE_SCORES`.

  Raises:
    ValueError: that is below half of what would fit, so that slices would be slow.
  """
  most = min(tokens, max(1, SLICE_SCORES // vocab))
  size = next(size for size in range(most, 0, -1) if tokens % size == 0)
  if 2 * size < most:
    raise ValueError(
      f"{tokens} tokens are cut into slices of {size} where {most} fit; give a power of two"
    )
  return size


def forward(one: Contender, variables: dict, hidden: jax.Array, tokens: jax.Array) -> Program:
  """Log-probabilities of the tokens."""
  size = slice_of(len(tokens), one.head.vocab)

  def in_slices(variables, hidden, tokens):
    part = lambda both: one.log_prob(variables, *both)
    return lax.map(part, _parts(size, hidden, tokens)).reshape(-1)

  return in_slices if one.sliced else one.log_prob, (variables, hidden, tokens)


def training(one: Contender, variables: dict, hidden: jax.Array, tokens: jax.Array) -> Program:
  """The mean loss, and its gradient in parameters and hidden vectors.

  Slices keep their scores for their backward pass, as if all were kept at once; what they cost
  more is the sum of their gradients.
  """
  size = slice_of(len(tokens), one.head.vocab) if one.sliced else len(tokens)
  params = variables["params"]
  tables = {name: tree for name, tree in variables.items() if name != "params"}

  def loss(params, hidden, tables, some):
    return -one.log_prob({"params": params, **tables}, hidden, some).sum() / len(tokens)

  gradient = jax.value_and_grad(loss, argnums=(0, 1))

  def in_slices(params, hidden, tables, tokens):
    def add(carry, both):
      part, (d_params, d_hidden) = gradient(params, both[0], tables, both[1])
      return jax.tree.map(jnp.add, carry, (part, d_params)), d_hidden

    start = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    (total, d_params), d_hidden = lax.scan(add, start, _parts(size, hidden, tokens))
    return total, (d_params, d_hidden.reshape(hidden.shape))

  return in_slices if one.sliced else gradient, (params, hidden, tables, tokens)


def decoding(head: Head, variables: dict, rows: int, ks: tuple[int, ...]) -> dict[str, Program]:
  """One step for so many rows, by name: a draw at temperature 1, and the best k."""
  hidden = jax.random.normal(jax.random.key(0), (rows, head.dim))
  draw = lambda v, h, key: head.apply(v, h, key, method="sample")
  best = lambda k: lambda v, h: head.apply(v, h, k, method="top_k")
  return {
    "sample": (draw, (variables, hidden, jax.random.key(1))),
    **{f"top {k}": (best(k), (variables, hidden)) for k in ks},
  }


def weight_bytes(head: Head) -> int:
  """Bytes of the parameters in 16 bits, as in Table 3."""
  return 2 * head.size().params


def table_bytes(head: Head) -> int:
  """Bytes of what is stored beside the parameters: tables of codes."""
  return head.size().state_bytes - 4 * head.size().params


def _own(head):
  return Contender(head, lambda v, h, t: head.apply(v, h, t, method="log_prob"))


def _materialised(variables, hidden, tokens):
  """The full softmax that everybody writes first."""
  return _picked(hidden @ variables["params"]["weight"].T, tokens)


def _gathered(variables, hidden, tokens):
  """Eq. 2-5 as they stand: K scores, gathered to V logits, and their softmax."""
  scores_NK = hidden @ variables["params"]["codebook"].T
  table_V = variables["codes"]["assignment"]
  return _picked(jnp.take(scores_NK, table_V, axis=1, mode="clip"), tokens)


def _picked(logits, tokens):
  return -optax.softmax_cross_entropy_with_integer_labels(logits, tokens)


def _parts(size, *arrays):
  return tuple(x.reshape(math.ceil(len(x) / size), size, *x.shape[1:]) for x in arrays)
