"""`init` and `apply` of a Flax module as compiled programs, which equal modules share.

A whole model that runs operation by operation compiles each of its operations, and these compile
longer than one program of them all.
"""

import functools

import jax


@functools.partial(jax.jit, static_argnums=0, static_argnames="method")
def init(module, key, *args, method="__call__"):
  """Returns the initial variables of the module, as `module.init` does."""
  return module.init(key, *args, method=method)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("method", "mutable"))
def apply(module, variables, *args, method="__call__", mutable=False):
  """Returns what `module.apply` does; all arguments but the keywords are arrays."""
  return module.apply(variables, *args, method=method, mutable=mutable)
