"""The contract of output heads, and what a head inherits.

The public methods are written once, here: they check and cast their arguments, run a hook where the
arrays are, and type its results. A head is what its hooks compute:

  declare                the variables
  flops_per_token        the cost of a token
  _scores                (arrays, hidden) -> the logits, a block of the vocabulary at a time

Everything else follows from the blocks, exactly. A head that knows better overrides `_log_prob`,
`_loss_terms`, `_sample`, `_top_k` or `_logits`. Hooks are functions of `arrays`, which hold what
`parts` names: the variables, or inside of a `shard_map` over the vocabulary the device's rows.
"""

# The way of a call:
#
#   log_prob(hidden, tokens)                     public: checks, casts, and nan for unknown tokens
#     _on_devices                                the arrays by name, as `parts` gives them
#       _computed                                explicit axes of the mesh made automatic
#         over_vocabulary(vocab_axis, parts)     each device with its rows of the arrays
#           _log_prob(arrays, hidden, token)     the hook; `token` is int32 in [0, V)
#
# What the hooks compute by default, each of which a head may replace alone:
#
#   _scores -> Blocks --+--> _log_prob --> _loss_terms        a pass, again for the gradient
#                       +--> _sample, _top_k                  one or a few passes
#                       +--> _logits                          all blocks in one array
#                       +--> over_blocks, gradient_share      what else reads logits
#
# On a mesh a hook reduces over `vocab_axis` itself, by `psum` or by an operation of `ops` that gets
# the axis, so that its result is the same on all devices. `_logits` alone runs on whole arrays.

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Integer, PRNGKeyArray

from vqjax.assign.text import TextStats
from vqjax.layer import VocabularyLayer
from vqjax.ops import sampling, symbolic, vocab_parallel
from vqjax.ops.gradient_share import GradientShare, gradient_share
from vqjax.ops.sampling import Blocks, SamplingOptions
from vqjax.ops.scores import check_temperature
from vqjax.ops.vocab_parallel import Sharded
from vqjax.ops.vocabulary import (
  allowed_of,
  check_arrays,
  check_given,
  check_ignore_index,
  check_mask,
  check_one_each,
  check_vectors,
  in_vocabulary,
  is_count,
  key_of,
  mean_over,
  value_of,
  widened,
)
from vqjax.types import Dtype

__all__ = ["Head"]

# The arrays of a layer by name, as `Layer.parts` gives them.
Arrays = dict[str, Any]

# Further terms of the training loss by name.
Terms = dict[str, Float[Array, ""]]


def _is_array(option: Any) -> bool:
  return isinstance(option, jax.Array | np.ndarray)


def _of_rows(hidden: ArrayLike, **option: Any) -> Array | None:
  """An option as an array with one number for each vector; None stays None."""
  ((name, value),) = option.items()
  if value is None:
    return None
  if _is_array(value):
    check_arrays(**option)
  shape, value = jnp.shape(hidden)[:-1], jnp.asarray(value, jnp.float32)
  try:
    return jnp.broadcast_to(value, shape)
  except ValueError:
    raise ValueError(
      f"`{name}` must be a number or have the shape {shape} of the vectors; got {value.shape}. Give"
      " one for each vector."
    ) from None


def _checked_mask(mask: ArrayLike | None, tokens: Array) -> Array | None:
  """A mask as an array with one boolean for each token; None stays None."""
  if mask is None:
    return None
  mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
  check_mask(mask, tokens.shape)
  return jnp.asarray(mask)


def _left_out(
  hidden: Array, tokens: Array, mask: Array | None, ignore_index: int | None
) -> tuple[Array, Array, Array | None]:
  """Vectors and targets, 0 and -1 where a token is left out, and whether each token counts.

  The last is None where all of them do.
  """
  tokens = widened(tokens)
  if mask is None and ignore_index is None:
    return hidden, tokens, None
  counted = jnp.ones(tokens.shape, bool) if mask is None else mask
  if ignore_index is not None:
    counted &= tokens != ignore_index
  # Before products: 0 · nan in the backward pass would reach the gradients of the variables.
  return jnp.where(counted[..., None], hidden, 0), jnp.where(counted, tokens, -1), counted


class Head(VocabularyLayer):
  """A distribution over the vocabulary for each hidden vector.

  Log-probabilities are in nats and float32. A head is a Linen module without `nn.compact` methods,
  so its methods can be called through `apply(..., method="log_prob")` or from a model's own
  methods.

  Where the mesh in context has an axis `vocab_axis`, each device of the axis holds and scans its
  own rows of the vocabulary, and the results are the same.

  Attributes:
    dim: width of the hidden vectors, D.
    dtype: dtype of the matrix products' operands; None: the promoted dtype of hidden and weights.
    precision: of the matrix products, a name of `jax.default_matmul_precision` such as "highest";
      None: JAX's default, which rounds float32 operands to TF32 on GPUs and to bfloat16 on TPUs:
      log-probabilities were up to 4.5e-3 nats off on an H200.
    param_dtype: dtype of the parameters.
  """

  dtype: Dtype | None = dataclasses.field(default=None, kw_only=True)
  precision: str | None = dataclasses.field(default=None, kw_only=True)
  param_dtype: Dtype = dataclasses.field(default=jnp.float32, kw_only=True)

  @final
  def __call__(self, hidden: Float[ArrayLike, "*B D"]) -> Float[Array, "*B V"]:
    """Return `logits(hidden)`."""
    return self.logits(hidden)

  @final
  def logits(self, hidden: Float[ArrayLike, "*B D"]) -> Float[Array, "*B V"]:
    """Scores whose softmax is the distribution.

    This is the only method that builds an array [*B, V].
    """
    # Not in a `shard_map`: the partitioner leaves the vocabulary of the logits where its rows are.
    return self._on_devices(self._logits, hidden, axis=None)

  @final
  def log_prob(
    self,
    hidden: Float[ArrayLike, "*B D"],
    tokens: Integer[ArrayLike, "*B"],
    temperature: float | int | Float[ArrayLike, "..."] = 1.0,
    mask: Bool[ArrayLike, "*B"] | None = None,
    ignore_index: int | None = None,
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats; nan for a token outside [0, V).

    The loss of a language model is -mean(log_prob). Neither it nor its gradient holds [*B, V]. A
    token that is left out has log-probability 0 and contributes to no gradient, whatever its hidden
    vector holds.

    Args:
      hidden: one vector for each token.
      tokens: the tokens.
      temperature: divides the logits, as in `sample`: the log-probabilities are those with which
        `sample` draws at this temperature. A number, or an array with one of each token, which a
        compiled program may get as an argument. At another temperature than 1 a head with factors
        scores all tokens, a block at a time.
      mask: False for the tokens to leave out.
      ignore_index: the target of further tokens to leave out, such as -1 or -100; unsigned tokens
        of 8 or 16 bits cannot hold a negative one.

    Raises:
      ValueError: `temperature` is not positive.
    """
    check_ignore_index(ignore_index)
    if not _is_array(temperature):
      check_temperature(temperature)
      temperature = float(temperature)
    each = (_of_rows(hidden, temperature=temperature),) if _is_array(temperature) else ()
    hidden, tokens = self._targets(hidden, tokens)
    mask = _checked_mask(mask, tokens)

    def body(arrays, hidden, tokens, mask, *each):
      hidden, tokens, counted = _left_out(hidden, tokens, mask, ignore_index)
      # A hook gets token 0 for an unknown one: a compiled program cannot raise, and clips indices.
      known, token = in_vocabulary(tokens, self.vocab)
      if each:
        found = Head._log_prob(self, arrays, hidden, token, *each, counted)
      else:
        found = self._log_prob(arrays, hidden, token, temperature, counted)
      return jnp.where(known, found, jnp.nan if counted is None else jnp.where(counted, jnp.nan, 0))

    return self._on_devices(body, hidden, tokens, mask, *each)

  @final
  def loss_terms(
    self,
    hidden: Float[ArrayLike, "*B D"],
    tokens: Integer[ArrayLike, "*B"],
    mask: Bool[ArrayLike, "*B"] | None = None,
    ignore_index: int | None = None,
  ) -> tuple[Float[Array, "*B"], Terms]:
    """`log_prob`, and further terms of the training loss by name, computed at once.

    A token that is left out has log-probability 0 and contributes to no term and no gradient,
    whatever its hidden vector holds. Without `mask` and `ignore_index`, the log-probability is nan
    for a token outside [0, V), and no term counts it. Given the random stream "sample", as in
    training steps, the log-probability of some heads is an estimate.

    Args:
      hidden: one vector for each token.
      tokens: the targets.
      mask: False for the tokens to leave out.
      ignore_index: the target of further tokens to leave out, such as -1 or -100; unsigned tokens
        of 8 or 16 bits cannot hold a negative one.
    """
    check_ignore_index(ignore_index)
    hidden, tokens = self._targets(hidden, tokens)
    mask = _checked_mask(mask, tokens)

    def compute(hidden, tokens, mask):
      hidden, tokens, counted = _left_out(hidden, tokens, mask, ignore_index)
      known, token = in_vocabulary(tokens, self.vocab)
      # Not in a hook: each device would draw, and variables cannot be written in a `shard_map`.
      parts, of_targets = self._training_parts(tokens)
      log_prob, terms = self._terms_of(parts, hidden, token, known, counted)
      # Tokens that are left out are unknown, too: -1.
      missing = jnp.nan if counted is None else jnp.where(counted, jnp.nan, 0.0)
      return jnp.where(known, log_prob, missing), terms | of_targets

    return self._computed(compute, hidden, hidden, tokens, mask)

  @final
  def sample(
    self,
    hidden: Float[ArrayLike, "*B D"],
    key: PRNGKeyArray,
    temperature: float | int | Float[ArrayLike, "..."] = 1.0,
    top_k: int | None = None,
    top_p: float | int | Float[ArrayLike, "..."] | None = None,
    allowed: Bool[ArrayLike, "..."] | None = None,
  ) -> Int[Array, "*B"]:
    """Draw a token from the exact distribution; -1 where no token is allowed.

    A row with a score of inf or nan has no distribution: its draw is -1, too, but at temperature 0.
    `temperature` and `top_p` are numbers, or arrays with one for each draw, which a compiled
    program may get as arguments: batches of a server mix requests. The draws are then made from all
    scores, without what a head knows better. A program cannot refuse numbers of an array: a
    temperature that is not positive takes the arg max, and a `top_p` outside (0, 1) keeps all.

    Args:
      hidden: one vector for each draw.
      key: source of randomness.
      temperature: divides the logits; 0 takes the arg max.
      top_k: keep only the k best tokens.
      top_p: keep only the smallest set of best tokens with this mass, after temperature and top_k.
      allowed: marks the tokens that may be drawn, [V] or [*B, V].

    Raises:
      ValueError: an option is outside its range, or `allowed` has another shape.
    """
    numbers_alone = [None if _is_array(x) else x for x in (temperature, top_p)]
    options = SamplingOptions(numbers_alone[0] or 0.0, top_k, numbers_alone[1])

    def body(arrays, hidden, key, allowed):
      return self._sample(arrays, hidden, key, options, allowed)

    def of_rows(arrays, hidden, key, allowed, temperature, top_p):
      blocks = sampling.allow(self._scores(arrays, hidden), allowed, self.vocab)
      k = None if top_k is None else min(top_k, self.vocab)
      return sampling.sample_rows(blocks, key, temperature, k, top_p)

    if _is_array(temperature) or _is_array(top_p):
      each = _of_rows(hidden, temperature=temperature), _of_rows(hidden, top_p=top_p)
      return self._drawn(of_rows, hidden, key, allowed, *each)
    return self._drawn(body, hidden, key, allowed)

  @final
  def top_k(
    self, hidden: Float[ArrayLike, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
    """Log-probabilities and tokens of the k most likely tokens, best first, exactly.

    Raises:
      ValueError: `k` is outside [1, V].
    """
    self._check_k(k)
    return self._on_devices(lambda arrays, hidden: self._top_k(arrays, hidden, k), hidden)

  @final
  def over_blocks(self, body: Callable, hidden: Float[ArrayLike, "*B D"], *shared: Any) -> Any:
    """Call body(blocks of `hidden`, *shared).

    Each device of `vocab_axis` has its own blocks of the logits (`ops.sampling.Blocks`). The body
    must reduce over `blocks.axis`, so that it returns the same on all of these devices.
    """

    def run(arrays, hidden, *shared):
      # Marking an array sums its gradient over the devices: before an operand of it is narrowed.
      arrays, hidden = vocab_parallel.varying((arrays, hidden))
      return body(self._scores(arrays, hidden), *shared)

    return self._on_devices(run, hidden, *shared)

  @final
  def gradient_share(
    self, hidden: Float[ArrayLike, "*B D"], tokens: Integer[ArrayLike, "*B"]
  ) -> GradientShare:
    """The share of the gradient in the logits that `hidden` receives.

    The loss is -log p(token). A diagnostic: exact, with about 4·V·D² operations for each hidden
    vector, which are taken one after another in blocks of the vocabulary. All but `rank` is nan for
    a token outside [0, V).

    Source: the question is that of Godey and Artzi, arXiv 2603.10145.

    Args:
      hidden: the contexts.
      tokens: their targets.
    """

    def body(arrays, hidden, tokens):
      known, token = in_vocabulary(tokens, self.vocab)
      found = gradient_share(lambda one: self._scores(arrays, one), hidden, token)
      outside = lambda x: jnp.where(known, x, jnp.nan)
      # The rank depends on the context alone, whatever the token is.
      return GradientShare(
        kept=outside(found.kept),
        gain=outside(found.gain),
        norm=outside(found.norm),
        rank=found.rank,
      )

    return self._on_devices(body, *self._targets(hidden, tokens))

  # Hooks. `arrays` are those of `parts` on this device, `token` is int32 in [0, V).

  @abc.abstractmethod
  def _scores(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> Blocks:
    """The logits of the rows that this device holds, a block at a time."""

  def _logits(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """The logits of all tokens, from the whole arrays."""
    return sampling.scores_of_all(self._scores(arrays, hidden), self.vocab)

  def _log_prob(
    self,
    arrays: Arrays,
    hidden: Float[Array, "*B D"],
    token: Int[Array, "*B"],
    temperature: Float[Array, "*B"] | float | int,
    counted: Bool[Array, "*B"] | None,
  ) -> Float[Array, "*B"]:
    """Log-probability of tokens; a head that overrides it gets a number as the temperature.

    Nobody reads what it is where `counted` is False: such tokens need not be scored. None: all are.
    """
    del counted
    arrays, hidden = vocab_parallel.varying((arrays, hidden))
    return sampling.log_prob(self._scores(arrays, hidden), token, temperature)

  def _loss_terms(
    self,
    arrays: Arrays,
    hidden: Float[Array, "*B D"],
    token: Int[Array, "*B"],
    known: Bool[Array, "*B"],
    counted: Bool[Array, "*B"] | None,
  ) -> tuple[Float[Array, "*B"], Terms]:
    """Log-probability of tokens, and the terms of those that are `known` to count.

    `counted` is as in `_log_prob`.
    """
    del known
    return self._log_prob(arrays, hidden, token, 1.0, counted), {}

  def _training_parts(self, tokens: Integer[Array, "*B"]) -> tuple[dict[str, Any], Terms]:
    """The `parts` of `_loss_terms`, and terms that follow from the targets alone.

    Outside of any `shard_map`, so that it may draw random numbers and write variables. Tokens that
    are left out are -1.
    """
    del tokens
    return self.parts(), {}

  def _sample(
    self,
    arrays: Arrays,
    hidden: Float[Array, "*B D"],
    key: PRNGKeyArray,
    options: SamplingOptions,
    allowed: Bool[Array, "..."] | None,
  ) -> Int[Array, "*B"]:
    """A token for each vector."""
    blocks = sampling.allow(self._scores(arrays, hidden), allowed, self.vocab)
    return sampling.sample(blocks, key, options)

  def _top_k(
    self, arrays: Arrays, hidden: Float[Array, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
    """Log-probabilities and tokens of the k best."""
    scores, tokens, log_z = sampling.best(self._scores(arrays, hidden), k)
    return scores - log_z[..., None], tokens

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """The bias of each token's frequency, for heads that have one bias a token."""
    has_bias = getattr(self, "use_bias", False) or getattr(self, "token_bias", False)
    return {"bias_init": text.log_frequencies()} if has_bias else {}

  def _terms_of(self, parts, hidden, token, known, counted):
    """`_loss_terms` on each device, and by chunks where the number of tokens is a symbol."""
    compute = functools.partial(vocab_parallel.over_vocabulary, self.vocab_axis, self._loss_terms)
    if not symbolic.is_symbolic(hidden):
      return compute(parts, hidden, token, known, counted)

    def of_chunk(*given):
      log_prob, terms = compute(*given)
      return log_prob, jax.tree.map(lambda x: jnp.broadcast_to(x, log_prob.shape), terms)

    log_prob, terms = symbolic.by_chunks(of_chunk, hidden, parts, hidden, token, known, counted)
    # Terms are means over known tokens, of which each chunk has its own number.
    return log_prob, jax.tree.map(lambda x: mean_over(x, known), terms)

  # What public methods of subclasses are built of, too.

  def _on_devices(self, body: Callable, hidden: ArrayLike, *shared: Any, axis: Any = ...) -> Any:
    """`body(arrays, hidden, *shared)` of each device of an axis and its arrays.

    The axis is `vocab_axis` if none is given, and None for a body of whole arrays.
    """
    hidden, axis = self._vectors(hidden), self.vocab_axis if axis is ... else axis
    on_devices = functools.partial(vocab_parallel.over_vocabulary, axis, body)
    compute = lambda *given: symbolic.by_chunks(on_devices, given[0], self.parts(), *given)
    return self._computed(compute, hidden, hidden, *shared)

  def _drawn(
    self, body: Callable, hidden: ArrayLike, key: PRNGKeyArray, allowed: Any, *each: Any
  ) -> Any:
    """body(arrays, hidden, key, allowed, *each) on each device, for checked arguments."""
    key = key_of(key)
    allowed = allowed_of(allowed, jnp.shape(hidden)[:-1])
    return self._on_devices(body, hidden, key, allowed, *each)

  def _operand_dtype(self, hidden: Array, weight: Any) -> Dtype:
    """The dtype of a product's operands."""
    return jnp.dtype(self.dtype or jnp.promote_types(hidden.dtype, weight.dtype))

  def _padded_bias(self, name: str) -> Sharded:
    """A bias [V] that removes the rows which pad a device's part.

    It is zeros where the head has none but rows are padded, and None where neither is the case.
    """
    bias = vocab_parallel.bias_of_padding(self.array(name), self.vocab, self.vocab_axis)
    return Sharded(bias, -jnp.inf)

  def _vectors(self, hidden: ArrayLike) -> Array:
    """Hidden vectors as an array of JAX, of the right width."""
    check_given(hidden=hidden)
    hidden = jnp.asarray(hidden)
    check_vectors(hidden)
    if hidden.shape[-1] != self.dim:
      raise ValueError(
        f"`hidden` must have the width of the head; got {hidden.shape[-1]} for dim {self.dim}."
        " Give the head the width of the model."
      )
    return hidden

  def _targets(self, hidden: ArrayLike, tokens: ArrayLike) -> tuple[Array, Array]:
    """Hidden vectors, and one token for each of them."""
    check_arrays(tokens=tokens)
    hidden, tokens = self._vectors(hidden), value_of(tokens)
    check_one_each(hidden, tokens)
    return hidden, tokens

  def _check_k(self, k: int) -> None:
    if not is_count(k) or not 1 <= k <= self.vocab:
      raise ValueError(
        f"`k` must be an integer in [1, vocab]; got {k} for vocab {self.vocab}. 50 is usual."
      )


class RegularizedHead(Head):
  """Base class of heads whose training loss may have z-loss and label smoothing.

  Attributes:
    z_loss: coefficient of the mean squared log-normaliser in the training loss.
    label_smoothing: part of the target, in [0, 1), that is spread evenly over the vocabulary in
      the training loss; `log_prob` is of the token itself.
  """

  z_loss: float = dataclasses.field(default=0.0, kw_only=True)
  label_smoothing: float = dataclasses.field(default=0.0, kw_only=True)

  def check(self) -> None:
    if not 0 <= self.label_smoothing < 1:
      raise ValueError(
        f"`label_smoothing` must be in [0, 1); got {self.label_smoothing}. 0.1 is usual."
      )
    for name, usual in (("z_loss", 1e-4), ("commitment", 0.25)):
      # Only heads with codes have a commitment.
      coefficient = getattr(self, name, 0.0)
      if not 0 <= coefficient < math.inf:
        raise ValueError(
          f"`{name}` must be finite and not negative; got {coefficient}. {usual} is usual, 0 for"
          " none."
        )

  def _regularizers(self, scores: Any, known: Bool[Array, "*B"]) -> Terms:
    """The terms with a coefficient above 0 by name, means over the known tokens.

    `scores` have `log_prob`, `log_z` and, for label smoothing, `mean_log_prob`.
    """
    named = {}
    if self.z_loss:
      # Of each token, not of the mean: the square keeps every normaliser near 0.
      named["z_loss"] = self.z_loss * mean_over(scores.log_z**2, known)
    if self.label_smoothing:
      # The smoothed loss is -(1 - s) log p - s · mean log p; -log p is counted already.
      excess = scores.log_prob - scores.mean_log_prob
      named["label_smoothing"] = self.label_smoothing * mean_over(excess, known)
    return named
