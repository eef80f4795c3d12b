"""Is a signal noted, whatever the run was doing when it came?"""

import os
import signal
import sys
import threading
import time

import pytest

from vqjax.lab.training.interrupt import deferred_signals


@pytest.fixture
def _as_in_the_foreground():
  """A shell that starts a program in the background has it ignore SIGINT from the start."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_as_in_the_foreground")
def test_a_signal_is_noted_once_and_a_second_one_stops_at_once(capfd):
  with deferred_signals() as stopped_by:
    assert stopped_by() is None
    signal.raise_signal(signal.SIGINT)
    assert stopped_by() == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
  assert "finishing the step and saving" in capfd.readouterr().err


def test_a_signal_in_the_middle_of_a_line_to_standard_error_is_noted(monkeypatch, capfd):
  source, sink = os.pipe()
  main = threading.main_thread().ident
  found = []

  def interrupt():
    with open(source) as reader:
      time.sleep(0.2)  # until the pipe is full, and the main thread waits in its write
      signal.pthread_kill(main, signal.SIGTERM)
      found.append(reader.read())

  thread = threading.Thread(target=interrupt)
  with open(sink, "w", buffering=1) as full, deferred_signals() as stopped_by:
    monkeypatch.setattr(sys, "stderr", full)
    thread.start()
    print("x" * 2**20, file=sys.stderr, flush=True)
    assert stopped_by() == signal.SIGTERM
  thread.join()
  assert found == ["x" * 2**20 + "\n"]
  assert "finishing the step and saving" in capfd.readouterr().err
