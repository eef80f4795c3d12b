"""Measurements on a noisy machine: programs in turn, medians, process memory."""

import gc
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vqjax.lab.report.units import MISSING

Call = tuple[Callable, tuple]
"""A function and its arguments."""

WIDEST = 1000
"""Characters of the widest table."""

ROUNDS = 3
MAX_CALLS = 30
MIN_SECONDS = 0.5
"""Shortest total of the calls behind a median: steps of a GPU take milliseconds."""
CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")
"""Linux resets the peak memory of the process when 5 is written here."""


class Unavailable(Exception):
  """A benchmark cannot run on this machine."""


class Timed(NamedTuple):
  """The cost of a compiled program.

  Attributes:
    seconds: median time of a call.
    cpu_seconds: median time of all cores together, of the programs of `compare`; otherwise 0.
    temp_bytes: temporaries, by the compiler's account.
    peak_bytes: arguments, results and temporaries, by the compiler's account.
    output: the result of the last call.
    calls: number of calls behind the median.
  """

  seconds: float
  temp_bytes: int
  peak_bytes: int
  output: Any
  calls: int
  cpu_seconds: float = 0.0


def compare(programs: dict[str, Call], rounds: int = 5) -> dict[str, Timed]:
  """Compile each program, then call all of them in turn, `rounds` times.

  A program that takes less than a fifth of the slowest one is called five times in a round, so that
  its median rests on a similar amount of time.
  """
  compiled = {n: jax.jit(f).lower(*args).compile() for n, (f, args) in programs.items()}
  times: dict[str, list[float]] = {name: [] for name in programs}
  of_cores: dict[str, list[float]] = {name: [] for name in programs}
  outputs = dict.fromkeys(programs)

  def call(name):
    # Dropped before the call: two results alive at once would raise the peak of memory.
    outputs[name] = None
    start, cpu = time.perf_counter(), time.process_time()
    outputs[name] = jax.block_until_ready(compiled[name](*programs[name][1]))
    return time.perf_counter() - start, time.process_time() - cpu

  first = {name: call(name)[0] for name in programs}
  repeats = {name: 5 if 5 * t < max(first.values()) else 1 for name, t in first.items()}
  for _ in range(rounds):
    for name in programs:
      call(name)  # not counted: it meets caches and heap as another program left them
      for _ in range(repeats[name]):
        seconds, cpu_seconds = call(name)
        times[name].append(seconds)
        of_cores[name].append(cpu_seconds)
  return {
    name: _timed(times[name], one, outputs[name])._replace(
      cpu_seconds=statistics.median(of_cores[name])
    )
    for name, one in compiled.items()
  }


def compare_within(
  programs: dict[Hashable, Call], seconds: float, log: Callable[[str], None]
) -> dict[Hashable, Timed]:
  """Compile each program and call it within `seconds`, at most `MAX_CALLS` times.

  The calls are divided into `ROUNDS` turns, since the noise of a machine changes over time. The
  first call is not counted unless it takes longer than `seconds`; then it is the only one. `log`
  receives lines of progress.
  """
  compiled, outputs, times, left = {}, {}, {}, {}

  def call(name):
    outputs[name] = None
    start = time.perf_counter()
    outputs[name] = jax.block_until_ready(compiled[name](*programs[name][1]))
    return time.perf_counter() - start

  for name, (function, arguments) in programs.items():
    start = time.perf_counter()
    compiled[name] = jax.jit(function).lower(*arguments).compile()
    compiling = time.perf_counter() - start
    first = call(name)
    left[name] = min(MAX_CALLS, int(seconds / first))
    times[name] = [] if left[name] else [first]
    log(f"{name}: compiled in {compiling:.1f} s, first call {first:.3f} s, {left[name]} more")
  for turn in range(ROUNDS):
    for name in programs:
      share = left[name] * (turn + 1) // ROUNDS - left[name] * turn // ROUNDS
      times[name] += [call(name) for _ in range(share)]
    log(f"round {turn + 1} of {ROUNDS} finished")
  return {name: _timed(times[name], one, outputs[name]) for name, one in compiled.items()}


def _timed(times, compiled, output):
  return Timed(
    seconds=statistics.median(times),
    temp_bytes=temp_bytes(compiled),
    peak_bytes=peak_bytes(compiled),
    output=output,
    calls=len(times),
  )


def settled_seconds(call: Callable[[], float]) -> float:
  """Median of the seconds that a call returns, over at least `MIN_SECONDS`.

  The first call is not counted: it meets caches and heap as another program left them.
  """
  total = min(MIN_SECONDS, 10 * call())
  times = [call()]
  while sum(times) < total:
    times.append(call())
  return statistics.median(times)


def temp_bytes(compiled: jax.stages.Compiled) -> int:
  """Temporaries on each device, by the compiler's account; 0 where it gives none."""
  memory = compiled.memory_analysis()
  return 0 if memory is None else int(memory.temp_size_in_bytes)


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Arguments, results and temporaries together, by the compiler's account."""
  memory = compiled.memory_analysis()
  if memory is None:
    return 0
  held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  return int(held + memory.temp_size_in_bytes)


def process_cost(call: Callable[[], object]) -> dict[str, float | None]:
  """Wall-clock seconds, CPU seconds and additional peak memory of a call.

  Memory is None on systems other than Linux. Pages of a memory-mapped file count as far as they
  were read.
  """
  gc.collect()
  has_peak = CLEAR_REFS.exists()
  if has_peak:
    CLEAR_REFS.write_text("5")
    before = _status("VmRSS")
  wall, cpu = time.perf_counter(), time.process_time()
  call()
  return {
    "seconds": time.perf_counter() - wall,
    "cpu_seconds": time.process_time() - cpu,
    "memory_bytes": _status("VmHWM") - before if has_peak else None,
  }


def peak_resident_bytes() -> int:
  """Largest resident memory of this process so far, on Linux."""
  return _status("VmHWM")


def _status(name: str) -> int:
  """Bytes of VmRSS (resident now) or VmHWM (peak since the reset)."""
  text = pathlib.Path("/proc/self/status").read_text()
  return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[1])


def show_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
  """Print a table of names (first column) and numbers."""
  say(title)
  table = Table()
  for index, column in enumerate(columns):
    table.add_column(column, justify="right" if index else "left", no_wrap=not index)
  for row in rows:
    table.add_row(*map(Text, row))
  # Neither wrapped nor cut, whatever the width of the terminal; it is 80 in a file.
  width = Console(width=WIDEST).measure(table).maximum
  Console(width=width).print(table)


def say(text: str) -> None:
  """Print a line without markup or wrapping."""
  Console().print(text, highlight=False, markup=False, soft_wrap=True)


def log(text: str) -> None:
  """Print a line of progress to standard error."""
  print(text, file=sys.stderr, flush=True)


def mib(count: int | None) -> str:
  """Bytes in MiB; a dash for None."""
  return MISSING if count is None else f"{count / 2**20:.1f}"
