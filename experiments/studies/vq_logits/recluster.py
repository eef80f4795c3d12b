"""Reassignment of tokens to the codes of a codebook head during training.

With the codebook and the hidden vectors h_n of a sample held fixed, let token v on code k have
the bias b_v and f_v positions in the sample, and let q_k = sum_n exp(h_n · c_k) / Z_n. If v moves
from code a to code b and b_v changes by log(q_a / q_b), v's expected probability stays. As
-log(1 + z) >= -z, moving any set of tokens raises the log-likelihood of the sample by at least

  sum over moved v of  (sum of h_n over v's positions) · (c_b - c_a) - f_v log(q_b / q_a):

so each token may move to its best code independently, and the likelihood never falls. This is the
exchange of Kneser and Ney (1993), for codes whose probabilities come from a network.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from vqjax import sharding
from vqjax.heads import CodebookHead
from vqjax.lab.data import EvaluationBatches, TokenSplit
from vqjax.lab.training.program import Program
from vqjax.lab.training.step import TrainState
from vqjax.lm.models import LanguageModel
from vqjax.ops import codes as code_ops

__all__ = ["Recluster"]

Between = Callable[[TrainState], tuple[TrainState, dict[str, float]]]
"""(state) -> (state, metrics), called between two steps; donates its state."""


class Codes(NamedTuple):
  """The arrays of a codebook head."""

  codebook: Float[Array, "K D"]
  assignment: Int[Array, "V"]
  bias: Float[Array, "V"]


class Contexts(NamedTuple):
  """Sums over the positions of a sample.

  Attributes:
    count: number of positions with each target.
    hidden: sum of the hidden vectors of these positions.
    mass: sum over all positions of the probability of each code.
  """

  count: Float[Array, "V"]
  hidden: Float[Array, "V D"]
  mass: Float[Array, "K"]


def contexts(
  codes: Codes,
  hidden: Float[Array, "*B D"],
  tokens: Integer[Array, "*B"],
  mask: Bool[Array, "*B"],
) -> Contexts:
  """Sums over the positions of the mask, with targets `tokens`, for `reassigned`."""
  vocab, (size, dim) = codes.assignment.shape[0], codes.codebook.shape
  hidden, weight = hidden.astype(jnp.float32), mask.astype(jnp.float32)
  scores_BK = hidden @ codes.codebook.T + code_ops.log_mass(codes.assignment, size, codes.bias)
  return Contexts(
    jnp.zeros(vocab).at[tokens].add(weight),
    jnp.zeros((vocab, dim)).at[tokens].add(weight[..., None] * hidden),
    jnp.tensordot(weight, jax.nn.softmax(scores_BK), weight.ndim),
  )


def reassigned(codes: Codes, sums: Contexts) -> tuple[Codes, dict[str, Array]]:
  """Move tokens to their best codes, and split codes onto codes without tokens.

  A token moves if the sample gains more than log K nats, the description length of a code: a rare
  token has too few contexts for a smaller gain to be reliable (minimum description length). A code
  without tokens takes the row of another code and one of its tokens: the one whose contexts are
  farthest from those of the code, by count times squared distance of the means. The array [V, K]
  never exists.

  Returns:
    The new arrays, and the numbers of `moved` and `split` tokens with `gain`, a lower bound in nats
    of the moves' gain of log-likelihood over the sample; the splits change no probability.
  """
  size, assignment = codes.codebook.shape[0], codes.assignment
  log_q_K = jnp.log(sums.mass) - code_ops.log_mass(assignment, size, codes.bias)

  def best(of_token):
    hidden, count, code = of_token
    # q is 0 or undefined for codes without tokens, and for codes without probability in the sample.
    gain_K = jnp.where(jnp.isfinite(log_q_K), codes.codebook @ hidden - count * log_q_K, -jnp.inf)
    to = jnp.argmax(gain_K)
    own = jnp.where(jnp.isfinite(log_q_K[code]), gain_K[code], jnp.inf)
    return to.astype(assignment.dtype), gain_K[to] - own

  to_V, gain_V = jax.lax.map(best, (sums.hidden, sums.count, assignment), batch_size=4096)
  moves_V = gain_V > jnp.log(size)
  moved_to_V = jnp.where(moves_V, to_V, assignment)
  shift_V = jnp.where(moves_V, log_q_K[assignment] - log_q_K[moved_to_V], 0)
  new, source_K, split = _split_codes(sums, moved_to_V, size)
  metrics = {"moved": moves_V.sum(), "split": split, "gain": jnp.where(moves_V, gain_V, 0).sum()}
  return Codes(codes.codebook[source_K], new, codes.bias + shift_V), metrics


def _split_codes(sums: Contexts, assignment, codes):
  """The new assignment, the code whose row each code has, and number of splits."""
  by_code = lambda x: jax.ops.segment_sum(x, assignment, codes)
  count_V, token_V = sums.count, jnp.arange(assignment.shape[0])
  mean_VD = sums.hidden / jnp.maximum(count_V, 1)[:, None]
  mean_KD = by_code(sums.hidden) / jnp.maximum(by_code(count_V), 1)[:, None]
  cost_V = count_V * ((mean_VD - mean_KD[assignment]) ** 2).sum(-1)
  # The most frequent token of a code stays (the first of equals), so that no code loses all.
  top_K = jax.ops.segment_max(count_V, assignment, codes)
  stays_V = jnp.where(count_V == top_K[assignment], token_V, token_V.size)
  keeper_K = jax.ops.segment_min(stays_V, assignment, codes)
  cost_V = jnp.where(keeper_K[assignment] == token_V, 0.0, cost_V)

  empty_K = by_code(jnp.ones_like(count_V)) == 0
  # The r-th code without tokens takes the token of r-th highest cost.
  code_of_rank = jnp.argsort(~empty_K, stable=True)
  cost, token_of_rank = jax.lax.top_k(cost_V, codes)
  takes = empty_K[code_of_rank] & (cost > 0)
  own = assignment[token_of_rank]
  source_K = jnp.arange(codes).at[code_of_rank].set(jnp.where(takes, own, code_of_rank))
  given = jnp.where(takes, code_of_rank, own).astype(assignment.dtype)
  return assignment.at[token_of_rank].set(given), source_K, takes.sum()


@dataclasses.dataclass(frozen=True)
class Recluster:
  """Moves tokens to the codes that fit their contexts best, every `every` steps.

  For given hidden states and codewords, the loss of the segment that is read never rises. Only
  codes without a token get other codewords, so Adam's moments are kept: the old moments of such a
  codeword decay within 1 / (1 - beta1) steps. The segment depends on the step alone, so that a
  resumed run repeats it.

  Attributes:
    every: number of steps between two reassignments.
    until: last step with a reassignment, so that the codebook can settle.
    tokens: length of the segment; a shorter text is read whole.
  """

  every: int
  until: int
  tokens: int = 2**18

  def is_due(self, step: int) -> bool:
    """Whether tokens are reassigned after this step."""
    return step % self.every == 0 and step <= self.until

  def segment(self, step: int, split: TokenSplit) -> TokenSplit:
    """The segment that is read after a step; the text starts over at its end."""
    total = len(split.tokens)
    length = min(self.tokens, total)
    first = min((step // self.every - 1) * length % total, total - length)
    return dataclasses.replace(split, tokens=split.tokens[first : first + length])

  def on(self, program: Program, split: TokenSplit) -> Between:
    """Return the function between steps: a pass over a segment, and reassignment.

    Its metrics are those of `reassigned`.

    Raises:
      ValueError: the model itself does not have an untied CodebookHead with a token bias.
    """
    # With a tied codebook the hidden states depend on the codes, and the loss may rise.
    own = program.abstract_state.params.get("head", {})
    if type(program.model.head) is not CodebookHead or not {"codebook", "token_bias"} <= own.keys():
      raise ValueError(
        "`model.head` must be an untied CodebookHead with a token bias, of the model itself, for"
        f" recluster; got a {type(program.model.head).__name__} of a"
        f" {type(program.model).__name__}. Set recluster to None, or change the head."
      )
    everywhere = sharding.replicated(program.mesh)
    shardings = jax.tree.map(lambda x: x.sharding, program.abstract_state)
    of_batch = functools.partial(_batch_contexts, program.model)
    contexts_of = program.jitted(of_batch, out_shardings=everywhere)
    move = program.jitted(_moved, donate_argnums=0, out_shardings=(shardings, everywhere))

    def between(state: TrainState) -> tuple[TrainState, dict[str, float]]:
      segment = self.segment(int(state.step), split)
      batches = EvaluationBatches(segment, program.micro, program.model.context)
      parts = (contexts_of(state.variables, program.place_whole(batch)) for batch in batches)
      total = functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)
      state, metrics = move(state, total)
      return state, {name: float(value) for name, value in metrics.items()}

    return between


def _head_codes(variables: dict) -> Codes:
  params = variables["params"]["head"]
  return Codes(params["codebook"], variables["codes"]["head"]["assignment"], params["token_bias"])


def _batch_contexts(model: LanguageModel, variables: dict, batch: dict) -> Contexts:
  hidden, targets = model.apply(variables, batch["inputs"], method="hidden"), batch["targets"]
  # A negative index would count from the end.
  return contexts(_head_codes(variables), hidden, jnp.maximum(targets, 0), targets >= 0)


def _moved(state: TrainState, total: Contexts) -> tuple[TrainState, dict[str, Array]]:
  new, metrics = reassigned(_head_codes(state.variables), total)
  params = {**state.params, "head": {"codebook": new.codebook, "token_bias": new.bias}}
  codes = {**state.model_state["codes"], "head": {"assignment": new.assignment}}
  model_state = {**state.model_state, "codes": codes}
  return state.replace(params=params, model_state=model_state), metrics
