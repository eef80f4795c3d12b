"""The adaptive softmax head, which scores rare tokens with narrower vectors."""

# The rows of the softmaxes, with cutoffs (a, b), factor f and V tokens:
#
#   head    [a + 2, D]         | token 0 ... token a - 1 | cluster 0 | cluster 1 |
#   tail_0  [b - a, D / f]     | token a ... token b - 1 |    scores of down_0 · hidden
#   tail_1  [V - b, D / f²]    | token b ... token V - 1 |    scores of down_1 · hidden
#
#   log p(v) = head(v)                                  before the first cutoff
#   log p(v) = head(cluster i) + tail_i(v - first)      in cluster i
#
# The loss scores a tail for the tokens in it alone (`cluster_log_prob`). Blocks of all tokens need
# log Z of every softmax, a pass each, before their scores are log-probabilities; the blocks of head
# and tails then follow one another as those of one vocabulary (`concatenate_blocks`).
#
# On a mesh the rows of each softmax are split, so that each is padded by itself: `parts` has a bias
# for each, "head_padding", "tail_0_padding", ..., or None where nothing is padded.

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vqjax.assign.blocks import zipf_counts
from vqjax.assign.rows import code_means
from vqjax.assign.text import TextStats
from vqjax.heads.base import Arrays, Head
from vqjax.ops import linear_decoding, sampling, softmax, vocab_parallel
from vqjax.ops.adaptive import Section, cluster_log_prob, concatenate_blocks
from vqjax.ops.scores import ScoreOptions
from vqjax.ops.vocab_parallel import Replicated, Sharded
from vqjax.variables import Declaration, Initializer, Variable, row_init

__all__ = ["AdaptiveHead"]


SHARES = 0.8, 0.9
"""Parts of a text before the cutoffs: 20,000 and 80,000 of 267,735 words, as in the source."""


class Cluster(NamedTuple):
  """A cluster of rare tokens, [first, first + rows), and the width of its rows."""

  first: int
  rows: int
  width: int


class AdaptiveHead(Head):
  """p(v) for frequent tokens, p(cluster i) · p(v | cluster i) for the others.

  One softmax holds the tokens before the first cutoff and a row for each cluster. Cluster i, from
  cutoff i to the next, has a softmax of its own over vectors of width D // factor^(i+1). Tokens
  must be in order of falling frequency; the rows of a cluster are scored only for the tokens in it.
  The distribution and the shapes are those of
  `torch.nn.AdaptiveLogSoftmaxWithLoss(div_value=factor, head_bias=False)`. Source: Grave et al.
  2017, Efficient softmax approximation for GPUs, Section 4.

  Attributes:
    cutoffs: the first token of each cluster, ascending; None: those before which 80 and 90 % of a
      text are, under Zipf's law.
    factor: ratio of the widths of consecutive clusters.
    head_init: initialiser of the [cutoff + clusters, D] weight of the first softmax.
    down_init: initialiser of the [width, D] projections.
    tail_init: initialiser of the [rows, width] weights of the clusters.
  """

  cutoffs: tuple[int, ...] | None = None
  factor: int = 4
  head_init: Initializer = row_init
  down_init: Initializer = row_init
  tail_init: Initializer = row_init

  def declare(self) -> Declaration:
    """The first softmax's weight, and each cluster's projection and weight."""
    clusters, dtype = self.clusters(), self.param_dtype
    rows, axes = self._cutoffs[0] + len(clusters), ("vocab", "table_embed")
    declared = {"head": Variable((rows, self.dim), axes, self.head_init, dtype, pad_value=0)}
    for i, cluster in enumerate(clusters):
      shape = cluster.width, self.dim
      declared[f"down_{i}"] = Variable(shape, ("rank", "embed"), self.down_init, dtype)
    for i, cluster in enumerate(clusters):
      shape = cluster.rows, cluster.width
      declared[f"tail_{i}"] = Variable(shape, axes, self.tail_init, dtype, pad_value=0)
    return declared

  def flops_per_token(self) -> int:
    """The operations of a token in the most expensive cluster.

    The projections of all clusters count for every token.
    """
    clusters = self.clusters()
    rows = self._cutoffs[0] + len(clusters) + sum(cluster.width for cluster in clusters)
    return 2 * (self.dim * rows + max(cluster.rows * cluster.width for cluster in clusters))

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """The cutoffs after 80 and 90 % of the text, and contexts as rows of the first softmax."""
    found = {"cutoffs": frequent_cutoffs(text.counts, self.dim, self.factor)}
    rows, cutoffs = text.contexts(self.dim), self.cutoffs or found["cutoffs"]
    if rows is not None:
      where = np.searchsorted(cutoffs, np.arange(self.vocab), side="right")
      means = code_means(rows, text.counts + 1.0, where, len(cutoffs) + 1)
      found["head_init"] = np.concatenate([rows[: cutoffs[0]], means[1:]])
    return found

  @property
  def _cutoffs(self) -> tuple[int, ...]:
    if self.cutoffs is not None:
      return self.cutoffs
    return frequent_cutoffs(zipf_counts(self.vocab), self.dim, self.factor)

  def clusters(self) -> tuple[Cluster, ...]:
    """The clusters of rare tokens, from the fields alone.

    Raises:
      ValueError: there is no cutoff, the cutoffs do not ascend or are outside (0, V), or `factor`
        is below 1 or leaves a cluster of width 0.
    """
    ends = (*self._cutoffs, self.vocab)
    if not self._cutoffs or any(a >= b for a, b in zip((0, *ends), ends)):
      raise ValueError(
        f"`cutoffs` must ascend inside of (0, {self.vocab}); got {tuple(self._cutoffs)}. Give the"
        " first token of each cluster, such as (20000, 80000) for 267735 tokens."
      )
    if self.factor < 1:
      raise ValueError(f"`factor` must be at least 1; got {self.factor}. 4 is usual.")
    widths = [self.dim // self.factor ** (i + 1) for i in range(len(self._cutoffs))]
    if not widths[-1]:
      raise ValueError(
        f"`factor` must leave each cluster a width; got {self.factor}, which leaves width 0 of dim"
        f" {self.dim} to cluster {widths.index(0)}. Lower it or give fewer cutoffs."
      )
    return tuple(Cluster(a, b - a, w) for a, b, w in zip(ends, ends[1:], widths))

  def _project(self, arrays, hidden, cluster):
    """down · hidden of a cluster, in float32."""
    dtype = self._operand_dtype(hidden, arrays["head"])
    return softmax.linear_scores(hidden, arrays[f"down_{cluster}"], dtype=dtype)

  def _log_prob(self, arrays, hidden, token, temperature, counted):
    """Log-probabilities; a cluster's rows are scored for the tokens in it alone."""
    # At another temperature the mass of a cluster is a sum over its tokens: all are scored.
    if temperature != 1:
      return super()._log_prob(arrays, hidden, token, temperature, counted)
    options = {"dtype": self._operand_dtype(hidden, arrays["head"]), "vocab_axis": self.vocab_axis}
    # 0 for a token of the first softmax, i + 1 for one of cluster i.
    where = jnp.searchsorted(jnp.asarray(self._cutoffs), token, side="right")
    # The row of cluster i is the i-th behind the tokens of the first softmax.
    row = jnp.where(where == 0, token, self._cutoffs[0] - 1 + where).astype(jnp.int32)
    padding = arrays["head_padding"]
    log_prob = softmax.linear_log_prob(
      hidden, arrays["head"], row, padding, mask=counted, **options
    )
    for i, cluster in enumerate(self.clusters()):
      inside = where == i + 1
      log_prob += cluster_log_prob(
        self._project(arrays, hidden, i),
        arrays[f"tail_{i}"],
        # 0 for a token of elsewhere, whose result is 0 whatever its index is.
        jnp.where(inside, token - cluster.first, 0),
        inside,
        arrays[f"tail_{i}_padding"],
        **options,
      )
    return log_prob

  def parts(self) -> dict[str, Sharded | Replicated]:
    """The variables, and a bias of -inf for the padding of each softmax."""
    parts = super().parts()
    for name in ("head", *(f"tail_{i}" for i in range(len(self._cutoffs)))):
      count = parts[name].rows.shape[0]
      bias = vocab_parallel.bias_of_padding(None, count, self.vocab_axis)
      parts[f"{name}_padding"] = Sharded(bias, -jnp.inf)
    return parts

  def _scores(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The log-probabilities, first of the first softmax and then of each cluster."""
    dtype, axis = self._operand_dtype(hidden, arrays["head"]), self.vocab_axis
    head, first, clusters = arrays["head"], self._cutoffs[0], self.clusters()
    options = ScoreOptions(dtype=dtype, vocab_axis=axis)

    def blocks(hidden, name, rows, above):
      """Blocks of hidden · weightᵀ - above, over `rows` rows on all devices."""
      found = linear_decoding.linear_blocks(hidden, arrays[name], None, rows, options)
      return found.map(lambda scores, _: scores - above)

    def log_z(hidden, name):
      weight = arrays[name]
      rows, padding = vocab_parallel.rows_in_all(axis, len(weight)), arrays[f"{name}_padding"]
      return sampling.log_z(linear_decoding.linear_blocks(hidden, weight, padding, rows, options))

    # The rows of the clusters are scored apart: they are no tokens, and `blocks` leaves them out.
    cluster_rows = vocab_parallel.sharded_lookup(head, first + jnp.arange(len(clusters)), axis)
    cluster_scores = softmax.linear_scores(hidden, cluster_rows, dtype=dtype)
    log_z_head = log_z(hidden, "head")
    sections = [Section(blocks(hidden, "head", first, log_z_head), 0)]
    for i, cluster in enumerate(clusters):
      # log p(v) = score - log_z(tail) + (cluster_score - log_z(head)).
      narrow, name = self._project(arrays, hidden, i), f"tail_{i}"
      above = log_z(narrow, name) + log_z_head - cluster_scores[..., i]
      sections.append(Section(blocks(narrow, name, cluster.rows, above), cluster.first))
    return concatenate_blocks(tuple(sections))


def frequent_cutoffs(counts: Int[np.ndarray, "V"], dim: int, factor: int) -> tuple[int, ...]:
  """The cutoffs after 80 and 90 % of the text; one where two leave no width or no token."""
  mass = np.cumsum(counts) / counts.sum()
  found = np.clip(np.searchsorted(mass, SHARES) + 1, 1, max(1, len(counts) - 1))
  kept = found if dim // max(1, factor) ** 2 else found[:1]
  return tuple(np.unique(kept).tolist())
