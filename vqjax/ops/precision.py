"""Precision of matrix products, in a computation and in its gradient.

An operation of JAX reads `jax.default_matmul_precision` when it is traced, and its transpose has
the same precision. The rules of a custom derivative are traced later, when that context may have
ended: `custom_vjp` gives them the precision of the call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax

__all__ = []


def using(precision: str | None) -> contextlib.AbstractContextManager:
  """The context of products of this precision; None leaves JAX's own in place."""
  return contextlib.nullcontext() if precision is None else jax.default_matmul_precision(precision)


def check_precision(precision: str | None) -> None:
  """Raise ValueError unless it is a name that `jax.default_matmul_precision` knows, or None."""
  try:
    with using(precision):
      pass
  except ValueError:
    raise ValueError(
      f"`precision` must be None or a name of `jax.default_matmul_precision`; got {precision!r}."
      ' "highest" is float32, None is JAX\'s default.'
    ) from None


class custom_vjp:  # noqa: N801, a decorator as JAX's
  """`jax.custom_vjp(function, nondiff_argnums=(0,))` whose rules have the precision of the call."""

  def __init__(self, function: Callable):
    def primal(static, *args):
      precision, plan = static
      with jax.default_matmul_precision(precision):
        return function(plan, *args)

    self._function = jax.custom_vjp(primal, nondiff_argnums=(0,))
    functools.update_wrapper(self, function)

  def defvjp(self, forward: Callable, backward: Callable, **options: Any) -> None:
    """Define the rules, as in JAX."""

    def forward_rule(static, *args):
      precision, plan = static
      with jax.default_matmul_precision(precision):
        return forward(plan, *args)

    def backward_rule(static, *args):
      precision, plan = static
      with jax.default_matmul_precision(precision):
        return backward(plan, *args)

    self._function.defvjp(forward_rule, backward_rule, **options)

  def __call__(self, plan: Any, *args: Any) -> Any:
    return self._function((jax.config.jax_default_matmul_precision, plan), *args)
