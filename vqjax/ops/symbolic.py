"""Batches whose number of tokens is a symbol, as in programs that `jax.export` writes.

The tokens are taken a chunk at a time, whose size is known, by a loop of symbolic length. What
chooses a program by the number of tokens, such as the sizes of tiles, sees a chunk alone.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from vqjax.ops import vocab_parallel

__all__ = []

_P = ParamSpec("_P")
_T = TypeVar("_T")


def is_symbolic(batch: Array) -> bool:
  """Whether an axis of the array has a symbol as its size."""
  return any(map(jax.export.is_symbolic_dim, batch.shape))


def chunk_size() -> int:
  """Number of tokens whose product takes about as long as the table is read."""
  return 64 if vocab_parallel.platform() == "cpu" else 256


def by_chunks(compute: Callable[..., Any], batch: Array, *trees: Any) -> Any:
  """`compute(*trees)`, a chunk of tokens at a time where the number of tokens is a symbol.

  Arrays of `trees` that begin with the axes of the tokens are cut into chunks [size, ...], a random
  key gets a number for each chunk, and all else is whole in each of them. Tokens that fill the last
  chunk are zeros. Results [size, ...] become [*B, ...] again, and numbers [] are added up.

  Args:
    compute: a function of the trees, whose results do not depend on other tokens.
    batch: its leading axes are those of the tokens: integers have no other axes, floating-point
      vectors have one more.
    *trees: arrays, and whatever else the function needs.
  """
  if not is_symbolic(batch):
    return compute(*trees)
  lead = batch.shape[: batch.ndim - jnp.issubdtype(batch.dtype, jnp.floating)]
  number, size = math.prod(lead), chunk_size()
  count = (number + size - 1) // size

  def split(x):
    flat = x.reshape(number, *x.shape[len(lead) :])
    padding = [(0, count * size - number, 0), *[(0, 0, 0)] * (flat.ndim - 1)]
    return lax.pad(flat, jnp.zeros((), x.dtype), padding).reshape(count, size, *flat.shape[1:])

  def join(x):
    if x.ndim == 1:
      return x.sum()
    return x.reshape(count * size, *x.shape[2:])[:number].reshape(*lead, *x.shape[2:])

  leaves, treedef = jax.tree.flatten(trees)
  leaves = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in leaves]
  is_array = [isinstance(x, jax.Array) for x in leaves]
  is_split = [ok and x.shape[: len(lead)] == lead for x, ok in zip(leaves, is_array)]
  is_key = [ok and jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x, ok in zip(leaves, is_array)]
  # The gradient of what all chunks read is summed over them in float32.
  wide = [vocab_parallel.summable(x) if ok else x for x, ok in zip(leaves, is_array)]

  def of_chunk(given):
    index, parts = given
    parts, own = iter(parts), []
    for x, whole, cut, random in zip(leaves, wide, is_split, is_key):
      if cut:
        own.append(next(parts))
      elif random:
        own.append(jax.random.fold_in(x, index))
      else:
        own.append(whole.astype(x.dtype) if whole is not x else x)
    return compute(*jax.tree.unflatten(treedef, own))

  parts = [split(x) for x, cut in zip(leaves, is_split) if cut]
  return jax.tree.map(join, lax.map(of_chunk, (lax.iota(jnp.int32, count), parts)))


def for_any_batch(batch: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
  """A decorator of functions of arrays, by `by_chunks`; the argument `batch` has their tokens."""

  def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
      given = signature.bind(*args, **kwargs).arguments
      like = given[batch]
      if not isinstance(like, jax.Array) or not is_symbolic(like):
        return function(*args, **kwargs)
      return by_chunks(lambda given: function(**given), like, given)

    return wrapped

  return decorate
