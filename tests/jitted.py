"""Functions and Flax modules as compiled programs.

What runs operation by operation compiles each of its operations, and these compile longer than one
program of them all. A test therefore makes its inputs by NumPy, and all arrays that it reads in one
program.
"""

import functools

import jax
import numpy as np


def results(function, *arrays):
  """Returns the results of the function, which is one program, as NumPy arrays to be changed."""
  return jax.tree.map(np.array, jax.jit(function)(*arrays))


def run(module, variables, function, *arrays):
  """Returns the results of function(bound module, *arrays) as `results` does."""
  return results(lambda v, *arrays: function(module.bind(v), *arrays), variables, *arrays)


def abstract_variables(module, *args, method="__call__"):
  """Returns the shapes and dtypes of the initial variables, of a head without arguments."""
  return jax.eval_shape(_init(module, args, method))


def initial_variables(module, *args, method="__call__"):
  """Returns the initial variables as NumPy arrays, of a head without arguments."""
  return results(_init(module, args, method))


def random_variables(module, *args, method="__call__", scale=0.4, seed=1):
  """Returns random parameters, and all else as it is initialised, as NumPy arrays.

  To compile an initialiser takes longer than most of what a test computes with its numbers.
  """
  rng, shapes = np.random.default_rng(seed), abstract_variables(module, *args, method=method)
  draw = lambda x: (scale * rng.standard_normal(x.shape)).astype(x.dtype)
  init = _init(module, args, method)
  tables = results(lambda: {**init(), "params": {}}) if shapes.keys() - {"params"} else {}
  return {**tables, "params": jax.tree.map(draw, shapes.get("params", {}))}


def _init(module, args, method):
  args = args or (np.zeros((1, module.dim), np.float32),)
  return lambda: module.init(jax.random.key(0), *args, method=method)


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
