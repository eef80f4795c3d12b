"""The rejection rule keeps the target's distribution, and a wrong draft distribution breaks it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests.ops.exact import normals
from vqjax.ops.rejection import FilteredDistribution, verify
from vqjax.ops.sampling import row_blocks

ROUNDS, V, K = 20_000, 11, 2
MAP = np.array([7, 0, 3, 10, 2])
"""Tokens of a drafter of five tokens."""

OPTIONS = {
  "the distribution itself": {"temperature": 1.0},
  "top-k": {"temperature": 1.3, "top_k": 4},
  "top-p": {"temperature": 1.0, "top_p": 0.8},
  "all": {"temperature": 0.8, "top_k": 9, "top_p": 0.97, "min_p": 0.01},
}


def filtered(logits, temperature, top_k=None, top_p=None, min_p=None):
  """Probabilities of the options, float64, by sorting."""
  p = np.exp((logits - logits.max()) / temperature, dtype=np.float64)
  p = np.where(p >= (min_p or 0), p, 0)
  order = np.argsort(-p)
  p[order[top_k or V :]] = 0
  p /= p.sum()
  if top_p:
    p[order[1 + np.searchsorted(np.cumsum(p[order]), top_p) :]] = 0
  return p / p.sum()


def blocks_of(scores):
  """Scores [B, T, V] in blocks of four tokens."""
  scores = jnp.moveaxis(scores, -1, 0)
  return row_blocks(scores.shape[1:], V, V, lambda cut: cut(scores), width=4)


@functools.partial(jax.jit, static_argnames=("options", "rounds"))
def rounds_of(logits, draft_logits, claimed, key, tokens, *, options, rounds):
  """Accepted tokens and the last one of rounds; `claimed` is what the rule believes to be q."""
  target = FilteredDistribution.of(
    blocks_of(jnp.broadcast_to(logits, (rounds, K + 1, V))), **dict(options)
  )
  draft_key, key = jax.random.split(key)
  number = jax.random.categorical(draft_key, draft_logits, shape=(rounds, K))
  log_q = jnp.broadcast_to(jax.nn.log_softmax(claimed)[..., None], (K, claimed.shape[-1], rounds))
  return number, *verify(target, number, log_q, tokens, V, key)


def p_value(options, tokens, claimed=None):
  """Of Pearson's test that first and second tokens are drawn from the target."""
  size = V if tokens is None else len(tokens)
  logits, draft_logits = normals(1, (K + 1, V), (K, size))
  number, accepted, last = rounds_of(
    *(logits, draft_logits, draft_logits if claimed is None else claimed, jax.random.key(3)),
    tokens,
    options=tuple(options.items()),
    rounds=ROUNDS,
  )
  drafted = np.asarray(number if tokens is None else tokens[number])
  accepted, last = np.asarray(accepted), np.asarray(last)
  first, values = np.where(accepted > 0, drafted[:, 0], last), []
  second = np.where(accepted > 1, drafted[:, 1], last)[accepted > 0]
  for position, found in enumerate((first, second)):
    p = filtered(logits[position], **options)
    count = np.bincount(found, minlength=V)
    if count[p == 0].any():
      return 0.0
    values.append(stats.chisquare(count[p > 0], p[p > 0] * count.sum()).pvalue)
  return min(values)


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_distributed_as_the_target(name):
  # Six tests of two positions: one in 8,000 seeds would fail.
  assert p_value(OPTIONS[name], None) > 1e-5


@pytest.mark.parametrize("name", ["the distribution itself", "all"])
def test_a_drafter_may_have_fewer_tokens(name):
  assert p_value(OPTIONS[name], MAP) > 1e-5


def test_drafts_without_probabilities_are_rejected_and_tokens_distributed_as_the_target():
  (logits,) = normals(1, (K + 1, V))
  nothing = np.zeros((K, V), np.float32)
  given = logits, nothing, np.full_like(nothing, np.nan), jax.random.key(3), None
  options = tuple(OPTIONS["the distribution itself"].items())
  _, accepted, last = rounds_of(*given, options=options, rounds=ROUNDS)
  assert not np.any(jax.device_get(accepted))
  expected = ROUNDS * filtered(logits[0], 1.0)
  assert stats.chisquare(np.bincount(last, minlength=V), expected).pvalue > 1e-5


@pytest.mark.parametrize("tokens", [None, MAP], ids=["one vocabulary", "mapped"])
def test_another_draft_distribution_than_that_of_the_drafts_is_noticed(tokens):
  size = V if tokens is None else len(tokens)
  assert p_value(OPTIONS["the distribution itself"], tokens, np.zeros((K, size), np.float32)) < 1e-9
