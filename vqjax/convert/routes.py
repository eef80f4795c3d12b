"""Training of the centroids of a `RoutedHead` on hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int, PRNGKeyArray

from vqjax.convert.trained_variables import Variables
from vqjax.heads import DenseHead, RoutedHead
from vqjax.ops import codes, routing

__all__ = ["LikelyTokens", "likely_tokens", "train_routes"]

AT_ONCE = 256
"""Hidden states that are scored at a time."""

SHRINKAGE = 0.1
"""Part of the mean eigenvalue of the states' moments that is added to all before whitening."""


class LikelyTokens(NamedTuple):
  """The k likeliest tokens of hidden states under a dense head.

  Attributes:
    tokens: the tokens, the likeliest first.
    log_probs: their log-probabilities in nats.
  """

  tokens: Int[np.ndarray, "N k"]
  log_probs: Float[np.ndarray, "N k"]


def likely_tokens(
  head: DenseHead, variables: Variables, hidden: Float[np.ndarray, "N D"], k: int = 32
) -> LikelyTokens:
  """What centroids are trained for: it takes a pass over the weight for each 256 states."""

  @jax.jit
  def best(variables, hidden):
    return head.apply(variables, hidden, k, method="top_k")

  found = []
  for first in range(0, len(hidden), AT_ONCE):
    part = np.asarray(hidden[first : first + AT_ONCE])
    # The last part is filled up, so that it needs no program of its own.
    filled = np.pad(part, ((0, AT_ONCE - len(part)), (0, 0)))
    log_prob_Nk, token_Nk = best(variables, filled)
    found.append((np.asarray(token_Nk)[: len(part)], np.asarray(log_prob_Nk)[: len(part)]))
  return LikelyTokens(*map(np.concatenate, zip(*found)))


def train_routes(
  head: RoutedHead,
  variables: Variables,
  hidden: Float[np.ndarray, "N D"],
  likely: LikelyTokens,
  *,
  key: PRNGKeyArray,
  epochs: int = 3,
  batch: int = 512,
  learning_rate: float = 5e-3,
  decay: float = 1.0,
  report: Callable[[int, float], None] = lambda epoch, loss: None,
) -> Variables:
  """Fit the centroids so that hidden states choose the clusters of their likely tokens.

  `ops.routing.routing_loss` is minimised by Adam, its learning rate falling to 0 as a cosine; rows,
  biases and the order stay as they are. The states are whitened, so that steps are of one size in
  all directions. It takes minutes: 100,000 states of width 640 and 2,048 clusters take one a epoch
  on a core.

  Args:
    head: the head.
    variables: its variables, such as those of `from_dense`.
    hidden: hidden states of the text that the head is for.
    likely: the likely tokens of each state under the dense head (`likely_tokens`).
    key: source of the order of the states.
    epochs: times that each state is used.
    batch: states of a step.
    learning_rate: largest learning rate.
    decay: cost of the squared distance of a centroid from where it began, for whitened states: what
      the text does not show stays as it was. 0 fits the given text a little better, and other
      languages far worse.
    report: called with the number of epochs and the mean loss of the last.

  Returns:
    The variables with trained centroids.

  Raises:
    ValueError: there are fewer states than a batch, or other numbers of states and tokens.
  """
  count = len(hidden)
  if count < batch or len(likely.tokens) != count:
    raise ValueError(
      f"`hidden` must have at least `batch` states, and `likely` as many; got {count} and"
      f" {len(likely.tokens)} for a batch of {batch}. Collect more, or take a smaller batch."
    )
  moment = np.asarray(hidden, np.float64).T @ np.asarray(hidden, np.float64) / count
  values, vectors = np.linalg.eigh(moment)
  values = np.maximum(values, 0) + SHRINKAGE * values.mean()
  white = jnp.asarray(vectors / np.sqrt(values), jnp.float32)
  bias = variables["params"].get("bias")
  assignment = jnp.asarray(variables["codes"]["assignment"])
  log_size = codes.log_mass(assignment, head.clusters, bias)
  old = jnp.asarray(variables["params"]["centroids"])
  # centroid · h = (centroid · white⁻ᵀ) · (h · white).
  first = jnp.asarray(old, jnp.float32) @ jnp.asarray(vectors * np.sqrt(values), jnp.float32)
  steps = count // batch
  rule = optax.adam(optax.cosine_decay_schedule(learning_rate, epochs * steps))

  def loss(centroids, hidden, tokens, log_probs):
    cluster_Nk = assignment[tokens]
    fit = routing.routing_loss(centroids, hidden @ white, log_size, cluster_Nk, log_probs)
    return fit + decay * jnp.square(centroids - first).sum(axis=-1).mean()

  @jax.jit
  def step(centroids, moments, *arrays):
    value, gradient = jax.value_and_grad(loss)(centroids, *arrays)
    updates, moments = rule.update(gradient, moments)
    return optax.apply_updates(centroids, updates), moments, value

  centroids, moments = first, rule.init(first)
  for epoch in range(epochs):
    order = np.asarray(jax.random.permutation(jax.random.fold_in(key, epoch), count))
    losses = []
    for part in order[: steps * batch].reshape(steps, batch):
      arrays = (np.asarray(x[part]) for x in (hidden, *likely))
      centroids, moments, value = step(centroids, moments, *arrays)
      losses.append(value)
    report(epoch + 1, float(np.mean(losses)))
  trained = (centroids @ white.T).astype(old.dtype)
  return {**variables, "params": {**variables["params"], "centroids": trained}}
