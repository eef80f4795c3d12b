"""What is the distribution softmax(hidden · weightᵀ + bias), without the [N, V] logits?

Log-probability and normaliser of N tokens, and on request the entropy, the mean log-probability and
the best tokens, all in one pass over two-dimensional tiles (`tiles`): only [N]-sized statistics
survive from tile to tile. The backward pass recomputes the scores of each tile from the saved
normaliser: 8NDV floating-point operations in all, against 6NDV when the logits are kept. What is
not asked for, and what has no gradient, costs nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from vqjax.ops import tiles, vocab_parallel
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.ops.statistics import LinearSoftmax, Outputs, distribution
from vqjax.ops.tiles import Tile, default_tile
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype

__all__ = [
  "LinearSoftmax",
  "RowFactory",
  "Tile",
  "default_tile",
  "linear_cross_entropy",
  "linear_log_prob",
  "linear_scores",
  "linear_softmax",
]


def linear_log_prob(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"] | RowFactory,
  tokens: Integer[Array, "*B"],
  bias: Float[Array, "V"] | None = None,
  *,
  softcap: float | int | None = None,
  tile: tuple[int, int] | None = None,
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of `tokens` under softmax(hidden · weightᵀ + bias).

  `linear_softmax(...).log_prob`, where the arguments are explained.
  """
  return linear_softmax(
    hidden, weight, tokens, bias, softcap=softcap, tile=tile, dtype=dtype, vocab_axis=vocab_axis
  ).log_prob


def linear_softmax(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"] | RowFactory,
  tokens: Integer[Array, "*B"],
  bias: Float[Array, "V"] | None = None,
  *,
  softcap: float | int | None = None,
  entropy: bool = False,
  mean: bool = False,
  top_k: int = 0,
  tile: tuple[int, int] | None = None,
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> LinearSoftmax:
  """softmax(softcap · tanh((hidden · weightᵀ + bias) / softcap)), and `tokens` in it.

  Exact: no sampling and no approximation; sums accumulate in float32 and results are float32,
  whatever the inputs are. Neither the forward nor the backward pass holds an array of N·V
  elements. A bias of -inf removes its row from the distribution. A token outside [0, V) has no
  probability: its `log_prob` is nan, so that a loss over it cannot pass unnoticed.

  Every floating-point result is differentiable in `hidden`, `weight` and `bias`, in reverse mode;
  the gradient in an operand that needs none (`jax.lax.stop_gradient`, or simply not asked for) is
  not computed. Forward mode is an error, as for every function with a custom VJP.

  With a mesh in context (`jax.set_mesh`, automatic axes), rows are spread over `vocab_axis` and
  tokens over all other axes: each device scans its own rows, and [N]-sized values are reduced.

  Args:
    hidden: one vector for each token.
    weight: one row for each word of the vocabulary, or `RowFactory` that are composed a tile at a time.
    tokens: indices into the vocabulary.
    bias: one score for each word, added to hidden · weightᵀ.
    softcap: largest absolute score c: scores are c · tanh(score / c).
    entropy: whether to compute the entropy.
    mean: whether to compute the mean log-probability. Without a softcap it costs no pass: the mean
      score is hidden · (mean row) + (mean bias).
    top_k: how many of the best tokens to find, 0 to 128.
    tile: (tokens, vocabulary rows) scored at once, on each device; `default_tile` by default.
    dtype: dtype of the matrix products' operands, to which each tile is cast: float32 parameters
      in a bfloat16 model are never copied, and get gradients that were never rounded. By default
      that of hidden and weight together.
    vocab_axis: mesh axis over which the rows are spread. Inside of a `jax.shard_map` over it,
      `weight` and `bias` are the device's own rows and `tokens` count over all devices' rows.

  Raises:
    ValueError: shapes that do not fit together, an empty vocabulary, a tile below 1, a softcap that
      is not positive, more than 128 best tokens or than there are rows, or a mesh without
      `vocab_axis`.
  """
  weight = as_row_factory(weight)
  _check_shapes(hidden, weight, tokens, bias)
  vocab = vocab_parallel.rows_in_all(vocab_axis, weight.count)
  _check_options(softcap, top_k, vocab)
  known, token = in_vocabulary(tokens.reshape(-1), vocab)
  scoring = tiles.Scoring(
    jnp.dtype(dtype or jnp.promote_types(hidden.dtype, weight.dtype)), softcap
  )
  ask = Outputs(scoring, entropy, mean, top_k, vocab_axis)

  def body(rows, shared):
    own, bias, by_all = rows
    part = dataclasses.replace(weight, per_row=own, shared=by_all)
    return distribution(ask, tile, *shared, part, bias)

  hidden_ND = hidden.reshape(-1, hidden.shape[-1])
  rows = (
    vocab_parallel.Sharded(weight.per_row, 0),
    vocab_parallel.Sharded(vocab_parallel.bias_of_padding(bias, vocab, vocab_axis), -jnp.inf),
    vocab_parallel.Replicated(weight.shared),
  )
  found = vocab_parallel.over_vocabulary(vocab_axis, body, rows, (hidden_ND, token))
  found = found._replace(log_prob=jnp.where(known, found.log_prob, jnp.nan))
  return jax.tree.map(lambda x: x.reshape(*tokens.shape, *x.shape[1:]), found)


def linear_cross_entropy(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"] | RowFactory,
  tokens: Integer[Array, "*B"],
  bias: Float[Array, "V"] | None = None,
  *,
  token_weight: Float[Array, "*B"] | None = None,
  label_smoothing: float | int = 0.0,
  z_loss: float | int = 0.0,
  softcap: float | int | None = None,
  tile: tuple[int, int] | None = None,
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> Float[Array, "*B"]:
  """The loss of each token, in nats: the caller sums or averages.

    token_weight · (-(1 - s) log p(token) - s · mean_v log p_v + z_loss · (log z)²),

  s the label smoothing. A token of weight 0 has loss 0 and no gradient, even one outside of the
  vocabulary or with a hidden vector that is no number: padding may be anything.

  Args:
    hidden: one vector for each token, as all further arguments in `linear_softmax`.
    weight: one row for each word.
    tokens: indices into the vocabulary.
    bias: one score for each word.
    token_weight: weight of each token's loss; 0 for padding.
    label_smoothing: probability, in [0, 1), that the target spreads evenly over the vocabulary; a
      Python number, as z_loss and softcap.
    z_loss: coefficient of the squared log-normaliser, which keeps scores from drifting.
    softcap: largest absolute score.
    tile: (tokens, vocabulary rows) scored at once.
    dtype: dtype of the matrix products' operands.
    vocab_axis: mesh axis over which the rows are spread.

  Raises:
    ValueError: as `linear_softmax`; a smoothing outside [0, 1), a negative z_loss, or weights of
      another shape than the tokens.
  """
  if not 0 <= label_smoothing < 1:
    raise ValueError(f"label_smoothing {label_smoothing} is outside [0, 1); 0.1 is usual")
  if z_loss < 0:
    raise ValueError(f"z_loss {z_loss} is negative; 1e-4 is usual, 0 for none")
  if token_weight is not None:
    if token_weight.shape != tokens.shape:
      raise ValueError(
        f"token_weight {token_weight.shape} and tokens {tokens.shape} disagree; give one weight for"
        " each token"
      )
    hidden = jnp.where((token_weight == 0)[..., None], 0, hidden)
  found = linear_softmax(
    hidden,
    weight,
    tokens,
    bias,
    softcap=softcap,
    mean=label_smoothing > 0,
    tile=tile,
    dtype=dtype,
    vocab_axis=vocab_axis,
  )
  loss = -found.log_prob
  if label_smoothing:
    loss = (1 - label_smoothing) * loss - label_smoothing * found.mean_log_prob
  if z_loss:
    loss = loss + z_loss * found.log_z**2
  if token_weight is None:
    return loss
  # Not a product alone: the loss of padding may be nan.
  return jnp.where(token_weight == 0, 0.0, loss * token_weight)


def linear_scores(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"] | RowFactory,
  bias: Float[Array, "V"] | None = None,
  dtype: Dtype | None = None,
  softcap: float | int | None = None,
) -> Float[Array, "*B V"]:
  """hidden · weightᵀ + bias, capped, accumulated and returned in float32.

  `dtype` is that of the product's operands; by default that of hidden and weight together.
  """
  weight = as_row_factory(weight).all()
  dtype = dtype or jnp.promote_types(hidden.dtype, weight.dtype)
  axes = ((hidden.ndim - 1,), (1,)), ((), ())
  scores = lax.dot_general(
    hidden.astype(dtype), weight.astype(dtype), axes, preferred_element_type=jnp.float32
  )
  bias = None if bias is None else bias.astype(jnp.float32)
  return tiles.Scoring(dtype, softcap).finish(scores, bias)


def log_softmax(scores: Float[Array, "*B V"], vocab_axis: str | None = None) -> Array:
  """log softmax over the last axis, which inside of `vocab_axis` is spread over its devices."""
  axis = vocab_parallel.inside(vocab_axis)
  if axis is None:
    return jax.nn.log_softmax(scores)
  top = lax.pmax(lax.stop_gradient(scores.max(axis=-1, keepdims=True)), axis)
  above = scores - top
  return above - jnp.log(lax.psum(jnp.exp(above).sum(axis=-1, keepdims=True), axis))


def _check_shapes(hidden, weight, tokens, bias):
  if hidden.shape[:-1] != tokens.shape:
    raise ValueError(
      f"hidden {hidden.shape} and tokens {tokens.shape} disagree: hidden needs the shape of tokens"
      " and one more axis"
    )
  if len(weight.shape) != 2 or weight.shape[1] != hidden.shape[-1]:
    raise ValueError(
      f"weight {weight.shape} does not fit hidden {hidden.shape}: it is [V, D], one row for each"
      " word; transpose a [D, V] kernel"
    )
  if weight.shape[0] == 0:
    raise ValueError("weight has no rows: a softmax needs a vocabulary of at least 1")
  if bias is not None and bias.shape != weight.shape[:1]:
    raise ValueError(f"bias {bias.shape} does not fit weight {weight.shape}: it is [V]")


def _check_options(softcap, top_k, vocab):
  if softcap is not None and not softcap > 0:
    raise ValueError(f"softcap {softcap} is not positive; 30 is usual, None for no cap")
  if not 0 <= top_k <= min(128, vocab):
    raise ValueError(
      f"top_k {top_k} for a vocabulary of {vocab}; give 0 to {min(128, vocab)} (a head's top_k"
      " method has no limit)"
    )
