"""Speculative decoding: a drafter proposes tokens, and one pass of the model verifies them.

A round drafts K tokens, computes the model's distributions at K + 1 positions, and appends the
tokens that are accepted and one more. Rows accept different numbers of tokens. What is generated is
distributed as without a drafter: `vqjax.ops.rejection` has the rule. Source: Leviathan et al., Fast
Inference from Transformers via Speculative Decoding, 2023.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from vqjax.heads import Head
from vqjax.lm.generation.draft_trees import check_count
from vqjax.lm.generation.kv_cache import Ring, Variables, extend, prefill, unstacked
from vqjax.lm.generation.sampling import Sampling, choose
from vqjax.lm.models import Transformer
from vqjax.lm.records import Range
from vqjax.ops import sampling as ops
from vqjax.ops.rejection import FilteredDistribution, verify
from vqjax.ops.sampling import Blocks
from vqjax.ops.vocab_parallel import own_promotion

__all__ = ["Draft", "Drafter", "EarlyExit", "RoundTimes"]

KEPT = 0.95
"""Weight of the earlier rounds in the running acceptance, once for each round."""

PRIOR = 1.0, 2.0
"""Accepted and verified tokens with which the running acceptance begins.

Few, so that a drafter that is of no use ends after some rounds.
"""


class RoundTimes(NamedTuple):
  """What a round of drafts takes, over the time of a token without a drafter.

  Attributes:
    cost: that of a draft token, its verification included.
    overhead: further time of a round with any draft.
  """

  cost: float | int
  overhead: float | int = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter(abc.ABC):
  """What proposes tokens, and how many.

  The number of tokens adapts to the acceptance a: of `length`, half of it and 0, the k with the
  highest (1 + a + ... + a^k) / (1 + overhead + k · cost), the expected speed relative to decoding
  without a drafter. a is the part of the latest verified tokens that was accepted, and half of a
  standard deviation more: after 0 it stays 0, which a few unlucky rounds are not to decide. The
  choice depends on earlier tokens alone, so that it does not change the distribution of the next.

  Attributes:
    length: most tokens that are drafted in a round.
    tokens: token of the model for each token of the drafter's head, all different; None: they
      have one vocabulary. EAGLE-3's `d2t` has differences: it is `tokens - arange(len(tokens))`.
    cost: time of a draft token, its verification included, over that of a token without a drafter.
      0 always drafts `length` tokens, whether they are drawn or not.
    overhead: further time of a round with any draft, in the same unit. On CPUs a product with
      several vectors takes longer than one with a single vector, however few they are.
    drawn: cost and overhead of rounds whose tokens are drawn, since to compare distributions takes
      longer than to compare tokens; None: those of greedy rounds.
  """

  length: int = dataclasses.field(default=4, kw_only=True)
  tokens: Int[ArrayLike, "U"] | Sequence[int] | None = dataclasses.field(default=None, kw_only=True)
  cost: float | int = dataclasses.field(default=0.1, kw_only=True)
  overhead: float | int = dataclasses.field(default=0.0, kw_only=True)
  drawn: RoundTimes | None = dataclasses.field(default=None, kw_only=True)

  def __post_init__(self):
    check_count("length", self.length, "4 is usual; without a drafter, leave `drafter` out.")
    for cost, overhead in filter(None, (RoundTimes(self.cost, self.overhead), self.drawn)):
      if not 0 <= cost < 1:
        raise ValueError(
          f"`cost` must be in [0, 1); got {cost}. A drafter that costs as much as the model does"
          " not help."
        )
      if not 0 <= overhead < math.inf:
        raise ValueError(
          f"`overhead` must be finite and at least 0; got {overhead}. `vqjax draft` measures it;"
          " 0 is usual on accelerators."
        )

  def times(self, sampling: Sampling) -> RoundTimes:
    """Cost and overhead of rounds with the options of sampling."""
    if sampling.is_greedy or self.drawn is None or self.cost == 0:
      return RoundTimes(self.cost, self.overhead)
    return self.drawn

  @abc.abstractmethod
  def _part(self, model: Transformer) -> DrafterModules:
    """The modules for drafting for a model."""

  @abc.abstractmethod
  def _variables(self, variables: Variables) -> dict[str, Variables]:
    """The variables of the modules, from the unstacked ones of the model."""

  def program(
    self, model: Transformer, sampling: Sampling, positions: int, has_log_probs: bool
  ) -> DraftingProgram:
    """What is compiled for a model; `bound` says which arguments are refused."""
    part = self.bound(model, sampling, positions)
    times = self.times(sampling)
    sizes = self.length, times.cost, self.length
    return DraftingProgram(model, part, sampling, *sizes, has_log_probs, times.overhead)

  def bound(self, model: Transformer, sampling: Sampling, positions: int) -> DrafterModules:
    """The modules for drafting for a model.

    Raises:
      ValueError: the vocabularies, the map between them, the options of sampling or the drafter's
        context do not fit.
    """
    if sampling.penalizes:
      raise ValueError(
        f"`repetition_penalty` must be 1 with a drafter; got {sampling.repetition_penalty}. Its"
        " distribution changes with each draft token: leave the penalty or the drafter out."
      )
    part = self._part(model)
    if positions > part.body.context:
      raise ValueError(
        "`drafter` must have a context of at least the tokens of the longest prompt and"
        f" `max_tokens`, {positions}; got {part.body.context}. Generate fewer tokens, or use a"
        " drafter with a longer context."
      )
    own, vocab = part.output.vocab, model.head.vocab
    if self.tokens is None:
      if own != vocab:
        raise ValueError(
          f"`drafter` must have the model's vocab {vocab}, or `tokens`, the model's token for each"
          f" of its own; got vocab {own} and no `tokens`. Give the map."
        )
      return part
    tokens = np.asarray(self.tokens)
    if tokens.shape != (own,) or not np.issubdtype(tokens.dtype, np.integer):
      raise ValueError(
        f"`tokens` must be {own} integers, one for each token of the drafter's head; got"
        f" {tokens.dtype} of shape {tokens.shape}. Give the map of this drafter."
      )
    if tokens.min() < 0 or tokens.max() >= vocab:
      raise ValueError(
        f"`tokens` must be in [0, {vocab}), the model's vocabulary; got {tokens.min()} to"
        f" {tokens.max()}. Add arange({own}) to a `d2t` of differences."
      )
    if len(np.unique(tokens)) < own:
      raise ValueError(
        f"`tokens` must be all different; got {own - len(np.unique(tokens))} repetitions. Leave"
        " repeated tokens out of the drafter's head."
      )
    return part

  def arrays(self, variables: Variables, part: DrafterModules, vocab: int) -> dict[str, Any]:
    """The arrays of the modules, and maps between the vocabularies."""
    arrays = self._variables(variables)
    if self.tokens is not None:
      tokens = np.asarray(self.tokens, np.int32)
      arrays["tokens"] = tokens
      if not part.shares:
        # A drafter reads its token 0 in place of tokens that it does not have.
        arrays["numbers"] = np.zeros(vocab, np.int32)
        arrays["numbers"][tokens] = np.arange(len(tokens))
    return arrays


@dataclasses.dataclass(frozen=True, eq=False)
class Draft(Drafter):
  """A smaller decoder as the drafter.

  Attributes:
    model: the decoder, with any head.
    variables: its variables.
  """

  model: Transformer
  variables: Variables

  def _part(self, model: Transformer) -> DrafterModules:
    if "params" not in self.variables:
      raise ValueError(
        f"`variables` must be those of the drafter's model; got {sorted(self.variables)} without"
        " 'params'. Give what its `init` or a checkpoint has."
      )
    return DrafterModules(self.model, None, shares=False)

  def _variables(self, variables: Variables) -> dict[str, Variables]:
    return {"body": unstacked(self.variables)}


@dataclasses.dataclass(frozen=True, eq=False)
class EarlyExit(Drafter):
  """The first blocks of the model itself, its final norm and a head as the drafter.

  Drafting and verification share the cache of these blocks. Source: Elhoushi et al., LayerSkip,
  2024.

  Attributes:
    layers: number of blocks.
    head: reads their output; None: the model's head.
    variables: those of the head.
  """

  layers: int
  head: Head | None = None
  variables: Variables | None = None

  def __post_init__(self):
    check_count("layers", self.layers, "A quarter of the model's is usual.")
    super().__post_init__()

  def _part(self, model: Transformer) -> DrafterModules:
    if self.layers >= model.layers:
      raise ValueError(
        f"`layers` must be less than the model's {model.layers}; got {self.layers}. A quarter of"
        " them is usual."
      )
    check_head(self.head, self.variables, model)
    local = None if model.window is None else model.is_local()[: self.layers]
    turned = None if model.turned is None else model.turned[: self.layers]
    body = model.clone(layers=self.layers, local=local, turned=turned, parent=None)
    return DrafterModules(body, self.head, shares=True)

  def _variables(self, variables: Variables) -> dict[str, Variables]:
    params = variables["params"]
    body = {**variables, "params": {**params, "blocks": params["blocks"][: self.layers]}}
    return {"body": body} if self.head is None else {"body": body, "head": self.variables}


def check_head(head: Head | None, variables: Variables | None, model: Transformer) -> None:
  """Raise ValueError unless a head of a drafter reads the hidden vectors of a model."""
  if (head is None) != (variables is None):
    raise ValueError(
      f"`head` and `variables` must be given together; got {head} and"
      f" {'no ' if variables is None else ''}variables. Give both, or neither."
    )
  if head is not None and head.dim != model.dim:
    raise ValueError(
      f"`head` must have the model's dim {model.dim}; got {head.dim}. Train a head of this model."
    )


class DrafterModules(NamedTuple):
  """The modules of a drafter.

  Attributes:
    body: the decoder.
    head: its head; None: that of `body`.
    shares: whether the blocks are the first ones of the model, and so is their cache.
  """

  body: Transformer
  head: Head | None
  shares: bool

  @property
  def output(self) -> Head:
    """The head that drafts."""
    return self.body.head if self.head is None else self.head

  def of_head(self, arrays: dict[str, Any], hidden_BD: Array, read: Callable) -> Any:
    """read(head, hidden vectors) with the head that drafts."""
    if self.head is None:
      return self.body.apply(arrays["body"], method=lambda model: read(model.head, hidden_BD))
    return self.head.apply(arrays["head"], method=lambda head: read(head, hidden_BD))


class State(NamedTuple):
  """What the loop carries; M is the size of the results.

  Attributes:
    rings: the cache of each block of the model.
    draft_rings: the cache of each block of the drafter, or what else its program keeps from round
      to round; empty if it shares those of the model.
    step: number of tokens of each row so far, less one: that of the token in `token`.
    before: the token before the latest one.
    token: the latest token of each row, which no cache has yet.
    length: number of tokens of each prompt.
    done: whether a row has ended.
    tokens: the tokens so far; -1 elsewhere.
    log_probs: their log-probabilities; None: not computed.
    round: number of rounds so far, and one.
    passes: number of passes of the model of each row, that over the prompt included.
    accepted: running number of draft tokens that were accepted.
    verified: running number of draft tokens that were compared, of which the last may be rejected.
  """

  rings: tuple[Ring, ...]
  draft_rings: tuple
  step: Int[Array, "B"]
  before: Int[Array, "B"]
  token: Int[Array, "B"]
  length: Int[Array, "B"]
  done: Bool[Array, "B"]
  tokens: Int[Array, "B M"]
  log_probs: Float[Array, "B M"] | None
  round: Int[Array, ""]
  passes: Int[Array, "B"]
  accepted: Float[Array, ""]
  verified: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class DraftingProgram:
  """What the compiled functions depend on, beside the shapes of arrays.

  Attributes:
    model: the model.
    part: the modules of the drafter.
    sampling: the distribution of the tokens.
    longest: most tokens that are drafted in a round.
    cost: that of `Drafter.times`.
    length: tokens that are drafted in each round; another number is another program.
    has_log_probs: whether log-probabilities are computed.
    overhead: that of `Drafter.times`.
  """

  model: Transformer
  part: DrafterModules
  sampling: Sampling
  longest: int
  cost: float | int
  length: int
  has_log_probs: bool
  overhead: float | int = 0.0

  reads_hidden = False
  """Whether drafting reads the final hidden vectors of the model."""

  @property
  def rejected(self) -> int:
    """Most tokens that a round writes to a cache and rejects."""
    return self.longest

  def prior(
    self, arrays, tokens_BT, hidden_BTD, length_B, draft_rings
  ) -> tuple[ArrayLike, ArrayLike]:
    """What `accepted` and `verified` of the state begin with."""
    return PRIOR

  def best_length(self, state: State) -> Int[Array, ""]:
    """The number of draft tokens with the highest expected speed."""
    if self.length == 0 or self.cost == 0:
      return jnp.int32(self.length)
    lengths = sorted({self.longest, self.longest // 2, 0}, reverse=True)
    mean = state.accepted / state.verified
    deviation = jnp.sqrt(jnp.maximum(mean * (1 - mean), 0) / state.verified)
    rate = jnp.minimum(1.0, mean + deviation / 2)
    times = [1 + self.overhead * (k > 0) + k * self.cost for k in lengths]
    speeds = [(rate ** jnp.arange(k + 1)).sum() / time for k, time in zip(lengths, times)]
    return jnp.array(lengths)[jnp.argmax(jnp.stack(speeds))]

  def begun(self, arrays, tokens_BT, hidden_BTD, length_B, capacity) -> tuple:
    """`State.draft_rings` after the prompts."""
    if self.part.shares:
      return ()
    fed_BT = arrays["numbers"][tokens_BT] if "numbers" in arrays else tokens_BT
    given = self.part.body, arrays["body"], fed_BT, length_B, capacity
    return prefill(*given, rejected=self.rejected)[1]

  def drafted(self, arrays, state, key):
    """Draft tokens [B, K] as numbers of the drafter, log q [K, U, B], and the state.

    Greedy drafts have no q.
    """
    body, shares = self.part.body, self.part.shares
    rings = state.rings[: body.layers] if shares else state.draft_rings
    # The cache of a drafter of its own lacks the last draft token if all were accepted.
    fed_BT = state.token[:, None] if shares else jnp.stack([state.before, state.token], axis=1)
    tokens, numbers = arrays.get("tokens"), arrays.get("numbers")

    def next_number(rings, fed_BT, step_B, index):
      fed_BT = fed_BT if numbers is None else numbers[fed_BT]
      hidden_BTD, rings = extend(body, arrays["body"], rings, fed_BT, state.length, step_B)
      read = functools.partial(self._draft, key=jax.random.fold_in(key, index))
      number_B, log_q_UB = self.part.of_head(arrays, hidden_BTD[:, -1], read)
      return rings, number_B, log_q_UB

    def further(carry, index):
      rings, number_B = carry
      token_B = number_B if tokens is None else tokens[number_B]
      rings, *drawn = next_number(rings, token_B[:, None], state.step + index, index)
      return (rings, drawn[0]), drawn

    rings, *first = next_number(rings, fed_BT, state.step - fed_BT.shape[1] + 1, 0)
    (rings, _), rest = lax.scan(further, (rings, first[0]), jnp.arange(1, self.length))
    join = lambda one, others: jnp.concatenate([one[None], others])
    number_KB, log_q_KUB = jax.tree.map(join, first, rest)
    if shares:
      state = state._replace(rings=(*rings, *state.rings[body.layers :]))
    else:
      state = state._replace(draft_rings=rings)
    return number_KB.T, log_q_KUB, state

  def observed(self, state, hidden_BTD) -> tuple:
    """`State.draft_rings` after a pass of the model over the latest token and the draft."""
    return state.draft_rings

  def _draft(self, head, hidden_BD, key):
    """A number for each row and log q [U, B]; None if greedy.

    Where no token has a score it is 0, which is rejected: the model would read -1 as nan.
    """
    if self.sampling.is_greedy:
      return jnp.maximum(head.top_k(hidden_BD, 1)[1][:, 0], 0), None
    score_UB = head.logits(hidden_BD).T
    number_U = jnp.arange(head.vocab)
    blocks = Blocks(1, lambda _: (score_UB, number_U), score_UB.shape[1:])
    kept = FilteredDistribution.of(blocks, *self._filters())
    return jnp.maximum(kept.draw(key), 0), kept.log_probs(head.vocab)

  def _filters(self):
    options = self.sampling
    return options.temperature, options.top_k, options.top_p, options.min_p

  def verified(self, variables, hidden_BTD, number_BK, log_q_KUB, tokens, allowed, key):
    """Number of accepted tokens [B], and tokens and log-probabilities of T = K + 1 positions.

    The token behind the accepted ones is the last that counts.
    """
    length = self.length
    if allowed is not None and allowed.ndim == 2:
      allowed = allowed[:, None]
    drafted_BK = number_BK if tokens is None or not length else tokens[number_BK]

    def best(head):
      if self.has_log_probs and allowed is None:
        log_prob_BT1, token_BT1 = head.top_k(hidden_BTD, 1)
        return token_BT1[..., 0], log_prob_BT1[..., 0]
      return choose(head, hidden_BTD, key, self.sampling, allowed), None

    def compared(blocks, number_BK, log_q_KUB, key, tokens, allowed):
      blocks = ops.allow(blocks, allowed, self.model.head.vocab)
      target = FilteredDistribution.of(blocks, *self._filters())
      return verify(target, number_BK, log_q_KUB, tokens, self.model.head.vocab, key)

    def of_head(model):
      head, log_prob_BT = model.head, None
      if length == 0 or self.sampling.is_greedy:
        token_BT, log_prob_BT = best(head)
        is_equal_BK = token_BT[:, :length] == drafted_BK
        accepted_B = jnp.cumprod(is_equal_BK, axis=1, dtype=jnp.int32).sum(axis=1)
      else:
        given = number_BK, log_q_KUB, key, tokens, allowed
        accepted_B, last_B = head.over_blocks(compared, hidden_BTD, *given)
        is_draft_BT = jnp.arange(length + 1) < accepted_B[:, None]
        token_BT = jnp.where(is_draft_BT, jnp.pad(drafted_BK, ((0, 0), (0, 1))), last_B[:, None])
      if self.has_log_probs and log_prob_BT is None:
        log_prob_BT = head.log_prob(hidden_BTD, jnp.maximum(token_BT, 0))
      return accepted_B, token_BT, log_prob_BT

    return self.model.apply(variables, method=of_head)

  def after_round(self, variables, arrays, state, key, stop, allowed, most) -> State:
    """The state after a round; no row gets more than `most` tokens in all."""
    draft_key, verify_key = jax.random.split(jax.random.fold_in(key, state.round))
    number_BK, log_q_KUB = jnp.zeros((len(state.token), 0), jnp.int32), None
    tokens = arrays.get("tokens")
    if self.length:
      number_BK, log_q_KUB, state = self.drafted(arrays, state, draft_key)
    drafted_BK = number_BK if tokens is None or not self.length else tokens[number_BK]
    fed_BT = jnp.concatenate([state.token[:, None], drafted_BK], axis=1)
    hidden_BTD, rings = extend(self.model, variables, state.rings, fed_BT, state.length, state.step)
    accepted_B, token_BT, log_prob_BT = self.verified(
      variables, hidden_BTD, number_BK, log_q_KUB, tokens, allowed, verify_key
    )
    verified_B = jnp.minimum(accepted_B + 1, self.length)
    state = state._replace(rings=rings, draft_rings=self.observed(state, hidden_BTD))
    found = hidden_BTD, accepted_B, verified_B, token_BT, log_prob_BT
    return self.appended(state, *found, stop, most)

  def appended(
    self, state, hidden_BTD, accepted_B, verified_B, token_BT, log_prob_BT, stop, most
  ) -> State:
    """The state with the accepted tokens, and the one behind them, of T = K + 1 positions."""
    order_T = jnp.arange(self.length + 1)
    is_broken_BT = jnp.isnan(hidden_BTD).any(-1)
    if self.has_log_probs:
      is_broken_BT |= jnp.isnan(log_prob_BT)
    token_BT = jnp.where(is_broken_BT, -1, token_BT)
    # A row without a token has ended; the host explains it.
    is_end_BT = (token_BT[..., None] == stop).any(-1) | (token_BT < 0)
    is_end_BT &= order_T <= accepted_B[:, None]
    before_end_B = jnp.where(is_end_BT.any(1), jnp.argmax(is_end_BT, axis=1), self.length)
    count_B = jnp.minimum(jnp.minimum(accepted_B, before_end_B) + 1, most - 1 - state.step)
    count_B = jnp.where(state.done, 0, count_B)
    is_new_BT = order_T < count_B[:, None]
    # Gathers and selections, because on CPUs a scatter is a loop over its indices.
    order_BM = jnp.arange(state.tokens.shape[1]) - state.step[:, None] - 1
    is_written_BM = (order_BM >= 0) & (order_BM < count_B[:, None])
    from_BM = jnp.clip(order_BM, 0, self.length)
    write = lambda old, new: jnp.where(is_written_BM, jnp.take_along_axis(new, from_BM, 1), old)
    row_of = jnp.concatenate([state.before[:, None], state.token[:, None], token_BT], axis=1)
    at = lambda index_B: jnp.take_along_axis(row_of, index_B[:, None], axis=1)[:, 0]
    active = jnp.maximum(1, (~state.done).sum())
    mean = lambda x_B: jnp.where(state.done, 0, x_B).sum() / active
    return state._replace(
      step=state.step + count_B,
      before=jnp.maximum(at(count_B), 0),
      token=jnp.maximum(at(count_B + 1), 0),
      done=state.done | (is_end_BT & is_new_BT).any(1) | (state.step + 1 + count_B >= most),
      tokens=write(state.tokens, token_BT),
      log_probs=write(state.log_probs, log_prob_BT) if self.has_log_probs else None,
      round=state.round + 1,
      passes=state.passes + ~state.done,
      accepted=KEPT * state.accepted + mean(accepted_B),
      verified=KEPT * state.verified + mean(verified_B),
    )


_Time = Annotated[float, Range(0, 1e9)]


@dataclasses.dataclass(frozen=True)
class _WrittenDraws:
  cost: _Time
  overhead: _Time = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenTimes:
  """Schema of what `written_times` returns."""

  cost: _Time
  overhead: _Time = 0.0
  drawn: _WrittenDraws | None = None


def written_times(drafter: Drafter) -> dict[str, Any]:
  """The times of a drafter's rounds as its file has them."""
  drawn = None if drafter.drawn is None else drafter.drawn._asdict()
  return {"cost": drafter.cost, "overhead": drafter.overhead, "drawn": drawn}


def read_times(facts: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of a drafter that `written_times` wrote, or an earlier version.

  Earlier files have no times of draws, and those of `Medusa` no overhead.
  """
  drawn = facts.get("drawn")
  return {
    "cost": facts["cost"],
    "overhead": facts.get("overhead", 0.0),
    "drawn": None if drawn is None else RoundTimes(**drawn),
  }


@functools.partial(jax.jit, static_argnames=("program", "capacity"))
@own_promotion
def begin(
  plain, arrays, tokens_BT, hidden_BTD, *, program: DraftingProgram, capacity: int
) -> tuple[State, Int[Array, ""]]:
  """The state after the prompts, from that of plain generation with the first token.

  Also the length to begin with.
  """
  length_B = plain.length
  draft_rings = program.begun(arrays, tokens_BT, hidden_BTD, length_B, capacity)
  accepted, verified = program.prior(arrays, tokens_BT, hidden_BTD, length_B, draft_rings)
  state = State(
    rings=plain.rings,
    draft_rings=draft_rings,
    step=jnp.zeros_like(length_B),
    before=jnp.take_along_axis(tokens_BT, (length_B - 1)[:, None], axis=1)[:, 0],
    token=plain.token,
    length=length_B,
    done=plain.done,
    tokens=plain.tokens,
    log_probs=plain.log_probs,
    round=jnp.ones((), jnp.int32),
    passes=jnp.ones_like(length_B),
    accepted=jnp.float32(accepted),
    verified=jnp.float32(verified),
  )
  return state, program.best_length(state)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
@own_promotion
def advance(
  variables, arrays, state, limit, most, key, stop, allowed, *, program: DraftingProgram
) -> tuple[State, Int[Array, ""]]:
  """The state once each row has `limit` tokens or has ended, or another length is better.

  Also the length to go on with, the program's own at the end. No row gets more than `most` tokens.
  """

  def next_length(state):
    is_short_B = (state.step + 1 < limit) & ~state.done
    return jnp.where(is_short_B.any(), program.best_length(state), -1)

  def after_round(state):
    return program.after_round(variables, arrays, state, key, stop, allowed, most)

  state = lax.while_loop(lambda state: next_length(state) == program.length, after_round, state)
  length = next_length(state)
  return state, jnp.where(length < 0, program.length, length)
