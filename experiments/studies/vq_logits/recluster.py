"""Reassignment of tokens to the codes of a codebook head during training."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.vq_logits import reassignment
from vqjax import assign, sharding
from vqjax.heads import CodebookHead
from vqjax.lab.data import EvaluationBatches, TokenSplit
from vqjax.lab.training.program import Program
from vqjax.lab.training.step import TrainState

__all__ = ["Recluster"]

Between = Callable[[TrainState], tuple[TrainState, dict[str, float]]]
"""(state) -> (state, metrics), called between two steps; donates its state."""


@dataclasses.dataclass(frozen=True)
class Recluster:
  """Moves tokens to the codes that fit their contexts best, every `every` steps.

  The mean hidden state of a token's contexts, over a segment of the training text, determines the
  code that raises the likelihood of the segment most: see `reassignment`. For given
  hidden states and codewords, the loss of the segment never rises. Only codes without a token get
  other codewords, so Adam's moments are kept: the old moments of such a codeword decay within
  1 / (1 - beta1) steps.

  The segment depends on the step alone, so that a resumed run repeats it.

  Attributes:
    every: number of steps between two reassignments.
    until: last step with a reassignment, so that the codebook can settle.
    tokens: length of the segment; a shorter text is read whole.

  Raises:
    ValueError: a field is below 1, or `until` below `every`.
  """

  every: int
  until: int
  tokens: int = 2**18

  def __post_init__(self):
    for name in ("every", "tokens"):
      if getattr(self, name) < 1:
        raise ValueError(
          f"`recluster.{name}` must be at least 1; got {getattr(self, name)}. Raise it."
        )
    if self.until < self.every:
      raise ValueError(
        f"`recluster.until` must be at least recluster.every = {self.every}, the first step; got"
        f" {self.until}. Raise it, or set recluster to None."
      )

  def is_due(self, step: int) -> bool:
    """Whether tokens are reassigned after this step."""
    return step % self.every == 0 and step <= self.until

  def on(self, program: Program, split: TokenSplit) -> Between:
    """Return the function between steps: a pass over a segment, and reassignment.

    Its metrics are the numbers of `moved` and `split` tokens, `gain_nats` (a lower bound of the
    gain per token of the segment), and the perplexity floors of the segment, `floor_before` and
    `floor_after`.

    Raises:
      ValueError: the model's head is not an untied CodebookHead, or is inside another model, as in
        a distillation.
    """
    head = program.model.head
    # With a tied codebook the hidden states depend on the codes, and the loss may rise.
    if type(head) is not CodebookHead or head.embedding is not None:
      tied = "a tied " if getattr(head, "embedding", None) is not None else "a "
      raise ValueError(
        f"`model.head` must be an untied CodebookHead for recluster; got {tied}"
        f"{type(head).__name__}. Set recluster to None, or change the head."
      )
    if "head" not in program.abstract_state.params:
      raise ValueError(
        "`model` must own its head for recluster; got a"
        f" {type(program.model).__name__}, whose head is inside another model. Set recluster to"
        " None."
      )
    return _Between(self, program, split)


class _Between:
  """`Recluster` on a program and a text."""

  def __init__(self, recluster: Recluster, program: Program, split: TokenSplit):
    self.recluster, self.program, self.split = recluster, program, split
    everywhere = sharding.replicated(program.mesh)
    shardings = jax.tree.map(lambda x: x.sharding, program.abstract_state)
    self._add = program.jitted(self._add_batch, donate_argnums=0, out_shardings=everywhere)
    self._move = program.jitted(_reassign, donate_argnums=0, out_shardings=(shardings, everywhere))

  def _add_batch(
    self, total: reassignment.Contexts, variables: dict, batch: dict
  ) -> reassignment.Contexts:
    """Add the contexts of a batch."""
    model, targets = self.program.model, batch["targets"]
    codebook, assignment, token_bias = _head_arrays(variables)
    contexts = reassignment.contexts(
      hidden=model.apply(variables, batch["inputs"], method="hidden"),
      codebook=codebook,
      assignment=assignment,
      tokens=jnp.maximum(targets, 0),  # a negative index would count from the end
      mask=targets >= 0,
      bias=token_bias,
      dtype=model.head.dtype,
      vocab_axis=model.head.vocab_axis,
    )
    return jax.tree.map(jnp.add, total, contexts)

  def _segment(self, step: int) -> TokenSplit:
    """Return the next segment of the text, which starts over at its end."""
    total = len(self.split.tokens)
    length = min(self.recluster.tokens, total)
    first = min((step // self.recluster.every - 1) * length % total, total - length)
    return dataclasses.replace(self.split, tokens=self.split.tokens[first : first + length])

  def __call__(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
    program, head = self.program, self.program.model.head
    total = reassignment.Contexts(
      count=jnp.zeros((head.vocab,), jnp.float32),
      hidden=jnp.zeros((head.vocab, head.dim), jnp.float32),
      mass=jnp.zeros((head.codes,), jnp.float32),
    )
    total = jax.device_put(total, sharding.replicated(program.mesh), may_alias=False)
    segment = self._segment(int(state.step))
    for batch in EvaluationBatches(segment, program.micro, program.model.context):
      total = self._add(total, state.variables, program.place_whole(batch))
    count = np.asarray(total.count).astype(np.int64)
    state, moves = self._move(state, total)
    floor = lambda assignment: (
      assign.floor(
        np.asarray(assignment), count, codes=head.codes, token_bias=head.token_bias
      ).perplexity
    )
    return state, {
      "moved": int(moves["moved"]),
      "split": int(moves["split"]),
      "gain_nats": float(moves["gain"]) / len(segment.tokens),
      "floor_before": floor(moves["before"]),
      "floor_after": floor(moves["after"]),
    }


def _head_arrays(variables: dict) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Return codebook, assignment and token bias of the head."""
  params = variables["params"]["head"]
  assignment = variables["codes"]["head"]["assignment"]
  return params["codebook"], assignment, params.get("token_bias")


def _reassign(state: TrainState, total: reassignment.Contexts) -> tuple[TrainState, dict[str, Any]]:
  codebook, before, bias = _head_arrays(state.variables)
  new = reassignment.reassigned(total, codebook, before, bias)
  params = {"codebook": new.codebook} | ({} if bias is None else {"token_bias": new.bias})
  codes = state.model_state["codes"] | {"head": {"assignment": new.assignment}}
  state = state.replace(
    params=state.params | {"head": state.params["head"] | params},
    model_state=state.model_state | {"codes": codes},
  )
  moves = {"moved": new.moved, "split": new.split, "gain": new.gain}
  return state, moves | {"before": before, "after": new.assignment}
