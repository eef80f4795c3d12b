"""How probable is a slot of a token's group, where every group has a linear of its own?

  log softmax(W_g h + b_g)[slot],  g the token's group

Tokens are sorted by group, so that those of a group lie together and meet its weight in one matrix
product: no token gets a copy of a weight, and no group is scored that it is not in. The backward
pass recomputes the scores from the saved normalisers: one array of N·S scores is alive at a time.
Source: LLM Vocabulary Compression for Low-Compute Environments, Figure 4.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from vqjax.ops import ragged_products, vocab_parallel
from vqjax.types import Dtype


class _Linears(NamedTuple):
  """One linear for each group: weight [G, S, D], bias [G, S] or None, sizes [G]."""

  weight: Array
  bias: Array | None
  sizes: Array


class _Tokens(NamedTuple):
  """hidden [N, D], group [N], G for a token that is in none, and slot [N]."""

  hidden: Array
  group: Array
  slot: Array


def unshared_slot_log_prob(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "G S D"],
  bias: Float[Array, "G S"] | None,
  sizes: Int[Array, "G"],
  group: Int[Array, "*B"],
  slot: Int[Array, "*B"],
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of a slot among the sizes[g] slots of its token's group g.

  Sums accumulate in float32 and the result is float32. A slot that the group lacks has none: -inf.
  Differentiable in hidden, weight and bias, in reverse mode. Inside of `vocab_axis` weight, bias
  and sizes are of the device's own groups, and `group` counts over those of all. On a mesh each
  device of the other axes sorts its own tokens.

  Args:
    hidden: one vector for each token.
    weight: the linear of each group; rows from its size on are not used.
    bias: added to the scores, or None.
    sizes: how many slots each group has.
    group: the group of each token.
    slot: its place inside of the group.
    dtype: dtype of the matrix products' operands; None: that of hidden and weight together.
    vocab_axis: mesh axis over which the groups are spread.
  """
  if not group.size:
    return jnp.zeros(group.shape, jnp.float32)
  axis, groups = vocab_parallel.inside(vocab_axis), sizes.shape[0]
  here = (group - vocab_parallel.first_row(axis, groups)).reshape(-1)
  mine = (here >= 0) & (here < groups)
  tokens = _Tokens(
    hidden.reshape(-1, hidden.shape[-1]), jnp.where(mine, here, groups), slot.reshape(-1)
  )
  dtype = jnp.dtype(dtype or jnp.promote_types(hidden.dtype, weight.dtype))
  # A group that fills up a device's part has no slot, and log 0 no gradient: give it one.
  linears = _Linears(weight, bias, jnp.maximum(sizes, 1))
  log_prob = _log_prob(dtype, *_marked((linears, tokens))).reshape(group.shape)
  return lax.psum(log_prob, axis) if axis else log_prob


def _marked(tree):
  """The arrays, all marked as `vocab_parallel.varying` does; their gradients are added up in float32."""
  wide = jax.tree.map(lambda x: x.astype(vocab_parallel.summed_dtype(x.dtype)), tree)
  return jax.tree.map(lambda x, like: x.astype(like.dtype), vocab_parallel.varying(wide), tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_prob(dtype, linears: _Linears, tokens: _Tokens) -> Array:
  """Log-probabilities [N] of the slots; 0 for tokens of no group."""
  return _forward(dtype, linears, tokens)[0]


def _forward(dtype, linears, tokens):
  forward = functools.partial(_forward_here, dtype)
  (log_prob, log_z), _ = _each_device_its_tokens(forward, linears, tokens)
  return log_prob, (linears, tokens, log_z)


def _backward(dtype, saved, cotangent):
  linears, tokens, log_z = saved
  backward = functools.partial(_backward_here, dtype)
  given = (tokens, log_z, cotangent)
  d_hidden, (d_weight, d_bias) = _each_device_its_tokens(backward, linears, given)
  narrow = lambda x, like: None if like is None else x.astype(like.dtype)
  d_linears = _Linears(narrow(d_weight, linears.weight), narrow(d_bias, linears.bias), None)
  return d_linears, _Tokens(narrow(d_hidden, tokens.hidden), None, None)


_log_prob.defvjp(_forward, _backward)


def _each_device_its_tokens(function, linears, per_token):
  """function(linears, tree of [N, ...]) -> (tree of [N, ...], tree of sums over the tokens).

  Each device of the automatic axes does a part of the tokens, and the sums are added up.
  """
  spread, n = vocab_parallel.token_shards(None), jax.tree.leaves(per_token)[0].shape[0]
  if spread.count == 1:
    return function(linears, per_token)

  def own(linears, per_token):
    given = jax.tree.map(lambda x: x[0], per_token)
    found, sums = function(*vocab_parallel.varying((linears, given), *spread.axes))
    return jax.tree.map(lambda x: x[None], found), lax.psum(sums, spread.axes)

  where = P(spread.axes)
  alone = jax.shard_map(
    own, in_specs=(P(), where), out_specs=(where, P()), axis_names=set(spread.axes)
  )
  found, sums = jax.jit(alone)(linears, jax.tree.map(spread.split, per_token))
  return jax.tree.map(lambda x: spread.join(x, n), found), sums


def _forward_here(dtype, linears, tokens):
  """Log-probabilities and log-normalisers; nothing is summed over tokens."""
  order, counts = jnp.argsort(tokens.group), _counts(linears, tokens)
  by_group = jax.tree.map(lambda x: x[order], tokens)
  scores_NS = _scores(dtype, linears, by_group, counts)
  log_z = jax.nn.logsumexp(scores_NS, axis=-1)
  picked = jnp.take_along_axis(scores_NS, by_group.slot[:, None], axis=-1)[:, 0]
  log_prob = jnp.where(_in_a_group(linears, by_group), picked - log_z, 0.0)
  return (_as_given(log_prob, order), _as_given(log_z, order)), None


def _backward_here(dtype, linears, given):
  """The cotangent of hidden, and those of weight and bias, all in float32."""
  order, counts = jnp.argsort(given[0].group), _counts(linears, given[0])
  by_group, log_z, cotangent = jax.tree.map(lambda x: x[order], given)
  mine_N1 = _in_a_group(linears, by_group)[:, None]
  scores_NS = _scores(dtype, linears, by_group, counts)
  chosen_NS = jnp.arange(scores_NS.shape[1]) == by_group.slot[:, None]
  d_NS = (chosen_NS - jnp.exp(scores_NS - log_z[:, None])) * cotangent[:, None]
  d_NS = jnp.where(mine_N1 & ~jnp.isneginf(scores_NS), d_NS, 0.0)
  operand_NS = d_NS.astype(dtype)
  d_weight = ragged_products.outer(operand_NS, by_group.hidden.astype(dtype), counts)
  d_bias = None
  if linears.bias is not None:
    d_bias = ragged_products.outer(d_NS, jnp.ones_like(d_NS[:, :1]), counts)[..., 0]
  d_hidden = ragged_products.rows_times(operand_NS, linears.weight, counts, contracted=1)
  return _as_given(jnp.where(mine_N1, d_hidden, 0.0), order), (d_weight, d_bias)


def _counts(linears, tokens):
  """How many tokens each group has, [G]."""
  zeros = vocab_parallel.varying((jnp.zeros_like(linears.sizes), tokens.group))[0]
  return zeros.at[tokens.group].add(1, mode="drop")


def _in_a_group(linears, tokens):
  return tokens.group < linears.sizes.shape[0]


def _scores(dtype, linears, tokens, counts):
  """Scores [N, S] in float32, -inf for slots that a group lacks; tokens sorted by group."""
  scores_NS = ragged_products.rows_times(
    tokens.hidden.astype(dtype), linears.weight, counts, contracted=2
  )
  group = jnp.minimum(tokens.group, linears.sizes.shape[0] - 1)
  if linears.bias is not None:
    scores_NS = scores_NS + linears.bias[group].astype(jnp.float32)
  present_NS = jnp.arange(scores_NS.shape[1]) < linears.sizes[group][:, None]
  return jnp.where(present_NS, scores_NS, -jnp.inf)


def _as_given(sorted_N, order):
  """The rows in the order before sorting."""
  return jnp.zeros_like(sorted_N).at[order].set(sorted_N, unique_indices=True)
