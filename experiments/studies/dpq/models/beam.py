"""Beam search with a length penalty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

__all__ = ["BeamResult", "beam_search"]

# Score of an absent sequence; finite, so that sums and differences of it are not nan.
_NEVER = -1e30

# (tokens [N], state) -> (log-probabilities and tokens [N, C] of the C most likely, state).
_Step = Callable[[Array, Any], tuple[Array, Array, Any]]


class BeamResult(NamedTuple):
  """The best sequence of each row.

  Attributes:
    tokens: the sequence without its `eos`, then -1.
    log_prob: log-probability of the sequence with its `eos`, in nats.
    ended: whether `eos` was reached; otherwise this is the best sequence of full length.
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
  step: _Step,
  state: Any,
  *,
  rows: int,
  beams: int,
  length: int,
  eos: int,
  penalty: float = 0.6,
) -> BeamResult:
  """The sequence of highest log p / ((5 + n) / 6)^penalty of each row.

  Here n is the number of tokens with `eos`. Each row keeps its `beams` most likely unfinished
  sequences. The search stops when no unfinished sequence can become better than the best finished
  one. Source: Wu et al., Google's neural machine translation system, 2016, Eq. 14, without its
  coverage penalty.

  Args:
    step: returns the C >= 2·beams most likely next tokens (or all of a smaller vocabulary) of each
      sequence; row b has sequences b·beams to (b + 1)·beams - 1.
    state: first state of `step`; sequences are the first axis of every array.
    rows: B.
    beams: K, number of sequences of a row; 1 is greedy decoding.
    length: largest number of tokens of a sequence, with `eos`.
    eos: token that ends a sequence, and that precedes the first token.
    penalty: 0 compares log-probabilities and so prefers short sequences; 1 compares nearly their
      means over tokens.

  Raises:
    ValueError: `beams` or `length` is below 1, or `penalty` is negative.
  """
  if beams < 1 or length < 1 or penalty < 0:
    raise ValueError(
      "`beams` and `length` must be at least 1 and `penalty` at least 0; got"
      f" {beams}, {length} and {penalty}. 4 beams and a penalty of 0.6 are usual."
    )
  weight = lambda n: ((5.0 + n) / 6.0) ** penalty
  none = jnp.full((rows, beams), _NEVER)
  empty = jnp.full((rows, beams, length), -1, jnp.int32)
  # All sequences of a row start equal: only the first one is present, or all beams would be copies.
  start = _Beam(jnp.int32(0), empty, none.at[:, 0].set(0.0), state, empty, none, none)

  def goes_on(beam: _Beam):
    # An upper bound: further tokens add at most 0, and the weight of the full length divides most.
    possible = beam.score.max(axis=1) / weight(length)
    return (beam.length < length) & (possible > beam.done_rank.max(axis=1)).any()

  def extend(beam: _Beam) -> _Beam:
    at = jnp.maximum(beam.length - 1, 0)
    last = jnp.where(beam.length == 0, eos, beam.tokens[:, :, at])
    log_prob, token, state = step(last.reshape(-1), beam.state)
    count = log_prob.shape[-1]
    total = beam.score[..., None] + log_prob.reshape(rows, beams, count)
    # 2·beams candidates: up to `beams` of them may end, and `beams` must remain.
    best, index = lax.top_k(total.reshape(rows, -1), min(2 * beams, beams * count))
    parent = index // count
    token = jnp.take_along_axis(token.reshape(rows, -1), index, axis=1).astype(jnp.int32)
    tokens = jnp.take_along_axis(beam.tokens, parent[..., None], axis=1)
    tokens = tokens.at[:, :, beam.length].set(token)
    is_end = token == eos
    beam = _finished(beam, tokens, jnp.where(is_end, best, _NEVER), weight)
    return _kept(beam, tokens, jnp.where(is_end, _NEVER, best), parent, state)

  def _finished(beam: _Beam, tokens, score, weight) -> _Beam:
    rank = jnp.where(score > _NEVER, score / weight(beam.length + 1), _NEVER)
    all_tokens = jnp.concatenate([beam.done_tokens, tokens], axis=1)
    all_scores = jnp.concatenate([beam.done_score, score], axis=1)
    best_rank, index = lax.top_k(jnp.concatenate([beam.done_rank, rank], axis=1), beams)
    return beam._replace(
      done_tokens=jnp.take_along_axis(all_tokens, index[..., None], axis=1),
      done_score=jnp.take_along_axis(all_scores, index, axis=1),
      done_rank=best_rank,
    )

  def _kept(beam: _Beam, tokens, score, parent, state) -> _Beam:
    best, index = lax.top_k(score, beams)
    parent = jnp.take_along_axis(parent, index, axis=1)
    source = (jnp.arange(rows)[:, None] * beams + parent).reshape(-1)
    return beam._replace(
      length=beam.length + 1,
      tokens=jnp.take_along_axis(tokens, index[..., None], axis=1),
      score=best,
      # A scalar of the state, such as a cache's length, belongs to all sequences.
      state=jax.tree.map(lambda x: x[source] if jnp.ndim(x) else x, state),
    )

  beam = lax.while_loop(goes_on, extend, start)
  ended = beam.done_rank[:, 0] > _NEVER
  first = jnp.where(ended[:, None], beam.done_tokens[:, 0], beam.tokens[:, 0])
  log_prob = jnp.where(ended, beam.done_score[:, 0], beam.score[:, 0])
  return BeamResult(jnp.where(first == eos, -1, first), log_prob, ended)
