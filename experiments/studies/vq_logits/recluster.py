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
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from vqjax import sharding
from vqjax.lab.data import EvaluationBatches, TokenSplit
from vqjax.lab.training.program import Program
from vqjax.lab.training.step import TrainState
from vqjax.ops import codes as code_ops


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


def contexts(codes: Codes, hidden: Float[Array, "*B D"], targets: Integer[Array, "*B"]) -> Contexts:
  """Sums over the positions whose target is not negative."""
  vocab, (size, dim) = codes.assignment.shape[0], codes.codebook.shape
  weight, tokens = (targets >= 0).astype(jnp.float32), jnp.maximum(targets, 0)
  scores_BK = hidden @ codes.codebook.T + code_ops.log_mass(codes.assignment, size, codes.bias)
  return Contexts(
    jnp.zeros(vocab).at[tokens].add(weight),
    jnp.zeros((vocab, dim)).at[tokens].add(weight[..., None] * hidden),
    jnp.tensordot(weight, jax.nn.softmax(scores_BK), weight.ndim),
  )


def reassigned(codes: Codes, sums: Contexts) -> tuple[Codes, dict[str, float]]:
  """Move tokens to their best codes, and split codes onto codes without tokens.

  A token moves if the sample gains more than log K nats, the description length of a code: a rare
  token has too few contexts for a smaller gain to be reliable (minimum description length). A code
  without tokens takes the row of another code and one of its tokens: the one whose contexts are
  farthest from those of the code, by count times squared distance of the means.

  Returns:
    The new arrays, and the numbers of `moved` and `split` tokens with `gain`, a lower bound in nats
    of the moves' gain of log-likelihood over the sample; the splits change no probability.
  """
  (codebook, old, bias), (count_V, hidden_VD, mass_K) = codes, sums
  size, token_V = len(codebook), np.arange(len(old))
  # q is 0 or undefined for codes without tokens, and for codes without probability in the sample.
  with np.errstate(divide="ignore", invalid="ignore"):
    log_q_K = np.log(mass_K / np.bincount(old, np.exp(bias), size))
    gain_VK = hidden_VD @ codebook.T - count_V[:, None] * log_q_K
  known_K = np.isfinite(log_q_K)
  gain_VK = np.where(known_K, gain_VK, -np.inf)
  to_V = gain_VK.argmax(-1)
  gain_V = np.where(known_K[old], gain_VK[token_V, to_V] - gain_VK[token_V, old], 0)
  moves_V = gain_V > np.log(size)
  new = np.where(moves_V, to_V, old).astype(old.dtype)
  bias = bias + np.where(moves_V, log_q_K[old] - log_q_K[new], 0).astype(bias.dtype)

  mean = lambda hidden, count: hidden / np.maximum(count, 1)[:, None]
  of_code_KD = np.zeros_like(codebook)
  np.add.at(of_code_KD, new, hidden_VD)
  mean_KD = mean(of_code_KD, np.bincount(new, count_V, size))
  cost_V = count_V * ((mean(hidden_VD, count_V) - mean_KD[new]) ** 2).sum(-1)
  # The most frequent token of a code stays (the first of equals), so that no code loses all.
  by_count = np.argsort(-count_V, kind="stable")
  cost_V[by_count[np.unique(new[by_count], return_index=True)[1]]] = 0
  empty = np.flatnonzero(np.bincount(new, minlength=size) == 0)
  farthest = np.argsort(-cost_V, kind="stable")[: len(empty)]
  farthest = farthest[cost_V[farthest] > 0]
  empty, codebook = empty[: len(farthest)], codebook.copy()
  codebook[empty] = codebook[new[farthest]]
  new[farthest] = empty
  numbers = {"moved": int(moves_V.sum()), "split": len(empty), "gain": float(gain_V[moves_V].sum())}
  return Codes(codebook, new, bias), numbers


@dataclasses.dataclass(frozen=True)
class Recluster:
  """Moves tokens to the codes that fit their contexts best, every `every` steps.

  The model's head must be an untied CodebookHead with a token bias: with a tied codebook the hidden
  states depend on the codes, and the loss may rise. For given hidden states and codewords, the loss
  of the segment that is read never rises. Only
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

  def on(
    self, program: Program, split: TokenSplit
  ) -> Callable[[TrainState], tuple[TrainState, dict[str, float]]]:
    """Return the function between steps: a pass over a segment, and `reassigned`."""

    def of_batch(variables: dict, batch: dict) -> Contexts:
      hidden = program.model.apply(variables, batch["inputs"], method="hidden")
      return contexts(_head_codes(variables), hidden, batch["targets"])

    contexts_of = program.jitted(of_batch, out_shardings=sharding.replicated(program.mesh))

    def between(state: TrainState) -> tuple[TrainState, dict[str, float]]:
      segment = self.segment(int(state.step), split)
      batches = EvaluationBatches(segment, program.micro, program.model.context)
      parts = (contexts_of(state.variables, program.place_whole(batch)) for batch in batches)
      sums = functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)
      new, numbers = reassigned(*jax.device_get((_head_codes(state.variables), sums)))
      params = {"head": {"codebook": new.codebook, "token_bias": new.bias}}
      codes = {"head": {"assignment": new.assignment}}
      changed = state.replace(
        params=state.params | params,
        model_state=state.model_state | {"codes": state.model_state["codes"] | codes},
      )
      return jax.device_put(changed, jax.tree.map(lambda x: x.sharding, state)), numbers

    return between


def _head_codes(variables: dict) -> Codes:
  params = variables["params"]["head"]
  return Codes(params["codebook"], variables["codes"]["head"]["assignment"], params["token_bias"])
