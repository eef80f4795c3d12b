"""What do a head's loss and its gradient cost, in seconds and in bytes of temporaries?"""

import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vqjax.heads import Head


class Cost(NamedTuple):
  """A measured cost.

  Attributes:
    seconds: median time of the loss and its gradient in the parameters and the hidden vectors.
    temp_bytes: temporaries of the compiled program, by the compiler's own account.
    tokens: how many tokens it was measured on.
  """

  seconds: float
  temp_bytes: int
  tokens: int


def loss_cost(head: Head, tokens: int, dtype=jnp.float32, repeats: int = 5) -> Cost:
  """Measures a freshly initialised head on random hidden vectors and tokens."""
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = jax.random.normal(keys[0], (tokens, head.dim), dtype)
  targets = jax.random.randint(keys[1], (tokens,), 0, head.vocab)
  variables = jax.jit(head.init)(keys[2], hidden[:1])
  params = variables["params"]
  tables = {name: tree for name, tree in variables.items() if name != "params"}

  def loss(params, hidden, tables, targets):
    return -head.apply({"params": params, **tables}, hidden, targets, method="log_prob").mean()

  gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
  compiled = gradient.lower(params, hidden, tables, targets).compile()
  memory = compiled.memory_analysis()
  run = lambda: jax.block_until_ready(compiled(params, hidden, tables, targets))
  run()
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    run()
    times.append(time.perf_counter() - start)
  temp = 0 if memory is None else int(memory.temp_size_in_bytes)
  return Cost(statistics.median(times), temp, tokens)
