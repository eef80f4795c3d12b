"""Which are the k best of scores that come a block at a time, or lie on several devices?"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from vqjax.ops import vocab_parallel


class Best(NamedTuple):
  """The best scores so far, falling, and their tokens; -inf and -1 where there is none."""

  scores: Float[Array, "*B k"]
  tokens: Int[Array, "*B k"]


def none_yet(batch: tuple[int, ...], k: int) -> Best:
  """What is best of nothing."""
  return Best(jnp.full((*batch, k), -jnp.inf, jnp.float32), jnp.full((*batch, k), -1, jnp.int32))


def merged_best(best: Best, scores: Float[Array, "*B W"], tokens: Int[Array, "*#B W"]) -> Best:
  """The best of what was best so far and of a block; equal scores stay in order of coming."""
  named = jnp.where(jnp.isneginf(scores), -1, tokens).astype(jnp.int32)
  k = best.scores.shape[-1]
  # First the block alone: what it is merged with would double the width of a narrow search.
  score_Bk, place_Bk = _highest(scores, min(k, scores.shape[-1]))
  token_Bk = jnp.take_along_axis(named, place_Bk, axis=-1)
  both = jnp.concatenate([best.scores, score_Bk], axis=-1)
  score_Bk, place_Bk = _highest(both, k)
  names = jnp.concatenate([best.tokens, token_Bk], axis=-1)
  return Best(score_Bk, jnp.take_along_axis(names, place_Bk, axis=-1))


def _highest(scores, k):
  return vocab_parallel.each_row(lambda rows: tuple(lax.top_k(rows, k)), scores)


def across(best: Best, axis: str | None) -> Best:
  """The best of all devices of an axis inside of which each has its own; the same on all of them.

  k candidates from each device travel, never the scores they were chosen from.
  """
  if vocab_parallel.inside(axis) is None:
    return best
  scores, tokens = (jnp.moveaxis(vocab_parallel.gathered(x, axis), 0, -2) for x in best)
  flat = (*scores.shape[:-2], -1)
  k = best.scores.shape[-1]
  score_Bk, place_Bk = _highest(scores.reshape(flat), k)
  return Best(score_Bk, jnp.take_along_axis(tokens.reshape(flat), place_Bk, axis=-1))


def winner(
  score: Float[Array, "*B"], token: Int[Array, "*B"], axis: str | None
) -> Int[Array, "*B"]:
  """The token of the device whose score is highest; the token itself outside of an axis."""
  return across(Best(score[..., None], token[..., None]), axis).tokens[..., 0]
