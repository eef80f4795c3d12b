"""Which sequence is the likeliest that a model can spell, among those that a beam keeps?"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

NEVER = -1e30
"""Score of what is not there: finite, so that differences of it are."""

Step = Callable[[Array, Any], tuple[Array, Array, Any]]
"""(tokens [N], state) -> (log-probabilities [N, C], tokens [N, C] of the C likeliest, state)."""


class BeamResult(NamedTuple):
  """The best sequence of each row.

  Attributes:
    tokens: without the token that ends them; -1 behind the end.
    log_prob: of the sequence with its end, in nats.
    ended: whether the end was reached; else the sequence is the best of those of full length.
  """

  tokens: Int[Array, "B T"]
  log_prob: Float[Array, "B"]
  ended: Bool[Array, "B"]


class _Beam(NamedTuple):
  """K unfinished and K finished sequences of each row."""

  length: Int[Array, ""]
  tokens: Int[Array, "B K T"]
  score: Float[Array, "B K"]
  state: Any
  done_tokens: Int[Array, "B K T"]
  done_score: Float[Array, "B K"]
  done_rank: Float[Array, "B K"]


def beam_search(
  step: Step,
  state: Any,
  *,
  rows: int,
  beams: int,
  length: int,
  eos: int,
  penalty: float = 0.6,
) -> BeamResult:
  """The sequences of highest log p / ((5 + n) / 6)^penalty, n their tokens with the end.

  A row keeps its `beams` likeliest unfinished sequences, and stops where none of them can become
  better than the best finished one. Source: Wu et al., Google's neural machine translation system,
  2016, Eq. 14, without its coverage.

  Args:
    step: gives the C >= 2·beams likeliest next tokens (or all of a smaller vocabulary) of each
      sequence; row b's sequences are b·beams to (b + 1)·beams.
    state: what it goes on from, the sequences on the first axis of every array.
    rows: B.
    beams: K; 1 is greedy.
    length: most tokens of a sequence, with the end.
    eos: the token that ends a sequence, and that each begins after.
    penalty: 0 prefers short sequences, 1 the mean log-probability.

  Raises:
    ValueError: beams or length below 1, or a negative penalty.
  """
  if beams < 1 or length < 1 or penalty < 0:
    raise ValueError(
      f"beams {beams} and length {length} must be at least 1 and penalty {penalty} not negative; 4"
      " beams and 0.6 are usual"
    )
  weight = lambda n: ((5.0 + n) / 6.0) ** penalty
  none = jnp.full((rows, beams), NEVER)
  empty = jnp.full((rows, beams, length), -1, jnp.int32)
  # At first all sequences of a row are the same one: the first counts.
  start = _Beam(jnp.int32(0), empty, none.at[:, 0].set(0.0), state, empty, none, none)

  def goes_on(beam: _Beam):
    # What is to come has a log-probability of at most 0, and the weight of the full length is best.
    possible = beam.score.max(axis=1) / weight(length)
    return (beam.length < length) & (possible > beam.done_rank.max(axis=1)).any()

  def extend(beam: _Beam) -> _Beam:
    at = jnp.maximum(beam.length - 1, 0)
    last = jnp.where(beam.length == 0, eos, beam.tokens[:, :, at])
    log_prob, token, state = step(last.reshape(-1), beam.state)
    count = log_prob.shape[-1]
    total = beam.score[..., None] + log_prob.reshape(rows, beams, count)
    best, place = lax.top_k(total.reshape(rows, -1), min(2 * beams, beams * count))
    parent = place // count
    token = jnp.take_along_axis(token.reshape(rows, -1), place, axis=1).astype(jnp.int32)
    tokens = jnp.take_along_axis(beam.tokens, parent[..., None], axis=1)
    tokens = tokens.at[:, :, beam.length].set(token)
    is_end = token == eos
    beam = _finished(beam, tokens, jnp.where(is_end, best, NEVER), weight)
    return _kept(beam, tokens, jnp.where(is_end, NEVER, best), parent, state)

  def _finished(beam: _Beam, tokens, score, weight) -> _Beam:
    rank = jnp.where(score > NEVER, score / weight(beam.length + 1), NEVER)
    every = [
      jnp.concatenate(pair, axis=1)
      for pair in ((beam.done_tokens, tokens), (beam.done_score, score), (beam.done_rank, rank))
    ]
    best_rank, place = lax.top_k(every[2], beams)
    return beam._replace(
      done_tokens=jnp.take_along_axis(every[0], place[..., None], axis=1),
      done_score=jnp.take_along_axis(every[1], place, axis=1),
      done_rank=best_rank,
    )

  def _kept(beam: _Beam, tokens, score, parent, state) -> _Beam:
    best, place = lax.top_k(score, beams)
    parent = jnp.take_along_axis(parent, place, axis=1)
    source = (jnp.arange(rows)[:, None] * beams + parent).reshape(-1)
    return beam._replace(
      length=beam.length + 1,
      tokens=jnp.take_along_axis(tokens, place[..., None], axis=1),
      score=best,
      state=jax.tree.map(lambda x: x[source] if jnp.ndim(x) else x, state),
    )

  beam = lax.while_loop(goes_on, extend, start)
  ended = beam.done_rank[:, 0] > NEVER
  first = jnp.where(ended[:, None], beam.done_tokens[:, 0], beam.tokens[:, 0])
  log_prob = jnp.where(ended, beam.done_score[:, 0], beam.score[:, 0])
  return BeamResult(jnp.where(first == eos, -1, first), log_prob, ended)
