"""Arguments of functions: arrays, numbers, tokens outside of the vocabulary, weights of tokens."""

from __future__ import annotations

import functools
import numbers
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from vqjax.types import Shape

__all__ = ["in_vocabulary"]


def check_arrays(**arrays: Any) -> None:
  """Check that each argument is None, or an array of JAX or NumPy of real numbers.

  Raises:
    TypeError: it is something else, or of numbers that JAX lacks.
    ValueError: a float has fewer than 16 bits, or an integer fewer than 8.
  """
  for name, array in arrays.items():
    if array is None:
      continue
    # PyTorch's arrays have a shape, and a method that JAX's do not have.
    if not hasattr(array, "shape") or hasattr(array, "detach"):
      raise TypeError(
        f"`{name}` must be an array; got {type(array).__name__}. Use jnp.asarray({name})."
      )
    if not is_real(array):
      raise TypeError(
        f"`{name}` must be an array of real numbers that JAX has; got {type(array).__name__} of"
        f" {array.dtype}. Use jnp.asarray(np.asarray({name}, np.float32)), or integers for tokens."
      )
    kind, least, wide = jnp.iinfo, 8, "int32"
    if jnp.issubdtype(array.dtype, jnp.floating):
      kind, least, wide = jnp.finfo, 16, "bfloat16"
    if array.dtype != bool and kind(array.dtype).bits < least:
      raise ValueError(
        f"`{name}` must have at least {least} bits a number; got {array.dtype}. Cast it to {wide}."
      )


def is_real(array: Any) -> bool:
  """Whether it holds integers, floats or booleans that JAX has, and none of them is masked."""
  if isinstance(array, np.ma.MaskedArray):
    return False
  dtype = array.dtype
  if dtype == np.bool_ or not jnp.issubdtype(dtype, np.number):
    return dtype == np.bool_
  # Differences of dates are integers to NumPy. JAX has no numbers of 128 bits, nor swapped bytes.
  return dtype.kind not in "mc" and dtype.itemsize <= 8 and dtype.isnative


def host_array(name: str, array: Any) -> np.ndarray:
  """The array of NumPy of any library's array or of a list; its name is for messages.

  Raises:
    TypeError: it is not one of real numbers.
  """
  if isinstance(array, jax.core.Tracer):
    raise TypeError(f"`{name}` must have values; got a traced array. Call this outside of jit.")
  try:
    found = array if isinstance(array, np.ndarray) else np.asarray(array)
  except (TypeError, ValueError):
    found = None
  if found is None or not is_real(found):
    kind = "" if found is None else f" of {found.dtype}"
    raise TypeError(
      f"`{name}` must be an array of real numbers; got {type(array).__name__}{kind}. Convert it to"
      " float32 or to integers."
    )
  return found


def value_of(array: Any) -> Any:
  """The array of JAX of a variable, such as an `nnx.Param`, or of a NumPy array.

  Inside of `nnx.grad` JAX does not trace the variable, only the array that it holds. Integers of 64
  bits that JAX's 32 do not hold become -1, no token, instead of some other number. Anything else is
  returned as it is.
  """
  is_other = isinstance(array, np.ndarray) or hasattr(array, "__jax_array__")
  # Arrays of objects, texts or dates are refused by name where they are read.
  if not is_other or (isinstance(array, np.ndarray) and not is_real(array)):
    return array
  if isinstance(array, np.ndarray) and array.dtype.kind in "iu":
    held = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
    # NumPy 2.5 has no -1 beside unsigned integers.
    array = np.where((array >= held.min) & (array <= held.max), array.astype(np.int64), -1)
  return jnp.asarray(array)


def values_of(tree: Any) -> Any:
  """A tree with `value_of` each of its arrays and variables."""
  return jax.tree.map(value_of, tree, is_leaf=lambda x: hasattr(x, "__jax_array__"))


def check_ignore_index(ignore_index: int | None) -> None:
  """Raise ValueError unless a token of 32 bits may be the index that is ignored."""
  if ignore_index is None:
    return
  if not is_count(ignore_index) or not -(2**31) <= ignore_index < 2**31:
    raise ValueError(
      f"`ignore_index` must be an integer of 32 bits; got {ignore_index!r}. -100 is usual."
    )


def check_numbers(**options: Any) -> None:
  """Raise TypeError unless each option is a Python or NumPy number."""
  for name, option in options.items():
    if isinstance(option, jax.core.Tracer):
      raise TypeError(
        f"`{name}` must be a Python number, which chooses the program; got a traced one. Make it"
        " static: jax.jit(..., static_argnames=...)."
      )
    if not isinstance(option, numbers.Real) or isinstance(option, bool):
      given = f"an array of shape {option.shape}" if hasattr(option, "shape") else repr(option)
      raise TypeError(
        f"`{name}` must be a Python number, one for all tokens; got {given}. Use float({name})."
      )


def key_of(key: Any) -> Any:
  """The key with a dtype of its own, also where it is the numbers of a `jax.random.PRNGKey`.

  Raises:
    TypeError: it is not a key of `jax.random`.
  """
  dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
  is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
  # The default keys are of as many numbers.
  if (
    shape != ()
    if is_key
    else dtype != np.uint32 or shape != jax.eval_shape(jax.random.PRNGKey, 0).shape
  ):
    given = repr(key) if shape is None else f"{dtype} of shape {shape}"
    raise TypeError(f"`key` must be a key of jax.random; got {given}. Use jax.random.key(0).")
  if is_key:
    return key
  return jax.random.wrap_key_data(key)


def allowed_of(allowed: Any, batch: Shape = ()) -> Array | None:
  """The marks of the tokens that may be drawn, as an array of JAX; None stays None.

  Where a size of the batch is a symbol, marks with further axes than V get all axes of the batch.

  Raises:
    TypeError: they are not booleans.
  """
  if allowed is None:
    return None
  marks = allowed if isinstance(allowed, jax.Array) else np.asarray(allowed)
  if marks.dtype != bool:  # any number but 0 would be true, ids and nan among them
    raise TypeError(
      f"`allowed` must be booleans; got {marks.dtype}. Give one for each token, such as"
      " jnp.zeros(vocab, bool).at[ids].set(True)."
    )
  marks = jnp.asarray(marks)
  if marks.ndim > 1 and any(map(jax.export.is_symbolic_dim, batch)):
    return jnp.broadcast_to(marks, (*batch, marks.shape[-1]))
  return marks


def is_count(number: Any) -> bool:
  """Whether it is an integer of Python or NumPy; True and False are none."""
  return isinstance(number, numbers.Integral) and not isinstance(number, bool | np.bool_)


def check_given(**arrays: Any) -> None:
  """Raise TypeError unless each argument, which is needed, is an array as of `check_arrays`."""
  check_arrays(**arrays)
  for name, array in arrays.items():
    if array is None:
      raise TypeError(f"`{name}` must be an array; got None. Only optional arguments may be None.")


def check_vectors(vectors: Array | jax.ShapeDtypeStruct, name: str = "hidden") -> None:
  """Raise ValueError unless vectors are floats of at least 16 bits, of some width."""
  check_given(**{name: vectors})
  if not jnp.issubdtype(vectors.dtype, jnp.floating) or not vectors.ndim or not vectors.shape[-1]:
    remedy = "Look token ids up in an embedding first"
    raise ValueError(
      f"`{name}` must be floating-point vectors; got {vectors.dtype} of shape {vectors.shape}."
      f" {remedy if name.endswith('hidden') else 'Cast it to float32'}."
    )


def check_one_each(hidden: Array, tokens: Array) -> None:
  """Raise ValueError unless there is one vector for each token."""
  check_given(tokens=tokens)
  if hidden.shape[:-1] != tokens.shape:
    raise ValueError(
      f"`hidden` must have the shape {tokens.shape} of `tokens` and one more axis; got"
      f" {hidden.shape}. Give one vector for each token."
    )


def check_mask(mask: Array, shape: Shape) -> None:
  """Raise ValueError unless a mask has one boolean for each token; TypeError for no array."""
  check_arrays(mask=mask)
  if mask.shape != shape or mask.dtype != bool:
    raise ValueError(
      f"`mask` must be bool of shape {shape}, one for each token; got {mask.dtype} of shape"
      f" {mask.shape}. Use mask > 0."
    )


class TokenWeight(NamedTuple):
  """Weights of tokens, of which those that are left out contribute exactly 0.

  Attributes:
    kept: False for tokens that are left out; None: all tokens count.
    weight: the weight of each token, 0 for those that are left out; None: 1.
  """

  kept: Bool[Array, "*B"] | None
  weight: Float[Array, "*B"] | None

  @classmethod
  def of(
    cls,
    shape: Shape,
    mask: Array | None = None,
    weight: Array | None = None,
    tokens: Array | None = None,
    ignore_index: int | None = None,
  ) -> "TokenWeight":
    """The tokens of `shape` that a mask, a weight of 0 or `ignore_index` leaves out.

    Raises:
      ValueError: `mask` or `weight` has another shape or dtype.
    """
    kept = []
    if mask is not None:
      check_mask(mask, shape)
      kept.append(jnp.asarray(mask))
    if weight is not None:
      if weight.shape != shape:
        raise ValueError(
          f"`token_weight` must have the shape {shape} of `tokens`; got {weight.shape}. Give one"
          " weight for each token."
        )
      kept.append(weight != 0)
    check_ignore_index(ignore_index)
    if ignore_index is not None:
      kept.append(widened(tokens) != ignore_index)
    return cls(functools.reduce(jnp.logical_and, kept) if kept else None, weight)

  def hide(self, vectors: Shaped[Array, "*B D"]) -> Shaped[Array, "*B D"]:
    """Vectors of the tokens, those of tokens that are left out as zeros.

    To be called before the products: 0 · nan in their backward pass would reach the gradients of
    the weights.
    """
    return vectors if self.kept is None else jnp.where(self.kept[..., None], vectors, 0)

  def of_each(self, numbers: Any) -> Any:
    """A tree of [*B, ...] arrays, weighted; of tokens that are left out 0 (integers: -1)."""

    def weighted(x):
      wide = lambda w: w.reshape(*w.shape, *[1] * (x.ndim - w.ndim))
      if jnp.issubdtype(x.dtype, jnp.integer):
        return x if self.kept is None else jnp.where(wide(self.kept), x, -1)
      x = x if self.weight is None else x * wide(self.weight)
      # `where`, because a token outside of the vocabulary is nan, and nan · 0 too.
      return x if self.kept is None else jnp.where(wide(self.kept), x, jnp.zeros_like(x))

    return jax.tree.map(weighted, numbers)


def widened(tokens: Integer[Array, "*B"]) -> Integer[Array, "*B"]:
  """The tokens as signed integers of at least 32 bits, which hold -1 and vocabulary sizes.

  Unsigned numbers of 32 bits become the negative ones that they may have been cast from: no
  vocabulary is so large.

  Raises:
    ValueError: the tokens are not integers.
  """
  check_given(tokens=tokens)
  if not jnp.issubdtype(tokens.dtype, jnp.integer):
    raise ValueError(f"`tokens` must be integers; got {tokens.dtype}. Cast them to int32.")
  return tokens.astype(jnp.int64 if jnp.iinfo(tokens.dtype).bits > 32 else jnp.int32)


def in_vocabulary(
  tokens: Integer[Array, "*B"], vocab: int
) -> tuple[Bool[Array, "*B"], Int[Array, "*B"]]:
  """A mask of the tokens in [0, vocab), and the tokens as int32, others as 0.

  Raises:
    ValueError: the tokens are not integers.
  """
  tokens = widened(tokens)
  valid = (tokens >= 0) & (tokens < vocab)
  return valid, jnp.where(valid, tokens, 0).astype(jnp.int32)


def mean_over(numbers: Float[Array, "*B"], counted: Bool[Array, "*B"]) -> Float[Array, ""]:
  """Mean of the numbers of the tokens that are counted; 0 if there are none."""
  total = jnp.where(counted, numbers, 0.0).astype(jnp.float32).sum()
  return total / jnp.maximum(counted.sum(), 1)
