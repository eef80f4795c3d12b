"""What does a call cost this process: time, and memory at its peak?"""

import gc
import pathlib
import re
import time
from collections.abc import Callable

RESET_PEAK = pathlib.Path("/proc/self/clear_refs")
"""What is written here on Linux begins the count of the peak anew; elsewhere memory is None."""


def measured(call: Callable[[], object]) -> dict:
  """Wall clock, seconds of all threads of this process, and memory beyond what it had before.

  Pages of a memory-mapped file count as far as they were read.
  """
  gc.collect()
  counted = RESET_PEAK.exists()
  if counted:
    RESET_PEAK.write_text("5")
    before = _status("VmRSS")
  wall, cpu = time.perf_counter(), time.process_time()
  call()
  return {
    "seconds": time.perf_counter() - wall,
    "cpu_seconds": time.process_time() - cpu,
    "memory_bytes": _status("VmHWM") - before if counted else None,
  }


def _status(name: str) -> int:
  """Bytes that Linux counts of this process: VmRSS now, VmHWM at its peak since the reset."""
  text = pathlib.Path("/proc/self/status").read_text()
  return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[1])
