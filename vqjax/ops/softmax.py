"""The distribution softmax(hidden · weightᵀ + bias), without the [N, V] logits.

Log-probability and normaliser of N tokens, and on request the entropy, the mean log-probability and
the best tokens, come from one pass over two-dimensional tiles (`vqjax.ops.tiles`): only [N]-sized
statistics survive from tile to tile. The backward pass recomputes the scores of each tile from the
saved normaliser: 8NDV floating-point operations in all, against 6NDV when the logits are kept.
Statistics that are not requested, and gradients that a compiled program does not use, cost nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Integer

from vqjax.ops import narrow, reduced_loss, statistics, tiles, vocab_parallel
from vqjax.ops.row_factory import RowFactory, as_row_factory, columns
from vqjax.ops.scores import OutputFunction, ScoreOptions
from vqjax.ops.statistics import LinearSoftmax, Outputs
from vqjax.ops.tiles import Linear, default_tile
from vqjax.ops.vocabulary import (
  TokenWeight,
  check_arrays,
  check_given,
  check_numbers,
  in_vocabulary,
  is_count,
)
from vqjax.types import Dtype, MeshAxes

__all__ = [
  "LinearSoftmax",
  "columns",
  "default_tile",
  "linear_cross_entropy",
  "linear_log_prob",
  "linear_scores",
  "linear_softmax",
]


@vocab_parallel.for_any_axes("hidden")
def linear_log_prob(
  hidden: Float[ArrayLike, "*B D"],
  weight: Float[ArrayLike, "V D"] | RowFactory,
  tokens: Integer[ArrayLike, "*B"],
  bias: Float[ArrayLike, "V"] | None = None,
  *,
  mask: Bool[ArrayLike, "*B"] | None = None,
  temperature: float | int = 1.0,
  softcap: float | int | None = None,
  scratch: int | None = None,
  tile: tuple[int, int] | None = None,
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
  precision: str | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of `tokens` under softmax(hidden · weightᵀ + bias).

  This is `linear_softmax(...).log_prob`; the arguments are explained there.

  Example:
    >>> import jax
    >>> from vqjax import linear_log_prob
    >>> hidden = jax.random.normal(jax.random.key(0), (4, 8))
    >>> weight = jax.random.normal(jax.random.key(1), (1000, 8))
    >>> tokens = jax.numpy.array([1, 2, 3, 4])
    >>> loss = lambda weight: -linear_log_prob(hidden, weight, tokens).mean()
    >>> print(jax.jit(jax.grad(loss))(weight).shape)
    (1000, 8)
  """
  options = ScoreOptions(
    temperature=temperature,
    softcap=softcap,
    tile=tile,
    dtype=dtype,
    vocab_axis=vocab_axis,
    scratch=scratch,
    precision=precision,
  )
  return _softmax(hidden, weight, tokens, bias, mask, options, Outputs()).log_prob


@vocab_parallel.for_any_axes("hidden")
def linear_softmax(
  hidden: Float[ArrayLike, "*B D"],
  weight: Float[ArrayLike, "V D"] | RowFactory,
  tokens: Integer[ArrayLike, "*B"],
  bias: Float[ArrayLike, "V"] | None = None,
  *,
  mask: Bool[ArrayLike, "*B"] | None = None,
  temperature: float | int = 1.0,
  softcap: float | int | None = None,
  output: OutputFunction | None = None,
  entropy: bool = False,
  mean: bool = False,
  top_k: int = 0,
  collision: bool = False,
  rank: bool = False,
  scratch: int | None = None,
  tile: tuple[int, int] | None = None,
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
  precision: str | None = None,
) -> LinearSoftmax:
  """Statistics of `tokens` under softmax(hidden · weightᵀ + bias), exactly.

  With a `softcap` c, scores are c · tanh((hidden · weightᵀ + bias) / c); a `temperature` divides
  them after that, and all results are of the distribution at that temperature. Sums accumulate in
  float32 and results are float32 for inputs of any float type. Neither the forward nor the backward
  pass holds an array of N·V elements. A bias of -inf removes its row from the distribution. A token
  outside [0, V) has no probability: its `log_prob` is nan, so that a loss over it cannot pass
  unnoticed, and its `rank` is -1.

  Every floating-point result is differentiable in `hidden`, `weight` and `bias`, in reverse mode.
  Under `jax.jit` XLA removes the gradient of an operand that needs none (`jax.lax.stop_gradient`,
  or an argument that is not differentiated). Forward mode (`jax.jvp`, `jax.jacfwd`) is an error, as
  for every function with a custom VJP: `vqjax.ops.forward_mode.linear_log_prob_jvp` computes it,
  and `jax.jvp` of `jax.grad` of a loss is a Hessian-vector product.

  With a mesh in context (`jax.set_mesh`), rows are sharded over `vocab_axis` and tokens over all
  other axes: each device scores its own rows, and [N]-sized values are reduced. Where axes are
  explicit, operands may be sharded in any way, and results have the type of the tokens of `hidden`.

  Args:
    hidden: one vector for each token.
    weight: one row for each token of the vocabulary: an array, a `RowFactory` that composes rows a
      tile at a time, or `columns(kernel)` of a kernel [D, V].
    tokens: indices into the vocabulary.
    bias: one number for each row, added to hidden · weightᵀ.
    mask: False for tokens that are left out: their results are 0, their `top_tokens` -1, and they
      have no gradient, whatever their tokens and hidden vectors hold. `mask=tokens != -100` leaves
      out the targets that PyTorch's `ignore_index` would.
    temperature: divides the scores, after their cap; a Python number. Without a cap and a bias,
      `hidden` may be divided by one of each token instead.
    softcap: largest absolute score c: scores are c · tanh(score / c).
    output: another function of each score, such as `SigSoftmax()`, instead of a cap.
    entropy: whether to compute the entropy.
    mean: whether to compute the mean log-probability. Without a softcap it costs no pass: the mean
      score is hidden · (mean row) + (mean bias).
    top_k: number of best tokens to return, 0 to 128.
    collision: whether to compute the sum of squared probabilities.
    rank: whether to compute the rank of the token. Scores that differ by no more than their
      rounding count as equal.
    scratch: bytes of scores that each device may keep for the gradient, instead of computing them
      again; None: as suits the device (`vqjax.ops.device`). Beside `top_k`, or where a mask lets
      tiles of tokens be left out, nothing is kept.
    tile: (tokens, vocabulary rows) that are scored at once on each device, of which nothing is
      kept; None: `default_tile`.
    dtype: dtype of the matrix products' operands, to which each tile is cast: float32 parameters
      in a bfloat16 model are never copied, and their gradients are not rounded to bfloat16. None:
      the promoted dtype of hidden and weight.
    vocab_axis: mesh axis over which the rows are sharded, or a tuple of several. Inside of a
      `jax.shard_map` over all of them, `weight` and `bias` are the device's own rows and `tokens`
      count over all devices' rows.
    precision: of the matrix products, such as "highest"; None: JAX's default, as explained in
      `ScoreOptions`: products of float32 operands are rounded on GPUs and TPUs.

  Raises:
    ValueError: the shapes do not fit together, the vocabulary is empty, a side of `tile` is below
      1, `softcap` or `temperature` is not positive and finite, there is an `output` beside a
      `softcap`, `top_k` is above 128 or the number of rows, or the mesh has no axis `vocab_axis`.
    TypeError: an operand is not an array, or an option not a Python number.
  """
  options = ScoreOptions(
    temperature=temperature,
    softcap=softcap,
    output=output,
    tile=tile,
    dtype=dtype,
    vocab_axis=vocab_axis,
    scratch=scratch,
    precision=precision,
  )
  outputs = Outputs(entropy, mean, top_k, collision, rank)
  return _softmax(hidden, weight, tokens, bias, mask, options, outputs)


def _softmax(hidden, weight, tokens, bias, mask, options, outputs) -> LinearSoftmax:
  """`linear_softmax` where the axes of the mesh are automatic."""
  check_given(tokens=tokens)
  check_arrays(mask=mask)
  layer = Linear.of(hidden, weight, bias, options, tokens)
  if not is_count(outputs.top_k) or not 0 <= outputs.top_k <= min(128, layer.vocab):
    raise ValueError(
      f"`top_k` must be in [0, {min(128, layer.vocab)}] for a vocabulary of {layer.vocab}; got"
      f" {outputs.top_k}. The `top_k` method of a head has no limit."
    )
  counted = None if mask is None else TokenWeight.of(tokens.shape, mask)
  if counted is not None:
    layer = dataclasses.replace(layer, hidden=counted.hide(hidden))
  # A compiled program cannot raise: tokens outside are scored as some token inside, and get nan.
  valid, token = in_vocabulary(tokens, layer.vocab)
  compute = functools.partial(statistics.distribution, outputs)
  kept = None if counted is None else counted.kept
  stats = tiles.on_each_device((layer,), token, compute, kept)
  stats = stats._replace(
    log_prob=jnp.where(valid, stats.log_prob, jnp.nan),
    is_best=valid & stats.is_best,
    rank=None if stats.rank is None else jnp.where(valid, stats.rank, -1),
  )
  return stats if counted is None else counted.of_each(stats)


@vocab_parallel.for_any_axes("hidden")
def linear_cross_entropy(
  hidden: Float[ArrayLike, "*B D"],
  weight: Float[ArrayLike, "V D"] | RowFactory,
  tokens: Integer[ArrayLike, "*B"],
  bias: Float[ArrayLike, "V"] | None = None,
  *,
  mask: Bool[ArrayLike, "*B"] | None = None,
  token_weight: Float[ArrayLike, "*B"] | None = None,
  class_weight: Float[ArrayLike, "V"] | None = None,
  ignore_index: int | None = None,
  label_smoothing: float | int = 0.0,
  z_loss: float | int = 0.0,
  temperature: float | int = 1.0,
  softcap: float | int | None = None,
  output: OutputFunction | None = None,
  reduction: str = "none",
  scratch: int | None = None,
  tile: tuple[int, int] | None = None,
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
  precision: str | None = None,
) -> Float[Array, "*B"] | Float[Array, ""]:
  """Cross-entropy of each token, in nats, with label smoothing and z-loss; or their sum or mean.

    token_weight · (-(1 - s) log p(token) - s · mean_v log p_v + z_loss · (log z)²),

  where s is the label smoothing. A token of weight 0 has loss 0 and no gradient, even one outside
  of the vocabulary or with a hidden vector of nan: padding may hold any values.

  The sum, and the mean that divides it by the sum of the weights, may form their gradient in the
  forward pass, in 6NDV instead of 8NDV operations, where `scratch` and the device's memory make
  that faster (`vqjax.ops.reduced_loss`). Value and gradient are the same for any cotangent.

  Args:
    hidden: one vector for each token; it and all arguments without a remark as in `linear_softmax`.
    weight: one row for each token of the vocabulary.
    tokens: indices into the vocabulary.
    bias: one number for each row.
    mask: False for tokens that are left out, as if their weight were 0.
    token_weight: weight of each token's loss; 0 for padding.
    class_weight: a further factor of the weight, by the token, as `weight` of PyTorch's
      `cross_entropy`: the mean divides by the sum of the weights. Inside of a `jax.shard_map` over
      `vocab_axis` it has the device's own rows, as `weight` does.
    ignore_index: target whose tokens have weight 0, such as -1 or -100; unsigned tokens of 8 or 16
      bits cannot hold a negative one.
    label_smoothing: probability, in [0, 1), that the target spreads evenly over the vocabulary; a
      Python number, like `z_loss` and `softcap`.
    z_loss: coefficient of the squared log-normaliser, which keeps scores from drifting.
    temperature: divides the scores, after their cap.
    softcap: largest absolute score.
    output: another function of each score instead of a cap, such as `SigmoidCap()`.
    reduction: "none", "sum" or "mean"; the mean over no weight is 0.
    scratch: as in `linear_softmax`; a sum or mean keeps these scores until their gradient is
      formed, beside a float32 gradient of the weight.
    tile: (tokens, vocabulary rows) that are scored at once; if it is given, nothing is kept.
    dtype: dtype of the matrix products' operands.
    vocab_axis: mesh axis over which the rows are sharded, or a tuple of several.
    precision: of the matrix products.

  Raises:
    ValueError: as `linear_softmax`; `label_smoothing` is outside [0, 1), `z_loss` is negative,
      `token_weight` has another shape than `tokens` or `class_weight` than [V], there is a
      `class_weight` beside `label_smoothing`, `reduction` is not one of the three, or `scratch` is
      not a number of bytes.
    TypeError: as `linear_softmax`.
  """
  check_given(hidden=hidden, tokens=tokens)
  check_arrays(mask=mask, token_weight=token_weight, class_weight=class_weight)
  check_numbers(label_smoothing=label_smoothing, z_loss=z_loss)
  if not 0 <= label_smoothing < 1:
    raise ValueError(f"`label_smoothing` must be in [0, 1); got {label_smoothing}. 0.1 is usual.")
  if not 0 <= z_loss <= 1e30:
    raise ValueError(f"`z_loss` must be finite and at least 0; got {z_loss}. 1e-4 is usual.")
  if reduction not in ("none", "sum", "mean"):
    raise ValueError(
      f'`reduction` must be "none", "sum" or "mean"; got {reduction!r}. "mean" divides by the sum'
      " of the weights."
    )
  options = ScoreOptions(
    temperature=temperature,
    softcap=softcap,
    output=output,
    tile=tile,
    dtype=dtype,
    vocab_axis=vocab_axis,
    scratch=scratch,
    precision=precision,
  )
  if class_weight is not None:
    if label_smoothing:
      raise ValueError(
        f"`label_smoothing` must be 0 where `class_weight` is given; got {label_smoothing}. PyTorch"
        " weighs each class of the smoothed target; give `token_weight` instead."
      )
    of_class = _of_classes(class_weight, tokens, as_row_factory(weight).count, vocab_axis)
    token_weight = of_class if token_weight is None else token_weight * of_class
  counted = TokenWeight.of(tokens.shape, mask, token_weight, tokens, ignore_index)
  terms = reduced_loss.Terms(float(label_smoothing), float(z_loss))
  if reduction == "none":
    outputs = Outputs(mean=label_smoothing > 0)
    stats = _softmax(hidden, weight, tokens, bias, counted.kept, options, outputs)
    return counted.of_each(terms.of(stats.log_prob, stats.log_z, stats.mean_log_prob))
  layer = Linear.of(counted.hide(hidden), weight, bias, options, tokens)
  valid, token = in_vocabulary(tokens, layer.vocab)
  each = counted.of_each(jnp.ones(tokens.shape, jnp.float32))
  total = each.sum(dtype=jnp.float32)
  # Divided here, so that the cotangent of the sum is 1 in most programs.
  share = each if reduction == "sum" else each / jnp.where(total == 0, 1.0, total)
  # A token outside of the vocabulary has no gradient, and makes the sum nan unless its weight is 0.
  wrong = (~valid & (share != 0)).any()
  share = jnp.where(valid, share, 0.0)
  compute = functools.partial(reduced_loss.weighted_sum, terms)
  loss = tiles.on_each_device((layer,), token, compute, counted.kept, share)
  return jnp.where(wrong, jnp.nan, loss)


def _of_classes(class_weight, tokens, rows, vocab_axis):
  """Weight of each token's class; 1 for a token outside of the vocabulary, whose loss is nan."""
  if class_weight.shape != (rows,):
    raise ValueError(
      f"`class_weight` must be [{rows}], one for each row of `weight`; got {class_weight.shape}."
      " Use `token_weight` for weights of tokens."
    )
  valid, token = in_vocabulary(tokens, vocab_parallel.rows_in_all(vocab_axis, rows))
  table = class_weight.astype(vocab_parallel.summed_dtype(class_weight.dtype))
  return jnp.where(valid, vocab_parallel.sharded_lookup(table, token, vocab_axis), 1.0)


def linear_scores(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"] | RowFactory,
  bias: Float[Array, "V"] | None = None,
  dtype: Dtype | None = None,
  softcap: float | int | None = None,
  output: OutputFunction | None = None,
) -> Float[Array, "*B V"]:
  """Scores hidden · weightᵀ + bias, capped, accumulated and returned in float32.

  `dtype` is the dtype of the product's operands; None: the promoted dtype of hidden and weight.
  `output` is another function of each score, instead of a cap.
  """
  weight = as_row_factory(weight)
  dtype = dtype or jnp.promote_types(hidden.dtype, weight.dtype)
  if vocab_parallel.platform() == "cpu" and math.prod(hidden.shape[:-1]) <= _FEW_ROWS:
    # With the weight first: XLA's product for CPUs reads it along its rows, in half the time.
    # Without the barrier the transposition would be folded into the product.
    first = lax.optimization_barrier(rows_scores(weight, hidden, dtype))
    scores = jnp.moveaxis(first, 0, -1)
  else:
    axes = ((hidden.ndim - 1,), (1,)), ((), ())
    scores = lax.dot_general(
      hidden.astype(dtype), weight.all().astype(dtype), axes, preferred_element_type=jnp.float32
    )
  bias = None if bias is None else bias.astype(jnp.float32)
  return ScoreOptions(softcap=softcap, output=output).finish(scores, bias)


# Largest number of hidden vectors whose product is computed with the weight first on a CPU.
_FEW_ROWS = 256


def rows_scores(
  weight: Float[Array, "V D"] | RowFactory,
  hidden: Float[Array, "*B D"],
  dtype: Dtype | None = None,
) -> Float[Array, "V *B"]:
  """Products weight · hidden, vocabulary first, in float32, without bias and cap."""
  weight = as_row_factory(weight)
  dtype = jnp.dtype(dtype or jnp.promote_types(hidden.dtype, weight.dtype))
  hidden = hidden.astype(dtype)
  # float32 results of bfloat16 operands: rounded scores would move probabilities by percents.
  is_cpu = vocab_parallel.platform() == "cpu"
  if weight.axis == 1 and is_cpu:
    # hidden · kernel reads a kernel [D, V] along its rows, far faster than weight · hidden, to
    # which the transposition would be folded without the barrier.
    axes = ((hidden.ndim - 1,), (0,)), ((), ())
    kernel = weight.per_row.astype(dtype)
    after = narrow.dot_general(hidden, kernel, axes, preferred_element_type=jnp.float32)
    return jnp.moveaxis(lax.optimization_barrier(after), -1, 0)
  rows = weight.all().astype(dtype)
  if math.prod(hidden.shape[:-1]) == 1 and dtype.itemsize < 4 and is_cpu:
    axes = ((hidden.ndim - 1,), (1,)), ((), ())
    one = narrow.dot_general(hidden, rows, axes, preferred_element_type=jnp.float32)
    return jnp.moveaxis(one, -1, 0)
  return narrow.weight_first(rows, hidden, jnp.float32)


def log_softmax(scores: Float[Array, "*B V"], vocab_axis: MeshAxes | None = None) -> Array:
  """log softmax over the last axis, which may be sharded over `vocab_axis`."""
  axis = vocab_parallel.inside(vocab_axis)
  if axis is None:
    return jax.nn.log_softmax(scores)
  top = vocab_parallel.common_shift(scores.max(axis=-1, keepdims=True), axis)
  above = scores - top
  return above - jnp.log(lax.psum(jnp.exp(above).sum(axis=-1, keepdims=True), axis))
