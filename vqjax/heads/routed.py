"""The dense head that scores the rows of the likeliest clusters only."""

# Of C clusters of S rows, each vector scores the rows of `budget` ones. Two ways, by `_is_few`:
#
#   few vectors    `_candidates`   rows of the chosen clusters gathered, [*B, n, D], n = budget · S
#   many vectors   `_all_routes`   blocks of all rows, -inf in what is not chosen
#
# Either way ends with `routes.beside`: scores of centroids [*B, C], shifted by one number so that
# the chosen ones together have the mass of the chosen rows. From then on every token has a score:
#
#   in a chosen cluster   exact    its row's                      by `_exact` or in a block
#   in another            spread   its cluster's, plus its bias   `_log_rest`: masses of clusters
#
#   log Z = logaddexp(logsumexp of the chosen rows, logsumexp of the rest)
#
# A draw chooses a row or a cluster of the rest, and in such a cluster a token by its bias. The k
# best are chosen rows, unless a cluster of the rest might hold a better token: then all are scored.

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from vqjax.assign.text import TextStats
from vqjax.heads.base import Arrays, Head
from vqjax.heads.dense import DenseHead, DenseRows
from vqjax.ops import codes as code_ops
from vqjax.ops import groups, linear_decoding, routing, sampling, topk, vocab_parallel
from vqjax.ops.scores import ScoreOptions, check_softcap
from vqjax.variables import Declaration, Initializer, Variable, row_init

__all__ = ["RoutedHead"]


class RoutedHead(DenseRows):
  """A dense head that scores centroids, then the rows of the best clusters.

  The vocabulary is divided into C clusters of equal size, and a softmax over scores of centroids
  gives each a probability. The probability of the `budget` likeliest clusters together is divided
  among their tokens by the scores of their rows, that of any other cluster by the biases alone,
  evenly without one (`vqjax.ops.routing`). All methods are exact for this distribution, so that a
  draft of this head can be verified. A few vectors at a time read C centroids and budget · V/C
  rows; many vectors take a pass over the whole weight.

  `from_dense` makes it of a trained head; `vqjax.convert.train_routes` fits its centroids to hidden
  states. The order is the variable `order` of the collection `codes`, and `assignment` the cluster
  of each token; neither is trained.

  Attributes:
    clusters: number of clusters, C.
    budget: number of clusters whose rows are scored, m.
    order_init: int [V], the tokens, cluster after cluster, or a function (key, shape, dtype) that
      makes it; None: in order of their ids. Clusters are consecutive and of equal size, or of one
      token fewer where C does not divide V.
    centroid_init: initialiser of the [C, D] centroids.
    softcap: largest absolute score c of a row: it is c · tanh(score / c); None: no cap.
  """

  clusters: int = dataclasses.field(kw_only=True)
  budget: int = dataclasses.field(kw_only=True)
  order_init: Initializer | None = dataclasses.field(default=None, kw_only=True)
  centroid_init: Initializer = dataclasses.field(default=row_init, kw_only=True)
  softcap: float | None = dataclasses.field(default=None, kw_only=True)

  @staticmethod
  def from_dense(
    head: Head, variables: dict[str, Any], order: ArrayLike, clusters: int, budget: int
  ) -> tuple["RoutedHead", dict[str, Any]]:
    """A routed head and variables, with a dense head's rows and their mean by cluster.

    Args:
      head: the dense head, tied or not.
      variables: its variables, with those of a tied embedding.
      order: the tokens, cluster after cluster, such as `assign.bisected(arrays, clusters)`.
      clusters: see the attribute.
      budget: see the attribute.

    Raises:
      ValueError: `head` is another head, `order` is not a permutation of its tokens, or `clusters`
        or `budget` is out of range.
    """
    if type(head) is not DenseHead:
      raise ValueError(
        f"`head` must be a DenseHead; got a {type(head).__name__}. Heads that are compressed score"
        " few numbers for each token already."
      )
    groups.check_order(order, head.vocab)
    if head.output is not None:
      raise ValueError(
        f"`output` must be None; got {head.output!r}. Route a dense head that was trained without"
        " it: a softcap is the only function of scores here."
      )
    names = {f.name for f in dataclasses.fields(RoutedHead) if f.init} - {"name", "parent"}
    own = {f.name: getattr(head, f.name) for f in dataclasses.fields(head) if f.name in names}
    made = RoutedHead(**own, clusters=clusters, budget=budget)
    made.check()
    return made, made._with_means(variables, jnp.asarray(order, jnp.int32))

  def _with_means(self, variables, order_V):
    assignment_V = self._clusters_of(order_V, (self.vocab,), jnp.int32)

    def means(self):
      of_cluster = lambda x: jax.ops.segment_sum(x, assignment_V, self.clusters)
      rows = vocab_parallel.over_vocabulary(None, self._rows, self.parts()).all()
      return of_cluster(rows.astype(jnp.float32)) / of_cluster(jnp.ones((self.vocab, 1)))

    params = {**variables.get("params", {})}
    params["centroids"] = jnp.zeros((self.clusters, self.dim), self.param_dtype)
    codes = {**variables.get("codes", {}), "order": order_V, "assignment": assignment_V}
    made = {**variables, "params": params, "codes": codes}
    params["centroids"] = self.apply(made, method=means).astype(self.param_dtype)
    return made

  def declare(self) -> Declaration:
    """The variables of the dense head, the centroids [C, D], order and clusters [V]."""
    centroids = Variable(
      (self.clusters, self.dim), ("clusters", "embed"), self.centroid_init, self.param_dtype
    )
    shape, codes = (self.vocab,), {"dtype": jnp.int32, "collection": "codes"}
    return super().declare() | {
      "centroids": centroids,
      "order": Variable(shape, ("positions",), self._checked_order, random=False, **codes),
      "assignment": Variable(
        shape, ("vocab",), self._clusters_of, source="order", pad_value=code_ops.NO_CODE, **codes
      ),
    }

  def _checked_order(self, key, shape, dtype):
    if self.order_init is None:
      return jnp.arange(self.vocab, dtype=dtype)
    order = self.order_init(key, shape, dtype)
    groups.check_order(order, self.vocab)
    return jnp.asarray(order, dtype)

  def _clusters_of(self, order, shape, dtype):
    starts = groups.group_starts(self.vocab, self.clusters)
    cluster_V, _ = groups.group_and_slot(groups.positions(order), starts)
    return cluster_V.astype(dtype)

  def check(self) -> None:
    super().check()
    if not 1 <= self.budget <= self.clusters <= self.vocab:
      raise ValueError(
        f"`budget` must be in [1, clusters] and `clusters` in [1, vocab]; got budget {self.budget},"
        f" clusters {self.clusters}, vocab {self.vocab}. 32 of 2048 are usual for 262,144 tokens."
      )
    check_softcap(self.softcap)

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """The fields of a dense head, clusters of contexts, and their means as centroids."""
    starts = groups.group_starts(self.vocab, self.clusters)
    order = text.order(np.diff(starts), self.order_init)
    if order is None:
      return super()._of_text(text)
    cluster = np.empty(self.vocab, np.int64)
    cluster[order] = np.repeat(np.arange(self.clusters), np.diff(starts))
    centroids = text.means(cluster, self.clusters, self.dim)
    return super()._of_text(text) | {"order_init": order, "centroid_init": centroids}

  def flops_per_token(self) -> int:
    """A product of width D for each centroid and each row of the chosen clusters."""
    return 2 * self.dim * (self.clusters + self._rows_scored())

  def _rows_scored(self):
    return self.budget * -(-self.vocab // self.clusters)

  def parts(self) -> dict[str, Any]:
    """The variables, with a bias that removes the rows which pad a device's part."""
    return super().parts() | {"bias": self._padded_bias("bias")}

  def _is_few(self, hidden):
    """Whether all vectors together choose fewer rows than the weight has."""
    return math.prod(hidden.shape[:-1]) * self._rows_scored() <= self.vocab

  def _log_size(self, arrays, temperature=1.0):
    """Log sum of exp(bias / temperature) over the tokens of each cluster."""
    bias = arrays["bias"]
    # The bias of padding may be there without a bias of the head: sizes are known anyway.
    if not self.use_bias:
      starts = groups.group_starts(self.vocab, self.clusters)
      return jnp.log(jnp.asarray(starts[1:] - starts[:-1], jnp.float32))
    bias = bias.astype(jnp.float32) / temperature
    return code_ops.log_mass(arrays["assignment"], self.clusters, bias, self.vocab_axis)

  def _routes(self, arrays, hidden):
    log_size_C = self._log_size(arrays)
    return routing.routes(hidden, arrays["centroids"], log_size_C, self.budget, self.dtype)

  def _exact(self, arrays, hidden, token_Bn):
    """Scores of the tokens' rows, whichever device has them."""
    # Marking an array sums its gradient over the devices.
    arrays, hidden = vocab_parallel.varying((arrays, hidden))
    weight = self._rows(arrays)
    dtype = self._operand_dtype(hidden, weight)
    axis, count = vocab_parallel.inside(self.vocab_axis), weight.count
    own_Bn = token_Bn - vocab_parallel.first_row(axis, count)
    at_Bn = jnp.clip(own_Bn, 0, count - 1)
    row_BnD = weight.at(at_Bn.reshape(-1)).reshape(*at_Bn.shape, self.dim)
    product_Bn = jnp.einsum(
      "...nd,...d->...n",
      row_BnD.astype(dtype),
      hidden.astype(dtype),
      preferred_element_type=jnp.float32,
    )
    bias = arrays["bias"]
    bias_Bn = None if bias is None else bias[at_Bn].astype(jnp.float32)
    # On a device without the row this is the score of another one, which `from_owner` leaves out.
    score_Bn = ScoreOptions(softcap=self.softcap).finish(product_Bn, bias_Bn)
    return score_Bn if axis is None else vocab_parallel.from_owner(score_Bn, own_Bn, count, axis)

  def _bias_of(self, arrays, token):
    if arrays["bias"] is None:
      return 0.0
    return vocab_parallel.sharded_lookup(
      arrays["bias"], token, self.vocab_axis, jnp.dtype(jnp.float32)
    )

  def _candidates(self, arrays, hidden, in_turn=False):
    """The routes, and scores and tokens [*B, n] of the rows of the chosen clusters.

    Slots that a smaller cluster lacks score -inf. `in_turn` scores one vector after another where
    that is faster: not for gradients, since each step would add to one of the whole weight.
    """
    routes = self._routes(arrays, hidden)
    token_BmS, present_BmS = routing.tokens_of(arrays["order"], self.clusters, routes.clusters)
    flat = lambda x: lax.collapse(x, x.ndim - 2)
    token_Bn = flat(token_BmS)
    score = lambda given: self._exact(arrays, *given)
    if in_turn and vocab_parallel.platform() == "cpu" and not vocab_parallel.axis_types():
      # The rows of one vector stay in a cache; those of all would be written and read again. A map
      # for each axis of the batch, since `lax.map` takes one.
      for _ in hidden.shape[:-1]:
        score = functools.partial(lax.map, score)
    score_Bn = jnp.where(flat(present_BmS), score((hidden, token_Bn)), -jnp.inf)
    log_rows_B = jax.nn.logsumexp(score_Bn, axis=-1)
    return routes.beside(log_rows_B, self._log_size(arrays)), score_Bn, token_Bn

  def _all_routes(self, arrays, hidden):
    """The routes of many vectors, whose chosen rows are found among all rows."""
    routes = self._routes(arrays, hidden)
    arrays, hidden = vocab_parallel.varying((arrays, hidden))
    is_chosen_CB = jnp.moveaxis(routes.is_chosen, -1, 0)

    def of_chosen(score_WB, token_W):
      return jnp.where(is_chosen_CB[self._cluster_of(arrays, token_W)], score_WB, -jnp.inf)

    chosen = self._row_blocks(arrays, hidden).map(of_chosen)
    return routes.beside(sampling.log_z(chosen), self._log_size(arrays))

  def _log_rest(self, arrays, routes, temperature):
    """Log-masses of the clusters that are not chosen; -inf for the others."""
    log_mass_BC = routes.scores / temperature + self._log_size(arrays, temperature)
    return jnp.where(routes.is_chosen, -jnp.inf, log_mass_BC)

  def _log_prob(self, arrays, hidden, token, temperature, counted):
    if self._is_few(hidden):
      routes, score_Bn, _ = self._candidates(arrays, hidden)
      log_chosen = jax.nn.logsumexp(score_Bn / temperature, axis=-1)
      log_rest = jax.nn.logsumexp(self._log_rest(arrays, routes, temperature), axis=-1)
      log_z = jnp.logaddexp(log_chosen, log_rest)
    else:
      routes = self._all_routes(arrays, hidden)
      # The shifted centroids have the masses of all clusters at temperature 1, and only there.
      if temperature == 1:
        log_z = jax.nn.logsumexp(routes.scores + self._log_size(arrays), axis=-1)
      else:
        blocks = self._routed_blocks(*vocab_parallel.varying((arrays, hidden, routes)))
        log_z = sampling.log_z(blocks, temperature)
    cluster = vocab_parallel.sharded_lookup(arrays["assignment"], token, self.vocab_axis)
    of_cluster = lambda x: jnp.take_along_axis(x, cluster[..., None], axis=-1)[..., 0]
    exact = self._exact(arrays, hidden, token[..., None])[..., 0]
    spread = of_cluster(routes.scores) + self._bias_of(arrays, token)
    return jnp.where(of_cluster(routes.is_chosen), exact, spread) / temperature - log_z

  def _scores(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The scores, after a pass over all rows for the mass of the chosen ones."""
    return self._routed_blocks(arrays, hidden, self._all_routes(arrays, hidden))

  def _routed_blocks(self, arrays, hidden, routes):
    first = lambda x: jnp.moveaxis(x, -1, 0)
    score_CB, is_chosen_CB, bias = first(routes.scores), first(routes.is_chosen), arrays["bias"]

    def routed(exact_WB, token_W):
      cluster_W = self._cluster_of(arrays, token_W)
      bias_W = None if bias is None else bias[self._own_row(arrays, token_W)]
      spread_WB = code_ops.token_scores(score_CB, cluster_W, bias_W)
      # Padding scores -inf, and so does a token that is removed.
      spread_WB = jnp.where(jnp.isneginf(exact_WB), -jnp.inf, spread_WB)
      return jnp.where(is_chosen_CB[cluster_W], exact_WB, spread_WB)

    return self._row_blocks(arrays, hidden).map(routed)

  def _row_blocks(self, arrays, hidden):
    return linear_decoding.linear_blocks(
      hidden,
      self._rows(arrays),
      arrays["bias"],
      self.vocab,
      ScoreOptions(softcap=self.softcap, dtype=self.dtype, vocab_axis=self.vocab_axis),
      # Several arrays of a block's size are alive at once.
      width=max(1, sampling.CACHED_SCORES // max(1, math.prod(hidden.shape[:-1]))),
    )

  def _own_row(self, arrays, token_W):
    # Padding names some token, whose row says nothing.
    count = len(arrays["assignment"])
    return jnp.maximum(token_W - vocab_parallel.first_row(self.vocab_axis, count), 0)

  def _cluster_of(self, arrays, token_W):
    # Padding has the cluster `NO_CODE`, which is no index.
    return jnp.minimum(arrays["assignment"][self._own_row(arrays, token_W)], self.clusters - 1)

  def _top_k(self, arrays, hidden, k):
    if not self._is_few(hidden):
      return super()._top_k(arrays, hidden, k)
    routes, score_Bn, token_Bn = self._candidates(arrays, hidden, in_turn=True)
    best = self._best(arrays, hidden, routes, score_Bn, token_Bn, k)
    log_rest = jax.nn.logsumexp(self._log_rest(arrays, routes, 1.0), axis=-1)
    log_z = jnp.logaddexp(jax.nn.logsumexp(score_Bn, axis=-1), log_rest)
    return best.scores - log_z[..., None], best.tokens

  def _best(self, arrays, hidden, routes, score_Bn, token_Bn, k):
    """The k highest scores; of all tokens only where a centroid's might be among them."""
    found = topk.merge(topk.empty(score_Bn.shape[:-1], k), score_Bn, token_Bn)
    # No token's bias is above the log of the sum of exponentials.
    most_C = 0.0 if arrays["bias"] is None else self._log_size(arrays)
    rest_B = jnp.where(routes.is_chosen, -jnp.inf, routes.scores + most_C).max(axis=-1)
    is_known = ((found.scores[..., -1] > rest_B) | jnp.isneginf(rest_B)).all()

    def of_all(_):
      scores, tokens, _ = sampling.best(self._scores(arrays, hidden), k, normalizer=False)
      return topk.TopK(scores, tokens)

    return lax.cond(is_known, lambda found: found, of_all, found)

  def _sample(self, arrays, hidden, key, options, allowed):
    """A token from the exact distribution.

    A few vectors draw among the chosen rows and the other clusters, and in a cluster among its
    tokens. A mask, or a nucleus without `top_k`, takes the scores of all tokens.
    """
    is_nucleus_of_all = options.kept is None and options.has_nucleus
    if allowed is not None or is_nucleus_of_all or not self._is_few(hidden):
      return super()._sample(arrays, hidden, key, options, allowed)
    routes, score_Bn, token_Bn = self._candidates(arrays, hidden, in_turn=True)
    if options.is_plain:
      score_Bn = score_Bn / options.temperature
      return self._draw(arrays, routes, score_Bn, token_Bn, key, options.temperature)
    k = min(options.kept, self.vocab)
    best = self._best(arrays, hidden, routes, score_Bn, token_Bn, k)
    return sampling.draw_of_best(best.scores, best.tokens, key, options)

  def _draw(self, arrays, routes, score_Bn, token_Bn, key, temperature):
    """A chosen row or another cluster by its mass, and then a token of the cluster."""
    first_key, token_key = jax.random.split(key)
    # One draw among n rows and C clusters, of which the chosen ones are -inf: their rows stand
    # for them.
    rest_BC = self._log_rest(arrays, routes, temperature)
    every = jnp.concatenate([score_Bn, rest_BC], axis=-1)
    count = score_Bn.shape[-1]
    drawn_B = jnp.argmax(every + sampling.gumbel(first_key, every.shape), axis=-1)
    # Where a row was drawn, some cluster's token is drawn too, and left out at the end.
    cluster_B = jnp.maximum(drawn_B - count, 0)
    token_BS, present_BS = routing.tokens_of(arrays["order"], self.clusters, cluster_B)
    bias_BS = jnp.where(present_BS, self._bias_of(arrays, token_BS) / temperature, -jnp.inf)
    slot_B = jnp.argmax(bias_BS + sampling.gumbel(token_key, bias_BS.shape), axis=-1)
    pick = lambda x, at_B: jnp.take_along_axis(x, at_B[..., None], axis=-1)[..., 0]
    row_B = pick(token_Bn, jnp.minimum(drawn_B, count - 1))
    token_B = jnp.where(drawn_B < count, row_B, pick(token_BS, slot_B))
    return jnp.where(jnp.isneginf(every.max(axis=-1)), -1, token_B)
