"""How are programs compared on a noisy machine: in turn, in one process, by medians?"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

Program = tuple[Callable, tuple]
"""A function and its arguments."""


class Timed(NamedTuple):
  """What one compiled program cost.

  Attributes:
    seconds: median time of a call.
    temp_bytes: the compiler's account of its temporaries.
    peak_bytes: the same, with its arguments and results.
    output: what the last call returned.
  """

  seconds: float
  temp_bytes: int
  peak_bytes: int
  output: object


def compare(programs: dict[str, Program], rounds: int = 5) -> dict[str, Timed]:
  """Compiles each program, then calls all of them in turn, `rounds` times.

  A program that takes less than a fifth of the slowest is called five times a round, so that its
  median rests on as much time.
  """
  compiled = {n: jax.jit(f).lower(*args).compile() for n, (f, args) in programs.items()}
  times: dict[str, list[float]] = {name: [] for name in programs}
  outputs = dict.fromkeys(programs)

  def call(name):
    # Before the call: two results at once would raise the peak of memory.
    outputs[name] = None
    start = time.perf_counter()
    outputs[name] = jax.block_until_ready(compiled[name](*programs[name][1]))
    return time.perf_counter() - start

  first = {name: call(name) for name in programs}
  repeats = {name: 5 if 5 * t < max(first.values()) else 1 for name, t in first.items()}
  for _ in range(rounds):
    for name in programs:
      call(name)  # not counted: it meets the caches and the heap as another program left them
      times[name] += [call(name) for _ in range(repeats[name])]
  return {
    name: Timed(statistics.median(times[name]), temp_bytes(one), peak_bytes(one), outputs[name])
    for name, one in compiled.items()
  }


def temp_bytes(compiled: jax.stages.Compiled) -> int:
  """Temporaries on each device, by the compiler's own account; 0 where it gives none."""
  memory = compiled.memory_analysis()
  return 0 if memory is None else int(memory.temp_size_in_bytes)


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Arguments, results and temporaries together, by the compiler's own account."""
  memory = compiled.memory_analysis()
  if memory is None:
    return 0
  held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  return int(held + memory.temp_size_in_bytes)
