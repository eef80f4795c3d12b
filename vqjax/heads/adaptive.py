"""What does the adaptive softmax look like: frequent tokens at full width, rare ones in tails?"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Integer

from vqjax.heads.base import Head, bytes_of, row_init
from vqjax.ops import sampling, softmax, vocab_parallel
from vqjax.ops.adaptive import Section, cluster_log_prob, concatenate_blocks
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype, Size


class TailShape(NamedTuple):
  """Which tokens a tail holds, [first, first + rows), and the width of what scores them."""

  first: int
  rows: int
  width: int


class AdaptiveHead(Head):
  """p(v) for the first tokens, p(tail i) · p(v | tail i) for the others.

  One softmax holds the tokens before the first cutoff and a row for each tail. Tail i, from cutoff
  i to the next, has a softmax of its own over vectors of width D // factor^(i+1). Tokens are in
  order of falling frequency, and only those in a tail pay for it. The distribution and the shapes
  are those of `torch.nn.AdaptiveLogSoftmaxWithLoss(div_value=factor, head_bias=False)`. Source:
  Grave et al. 2017, Efficient softmax approximation for GPUs, Section 4.

  Attributes:
    cutoffs: the first token of each tail, ascending.
    factor: by how much each tail is narrower than the one before it.
    head_init: initialiser of the [cutoff + tails, D] weight of the first softmax.
    down_init: initialiser of the [width, D] projections.
    tail_init: initialiser of the [rows, width] weights of the tails.
    dtype: dtype of the matrix products' operands; None: that of hidden and weights together.
    param_dtype: dtype of the parameters.
  """

  cutoffs: tuple[int, ...]
  factor: int = 4
  head_init: nn.initializers.Initializer = row_init
  down_init: nn.initializers.Initializer = row_init
  tail_init: nn.initializers.Initializer = row_init
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def setup(self):
    shapes = self.tails()
    new = lambda name, init, *shape: self.param(name, init, shape, self.param_dtype)
    self.head = new("head", self.head_init, self.cutoffs[0] + len(shapes), self.dim)
    self.down = [
      new(f"down_{i}", self.down_init, tail.width, self.dim) for i, tail in enumerate(shapes)
    ]
    self.tail = [
      new(f"tail_{i}", self.tail_init, tail.rows, tail.width) for i, tail in enumerate(shapes)
    ]

  def tails(self) -> tuple[TailShape, ...]:
    """The tails' shapes, from the fields alone.

    Raises:
      ValueError: cutoffs that are none, do not ascend, or are outside (0, V); a factor below 1 or
        one that leaves a tail no width.
    """
    ends = (*self.cutoffs, self.vocab)
    if not self.cutoffs or any(a >= b for a, b in zip((0, *ends), ends)):
      raise ValueError(
        f"cutoffs {tuple(self.cutoffs)} do not ascend inside of (0, {self.vocab}); give the first"
        " token of each tail, as (20000, 80000) for 267735 tokens"
      )
    if self.factor < 1:
      raise ValueError(f"factor {self.factor} is below 1; 4 is usual")
    widths = [self.dim // self.factor ** (i + 1) for i in range(len(self.cutoffs))]
    if not widths[-1]:
      raise ValueError(
        f"factor {self.factor} leaves width 0 of dim {self.dim} to tail {widths.index(0)}; lower it"
        " or give fewer cutoffs"
      )
    return tuple(TailShape(a, b - a, w) for a, b, w in zip(ends, ends[1:], widths))

  def _dtype(self, hidden):
    return self.dtype or jnp.promote_types(hidden.dtype, self.head.dtype)

  def _narrow(self, hidden, i):
    """down_i · hidden, float32."""
    return softmax.linear_scores(hidden, self.down[i], dtype=self._dtype(hidden))

  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Log-probabilities of all tokens, which are logits that need no normaliser."""
    self._check_hidden(hidden)
    dtype, first = self._dtype(hidden), self.cutoffs[0]
    log_head = jax.nn.log_softmax(softmax.linear_scores(hidden, self.head, dtype=dtype))
    found = [log_head[..., :first]]
    for i, weight in enumerate(self.tail):
      scores = softmax.linear_scores(self._narrow(hidden, i), weight, dtype=dtype)
      found.append(log_head[..., first + i, None] + jax.nn.log_softmax(scores))
    return jnp.concatenate(found, axis=-1)

  def log_prob(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats; nan for a token outside [0, V).

    Besides a projection, a tail costs nothing to tokens that are not in it.
    """
    self._check_hidden(hidden)
    known, token = in_vocabulary(tokens, self.vocab)

    def body(rows, hidden, token):
      (head, head_bias), *tails = _pairs(rows)
      options = {"dtype": self._dtype(hidden), "vocab_axis": self.vocab_axis}
      # 0 for a token of the first softmax, i + 1 for one of tail i.
      where = jnp.searchsorted(jnp.asarray(self.cutoffs), token, side="right")
      row = jnp.where(where == 0, token, self.cutoffs[0] - 1 + where).astype(jnp.int32)
      log_prob = softmax.linear_log_prob(hidden, head, row, head_bias, **options)
      for i, ((weight, removed), shape) in enumerate(zip(tails, self.tails(), strict=True)):
        inside = where == i + 1
        place = jnp.where(inside, token - shape.first, 0)
        log_prob += cluster_log_prob(
          self._narrow(hidden, i), weight, place, inside, removed, **options
        )
      return log_prob

    return jnp.where(known, self._over_vocabulary(body, hidden, token), jnp.nan)

  def _rows(self) -> tuple[vocab_parallel.Sharded, ...]:
    """The weight of each softmax, each followed by what removes the rows that fill it up."""
    found = []
    for weight in (self.head, *self.tail):
      removed = vocab_parallel.bias_of_padding(None, weight.shape[0], self.vocab_axis)
      found += [vocab_parallel.Sharded(weight, 0), vocab_parallel.Sharded(removed, -jnp.inf)]
    return tuple(found)

  def _blocks(self, rows: tuple, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The log-probabilities, the first softmax's and then each tail's."""
    self._check_hidden(hidden)
    (head, head_bias), *tails = _pairs(rows)
    first, shapes = self.cutoffs[0], self.tails()
    own = vocab_parallel.sharded_lookup(
      head, first + jnp.arange(len(shapes)), vocab_parallel.inside(self.vocab_axis)
    )
    of_tails = softmax.linear_scores(hidden, own, dtype=self._dtype(hidden))
    log_z = self._log_z(hidden, head, head_bias)
    sections = [Section(self._section(hidden, head, first, log_z), 0)]
    for i, ((weight, removed), shape) in enumerate(zip(tails, shapes, strict=True)):
      narrow = self._narrow(hidden, i)
      above = self._log_z(narrow, weight, removed) + log_z - of_tails[..., i]
      sections.append(Section(self._section(narrow, weight, shape.rows, above), shape.first))
    return concatenate_blocks(tuple(sections))

  def _log_z(self, hidden, weight, removed):
    tokens = jnp.zeros(hidden.shape[:-1], jnp.int32)
    options = {"dtype": self._dtype(hidden), "vocab_axis": self.vocab_axis}
    return softmax.linear_softmax(hidden, weight, tokens, removed, **options).log_z

  def _section(self, hidden, weight, tokens, above_B):
    """Blocks of hidden · weightᵀ - above, of so many tokens in all."""
    batch = hidden.shape[:-1]
    scores = lambda row_W: (
      softmax.linear_scores(hidden, weight[row_W], dtype=self._dtype(hidden)) - above_B[..., None]
    )
    return sampling.row_blocks(batch, weight.shape[0], tokens, scores, self.vocab_axis)

  def size(self) -> Size:
    """D·(first cutoff + tails) parameters and width·(D + rows) for each tail.

    Operations are those of a token in the tail that costs most; others pay for the projections.
    """
    shapes = self.tails()
    head = self.dim * (self.cutoffs[0] + len(shapes))
    down = self.dim * sum(tail.width for tail in shapes)
    scored = [tail.rows * tail.width for tail in shapes]
    params = head + down + sum(scored)
    return Size(params, bytes_of(params, self.param_dtype), 2 * (head + down + max(scored)))

  def logical_axes(self) -> dict:
    """Axes of the weights and of the projections."""
    count = len(self.cutoffs)
    axes = {"head": ("vocab", "table_embed")}
    axes |= {f"down_{i}": ("rank", "embed") for i in range(count)}
    axes |= {f"tail_{i}": ("vocab", "table_embed") for i in range(count)}
    return {"params": axes}


def _pairs(rows):
  return list(zip(rows[::2], rows[1::2], strict=True))
