"""Benchmarks of heads and whole models at the sizes of VQ-Logits."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from configs.vq_logits import c4, ptb, wikitext103
from experiments.bench import measure
from experiments.bench.losses import LossShape
from experiments.bench.measure import Call, Timed, compare_within
from vqjax import (
  AdaptiveHead,
  CodebookHead,
  DenseEmbedding,
  DenseHead,
  Head,
  LowRankHead,
  assign,
)
from vqjax.lab.training.provenance import device
from vqjax.lm.models import Transformer

FULL = "full, in slices"
TILED = "full, tiled"
GATHER = "gather, in slices"
SLICE_SCORES = 2**28
"""Largest number of scores of a slice of tokens: 1 GiB."""


class CodebookSizes(NamedTuple):
  """Sizes of the compared heads.

  Attributes:
    shape: tokens of a batch, width, vocabulary.
    codes: codes of the codebooks; the first is also computed by gathering.
    cutoffs: cutoffs of the adaptive softmax.
    rank: rank of the low-rank head.
  """

  shape: LossShape
  codes: tuple[int, ...]
  cutoffs: tuple[int, ...]
  rank: int


PAPER = CodebookSizes(
  shape=LossShape(16384, 768, 267_735),
  codes=(1024, 2048, 4096),
  cutoffs=(20_000, 80_000),
  rank=512,
)
"""The sizes of Table 3: 32 sequences of 512 tokens of WikiText-103."""
QUICK = CodebookSizes(LossShape(32, 16, 512), (16, 32), (40, 160), 8)
SECONDS_PER_TOKEN = 15 / 16384
"""Seconds that the calls of a program may take after the first, for each token of the batch."""


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Time log-probabilities and training, relative to a full softmax.

  At the sizes of Table 3 materialised logits would take 17.5 GB and more for their softmax, so the
  full softmax takes a slice of the tokens at a time, as the paper's gather does.
  """
  sizes = QUICK if quick else PAPER
  figures = {"sizes": sizes._asdict() | {"shape": sizes.shape._asdict()}}
  yield figures | batches(sizes, 0.0 if quick else SECONDS_PER_TOKEN * sizes.shape.tokens)


def batches(sizes: CodebookSizes, seconds: float) -> dict[str, dict]:
  """Print and return the cost of log-probabilities and of loss and gradient."""
  rows = contenders(sizes)
  variables = variables_of([one.head for one in rows.values()])
  data = batch(sizes.shape)
  of_slice = slice_of(sizes.shape.tokens, sizes.shape.vocab)
  measure.say(f"slices of {of_slice} tokens; tokens by Zipf's law; random codes; 16-bit weights")

  def table(title: str, program: Callable) -> dict[str, Timed]:
    programs = {name: program(one, variables[one.head], *data) for name, one in rows.items()}
    timed = compare_within(programs, seconds, log=measure.log)
    measure.show_rows(
      f"{title}, {sizes.shape} float32, {device()}",
      ("", "ms", "faster", "temp MiB", "weights MB", "codes MB"),
      [_cells(name, t, timed[FULL], rows[name].head) for name, t in timed.items()],
    )
    return timed

  found = table("log-probabilities (Table 3)", forward)
  differences = _differences(found, sizes)
  trained = table("loss and gradient", training_program)
  return {
    "slice": of_slice,
    "forward": _figures(found, rows),
    "differences": differences,
    "training": _figures(trained, rows),
  }


def _cells(name, timed, full, head):
  return [
    name,
    f"{timed.seconds * 1e3:.1f}",
    f"{full.seconds / timed.seconds:.3g}x",
    measure.mib(timed.temp_bytes),
    f"{weight_bytes(head) / 1e6:.2f}",
    f"{integer_bytes(head) / 1e6:.2f}",
  ]


def _figures(timed, rows):
  return {
    name: _measured(t, timed[FULL])
    | {
      "weight_bytes_16_bit": weight_bytes(rows[name].head),
      "table_bytes": integer_bytes(rows[name].head),
    }
    for name, t in timed.items()
  }


def _measured(timed: Timed, full: Timed) -> dict[str, float]:
  return {
    "seconds": timed.seconds,
    "calls": timed.calls,
    "times_faster": full.seconds / timed.seconds,
    "temp_bytes": timed.temp_bytes,
  }


def _differences(timed: dict[str, Timed], sizes: CodebookSizes) -> dict[str, float]:
  """Largest differences in nats between equal log-probabilities."""
  found = {}
  exact = codebook_name(sizes.codes[0])
  for first, second in ((FULL, TILED), (GATHER, exact)):
    off = np.abs(np.asarray(timed[first].output) - np.asarray(timed[second].output)).max()
    found[second] = float(off)
    measure.say(f"{second} is at most {off:.1e} nats off {first}")
  return found


class ScoredHead(NamedTuple):
  """A head and the computation of its log-probabilities.

  Attributes:
    head: the head that owns the variables.
    log_prob: (variables, hidden, tokens) -> [N].
    sliced: whether all scores of its tokens are in memory, so that it needs slices of tokens.
  """

  head: Head
  log_prob: Callable
  sliced: bool = False


def contenders(sizes: CodebookSizes) -> dict[str, ScoredHead]:
  """The rows of Table 3, with the baselines of Table 1.

  The codes are random: neighbours in the vocabulary have different codes, as after clustering.
  """
  vocab, dim = sizes.shape.vocab, sizes.shape.dim
  dense = DenseHead(vocab, dim)
  codebooks = {k: CodebookHead(vocab, dim, k, assign.Random()) for k in sizes.codes}
  return {
    FULL: ScoredHead(dense, _materialised, sliced=True),
    TILED: _own(dense),
    GATHER: ScoredHead(codebooks[sizes.codes[0]], _gathered, sliced=True),
    **{codebook_name(k): _own(head) for k, head in codebooks.items()},
    "adaptive": _own(AdaptiveHead(vocab, dim, sizes.cutoffs)),
    f"low rank {sizes.rank}": _own(LowRankHead(vocab, dim, sizes.rank)),
  }


def codebook_name(codes: int) -> str:
  """Label of a codebook whose normaliser is computed over its codes."""
  return f"codebook K={codes}"


class WholeModels(NamedTuple):
  """Decoders that differ in their heads.

  Attributes:
    model: the decoder with a full softmax.
    heads: the heads.
    tokens: tokens of a batch.
  """

  model: Transformer
  heads: dict[str, Head]
  tokens: int = 1024


def whole_models() -> dict[str, WholeModels]:
  """The models of Tables 1, 9 and 10 in float32, by the number of the table."""
  sizes = {
    "1": (wikitext103, (20_000, 80_000), (1024, 2048, 4096)),
    "9": (c4, (2400, 9600), (512, 1024, 2048)),
    "10": (ptb, (750, 3000), (256, 512, 1024)),
  }
  found = {}
  for table, (config, cutoffs, codes) in sizes.items():
    model = config.experiment().model
    shape = config.VOCAB, model.dim
    heads = {"full": DenseHead(*shape), "adaptive": AdaptiveHead(*shape, cutoffs)}
    if table == "1":
      heads["low-rank"] = LowRankHead(*shape, 512)
    heads |= {f"vq-{k}": CodebookHead(*shape, k, assign.Random()) for k in codes}
    small = model.clone(embedding=DenseEmbedding(*shape), head=heads["full"], dtype=jnp.float32)
    found[table] = WholeModels(small, heads)
  return found


def whole(quick: bool) -> Iterator[dict[str, Any]]:
  """Time the log-probabilities of a batch by whole models, relative to the full softmax."""
  models = whole_models()
  if quick:
    shape = 512, 16
    heads = {"full": DenseHead(*shape), "vq-16": CodebookHead(*shape, 16)}
    model = models["10"].model.clone(
      embedding=DenseEmbedding(*shape), head=heads["full"], dim=16, layers=1, heads=1, context=8
    )
    models = {"quick": WholeModels(model, heads, 32)}
  figures = {}
  for table, one in models.items():
    figures[table] = _whole(table, one, 0.0 if quick else 60.0)
    yield figures


def _whole(table: str, one: WholeModels, seconds: float) -> dict[str, dict[str, float]]:
  """Print and return parameters and times of the models of a table."""
  model = one.model
  _, tokens = batch(LossShape(one.tokens, 1, model.head.vocab))
  tokens = tokens.reshape(-1, model.context)
  shared = jax.jit(model.init)(jax.random.key(0), tokens[:1, :2])["params"]
  own = variables_of(list(one.heads.values()))
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  body = count({name: part for name, part in shared.items() if name not in ("embedding", "head")})
  programs, params = {}, {}
  for name, head in one.heads.items():
    variables = {collection: {"head": tree} for collection, tree in own[head].items()}
    variables["params"] = shared | variables["params"]
    params[name] = count(variables["params"])
    score = functools.partial(model.clone(head=head).apply, method="log_prob")
    programs[name] = score, (variables, tokens, jnp.roll(tokens, -1, axis=1))
  timed = compare_within(programs, seconds, log=measure.log)
  full = timed["full"].seconds
  found = {
    name: {
      "params": params[name],
      "head_params": one.heads[name].size().params,
      "body_params": body,
      "seconds": t.seconds,
      "calls": t.calls,
      "times_faster": full / t.seconds,
    }
    for name, t in timed.items()
  }
  measure.show_rows(
    f"whole models of Table {table}, {one.tokens} tokens, float32, {device()}",
    ("", "M parameters", "ms", "faster"),
    [
      [n, f"{f['params'] / 1e6:.2f}", f"{f['seconds'] * 1e3:.1f}", f"{f['times_faster']:.3g}x"]
      for n, f in found.items()
    ],
  )
  return found


def variables_of(heads: list[Head]) -> dict[Head, dict]:
  """Fresh variables of each head; equal heads share theirs."""
  start = lambda head: jax.jit(head.init)(jax.random.key(1), jnp.zeros((1, head.dim)))
  return {head: start(head) for head in dict.fromkeys(heads)}


def batch(shape: LossShape) -> tuple[jax.Array, jax.Array]:
  """Hidden states, and tokens by Zipf's law."""
  share = 1 / np.arange(1, shape.vocab + 1)
  tokens = np.random.default_rng(0).choice(shape.vocab, shape.tokens, p=share / share.sum())
  hidden = jax.random.normal(jax.random.key(0), (shape.tokens, shape.dim))
  return hidden, jnp.asarray(tokens, jnp.int32)


def slice_of(tokens: int, vocab: int) -> int:
  """The largest divisor of the tokens whose scores are at most `SLICE_SCORES`.

  Raises:
    ValueError: the divisor is less than half of what fits, so that slices would be slow.
  """
  most = min(tokens, max(1, SLICE_SCORES // vocab))
  size = next(size for size in range(most, 0, -1) if tokens % size == 0)
  if 2 * size < most:
    raise ValueError(
      f"`tokens` must have a divisor near {most}; got {tokens}, whose is {size}. Use a power of two"
    )
  return size


def forward(one: ScoredHead, variables: dict, hidden: jax.Array, tokens: jax.Array) -> Call:
  """The program of the tokens' log-probabilities."""
  size = slice_of(len(tokens), one.head.vocab)

  def in_slices(variables, hidden, tokens):
    part = lambda both: one.log_prob(variables, *both)
    return lax.map(part, _parts(size, hidden, tokens)).reshape(-1)

  return in_slices if one.sliced else one.log_prob, (variables, hidden, tokens)


def training_program(
  one: ScoredHead, variables: dict, hidden: jax.Array, tokens: jax.Array
) -> Call:
  """The program of the mean loss and its gradient in parameters and hidden states.

  A slice keeps its scores for its backward pass; the gradients of the slices are summed.
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


def weight_bytes(head: Head) -> int:
  """Bytes of the parameters in 16 bits, as in Table 3."""
  return 2 * head.size().params


def integer_bytes(head: Head) -> int:
  """Bytes of the integer tables."""
  return head.size().state_bytes - 4 * head.size().params


def _own(head):
  return ScoredHead(head, lambda v, h, t: head.apply(v, h, t, method="log_prob"))


def _materialised(variables, hidden, tokens):
  """Log-probabilities of the full softmax from materialised logits."""
  return _picked(hidden @ variables["params"]["weight"].T, tokens)


def _gathered(variables, hidden, tokens):
  """Log-probabilities by Eq. 2-5: K scores, gathered to V logits, and their softmax."""
  scores_NK = hidden @ variables["params"]["codebook"].T
  table_V = variables["codes"]["assignment"]
  return _picked(jnp.take(scores_NK, table_V, axis=1, mode="clip"), tokens)


def _picked(logits, tokens):
  return -optax.softmax_cross_entropy_with_integer_labels(logits, tokens)


def _parts(size, *arrays):
  return tuple(x.reshape(math.ceil(len(x) / size), size, *x.shape[1:]) for x in arrays)
