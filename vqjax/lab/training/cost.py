"""What do a head's loss and its gradient cost, in seconds and in bytes of temporaries?"""

import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vqjax.heads import Head
from vqjax.heads.workload import loss_and_gradient


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
  function, arguments = loss_and_gradient(head, tokens, dtype)
  compiled = jax.jit(function).lower(*arguments).compile()
  memory = compiled.memory_analysis()
  run = lambda: jax.block_until_ready(compiled(*arguments))
  run()
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    run()
    times.append(time.perf_counter() - start)
  temp = 0 if memory is None else int(memory.temp_size_in_bytes)
  return Cost(statistics.median(times), temp, tokens)
