"""A drafter of one block that reads the final hidden vectors of the model.

At position p the block reads the embedding of token p and the model's final hidden vector at p - 1,
and predicts the one at p, from which a head drafts token p + 1. While it drafts, it reads its own
predictions; after a round it reads the model's vectors of the accepted tokens again. Source: Li et
al., EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty, 2024. It is trained as it
drafts, several predictions deep: Li et al., EAGLE-3, 2025.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from vqjax.heads import DenseHead, Head
from vqjax.lm import records
from vqjax.lm.generation.kv_cache import Ring, Variables
from vqjax.lm.generation.sampling import Sampling
from vqjax.lm.generation.speculation import (
  Drafter,
  DrafterModules,
  DraftingProgram,
  State,
  WrittenTimes,
  check_head,
  read_times,
  written_times,
)
from vqjax.lm.lenses.tuned import check_mark, model_mark
from vqjax.lm.models import Transformer
from vqjax.lm.models.attention import attend, sunk_softmax
from vqjax.ops.vocab_parallel import own_promotion
from vqjax.tables.tensor_files import load_file, save_file

__all__ = ["Eagle", "initial_params", "load_eagle", "save_eagle"]

TESTED_POSITIONS = 32
"""Positions of the prompts, of all rows together, on which a drafter is tested before it drafts."""

PROMPT_WEIGHT = 0.5
"""Weight of such a position over that of a draft token: the model did not write the prompt."""

Params = dict[str, Any]
"""Parameters of the block, and of what it reads and returns."""

FORMAT = "vqjax eagle"
"""Key of the options in a file; a file with several keys would have them in any order."""


@dataclasses.dataclass(frozen=True, eq=False)
class Eagle(Drafter):
  """One block on the model's final hidden vectors as the drafter.

  Any head over the model's hidden vectors drafts: the model's own, its most frequent rows, or a
  cheaper form of them. Neither the embedding nor the model's head is held twice. A drafter with
  fewer tokens than the model is tested on the prompts before it drafts, unless its `cost` is 0.

  Attributes:
    params: of the block, such as `vqjax draft` trains.
    head: reads the predicted hidden vectors; None: the model's head.
    variables: those of the head.
  """

  params: Params
  head: Head | None = None
  variables: Variables | None = None

  def program(
    self, model: Transformer, sampling: Sampling, positions: int, has_log_probs: bool
  ) -> EagleProgram:
    """What is compiled for a model; `bound` says which arguments are refused."""
    given = super().program(model, sampling, positions, has_log_probs)
    return EagleProgram(**vars(given))

  def _part(self, model: Transformer) -> DrafterModules:
    _check_params(self.params, model)
    check_head(self.head, self.variables, model)
    return DrafterModules(model, self.head, shares=True)

  def _variables(self, variables: Variables) -> dict[str, Variables]:
    arrays = {"body": variables, "eagle": self.params}
    return arrays if self.head is None else arrays | {"head": self.variables}


class EagleState(NamedTuple):
  """What an `Eagle` keeps from round to round, with T = `length` + 1.

  Attributes:
    ring: keys and values of its block.
    hidden: the model's hidden vectors at the tokens of the last round.
    first: number of the first of these tokens; -1 is the last token of a prompt.
  """

  ring: Ring
  hidden: Float[Array, "B T D"]
  first: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class EagleProgram(DraftingProgram):
  """What the compiled functions of an `Eagle` depend on."""

  reads_hidden = True

  def begun(self, arrays, tokens_BT, hidden_BTD, length_B, capacity) -> EagleState:
    """Keys and values of the prompts, and the hidden vector of the last token of each."""
    # A token's vector is read at the position behind it.
    before_BTD = jnp.pad(hidden_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    position_T = jnp.arange(tokens_BT.shape[1])
    x_BTD = self._inputs(arrays, tokens_BT, before_BTD, position_T)
    _, key, value = self._query_key_values(arrays, x_BTD, position_T)
    ring = Ring(key, value).of_prompt(length_B, capacity + self.longest)
    last_BD = jnp.take_along_axis(hidden_BTD, (length_B - 1)[:, None, None], axis=1)
    last_BTD = jnp.pad(last_BD, ((0, 0), (0, self.longest), (0, 0)))
    return EagleState(ring, last_BTD, jnp.full_like(length_B, -1))

  def prior(
    self, arrays, tokens_BT, hidden_BTD, length_B, draft_rings
  ) -> tuple[ArrayLike, ArrayLike]:
    """Counts that a drafter with fewer tokens than the model has from the ends of the prompts.

    There the drafter's head reads the model's vectors and the predicted ones. What would be
    accepted is the agreement of the two, times the part of the prompt's tokens that the drafter
    has. Where the drafter knows little of a text, few rounds or none have to show it.

    A head of all tokens is not tested: it would take the time of several tokens.
    """
    accepted, verified = super().prior(arrays, tokens_BT, hidden_BTD, length_B, draft_rings)
    if "tokens" not in arrays or self.cost == 0:
      return accepted, verified
    index_BW = length_B[:, None] - 1 - jnp.arange(max(1, TESTED_POSITIONS // len(length_B)))
    # A vector is predicted from the model's at the position before it.
    is_tested_BW, index_BW = index_BW > 0, jnp.maximum(index_BW, 1)
    take = jax.vmap(lambda x_T, at_W: x_T[at_W])
    token_BW, hidden_BWD = take(tokens_BT, index_BW), take(hidden_BTD, index_BW)
    x_BWD = self._inputs(arrays, token_BW, take(hidden_BTD, index_BW - 1), index_BW)
    query, _, _ = self._query_key_values(arrays, x_BWD, index_BW)
    ring = draft_rings.ring
    slot_BS = ring.positions(length_B, jnp.int32(-1))
    mixed = self._attended(arrays, query, ring, index_BW, slot_BS)
    predicted_BWD = _finished(self.model, arrays["eagle"], x_BWD, mixed)

    def read(vectors_BWD):
      draw = functools.partial(self._draft, key=jax.random.key(0))
      return self.part.of_head(arrays, vectors_BWD.reshape(index_BW.size, -1), draw)

    (number_N, log_p_UN), (draft_N, log_q_UN) = read(hidden_BWD), read(predicted_BWD)
    if log_q_UN is None:
      agreement_N = number_N == draft_N
    else:
      agreement_N = jnp.exp(jnp.minimum(log_p_UN, log_q_UN)).sum(axis=0)
    # Vectors of nan agree with none.
    agreement_BW = jnp.nan_to_num(agreement_N.astype(jnp.float32)).reshape(index_BW.shape)
    of_row = lambda x_BW: jnp.where(is_tested_BW, x_BW, 0).sum(axis=1)
    count_B = is_tested_BW.sum(axis=1)
    known_B = of_row(jnp.isin(token_BW, arrays["tokens"])) / jnp.maximum(1, count_B)
    # Many prompts have more positions, one each.
    weight = PROMPT_WEIGHT * jnp.minimum(1, TESTED_POSITIONS / jnp.maximum(1, count_B.sum()))
    agreed = (of_row(agreement_BW) * known_B).sum()
    return accepted + weight * agreed, verified + weight * count_B.sum()

  def drafted(self, arrays, state, key):
    """Draft tokens [B, K] as numbers of the drafter, log q [K, U, B], and the state."""
    tokens = arrays.get("tokens")

    def next_number(hidden_BD, index):
      read = functools.partial(self._draft, key=jax.random.fold_in(key, index))
      return self.part.of_head(arrays, hidden_BD, read)

    def further(carry, index):
      ring, hidden_BD, number_B = carry
      token_B = number_B if tokens is None else tokens[number_B]
      given = token_B[:, None], hidden_BD[:, None], state.step + index
      hidden_BD, ring = self._predicted(arrays, ring, *given, state.length)
      drawn = next_number(hidden_BD, index)
      return (ring, hidden_BD, drawn[0]), drawn

    hidden_BD, ring = self._first_prediction(arrays, state)
    first = next_number(hidden_BD, 0)
    carry = ring, hidden_BD, first[0]
    (ring, *_), rest = lax.scan(further, carry, jnp.arange(1, self.length))
    join = lambda one, others: jnp.concatenate([one[None], others])
    number_KB, log_q_KUB = jax.tree.map(join, first, rest)
    kept = state.draft_rings._replace(ring=ring)
    return number_KB.T, log_q_KUB, state._replace(draft_rings=kept)

  def observed(self, state, hidden_BTD) -> EagleState:
    """The hidden vectors that the model has computed, for the next round."""
    if not self.length:  # no later round drafts
      return state.draft_rings
    missing = self.longest - self.length
    hidden_BTD = jnp.pad(hidden_BTD, ((0, 0), (0, missing), (0, 0)))
    return state.draft_rings._replace(hidden=hidden_BTD, first=state.step)

  def _first_prediction(self, arrays, state: State):
    """The hidden vector [B, D] predicted at the latest token, and the ring.

    The model's vectors replace the predictions that the tokens of the last round were read with.
    """
    ring, hidden_BTD, first_B = state.draft_rings
    number_BT = first_B[:, None] + 1 + jnp.arange(self.longest + 1)
    index_BT = jnp.minimum(number_BT, state.tokens.shape[1] - 1)
    # There is no token yet behind the latest one; what is written for it is replaced.
    token_BT = jnp.maximum(jnp.take_along_axis(state.tokens, index_BT, axis=1), 0)
    last_B = state.step - first_B - 1
    return self._predicted(arrays, ring, token_BT, hidden_BTD, first_B + 1, state.length, last_B)

  def _predicted(self, arrays, ring, token_BT, hidden_BTD, step_B, length_B, last_B=None):
    """The hidden vector predicted at token `last` of T tokens, and the ring with all of them.

    Keys and values need no more than a block's inputs, so that the rest of the block is computed
    for a single token.
    """
    params = arrays["eagle"]
    ahead_T = jnp.arange(token_BT.shape[1])
    position_BT = (length_B + step_B)[:, None] + ahead_T
    x_BTD = self._inputs(arrays, token_BT, hidden_BTD, position_BT)
    query, key, value = self._query_key_values(arrays, x_BTD, position_BT)
    ring = ring.extended(Ring(key, value), step_B)
    slot_BW = ring.positions(length_B, step_B + ahead_T[-1])
    if last_B is not None:
      take = lambda x: jnp.take_along_axis(x, last_B.reshape(-1, *[1] * (x.ndim - 1)), axis=1)
      x_BTD, query, position_BT = take(x_BTD), take(query), take(position_BT)
    mixed = self._attended(arrays, query, ring, position_BT, slot_BW)
    return _finished(self.model, params, x_BTD, mixed)[:, 0], ring

  def _attended(self, arrays, query, ring, position_BT, slot_BW):
    attention, sink = self.model.attention, arrays["eagle"]["block"].get("sink")
    options = {"scale": attention.scale, "softcap": attention.softcap, "sink": sink}
    return attend(query, ring.key, ring.value, position_BT, slot_BW, **options)

  def _inputs(self, arrays, token_BT, hidden_BTD, position):
    return _inputs(self.model, arrays["body"], arrays["eagle"], token_BT, hidden_BTD, position)

  def _query_key_values(self, arrays, x_BTD, position):
    return _query_key_values(self.model, arrays["eagle"], x_BTD, position)


def _inputs(model, variables, params, token_BT, hidden_BTD, position):
  """The residual stream of the block: embeddings and hidden vectors, normalised and fused."""
  embed = lambda m: m.embedded(m.embedding(token_BT), position)
  vector_BTD = model.apply(variables, method=embed)
  norm = lambda name, x: model.norm.module(model.dtype).apply({"params": params[name]}, x)
  parts = norm("embedding_norm", vector_BTD), norm("hidden_norm", hidden_BTD.astype(model.dtype))
  return jnp.concatenate(parts, axis=-1) @ params["fuse"].astype(model.dtype)


def _query_key_values(model, params, x_BTD, position):
  one = _one_block(model)

  def of_block(block):
    return block.query_key_values(x_BTD, one.layer_inputs(), one.angles(position))

  return one.block().apply({"params": params["block"]}, method=of_block)


def _finished(model, params, x_BTD, mixed):
  """The predicted hidden vectors, from the residual stream and what attention mixed."""
  given = {"params": params["block"]}, x_BTD, mixed, True
  x_BTD = model.block().apply(*given, method="feed_forward")
  normed_BTD = model.norm.module(model.dtype).apply({"params": params["final_norm"]}, x_BTD)
  scale = 1.0 if model.final_scale is None else model.final_scale
  return normed_BTD * jnp.asarray(scale, normed_BTD.dtype)


def _one_block(model: Transformer) -> Transformer:
  """The decoder whose only block is of the model's kind, without a window."""
  model.check_keys_suffice()
  return model.clone(layers=1, window=None, local=None, local_rotary=None, turned=None, parent=None)


def initial_params(model: Transformer, variables: Variables, key: PRNGKeyArray) -> Params:
  """Parameters of a drafter before its training, with the model's last block and final norm."""
  params = variables["params"]
  blocks = params["blocks"]
  last = blocks[-1] if isinstance(blocks, tuple) else jax.tree.map(lambda x: x[-1], blocks)
  fresh = _fresh_params(model, key)
  # Copies, which training may donate.
  return fresh | jax.tree.map(jnp.array, {"block": last, "final_norm": params["final_norm"]})


@own_promotion
def _fresh_params(model, key):
  one, position_T = _one_block(model), jnp.zeros(1, jnp.int32)
  zeros_BTD, dim = jnp.zeros((1, 1, model.dim), model.dtype), model.dim
  block_key, fuse_key = jax.random.split(key)
  given = zeros_BTD, one.layer_inputs(), one.angles(position_T), True
  block = one.block().init(block_key, *given)["params"]
  # Arrays of their own: training donates each.
  norm = lambda: model.norm.module(model.dtype).init(key, zeros_BTD)["params"]
  from_embedding = 0.5 * dim**-0.5 * jax.random.normal(fuse_key, (dim, dim))
  return {
    "embedding_norm": norm(),
    "hidden_norm": norm(),
    "fuse": jnp.concatenate((from_embedding, jnp.eye(dim))),
    "block": block,
    "final_norm": norm(),
  }


def _check_params(params: Params, model: Transformer) -> None:
  """Raise ValueError unless parameters have the names and shapes of a drafter for a model."""
  wanted, found = _shapes_of(model), _shapes(params)
  if wrong := sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name)):
    name = wrong[0]
    raise ValueError(
      f"`params` must be those of a drafter of this model: {name} must have shape"
      f" {wanted.get(name)}; got {found.get(name)}. Train a drafter on this model."
    )


@functools.lru_cache(maxsize=8)
def _shapes_of(model):
  """The shapes of a drafter for a model; to trace its block takes as long as many tokens."""
  made = jax.eval_shape(lambda: _fresh_params(model, jax.random.key(0)))
  return _shapes(jax.tree.map(lambda x: np.empty(x.shape, bool), made))


def _shapes(tree):
  flat = traverse_util.flatten_dict(dict(tree))
  return {"/".join(path): np.shape(x) for path, x in flat.items()}


def frequent_head(
  model: Transformer, variables: Variables, tokens: Int[ArrayLike, "U"] | Sequence[int]
) -> tuple[DenseHead, Variables]:
  """A dense head of some rows of a model's, and its variables.

  Raises:
    ValueError: the head's scores are not products with rows.
  """
  if not hasattr(model.head, "linear"):
    raise ValueError(
      f"`model` must have a head that scores rows; got a {type(model.head).__name__}. Draft with"
      " the model's whole head, or with a head of your own."
    )

  def chosen(model):
    weight, bias = model.head.linear()
    index = jnp.asarray(tokens, jnp.int32)
    return weight.at(index), None if bias is None else bias[index]

  weight, bias = model.apply(variables, method=chosen)
  head = DenseHead(
    len(weight),
    model.dim,
    use_bias=bias is not None,
    dtype=model.head.dtype,
    param_dtype=weight.dtype,
    softcap=model.head.softcap,
  )
  return head, {"params": {"weight": weight} | ({} if bias is None else {"bias": bias})}


@dataclasses.dataclass(frozen=True)
class _Options(WrittenTimes):
  """What the header of a file holds."""

  length: Annotated[int, records.Range(1, 2**31 - 1)]


def save_eagle(path: str | os.PathLike, eagle: Eagle, variables: Variables) -> None:
  """Write a drafter as safetensors, with a mark of the model that it is of.

  Its head is the model's, or those of its rows that `tokens` lists: no other one is written.

  Raises:
    ValueError: the drafter has another head.
  """
  if eagle.head is not None and (eagle.tokens is None or type(eagle.head) is not DenseHead):
    raise ValueError(
      "`eagle` must have the model's head, or the rows of it that `tokens` lists; got a"
      f" {type(eagle.head).__name__}. Write its variables yourself, and the drafter without it."
    )
  flat = traverse_util.flatten_dict(eagle.params, sep="/")
  tensors = {name: np.ascontiguousarray(value, np.float32) for name, value in flat.items()}
  tensors["mark"] = model_mark(variables)
  if eagle.tokens is not None:
    tensors["tokens"] = np.asarray(eagle.tokens, np.int32)
  options = {"length": int(eagle.length), **written_times(eagle)}
  save_file(tensors, path, {FORMAT: json.dumps(options)})


def load_eagle(path: str | os.PathLike, model: Transformer, variables: Variables) -> Eagle:
  """Read the drafter of a model.

  Raises:
    ValueError: the file is not a drafter, or that of another model.
  """
  try:
    tensors, metadata = load_file(path)
    where, remedy = f"the header of {path}", "Train one again."
    options = records.parse_json(metadata[FORMAT], _Options, where, remedy, seal=False)
    mark, tokens = tensors.pop("mark"), tensors.pop("tokens", None)
    options = {"length": options["length"], **read_times(options)}
  except (ValueError, KeyError) as error:
    raise ValueError(
      f"`path` must be a drafter of `vqjax draft`; got {path}: {error}. Train one again."
    ) from error
  check_mark(mark, variables, path, kind="drafter")
  params = jax.tree.map(jnp.asarray, traverse_util.unflatten_dict(tensors, sep="/"))
  head = (None, None) if tokens is None else frequent_head(model, variables, tokens)
  return Eagle(params, *head, tokens=tokens, **options)


@own_promotion
def unrolled(
  model: Transformer,
  variables: Variables,
  params: Params,
  tokens: Int[Array, "B T"],
  hidden: Float[Array, "B T D"],
  depth: int,
) -> Float[Array, "K B T D"]:
  """Hidden vectors that the drafter predicts from text, K = `depth` predictions deep.

  Vector [k, b, p] is the prediction at position p of a draft that began k positions before it:
  what it reads up to there is the model's, and then its own. It is defined from p = k on.

  Args:
    model: the decoder.
    variables: its variables.
    params: those of the drafter.
    tokens: rows of text.
    hidden: final hidden vectors of the model at all of them.
    depth: number of predictions.
  """
  position_T = jnp.arange(tokens.shape[1])
  shifted = lambda x, count: jnp.pad(x, ((0, 0), (count, 0)) + ((0, 0),) * (x.ndim - 2))[
    :, : x.shape[1]
  ]
  found, keys, values, hidden_BTD = [], [], [], hidden
  for number in range(depth):
    x_BTD = _inputs(model, variables, params, tokens, shifted(hidden_BTD, 1), position_T)
    query, key, value = _query_key_values(model, params, x_BTD, position_T)
    keys.append(key)
    values.append(value)
    mixed = _attend_unrolled(
      query,
      [shifted(key, number - at) if at else key for at, key in enumerate(keys)],
      [shifted(value, number - at) if at else value for at, value in enumerate(values)],
      model.attention,
      params["block"].get("sink"),
    )
    hidden_BTD = _finished(model, params, x_BTD, mixed)
    found.append(hidden_BTD)
  return jnp.stack(found)


def _attend_unrolled(query, keys, values, attention, sink):
  """Attention of each position to those before its draft, and to its draft.

  Args:
    query: [B, T, H, C].
    keys: those of the model's vectors [B, T, G, C], and for each prediction of the draft the one
      that the query at the same index reads.
    values: likewise.
    attention: the options.
    sink: as in `attend`.
  """
  batch, length, _, width = query.shape
  grouped = query.reshape(batch, length, keys[0].shape[2], -1, width)
  scores = [jnp.einsum("btgnc,bsgc->bgnts", grouped, keys[0])]
  scores += [jnp.einsum("btgnc,btgc->bgnt", grouped, key)[..., None] for key in keys[1:]]
  scores = jnp.concatenate(scores, axis=-1).astype(jnp.float32)
  scores *= width**-0.5 if attention.scale is None else attention.scale
  if attention.softcap is not None:
    scores = attention.softcap * jnp.tanh(scores / attention.softcap)
  drafted = len(keys) - 1
  order_T = jnp.arange(length)
  seen_TS = order_T[:, None] - drafted >= order_T
  seen_TS = jnp.pad(seen_TS, ((0, 0), (0, drafted)), constant_values=True)
  weight = sunk_softmax(jnp.where(seen_TS, scores, jnp.finfo(scores.dtype).min), sink)
  weight = weight.astype(query.dtype)
  mixed = jnp.einsum("bgnts,bsgc->btgnc", weight[..., :length], values[0])
  for at, value in enumerate(values[1:]):
    own = jnp.moveaxis(weight[..., length + at], 3, 1)
    mixed += own[..., None] * value[:, :, :, None]
  return mixed.reshape(query.shape)
