"""Rounds of speculative decoding in which a drafter proposes a tree of tokens.

The candidates are a function of the tokens so far, not drawn. The exact rule draws the model's own
token at each node, and goes on with the child that has it: what is generated is drawn by the model,
and the tree decides how much of it one pass gives. Source: Cai et al., Medusa: Simple LLM Inference
Acceleration Framework with Multiple Decoding Heads, 2024.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from vqjax.lm.generation.draft_trees import DraftTree
from vqjax.lm.generation.kv_cache import Ring, Variables, extend
from vqjax.lm.generation.sampling import Sampling, choose
from vqjax.lm.generation.speculation import (
  PRIOR,
  Draft,
  Drafter,
  DrafterModules,
  DraftingProgram,
  EarlyExit,
  State,
)
from vqjax.lm.models import Transformer
from vqjax.ops import sampling as ops
from vqjax.ops.rejection import FilteredDistribution

__all__ = ["TreeDraft", "Typical"]


@dataclasses.dataclass(frozen=True)
class Typical:
  """Acceptance of every draft token that is likely enough, which changes the distribution.

  A token is accepted where p > min(epsilon, delta · exp(-H)), with the model's distribution p after
  temperature and filters, and its entropy H. Of the accepted paths the longest is taken, and the
  likeliest of those. Greedy decoding stays exact. Source: Cai et al., Medusa, 2024, Section 2.3.1.

  Attributes:
    epsilon: probability at which any token is accepted.
    delta: part of the perplexity's inverse, exp(-H), that is enough.
  """

  epsilon: float = 0.09
  delta: float = 0.3

  def __post_init__(self):
    for name in ("epsilon", "delta"):
      if not 0 < getattr(self, name) <= 1:
        raise ValueError(
          f"`{name}` must be in (0, 1]; got {getattr(self, name)}. Use 0.09 and 0.3, or leave"
          " `typical` out."
        )


@dataclasses.dataclass(frozen=True)
class TreeProgram(DraftingProgram):
  """Rounds that verify a tree, or, where few of its tokens are accepted, none.

  `longest` is the depth of the tree, and `cost` is that of one of its tokens. Of the state,
  `verified` counts rounds, so that `accepted` over it is the mean of a round.

  Attributes:
    tree: the tree.
    typical: the rule of acceptance; None: the exact one.
  """

  tree: DraftTree = dataclasses.field(kw_only=True)
  typical: Typical | None = dataclasses.field(kw_only=True)

  @abc.abstractmethod
  def candidates(self, arrays, state: State) -> tuple[Int[Array, "B N"], State]:
    """The token of each node, and the state with what the drafter keeps of them."""

  @abc.abstractmethod
  def kept(self, state: State, way: Int[Array, "B T"], hidden: Float[Array, "B D"]) -> tuple:
    """`State.draft_rings` after a round.

    Args:
      state: the state, with `step` before the round.
      way: the nodes from the root to the last accepted one.
      hidden: final hidden vectors of the model at that node.
    """

  @property
  def rejected(self) -> int:
    """Most tokens that a round writes to a cache and rejects."""
    return self.tree.size

  def prior(
    self, arrays, tokens_BT, hidden_BTD, length_B, draft_rings
  ) -> tuple[ArrayLike, ArrayLike]:
    """Rounds that accept all, so that a tree is tried first."""
    return PRIOR[1] * self.tree.depth, PRIOR[1]

  def best_length(self, state: State) -> Int[Array, ""]:
    """The depth of the tree, or 0 where it costs more than it gives."""
    if self.length == 0 or self.cost == 0:
      return jnp.int32(self.length)
    cost = self.overhead + self.cost * self.tree.size
    return jnp.where(state.accepted / state.verified >= cost, self.longest, 0)

  def after_round(self, variables, arrays, state, key, stop, allowed, most) -> State:
    """The state after a round; no row gets more than `most` tokens in all."""
    if self.length == 0:
      return super().after_round(variables, arrays, state, key, stop, allowed, most)
    key = jax.random.fold_in(key, state.round)
    token_BN, state = self.candidates(arrays, state)
    hidden_BND, rings = extend(
      self.model, variables, state.rings, token_BN, state.length, state.step, self.tree
    )
    if allowed is not None and allowed.ndim == 2:
      allowed = allowed[:, None]
    rule = self._typical if self.typical and not self.sampling.is_greedy else self._exact

    def of_head(model):
      node_B, next_B = rule(model.head, hidden_BND, token_BN, key, allowed)
      way_BT = jnp.asarray(self.tree.ways)[node_B]
      accepted_B = jnp.asarray(self.tree.depths)[node_B]
      hidden_BTD = jnp.take_along_axis(hidden_BND, way_BT[..., None], axis=1)
      is_draft_BT = jnp.arange(self.length + 1) < accepted_B[:, None]
      drafted_BT = jnp.take_along_axis(token_BN, jnp.roll(way_BT, -1, axis=1), axis=1)
      token_BT = jnp.where(is_draft_BT, drafted_BT, next_B[:, None])
      log_prob_BT = None
      if self.has_log_probs:
        log_prob_BT = model.head.log_prob(hidden_BTD, jnp.maximum(token_BT, 0))
      return way_BT, (hidden_BTD, accepted_B, jnp.ones_like(accepted_B), token_BT, log_prob_BT)

    way_BT, found = self.model.apply(variables, method=of_head)
    last_BD = jnp.take_along_axis(found[0], found[1][:, None, None], axis=1)[:, 0]
    rings = tuple(ring.along(state.step, way_BT) for ring in rings)
    state = state._replace(rings=rings, draft_rings=self.kept(state, way_BT, last_BD))
    return self.appended(state, *found, stop, most)

  def _exact(self, head, hidden_BND, token_BN, key, allowed):
    """The last node on the path of the model's own tokens, and its token after it."""
    drawn_BN = choose(head, hidden_BND, key, self.sampling, allowed)
    is_drawn_BN = drawn_BN[:, self.tree.parents] == token_BN
    node_B = jnp.argmax(self._accepted(is_drawn_BN) * self.tree.depths, axis=1)
    return node_B, jnp.take_along_axis(drawn_BN, node_B[:, None], axis=1)[:, 0]

  def _typical(self, head, hidden_BND, token_BN, key, allowed):
    """The last node of the longest path of likely tokens, and a token drawn after it."""

    def compared(blocks, token_BN, allowed):
      target = FilteredDistribution.of(
        ops.allow(blocks, allowed, self.model.head.vocab), *self._filters()
      )
      return target.log_prob(token_BN), target.entropy()

    before_BND = hidden_BND[:, self.tree.parents]
    log_p_BN, entropy_BN = head.over_blocks(compared, before_BND, token_BN, allowed)
    enough_BN = jnp.minimum(jnp.log(self.typical.epsilon), jnp.log(self.typical.delta) - entropy_BN)
    accepted_BN = self._accepted(log_p_BN > enough_BN)
    depth_BN = accepted_BN * self.tree.depths
    is_longest_BN = accepted_BN & (depth_BN == depth_BN.max(axis=1, keepdims=True))
    is_draft_BN = accepted_BN & (self.tree.depths > 0)
    path_BN = jnp.where(is_draft_BN, log_p_BN, 0) @ jnp.asarray(self.tree.sees.T, jnp.float32)
    node_B = jnp.argmax(jnp.where(is_longest_BN, path_BN, -jnp.inf), axis=1)
    last_BD = jnp.take_along_axis(hidden_BND, node_B[:, None, None], axis=1)
    return node_B, choose(head, last_BD, key, self.sampling, allowed)[:, 0]

  def _accepted(self, is_right_BN: Bool[Array, "B N"]) -> Bool[Array, "B N"]:
    """Whether all draft tokens on the path to each node are right; always of the root."""
    is_right_BN = is_right_BN | (self.tree.depths == 0)
    return (is_right_BN[:, None] | ~self.tree.sees).all(axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class TreeDraft(Drafter):
  """The likeliest tokens of a decoder that drafts, as a tree.

  The tree is drafted whole or not at all; `length` is its depth, and `tokens` are the drafter's.
  Each depth is a pass of the drafter over the nodes so far.

  Attributes:
    drafter: a `Draft` or an `EarlyExit`, of which `length` and `cost` do not matter.
    tree: the tree.
    typical: accepts more tokens than the exact rule does, and changes the distribution.
  """

  drafter: Drafter
  tree: DraftTree
  typical: Typical | None = dataclasses.field(default=None, kw_only=True)
  length: int = dataclasses.field(default=1, init=False)
  tokens: Int[ArrayLike, "U"] | Sequence[int] | None = dataclasses.field(default=None, init=False)

  def __post_init__(self):
    if not isinstance(self.drafter, Draft | EarlyExit):
      raise ValueError(
        f"`drafter` must be a Draft or an EarlyExit; got {type(self.drafter).__name__}. A `Medusa`"
        " has a tree of its own, and an `Eagle` drafts one path."
      )
    object.__setattr__(self, "length", self.tree.depth)
    object.__setattr__(self, "tokens", self.drafter.tokens)
    super().__post_init__()

  def program(
    self, model: Transformer, sampling: Sampling, positions: int, has_log_probs: bool
  ) -> TreeProgram:
    """What is compiled for a model; `bound` says which arguments are refused."""
    given = super().program(model, sampling, positions, has_log_probs)
    return _DraftProgram(**vars(given), tree=self.tree, typical=self.typical)

  def _part(self, model: Transformer) -> DrafterModules:
    part = self.drafter._part(model)
    self.tree.check_width(part.output.vocab)
    return part

  def _variables(self, variables: Variables) -> dict[str, Variables]:
    return self.drafter._variables(variables)


@dataclasses.dataclass(frozen=True)
class _DraftProgram(TreeProgram):
  def kept(self, state, way, hidden) -> tuple[Ring, ...]:
    """The drafter's caches of the accepted path."""
    return tuple(ring.along(state.step, way) for ring in state.draft_rings)

  def candidates(self, arrays, state: State) -> tuple[Int[Array, "B N"], State]:
    """The token of each node, and the state with the drafter's caches of all of them."""
    tree, part, shares = self.tree, self.part, self.part.shares
    tokens, numbers = arrays.get("tokens"), arrays.get("numbers")
    rings = state.rings[: part.body.layers] if shares else state.draft_rings
    token_BN = state.token[:, None]
    read = lambda head, hidden_BPD: head.top_k(hidden_BPD, tree.width)[1]

    def drafted(token_BN, first):
      fed_BN = token_BN if numbers is None else numbers[token_BN]
      # The nodes of smaller depths come first, and are a tree themselves.
      part_tree = DraftTree(tree.nodes[1 : fed_BN.shape[1]]) if fed_BN.shape[1] > 1 else None
      given = rings, fed_BN, state.length, state.step, part_tree
      hidden_BND, extended = extend(part.body, arrays["body"], *given)
      return hidden_BND[:, first:], extended

    for depth in range(tree.depth):
      first, end = np.searchsorted(tree.depths, (depth, depth + 1))
      hidden_BPD, _ = drafted(token_BN, first)
      # Where fewer tokens have a score the others are -1, which the model would read as nan.
      number_BPR = jnp.maximum(part.of_head(arrays, hidden_BPD, read), 0)
      token_BPR = number_BPR if tokens is None else tokens[number_BPR]
      children = slice(end, np.searchsorted(tree.depths, depth + 2))
      new_BC = token_BPR[:, tree.parents[children] - first, tree.ranks[children]]
      token_BN = jnp.concatenate([token_BN, new_BC], axis=1)
    if not shares:
      state = state._replace(draft_rings=drafted(token_BN, 0)[1])
    return token_BN, state
