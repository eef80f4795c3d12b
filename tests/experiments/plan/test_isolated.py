"""A call in its own process is isolated from its caller and ends with it."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments.plan.isolated import isolated

ROOT = pathlib.Path(__file__).parents[3]


def test_results_and_errors_come_back_from_another_process():
  assert isolated(os.getpid) != os.getpid()
  assert isolated(int, "11", base=2) == 3
  with pytest.raises(ValueError, match="invalid literal"):
    isolated(int, "x")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_a_caller_that_is_stopped_takes_it_along(tmp_path, name):
  script, told = tmp_path / "caller.py", tmp_path / "child"
  script.write_text(f"""
import os, pathlib, signal, time
from experiments.plan.isolated import isolated

def stay():
  pathlib.Path({str(told)!r}).write_text(str(os.getpid()))
  time.sleep(250)

if __name__ == "__main__":
  # Whoever started this may have had it ignored.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  isolated(stay)
""")
  caller = subprocess.Popen([sys.executable, script], env=os.environ | {"PYTHONPATH": str(ROOT)})
  try:
    assert _soon(lambda: told.exists() and told.read_text())
    child = int(told.read_text())
    assert _lives(child)
  finally:
    caller.send_signal(getattr(signal, name))
    caller.wait(timeout=60)
  assert _soon(lambda: not _lives(child))


def _lives(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  # One that has ended is there until somebody asks how: on Linux its state says so.
  state = pathlib.Path(f"/proc/{pid}/stat")
  return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def _soon(holds) -> bool:
  deadline = time.monotonic() + 60
  while not holds() and time.monotonic() < deadline:
    time.sleep(0.05)
  return bool(holds())
