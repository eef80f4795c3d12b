"""A head's training loss on random hidden vectors and tokens, for measurements."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from vqjax.heads.base import Head
from vqjax.row_updates import value_and_grad
from vqjax.types import Dtype

__all__ = ["loss_and_gradient"]


def loss_and_gradient(
  head: Head, tokens: int, dtype: Dtype = jnp.float32
) -> tuple[Callable, tuple]:
  """The loss and gradient of a freshly initialised head, and its arguments.

  The function returns the mean loss in nats, and its gradient with respect to the parameters and
  the hidden vectors, which have `dtype`.
  """
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = jax.random.normal(keys[0], (tokens, head.dim), dtype)
  targets = jax.random.randint(keys[1], (tokens,), 0, head.vocab)
  # The gradient is of floating-point parameters: tables of integers are an argument of their own.
  variables = jax.jit(head.init)(keys[2], hidden[:1])
  tables = {name: tree for name, tree in variables.items() if name != "params"}

  def loss(trained, tables, targets):
    variables, hidden = {"params": trained["params"], **tables}, trained["hidden"]
    return -head.apply(variables, hidden, targets, method="log_prob").mean()

  # Arguments, not constants of the program, which XLA would fold.
  arguments = variables["params"], hidden, tables, targets

  def both(params, hidden, tables, targets):
    trained = {"params": params, "hidden": hidden}
    value, gradient = value_and_grad(loss)(trained, tables, targets)
    return value, (gradient["params"], gradient["hidden"])

  return both, arguments
