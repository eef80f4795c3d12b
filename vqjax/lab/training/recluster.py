"""How does the assignment of a codebook head follow what the model learns?"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vqjax import assign, sharding
from vqjax.heads import CodebookHead
from vqjax.lab.data import EvaluationBatches, TokenSplit
from vqjax.lab.training.program import Program
from vqjax.lab.training.state import TrainState
from vqjax.ops import reassignment

Between = Callable[[TrainState], tuple[TrainState, dict[str, float]]]
"""Between two steps: state -> state, and what to log. The state that it is given is donated."""


@dataclasses.dataclass(frozen=True)
class Recluster:
  """Every so many steps, tokens move to the codes that fit their contexts best.

  The mean hidden vector of a token's contexts, over a stretch of the training text, says which code
  raises the likelihood of that text most: see `vqjax.ops.reassignment`. The loss of the stretch, hidden
  vectors and rows being as they are, never rises by it. Rows stay but for those of codes that no
  token sits on, so Adam's moments stay too: what they hold of such a row fades within
  1 / (1 - beta1) steps.

  Which stretch follows from the step alone, so a resumed run repeats it.

  Attributes:
    every: steps between two times.
    until: the last step at which it happens, so that the codebook can settle.
    tokens: length of the stretch; a text that is shorter is read whole.

  Raises:
    ValueError: a number that is below 1, or an end before the first time.
  """

  every: int
  until: int
  tokens: int = 2**18

  def __post_init__(self):
    for name in ("every", "tokens"):
      if getattr(self, name) < 1:
        raise ValueError(f"recluster.{name} {getattr(self, name)} is below 1; give a positive int")
    if self.until < self.every:
      raise ValueError(
        f"recluster.until {self.until} is before the first time, step {self.every}; raise it, or"
        " lower recluster.every"
      )

  def is_due(self, step: int) -> bool:
    """Whether it happens after this step."""
    return step % self.every == 0 and step <= self.until

  def on(self, program: Program, split: TokenSplit) -> Between:
    """What happens between steps: a pass over a stretch of the split, and the moves.

    It logs `moved` and `split` tokens, `gain_nats` (what a token of the stretch gains at least),
    and the lowest perplexity of the stretch that the assignment allows, `floor_before` and
    `floor_after`.

    Raises:
      ValueError: the model's head is no CodebookHead with a codebook of its own, or not the
        model's own, as in a distillation.
    """
    head = program.model.head
    # A tied codebook changes the hidden vectors with the codes: nothing is known of the loss then.
    if type(head) is not CodebookHead or head.embedding is not None:
      tied = "a tied " * (getattr(head, "embedding", None) is not None)
      raise ValueError(
        f"recluster moves the tokens of an untied CodebookHead, and this model has"
        f" {tied or 'a '}{type(head).__name__}; set recluster to None, or change the head"
      )
    if "head" not in program.abstract_state.params:
      raise ValueError(
        f"recluster moves the tokens of a model's own head, and that of a"
        f" {type(program.model).__name__} is inside another model; set recluster to None"
      )
    return _Between(self, program, split)


class _Between:
  """`Recluster` on a program and a text."""

  def __init__(self, recluster: Recluster, program: Program, split: TokenSplit):
    self.recluster, self.program, self.split = recluster, program, split
    everywhere = sharding.replicated(program.mesh)
    placed = jax.tree.map(lambda x: x.sharding, program.abstract_state)
    self._add = program.jitted(self._added, donate_argnums=0, out_shardings=everywhere)
    self._move = program.jitted(_moved, donate_argnums=0, out_shardings=(placed, everywhere))

  def _added(
    self, total: reassignment.Contexts, variables: dict, batch: dict
  ) -> reassignment.Contexts:
    head = self.program.model.head
    hidden = self.program.model.apply(variables, batch["inputs"], method="hidden")
    targets = batch["targets"]
    found = reassignment.contexts(
      *(hidden, *_of_head(variables)[:2], jnp.maximum(targets, 0), targets >= 0),
      *(_of_head(variables)[2], head.dtype, head.vocab_axis),
    )
    return jax.tree.map(jnp.add, total, found)

  def _stretch(self, step: int) -> TokenSplit:
    """The next stretch of the text, from its beginning again where the text ends."""
    total = len(self.split.tokens)
    length = min(self.recluster.tokens, total)
    first = min((step // self.recluster.every - 1) * length % total, total - length)
    return dataclasses.replace(self.split, tokens=self.split.tokens[first : first + length])

  def __call__(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
    program, head = self.program, self.program.model.head
    shapes = (head.vocab,), (head.vocab, head.dim), (head.codes,)
    total = reassignment.Contexts(*(jnp.zeros(shape, jnp.float32) for shape in shapes))
    total = jax.device_put(total, sharding.replicated(program.mesh), may_alias=False)
    stretch = self._stretch(int(state.step))
    for batch in EvaluationBatches(stretch, program.micro, program.model.context):
      total = self._add(total, state.variables, program.place_whole(batch))
    count = np.asarray(total.count).astype(np.int64)
    state, found = self._move(state, total)
    floors = (
      assign.floor(np.asarray(table), count, codes=head.codes, token_bias=head.token_bias)
      for table in (found["before"], found["after"])
    )
    before, after = (floor.perplexity for floor in floors)
    return state, {
      "moved": int(found["moved"]),
      "split": int(found["split"]),
      "gain_nats": float(found["gain"]) / len(stretch.tokens),
      "floor_before": before,
      "floor_after": after,
    }


def _of_head(variables: dict) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Codebook, assignment and token bias."""
  own = variables["params"]["head"]
  return own["codebook"], variables["codes"]["head"]["assignment"], own.get("token_bias")


def _moved(state: TrainState, total: reassignment.Contexts) -> tuple[TrainState, dict[str, Any]]:
  codebook, before, bias = _of_head(state.variables)
  found = reassignment.reassigned(total, codebook, before, bias)
  own = {"codebook": found.codebook} | ({} if bias is None else {"token_bias": found.bias})
  tables = state.model_state["codes"] | {"head": {"assignment": found.assignment}}
  moved = state.replace(
    params=state.params | {"head": state.params["head"] | own},
    model_state=state.model_state | {"codes": tables},
  )
  named = {"moved": found.moved, "split": found.split, "gain": found.gain}
  return moved, {"before": before, "after": found.assignment, **named}
