"""A softmax over clusters of the vocabulary, of which the best few are scored row by row.

Cluster c has a centroid k_c and the log-size n_c, log sum of exp(b_v) over its tokens v: without a
bias, log of their number. For a hidden vector h the clusters have the distribution

  p(c) = softmax(h · k_c + n_c),

and the m likeliest are chosen. Their mass together is divided by the scores of rows, that of
another cluster by the biases:

  p(v) = p(chosen) · exp(h · w_v + b_v) / (sum of it over all chosen tokens)   in a chosen cluster,
  p(v) = p(c) · exp(b_v - n_c)                                                 in another cluster c.

So centroids need not be on the scale of rows. This is the softmax of the scores of rows as they
are, and of h · k_c + b_v + shift elsewhere, where the shift gives the chosen centroids the mass of
the chosen rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from vqjax.ops import groups, softmax
from vqjax.types import Dtype

__all__ = []


class Routes(NamedTuple):
  """The clusters that hidden vectors choose.

  Attributes:
    scores: h · centroid of every cluster, float32.
    clusters: the chosen clusters, those of the highest mass first.
    is_chosen: whether a cluster is among them.
  """

  scores: Float[Array, "*B C"]
  clusters: Int[Array, "*B m"]
  is_chosen: Bool[Array, "*B C"]

  def beside(self, log_rows: Float[Array, "*B"], log_size: Float[Array, "C"]) -> "Routes":
    """The routes with scores on the scale of rows, whose chosen ones have this log-mass."""
    # One shift for all chosen centroids keeps their scores' differences, and sets their mass.
    chosen_BC = jnp.where(self.is_chosen, self.scores + log_size, -jnp.inf)
    shift_B = log_rows - jax.nn.logsumexp(chosen_BC, axis=-1)
    return self._replace(scores=self.scores + shift_B[..., None])


def routes(
  hidden: Float[Array, "*B D"],
  centroids: Float[Array, "C D"],
  log_size: Float[Array, "C"],
  budget: int,
  dtype: Dtype | None = None,
) -> Routes:
  """The `budget` clusters of the highest mass, h · centroid + log_size; the first of equal ones.

  Args:
    log_size: log sum of exp(bias) over the tokens of each cluster; log of their number without one.
    dtype: dtype of the product's operands; None: the promoted dtype of both.
  """
  score_BC = softmax.linear_scores(hidden, centroids, dtype=dtype)
  # The choice has no gradient; the scores of what is chosen have one.
  _, cluster_Bm = lax.top_k(lax.stop_gradient(score_BC + log_size), budget)
  put = lambda index_m: jnp.zeros(centroids.shape[0], bool).at[index_m].set(True)
  for _ in hidden.shape[:-1]:
    put = jax.vmap(put)
  return Routes(score_BC, cluster_Bm, put(cluster_Bm))


def tokens_of(
  order: Int[Array, "V"], clusters: int, cluster: Int[Array, "*B"]
) -> tuple[Int[Array, "*B S"], Bool[Array, "*B S"]]:
  """The tokens of some clusters, and which are real: clusters may differ in size by one token.

  Args:
    order: the tokens, cluster after cluster; the clusters are those of `groups.group_starts`.
  """
  starts = groups.group_starts(order.shape[0], clusters)
  # As many slots as the largest cluster has: `starts` is NumPy's, so that the number is static.
  slot_S = jnp.arange(np.diff(starts).max(), dtype=jnp.int32)
  start_C = jnp.asarray(starts, jnp.int32)
  position_BS = start_C[cluster][..., None] + slot_S
  present_BS = position_BS < start_C[cluster + 1][..., None]
  return order[jnp.where(present_BS, position_BS, 0)], present_BS


def routing_loss(
  centroids: Float[Array, "C D"],
  hidden: Float[Array, "N D"],
  log_size: Float[Array, "C"],
  cluster: Int[Array, "N k"],
  log_prob: Float[Array, "N k"],
) -> Float[Array, ""]:
  """Mean cross entropy of the clusters' distribution under likely tokens, in nats.

  Up to a constant it is the divergence of p(c) from the probabilities of the clusters under the
  dense head, as far as the given tokens tell: theirs are scaled to the sum 1.

  Args:
    cluster: clusters of likely tokens of each state.
    log_prob: log-probabilities of these tokens under the dense head, in nats.
  """
  score_NC = softmax.linear_scores(hidden, centroids) + log_size
  own_Nk = jnp.take_along_axis(score_NC, cluster, axis=-1)
  wanted_N = (jax.nn.softmax(log_prob) * own_Nk).sum(axis=-1)
  return (jax.nn.logsumexp(score_NC, axis=-1) - wanted_N).mean()
