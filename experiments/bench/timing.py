"""How are programs compared on a noisy machine: in turn, in one process, by medians?"""

import statistics
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax

Program = tuple[Callable, tuple]
"""A function and its arguments."""

ROUNDS = 3
MOST_CALLS = 30


class Timed(NamedTuple):
  """What one compiled program cost.

  Attributes:
    seconds: median time of a call.
    temp_bytes: the compiler's account of its temporaries.
    peak_bytes: the same, with its arguments and results.
    output: what the last call returned.
    calls: how many calls the median is of.
  """

  seconds: float
  temp_bytes: int
  peak_bytes: int
  output: object
  calls: int


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
  return {name: _timed(times[name], one, outputs[name]) for name, one in compiled.items()}


def budgeted(
  programs: dict[Hashable, Program], seconds: float, said: Callable[[str], None]
) -> dict[Hashable, Timed]:
  """Compiles each program and calls it as often as `seconds` allow, at most `MOST_CALLS` times.

  In `ROUNDS` turns, since a noisy machine is not as noisy all the time. The first call is not
  counted, but where another would take longer than that: then it is the only one. `said` is told
  what runs, and how long it took.
  """
  compiled, outputs, times = {}, {}, {}

  def call(name):
    outputs[name] = None
    start = time.perf_counter()
    outputs[name] = jax.block_until_ready(compiled[name](*programs[name][1]))
    return time.perf_counter() - start

  left = {}
  for name, (function, arguments) in programs.items():
    start = time.perf_counter()
    compiled[name] = jax.jit(function).lower(*arguments).compile()
    compiling = time.perf_counter() - start
    said(f"{name}: compiled in {compiling:.1f} s")
    first = call(name)
    left[name] = min(MOST_CALLS, int(seconds / first))
    times[name] = [] if left[name] else [first]
    said(f"{name}: first call {first:.3f} s, {left[name]} more")
  for turn in range(ROUNDS):
    for name in programs:
      share = left[name] * (turn + 1) // ROUNDS - left[name] * turn // ROUNDS
      times[name] += [call(name) for _ in range(share)]
    said(f"round {turn + 1} of {ROUNDS} done")
  return {name: _timed(times[name], one, outputs[name]) for name, one in compiled.items()}


def _timed(times, compiled, output):
  return Timed(
    statistics.median(times), temp_bytes(compiled), peak_bytes(compiled), output, len(times)
  )


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
