"""Medusa: residual blocks on the last hidden vector, each of which drafts one further token.

Source: Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads, 2024. Here all blocks share one output layer, which may be a compressed one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, ArrayLike, Float, Int

from vqjax.heads import DenseHead, Head
from vqjax.lm import records
from vqjax.lm.drafting.eagle import Eagle, load_eagle
from vqjax.lm.generation.draft_trees import DraftTree
from vqjax.lm.generation.kv_cache import Variables
from vqjax.lm.generation.sampling import Sampling
from vqjax.lm.generation.speculation import (
  Drafter,
  DrafterModules,
  State,
  WrittenTimes,
  check_head,
  read_times,
  written_times,
)
from vqjax.lm.generation.tree_drafting import TreeProgram, Typical
from vqjax.lm.lenses.tuned import check_mark, model_mark
from vqjax.lm.models import Transformer
from vqjax.ops.vocab_parallel import own_promotion
from vqjax.tables.tensor_files import load_file, open_file, save_file

__all__ = [
  "Medusa",
  "MedusaBlocks",
  "load_drafter",
  "load_medusa",
  "medusa_loss",
  "medusa_ranks",
  "save_medusa",
]


class MedusaBlocks(NamedTuple):
  """Residual blocks h + silu(W_k h + b_k), one for each draft token.

  Block k reads the hidden vector that a token was drawn from, and its output is scored for the
  token k + 1 places after that one.

  Attributes:
    weight: W of each block; its rows are inputs.
    bias: b of each block.
  """

  weight: Float[Array, "K D D"]
  bias: Float[Array, "K D"]

  @staticmethod
  def identity(dim: int, count: int) -> MedusaBlocks:
    """Blocks that change nothing, with which training begins."""
    return MedusaBlocks(jnp.zeros((count, dim, dim)), jnp.zeros((count, dim)))

  def __call__(self, hidden: Float[Array, "*B D"]) -> Float[Array, "K *B D"]:
    """The output of each block."""
    inner = jnp.einsum("...d,kde->k...e", hidden, self.weight.astype(hidden.dtype))
    bias = self.bias.reshape(len(self.bias), *[1] * (hidden.ndim - 1), -1)
    return hidden + jax.nn.silu(inner + bias.astype(hidden.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class Medusa(Drafter):
  """Residual blocks on the model's last hidden vector, and one output layer, as the drafter.

  It drafts a tree of the likeliest tokens at each offset, whole or not at all; `length` is the
  depth of the tree. `cost` is the time of a token of the tree, drafted and verified.

  Attributes:
    blocks: the blocks.
    head: reads their outputs; None: the model's head.
    variables: those of the head.
    tree: the tree; None: the likeliest token of each block.
    typical: accepts more tokens than the exact rule does, and changes the distribution.
  """

  blocks: MedusaBlocks
  head: Head | None = None
  variables: Variables | None = None
  tree: DraftTree | None = dataclasses.field(default=None, kw_only=True)
  typical: Typical | None = dataclasses.field(default=None, kw_only=True)
  length: int = dataclasses.field(default=1, init=False)
  cost: float | int = dataclasses.field(default=0.02, kw_only=True)

  def __post_init__(self):
    count = len(self.blocks.weight)
    if self.tree is None:
      object.__setattr__(self, "tree", DraftTree.chain(count))
    if self.tree.depth > count:
      raise ValueError(
        f"`tree` must be at most as deep as there are blocks, {count}; got depth {self.tree.depth}."
        " Leave the longest paths out, or train more blocks."
      )
    object.__setattr__(self, "length", self.tree.depth)
    super().__post_init__()

  def program(
    self, model: Transformer, sampling: Sampling, positions: int, has_log_probs: bool
  ) -> TreeProgram:
    """What is compiled for a model; `bound` says which arguments are refused."""
    given = super().program(model, sampling, positions, has_log_probs)
    return _MedusaProgram(**vars(given), tree=self.tree, typical=self.typical)

  def _part(self, model: Transformer) -> DrafterModules:
    count = len(self.blocks.weight)
    shapes = (count, model.dim, model.dim), (count, model.dim)
    if (self.blocks.weight.shape, self.blocks.bias.shape) != shapes:
      raise ValueError(
        f"`blocks` must have shapes {shapes[0]} and {shapes[1]}, of the model's dim; got"
        f" {self.blocks.weight.shape} and {self.blocks.bias.shape}. Train blocks of this model."
      )
    check_head(self.head, self.variables, model)
    part = DrafterModules(model, self.head, shares=True)
    self.tree.check_width(part.output.vocab)
    return part

  def _variables(self, variables: Variables) -> dict[str, Any]:
    own = {} if self.head is None else {"head": self.variables}
    return {"body": variables, "blocks": self.blocks, **own}


@dataclasses.dataclass(frozen=True)
class _MedusaProgram(TreeProgram):
  """Rounds of which the state keeps the hidden vectors that the latest tokens were drawn from."""

  reads_hidden = True

  def begun(self, arrays, tokens_BT, hidden_BTD, length_B, capacity) -> tuple:
    """The hidden vectors [B, D] of the last tokens of the prompts."""
    return (jnp.take_along_axis(hidden_BTD, (length_B - 1)[:, None, None], axis=1)[:, 0],)

  def kept(self, state, way, hidden) -> tuple:
    """The hidden vectors [B, D] of the last accepted nodes."""
    return (hidden,)

  def candidates(self, arrays, state: State) -> tuple[Int[Array, "B N"], State]:
    """The token of each node, and the state."""
    tree, tokens = self.tree, arrays.get("tokens")
    hidden_KBD = MedusaBlocks(*(x[: tree.depth] for x in arrays["blocks"]))(*state.draft_rings)
    read = lambda head, hidden_KBD: head.top_k(hidden_KBD, tree.width)[1]
    # Where fewer tokens have a score the others are -1, which the model would read as nan.
    number_KBR = jnp.maximum(self.part.of_head(arrays, hidden_KBD, read), 0)
    token_KBR = number_KBR if tokens is None else tokens[number_KBR]
    token_SB = token_KBR[tree.depths[1:] - 1, :, tree.ranks[1:]]
    return jnp.concatenate([state.token[:, None], token_SB.T], axis=1), state


@own_promotion
def medusa_loss(
  model: Transformer,
  variables: Variables,
  blocks: MedusaBlocks,
  hidden: Float[ArrayLike, "N D"],
  targets: Int[ArrayLike, "N K"],
  head: Head | None = None,
  head_variables: Variables | None = None,
) -> Float[Array, "K"]:
  """Cross-entropy of each block, mean nats a token, with further terms of the head's loss.

  It is differentiable in the blocks and in the head's variables, and holds no array of the size of
  the vocabulary for all positions. Cai et al. weight block k by 0.8^k.

  Args:
    model: the decoder, which is not changed.
    variables: its variables.
    blocks: the blocks.
    hidden: final hidden vectors.
    targets: the tokens 2, ..., K + 1 places after that of each hidden vector, as numbers of the
      output layer; -1 where it has no such token.
    head: the output layer; None: the model's head.
    head_variables: those of `head`.
  """
  hidden_ND, target_KN = jnp.asarray(hidden), jnp.asarray(targets).T

  def loss(head):
    log_prob_KN, terms = head.loss_terms(blocks(hidden_ND), target_KN, ignore_index=-1)
    count_K = jnp.maximum(1, (target_KN >= 0).sum(axis=1))
    return sum(terms.values(), -log_prob_KN.sum(axis=1) / count_K)

  if head is None:
    return model.apply(variables, method=lambda model: loss(model.head))
  return head.apply(head_variables, method=loss)


@own_promotion
def medusa_ranks(
  drafter: Medusa,
  model: Transformer,
  variables: Variables,
  hidden: Float[ArrayLike, "N D"],
  targets: Int[ArrayLike, "N K"],
  candidates: int,
) -> Int[Array, "N K"]:
  """The rank that each block gives to its target; -1 where it is not among the candidates.

  Args:
    drafter: the drafter; its tree does not matter.
    model: the decoder.
    variables: its unstacked variables.
    hidden: final hidden vectors.
    targets: the tokens 2, ..., K + 1 places after that of each hidden vector, of the model's
      vocabulary.
    candidates: most candidates of a block.
  """
  part = drafter._part(model)
  arrays = drafter.arrays(variables, part, model.head.vocab)
  read = lambda head, hidden: head.top_k(hidden, min(candidates, head.vocab))[1]
  number_KNR = part.of_head(arrays, drafter.blocks(jnp.asarray(hidden)), read)
  token_KNR = number_KNR if drafter.tokens is None else jnp.asarray(arrays["tokens"])[number_KNR]
  is_target_KNR = token_KNR == jnp.asarray(targets).T[..., None]
  return jnp.where(is_target_KNR.any(-1), jnp.argmax(is_target_KNR, axis=-1), -1).T


FORMAT = "vqjax medusa"
"""The entry of a file's metadata that says what it is."""


@dataclasses.dataclass(frozen=True)
class _DenseHead:
  softcap: Annotated[float, records.Range(0, 1e30, above=True)] | None = None


@dataclasses.dataclass(frozen=True)
class _Facts(WrittenTimes):
  """What the header of a file holds."""

  paths: list[list[Annotated[int, records.Range(0, 2**31 - 1)]]]
  dense_head: _DenseHead | None = None


def save_medusa(drafter: Medusa, path: str | os.PathLike, variables: Variables) -> None:
  """Write a drafter as safetensors, with a mark of the model that it is of.

  The tree, the map of tokens and the times of rounds are kept; the rule of acceptance is not, and
  of heads the class of none but a `DenseHead`.
  """
  tensors = {name: np.ascontiguousarray(x) for name, x in drafter.blocks._asdict().items()}
  flat = flatten_dict(drafter.variables or {}, sep="/")
  tensors |= {f"head/{name}": np.ascontiguousarray(x) for name, x in flat.items()}
  if drafter.tokens is not None:
    tensors["tokens"] = np.asarray(drafter.tokens, np.int32)
  facts = {"paths": drafter.tree.paths, **written_times(drafter)}
  if type(head := drafter.head) is DenseHead and head.embedding is None and head.output is None:
    facts["dense_head"] = {"softcap": head.softcap}
  save_file(tensors | {"mark": model_mark(variables)}, path, {FORMAT: json.dumps(facts)})


def load_medusa(
  path: str | os.PathLike,
  model: Transformer,
  variables: Variables,
  head: Head | None = None,
  typical: Typical | None = None,
) -> Medusa:
  """Read a drafter of a model.

  Args:
    path: a file of `save_medusa`.
    model: the model that it was trained on.
    variables: its variables.
    head: the output layer of the blocks; None: the `DenseHead` in the file, or the model's head if
      there is no output layer in it.
    typical: a rule of acceptance that changes the distribution.

  Raises:
    ValueError: the file is not a drafter, or that of another model or head.
  """
  try:
    tensors, metadata = load_file(path)
    where, remedy = f"the header of {path}", "Train the drafter again."
    facts = records.parse_json(metadata[FORMAT], _Facts, where, remedy, seal=False)
    blocks = MedusaBlocks(*(jnp.asarray(tensors[name]) for name in MedusaBlocks._fields))
    mark, tree, times = tensors["mark"], DraftTree(facts["paths"]), read_times(facts)
  except (ValueError, KeyError) as error:
    raise ValueError(
      f"`path` must be a file of `save_medusa`; got {path}: {error}. Train the drafter again."
    ) from error
  check_mark(mark, variables, path, kind="drafter")
  flat = {name[5:]: jnp.asarray(x) for name, x in tensors.items() if name.startswith("head/")}
  if head is None and "dense_head" in facts:
    weight = flat["params/weight"]
    head = DenseHead(
      *weight.shape,
      use_bias="params/bias" in flat,
      dtype=model.head.dtype,
      param_dtype=weight.dtype,
      **facts["dense_head"],
    )
  if bool(flat) != (head is not None):
    raise ValueError(
      f"`head` must be {'the output layer in the file' if flat else 'None, the head of the model'};"
      f" got {head}. Give the head that the drafter was trained with."
    )
  own = unflatten_dict(flat, sep="/") if flat else None
  options = {"tokens": tensors.get("tokens"), "tree": tree, "typical": typical}
  drafter = Medusa(blocks, head, own, **options, **times)
  drafter._part(model)
  return drafter


def load_drafter(
  path: str | os.PathLike, model: Transformer, variables: Variables
) -> Eagle | Medusa:
  """Read a drafter that `vqjax draft` wrote, of either kind.

  Raises:
    ValueError: the file is not a drafter, or that of another model.
  """
  try:
    is_medusa = FORMAT in open_file(path)[1]
  except ValueError:  # `load_eagle` explains
    is_medusa = False
  return (load_medusa if is_medusa else load_eagle)(path, model, variables)
