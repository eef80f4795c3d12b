"""Scores that a softmax is taken of: their options, and functions of a score.

    hidden · weightᵀ  ->  + bias  ->  cap or other function  ->  / temperature  ->  softmax
    operands in `dtype`, and float32 from there on

`ScoreOptions` has all that is static about it, and goes as one argument from the losses that people
call down to the tiles, where `finish` and `pull_back` apply it.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vqjax.ops.precision import check_precision
from vqjax.ops.vocabulary import check_numbers, is_count
from vqjax.types import Dtype, MeshAxes

__all__ = ["OutputFunction", "ScoreOptions", "SigSoftmax", "SigmoidCap"]


class OutputFunction(abc.ABC):
  """A rising function of each score, with its slope as a function of its result."""

  @abc.abstractmethod
  def __call__(self, score: Float[Array, "..."]) -> Float[Array, "..."]:
    """The scores that the softmax is taken of."""

  # The gradient of a tile has the finished score, since the raw one is not kept.
  @abc.abstractmethod
  def slope(self, result: Float[Array, "..."]) -> Float[Array, "..."]:
    """The derivative where the function has the value `result`."""


@dataclasses.dataclass(frozen=True)
class Softcap(OutputFunction):
  """c · tanh(score / c).

  Attributes:
    cap: largest absolute result, c.
  """

  cap: float | int

  def __call__(self, score: Float[Array, "..."]) -> Float[Array, "..."]:
    """The capped scores."""
    return self.cap * jnp.tanh(score / self.cap)

  def slope(self, result: Float[Array, "..."]) -> Float[Array, "..."]:
    """d tanh(x) = 1 - tanh(x)², and result / c is that tanh."""
    return 1 - (result * (1 / self.cap)) ** 2


@dataclasses.dataclass(frozen=True)
class SigmoidCap(OutputFunction):
  """c · sigmoid((score + shift) / width), a cap whose scores lie in (0, c).

  A softmax depends on differences of scores alone, so that the range may begin at 0. The defaults
  are those of modded-nanogpt (github.com/KellerJordan/modded-nanogpt); a width of c / 4 and no
  shift give slope 1 at 0.

  Attributes:
    cap: upper limit of the result, c.
    width: scale of the raw scores.
    shift: added to the raw scores.

  Raises:
    ValueError: `cap` or `width` is not positive and finite.
    TypeError: an attribute is not a Python number.
  """

  cap: float | int = 23.0
  width: float | int = 7.5
  shift: float | int = 5.0

  def __post_init__(self):
    check_numbers(cap=self.cap, width=self.width, shift=self.shift)
    if not (_LEAST <= self.cap <= _MOST and _LEAST <= self.width <= _MOST):
      raise ValueError(
        f"`cap` and `width` must be positive and finite; got {self.cap} and {self.width}. 23 and"
        " 7.5 are usual."
      )

  def __call__(self, score: Float[Array, "..."]) -> Float[Array, "..."]:
    """The capped scores."""
    return self.cap * jax.nn.sigmoid((score + self.shift) / self.width)

  def slope(self, result: Float[Array, "..."]) -> Float[Array, "..."]:
    """d sigmoid(x) = sigmoid(x) (1 - sigmoid(x)), and result / c is that sigmoid."""
    return result * (1 - result / self.cap) / self.width


@dataclasses.dataclass(frozen=True)
class SigSoftmax(OutputFunction):
  """log(exp(score) · sigmoid(score)), whose softmax is the sigsoftmax.

  It is not linear, so that the log-probabilities of many contexts may have a rank above D + 1, and
  it adds neither parameters nor products.

  Source: Kanai et al., Sigsoftmax: reanalysis of the softmax bottleneck, Eq. 12.

  Example:
    >>> import jax
    >>> from vqjax.nnx import DenseHead
    >>> from vqjax import SigSoftmax
    >>> from flax import nnx
    >>> head = DenseHead(1000, 8, output=SigSoftmax(), rngs=nnx.Rngs(0))
    >>> hidden = jax.random.normal(jax.random.key(0), (4, 8))
    >>> print(head.log_prob(hidden, jax.numpy.arange(4)).shape)
    (4,)
  """

  def __call__(self, score: Float[Array, "..."]) -> Float[Array, "..."]:
    """score + log sigmoid(score)."""
    return score + jax.nn.log_sigmoid(score)

  def slope(self, result: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 + sigmoid(-score).

    With y = exp(result), exp(score) is the positive root of x² - y·x - y, (y + sqrt(y² + 4y)) / 2,
    whose logarithm is result / 2 + asinh(sqrt(y) / 2).
    """
    # Above 60 the slope is 1 in float32, and sqrt(y) would overflow further up.
    root = jnp.exp(jnp.minimum(result, 60.0) / 2)
    return 1 + jax.nn.sigmoid(-(result / 2 + jnp.arcsinh(root / 2)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOptions:
  """How scores are computed from hidden · weightᵀ + bias.

  All of it is static: other options are another program.

  Attributes:
    temperature: divides the scores, after their cap; a Python number.
    softcap: largest absolute score c: scores are c · tanh(score / c).
    output: another function of each score, such as `SigSoftmax()`, instead of a cap.
    tile: (tokens, vocabulary rows) that are scored at once on each device; None: `default_tile`.
    dtype: dtype of the matrix products' operands, to which each tile is cast; None: the promoted
      dtype of hidden and weight.
    vocab_axis: mesh axis over which the rows are sharded, or a tuple of several. Inside of a
      `jax.shard_map` over all of them, weight and bias are the device's own rows, and tokens
      count over all devices' rows.
    scratch: bytes of scores that each device may keep for the gradient, instead of computing them
      again; None: as suits the device. Losses against a teacher or several targets keep nothing.
    precision: of the matrix products, a name of `jax.default_matmul_precision` such as "highest";
      None: JAX's default. It rounds float32 operands to TF32 on GPUs and to bfloat16 on TPUs:
      log-probabilities were up to 4.5e-3 nats off on an H200. CPUs do not round.

  Raises:
    ValueError: `softcap` or `temperature` is not positive and finite, there is an `output` beside a
      `softcap`, a side of `tile` is below 1, `scratch` is not a number of bytes, or `precision` is
      not known.
    TypeError: `softcap` or `temperature` is not a Python number.
  """

  temperature: float | int = 1.0
  softcap: float | int | None = None
  output: OutputFunction | None = None
  tile: tuple[int, int] | None = None
  dtype: Dtype | None = None
  vocab_axis: MeshAxes | None = None
  scratch: int | None = None
  precision: str | None = None
  # The cap or the other function; None for none.
  function: OutputFunction | None = dataclasses.field(init=False, repr=False, compare=False)

  def __post_init__(self):
    check_softcap(self.softcap)
    check_temperature(self.temperature)
    check_precision(self.precision)
    if self.softcap is not None and self.output is not None:
      raise ValueError(
        f"`softcap` must be None where `output` is given; got {self.softcap} and {self.output}."
        " Leave out one."
      )
    if self.output is not None and not isinstance(self.output, OutputFunction):
      raise TypeError(
        f"`output` must be an `OutputFunction`; got {self.output!r}. Use SigSoftmax(), or None."
      )
    check_dtype(self.dtype)
    if isinstance(self.vocab_axis, list):
      object.__setattr__(self, "vocab_axis", tuple(self.vocab_axis))
    if self.tile is not None:
      sides = self.tile if isinstance(self.tile, (tuple, list)) else ()
      if len(sides) != 2 or not all(isinstance(side, int) and side >= 1 for side in sides):
        raise ValueError(
          f"`tile` must be (tokens, vocabulary rows), two ints of at least 1; got {self.tile}. Use"
          " None for the default."
        )
      # A list cannot be hashed, as a static argument of `jax.jit` must be.
      object.__setattr__(self, "tile", tuple(sides))
    if self.scratch is not None and not (is_count(self.scratch) and self.scratch >= 0):
      raise ValueError(
        f"`scratch` must be a number of bytes, an int of at least 0; got {self.scratch!r}. 0 keeps"
        " no scores, None suits the device."
      )
    # A NumPy number would have a dtype, to which it promotes the scores.
    object.__setattr__(self, "temperature", float(self.temperature))
    function = self.output if self.softcap is None else Softcap(float(self.softcap))
    object.__setattr__(self, "function", function)

  def resolved(self, hidden: Array, weight: Any) -> "ScoreOptions":
    """The options with the dtype of the products' operands; `weight` is anything with a dtype."""
    dtype = self.dtype or jnp.promote_types(hidden.dtype, weight.dtype)
    return dataclasses.replace(self, dtype=jnp.dtype(dtype))

  def finish(self, product: Array, bias: Array | None) -> Array:
    """Scores from hidden · weightᵀ; a bias of -inf removes its row under a function too."""
    raw, function = product if bias is None else product + bias, self.function
    if function is not None and bias is None:
      raw = function(raw)
    elif function is not None:
      # A cap would turn the -inf of a removed row into -c, and other functions have no slope there.
      removed = jnp.isneginf(bias)
      raw = jnp.where(removed, -jnp.inf, function(jnp.where(removed, 0.0, raw)))
    return raw if self.temperature == 1 else raw / self.temperature

  def finish_rows(
    self, product: Float[Array, "V *B"], bias: Float[Array, "V"] | None
  ) -> Float[Array, "V *B"]:
    """Scores from weight · hidden, vocabulary first."""
    if bias is not None:
      bias = bias.astype(jnp.float32).reshape(-1, *[1] * (product.ndim - 1))
    return self.finish(product, bias)

  def pull_back(self, score: Array, d_score: Array) -> Array:
    """The cotangent of hidden · weightᵀ + bias, from that of the finished scores."""
    if self.function is not None:
      # The score of a removed row is -inf, where a slope would meet a cotangent of 0 as nan.
      finite = jnp.where(jnp.isneginf(score), 0.0, score)
      d_score = d_score * self.function.slope(finite * self.temperature)
    return d_score if self.temperature == 1 else d_score / self.temperature


def check_softcap(softcap: float | int | None, name: str = "softcap") -> None:
  """Raise an error unless a softcap is a positive finite number or None."""
  if softcap is None:
    return
  check_numbers(**{name: softcap})
  if not _LEAST <= softcap <= _MOST:
    raise ValueError(
      f"`{name}` must be positive and finite; got {softcap}, in float32. 30 is usual, None is no"
      " cap."
    )


def check_dtype(dtype: Any) -> None:
  """Raise TypeError unless a dtype is None or floating-point, of at least 16 bits."""
  is_array = hasattr(dtype, "shape") and not isinstance(dtype, type | np.dtype)
  try:
    is_floating = dtype is None or (not is_array and jnp.issubdtype(dtype, jnp.floating))
  except (TypeError, ValueError):
    is_floating = False
  if not is_floating or (dtype is not None and jnp.dtype(dtype).itemsize < 2):
    raise TypeError(
      f"`dtype` must be a floating-point dtype of at least 16 bits; got {dtype!r}. Use"
      " jnp.bfloat16, or None for that of the operands."
    )


def check_temperature(temperature: float | int) -> None:
  """Raise an error unless `temperature` is a positive finite number."""
  check_numbers(temperature=temperature)
  if not _LEAST <= temperature <= _MOST:
    raise ValueError(
      f"`temperature` must be positive and finite; got {temperature}, in float32. The arg max,"
      " which a temperature of 0 stands for in decoding, is not a distribution: score its tokens"
      " at 1."
    )


# Numbers by which float32 scores can be divided and multiplied.
_LEAST, _MOST = 1e-6, 1e30


def exp_shift(top: Float[Array, "*B"]) -> Float[Array, "*B"]:
  """The number to subtract before exp: the maximum score, or 0 where it is -inf."""
  # Where every score so far is -inf, -inf - (-inf) would be nan.
  return jnp.where(jnp.isneginf(top), 0.0, top)


class LogSum(NamedTuple):
  """log Σ exp(score) in two parts: their sum would round `log_sum` away under a large offset."""

  top: Array
  log_sum: Array
