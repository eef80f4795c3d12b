"""A process that is killed or stopped by a signal resumes bitwise."""

import os
import resource
import shutil
import signal
import sys
import threading
import time

import pytest

from tests.lab.training.launcher import finish, finish_well
from vqjax.lab.run_files import read_result
from vqjax.lab.training.interrupt import deferred_signals

ALONE = {"processes": 1, "devices": 1}
LONG = "train.steps=60", "train.eval_every=20", "train.save_every=10"


@pytest.fixture(scope="module")
def whole(launcher):
  """The name of a run that was never stopped."""
  finish_well(launcher.start("whole", *LONG, **ALONE))
  return "whole"


@pytest.mark.slow
def test_a_model_that_does_not_fit_in_memory_is_one_line(launcher):
  (started,) = launcher.start("large", "model.layers=100_000_000", **ALONE)
  resource.prlimit(started.pid, resource.RLIMIT_AS, (2**33, 2**33))
  ((code, err),) = finish([started])
  assert code == 1
  assert err.splitlines()[-1].startswith("error: out of memory (RESOURCE_EXHAUSTED")


@pytest.mark.slow
def test_a_run_killed_twice_ends_bitwise_like_one_that_was_not(launcher, whole):
  for step in (3, 48):  # before the first checkpoint, and after the fourth
    processes = launcher.start("killed", *LONG, **ALONE)
    launcher.wait_for_step("killed", step, processes)
    processes[0].send_signal(signal.SIGKILL)
    processes[0].wait()
  finish_well(launcher.start("killed", *LONG, **ALONE))
  assert launcher.rows("killed") == launcher.rows(whole)
  assert launcher.checkpoint("killed", 60) == launcher.checkpoint(whole, 60)
  results = [read_result(launcher.folder / run) for run in (whole, "killed")]
  assert results[0]["test"] == results[1]["test"]
  assert results[0]["train"]["loss"] == results[1]["train"]["loss"]


@pytest.mark.slow
def test_a_run_killed_before_its_result_only_measures_again(launcher, whole):
  run = shutil.copytree(launcher.folder / whole, launcher.folder / "measured")
  (run / "result.json").unlink()
  finish_well(launcher.start("measured", *LONG, **ALONE))
  first, again = (read_result(launcher.folder / name)["train"] for name in (whole, "measured"))
  assert again["loss"] == first["loss"]
  assert again["tokens_per_second"] > 0


@pytest.mark.slow
def test_a_signal_finishes_the_step_and_saves(launcher):
  processes = launcher.start("signalled", *LONG, **ALONE)
  launcher.wait_for_step("signalled", 30, processes)
  processes[0].send_signal(signal.SIGHUP)
  ((code, err),) = finish(processes)
  assert code == 128 + signal.SIGHUP
  assert "stopped by SIGHUP after step" in err
  assert "Traceback" not in err
  newest = max(launcher.saved("signalled"))
  assert f"after step {newest}, which is saved" in err
  assert launcher.rows("signalled")[-1]["step"] == newest


@pytest.fixture
def _as_in_the_foreground():
  """Restores SIGINT, which a shell makes background programs ignore."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_as_in_the_foreground")
def test_a_signal_is_deferred_and_a_second_one_stops_at_once(capfd):
  with deferred_signals() as stopped_by:
    assert stopped_by() is None
    signal.raise_signal(signal.SIGINT)
    assert stopped_by() == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
  assert capfd.readouterr().err


def test_a_signal_in_the_middle_of_a_write_to_standard_error_is_deferred(monkeypatch, capfd):
  source, sink = os.pipe()
  main = threading.main_thread().ident
  received = []

  def interrupt():
    with open(source) as reader:
      time.sleep(0.2)  # until the pipe is full, and the main thread waits in its write
      signal.pthread_kill(main, signal.SIGTERM)
      received.append(reader.read())

  thread = threading.Thread(target=interrupt)
  with open(sink, "w", buffering=1) as full, deferred_signals() as stopped_by:
    monkeypatch.setattr(sys, "stderr", full)
    thread.start()
    print("x" * 2**20, file=sys.stderr, flush=True)
    assert stopped_by() == signal.SIGTERM
  thread.join()
  assert received == ["x" * 2**20 + "\n"]
  assert capfd.readouterr().err
