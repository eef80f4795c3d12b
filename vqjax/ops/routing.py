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

from vqjax.ops import groups, softmax, tiles
from vqjax.ops.row_factory import RowFactory, as_row_factory
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
  # A row of a one-hot matrix for each choice would be [*B, m, C]; a scatter has no such array.
  flat = cluster_Bm.reshape(-1, budget)
  row_N1 = jnp.arange(flat.shape[0])[:, None]
  chosen_NC = jnp.zeros((flat.shape[0], centroids.shape[0]), bool).at[row_N1, flat].set(True)
  return Routes(score_BC, cluster_Bm, chosen_NC.reshape(score_BC.shape))


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


def cluster_log_masses(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"] | RowFactory,
  order: Int[Array, "V"],
  clusters: int,
  bias: Float[Array, "V"] | None = None,
  *,
  softcap: float | None = None,
) -> Float[Array, "*B C"]:
  """Log of the sum of exp(score) over the tokens of each cluster: what centroids are trained for.

  Args:
    hidden: the vectors.
    weight: one row for each token.
    order: the tokens, cluster after cluster.
    clusters: number of clusters, C.
    bias: a score of each token.
    softcap: largest absolute score.
  """
  weight = as_row_factory(weight)
  scoring = tiles.Scoring(jnp.promote_types(hidden.dtype, weight.dtype), softcap)

  def mass(cluster):
    token_S, present_S = tokens_of(order, clusters, cluster)
    product_SB = softmax.rows_scores(weight.select(lambda x: x[token_S]), hidden, scoring.dtype)
    own = None if bias is None else bias[token_S]
    score_SB = softmax.finished_rows(scoring, product_SB, own)
    present_SB = present_S.reshape(-1, *[1] * (hidden.ndim - 1))
    return jax.nn.logsumexp(jnp.where(present_SB, score_SB, -jnp.inf), axis=0)

  return jnp.moveaxis(lax.map(mass, jnp.arange(clusters, dtype=jnp.int32)), 0, -1)


def routing_loss(
  centroids: Float[Array, "C D"],
  hidden: Float[Array, "N D"],
  log_mass: Float[Array, "N C"],
  log_size: Float[Array, "C"] | float,
) -> Float[Array, ""]:
  """Mean divergence of the clusters' distribution from that of the centroids, in nats.

  With the wanted masses P_c = exp(log_mass_c) / Z and Q of the centroids, exp(h · k_c + log_size_c),
  it is KL(P ‖ Q / sum of Q), plus half the square of log (sum of Q) - log Z. The first term makes the
  clusters of the highest mass the chosen ones; the second puts the scores of centroids on the scale
  of those of rows, beside which they stand in one softmax.
  """
  score_NC = softmax.linear_scores(hidden, centroids) + log_size
  log_z_N, log_q_N = (jax.nn.logsumexp(x, axis=-1) for x in (log_mass, score_NC))
  log_p_NC = log_mass - log_z_N[:, None]
  p_NC = jnp.exp(log_p_NC)
  ratio_NC = log_p_NC - (score_NC - log_q_N[:, None])
  divergence_N = jnp.where(p_NC > 0, p_NC * ratio_NC, 0.0).sum(axis=-1)
  return (divergence_N + 0.5 * (log_q_N - log_z_N) ** 2).mean()
