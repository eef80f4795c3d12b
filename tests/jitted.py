"""Functions and Flax modules as compiled programs.

What runs operation by operation compiles each of its operations, and these compile longer than one
program of them all. A test therefore makes its inputs by NumPy, and all arrays that it reads in one
program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def results(function, *arrays):
  """Returns the results of the function, which is one program, as NumPy arrays to be changed."""
  return jax.tree.map(np.array, jax.jit(function)(*arrays))


def run(module, variables, function, *arrays):
  """Returns the results of function(bound module, *arrays) as `results` does."""
  return results(lambda v, *arrays: function(module.bind(v), *arrays), variables, *arrays)


def head_variables(head, seed=0):
  """Returns the initial variables of a head as NumPy arrays."""
  return results(lambda: head.init(jax.random.key(seed), jnp.zeros((1, head.dim))))


def abstract_variables(head):
  """Returns the shapes and dtypes of the initial variables of a head."""
  return jax.eval_shape(lambda: head.init(jax.random.key(0), jnp.zeros((1, head.dim))))


@functools.partial(jax.jit, static_argnums=0, static_argnames="method")
def init(module, key, *args, method="__call__"):
  """Returns the initial variables of the module, as `module.init` does."""
  return module.init(key, *args, method=method)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("method", "mutable"))
def apply(module, variables, *args, method="__call__", mutable=False):
  """Returns what `module.apply` does; all arguments but the keywords are arrays."""
  return module.apply(variables, *args, method=method, mutable=mutable)


def make_step(*args, **kwargs):
  """Returns `train_step(...)`, jitted; the step donates its state."""
  from vqjax.lab.training.step import train_step

  return jax.jit(train_step(*args, **kwargs), donate_argnums=0)
