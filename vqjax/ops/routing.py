"""A softmax over clusters of the vocabulary, of which the best few are scored row by row.

Cluster c has a centroid k_c. The m clusters of the highest mass are chosen for a hidden vector h, and

  score(v) = h · w_v + b_v where the cluster of v is chosen, h · k_c(v) + b_v elsewhere,

whose softmax is a distribution over all tokens. The mass of a cluster that is not chosen is
exp(h · k_c) times the sum of exp(b_v) over its tokens: without a bias, the number of its tokens, among
which it is spread evenly. So the normaliser takes the scores of all centroids and m clusters of rows.
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


def routes(
  hidden: Float[Array, "*B D"],
  centroids: Float[Array, "C D"],
  log_size: Float[Array, "C"],
  budget: int,
  dtype: Dtype | None = None,
) -> Routes:
  """The `budget` clusters of the highest mass, h · centroid + log_size; the first of equal ones.

  Args:
    hidden: the vectors.
    centroids: one row for each cluster.
    log_size: log sum of exp(bias) over the tokens of each cluster; log of their number without one.
    budget: number of clusters to choose.
    dtype: dtype of the product's operands; None: the promoted dtype of both.
  """
  score_BC = softmax.linear_scores(hidden, centroids, dtype=dtype)
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
    clusters: number of clusters, C.
    cluster: the clusters.
  """
  starts = groups.group_starts(order.shape[0], clusters)
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
  log_z: Float[Array, "N"],
) -> Float[Array, ""]:
  """Mean divergence of the clusters of likely tokens from those of the centroids, in nats.

  With Q_c = exp(h · centroid_c + log_size_c) it is the cross entropy of Q / sum of Q under the
  clusters of the given tokens, whose probabilities are scaled to the sum 1, plus half the square of
  log (sum of Q) - log_z. The first term makes the clusters of likely tokens the chosen ones. The
  second puts the scores of centroids on the scale of those of rows, beside which they stand in one
  softmax.

  Args:
    centroids: one row for each cluster.
    hidden: hidden states.
    log_size: as in `routes`.
    cluster: clusters of likely tokens of each state.
    log_prob: log-probabilities of these tokens under the dense head, in nats.
    log_z: log-normalisers of the dense head.
  """
  score_NC = softmax.linear_scores(hidden, centroids) + log_size
  log_q_N = jax.nn.logsumexp(score_NC, axis=-1)
  p_Nk = jax.nn.softmax(log_prob)
  wanted_N = (p_Nk * jnp.take_along_axis(score_NC, cluster, axis=-1)).sum(axis=-1)
  return (log_q_N - wanted_N + 0.5 * (log_q_N - log_z) ** 2).mean()
