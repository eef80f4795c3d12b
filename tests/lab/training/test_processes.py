"""Several processes train one run, and all of them end with a reason when one dies."""

import signal
import time

import numpy as np
import pytest

from tests.lab.training.launcher import SILENCE, finish, finish_well, free_port
from vqjax.lab.training import distributed

STEPS = 24


# One test, so that two workers do not both train the run of one process.
@pytest.mark.slow
def test_two_processes_train_what_one_does_stop_together_and_survive_the_death_of_either(launcher):
  finish_well(launcher.start("one", processes=1, devices=8))
  finish_well(launcher.start("two"))
  # Sums over devices come in another order, in float32.
  np.testing.assert_allclose(launcher.losses("two"), launcher.losses("one"), rtol=1e-5)
  alone, shared = launcher.read("one", 1), launcher.read("two", 2)
  steps = {key: targets for key, targets in alone.items() if key[0] < STEPS}
  assert {key: shared[key] for key in steps} == steps
  assert len(steps) == STEPS * 8

  # A signal to one stops both after the same step.
  processes = launcher.start("stopped")
  launcher.wait_for_step("stopped", 6, processes)
  processes[1].send_signal(signal.SIGTERM)
  (first, err), (second, _) = finish(processes)
  assert (first, second) == (128 + signal.SIGTERM,) * 2
  stopped = max(launcher.saved("stopped"))
  assert f"stopped by SIGTERM after step {stopped}, which is saved" in err
  assert launcher.rows("stopped")[-1]["step"] == stopped < STEPS

  # Two continue it, and are started again after process 0 dies, which writes the checkpoints.
  for victim, step in ((0, stopped + 3), (1, 18)):
    processes = launcher.start("stopped")
    launcher.wait_for_step("stopped", step, processes)
    processes[victim].send_signal(signal.SIGKILL)
    began = time.monotonic()
    code, err = finish(processes)[1 - victim]
    assert time.monotonic() - began < 2 * SILENCE + 10
    assert code == 1
    assert err.splitlines()[-1].startswith(f"error: process {1 - victim} has lost another process")
  finish_well(launcher.start("stopped"))
  assert launcher.rows("stopped") == launcher.rows("two")
  assert launcher.checkpoint("stopped", STEPS) == launcher.checkpoint("two", STEPS)


@pytest.mark.slow
def test_processes_of_different_configs_stop_and_say_who_has_which(launcher):
  changed = lambda i: [f"train.steps={STEPS + i}"]
  processes = launcher.start("mixed", each=changed, open_mpi=True)  # which jax detects
  for code, _ in (ended := finish(processes, 60)):
    assert code == 2
  message = ended[0][1].splitlines()[-1]
  assert message.startswith("error: the processes differ in the config: ")
  assert "on process 0" in message
  assert "on process 1" in message
  assert not (launcher.folder / "mixed").exists()


@pytest.mark.slow
def test_processes_that_do_not_share_the_folder_stop_and_say_so(launcher):
  # The last --run counts.
  processes = launcher.start("seen", each=lambda i: ["--run", str(launcher.folder / f"seen-{i}")])
  (code, _), (other, err) = finish(processes, 60)
  assert (code, other) == (1, 2)
  assert "seen-1 is not the one that process 0 has opened" in err.splitlines()[-1]


@pytest.mark.slow
def test_the_wait_for_other_processes_ends_after_patience(launcher):
  started, addresses = [], []
  for process in ("0", "1"):  # each waits for another, at its own address
    addresses.append(f"127.0.0.1:{free_port()}")
    place = ("--coordinator", addresses[-1], "--num-processes", "2", "--patience", "2")
    started += launcher.start(f"w{process}", *place, "--process-id", process, processes=1)
  (first, alone), (second, late) = finish(started, 60)
  assert (first, second) == (2, 2)
  assert f"not all of the 2 processes came to {addresses[0]} within 2 s" in alone
  assert f"the coordinator {addresses[1]} does not answer within 2 s" in late


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("nowhere", 2, 0), "must be HOST:PORT; got 'nowhere'"),
    (("host:99999", 2, 0), "must be HOST:PORT; got 'host:99999'"),
    (("host:1234", 2, 2), r"--process-id must be in \[0, 2\); got 2"),
    (("host:1234", 0, 0), "--num-processes must be at least 1; got 0"),
    (("host:1234", None, None), "give --coordinator, --num-processes and --process-id"),
  ],
)
def test_wrong_arguments_are_refused_at_once(arguments, message):
  with pytest.raises(ValueError, match=message):
    distributed.start(*arguments)


def test_the_process_is_detected_by_jax_unless_it_is_the_only_one(monkeypatch):
  calls = []

  def initialize(*place, cluster_detection_method, **options):
    del options
    calls.append((place, cluster_detection_method))
    raise ValueError("coordinator_address should be defined.")

  monkeypatch.setattr("jax.distributed.initialize", initialize)
  distributed.start()
  assert calls.pop() == ((None, None, None), None)
  with pytest.raises(ValueError, match="give --coordinator, --num-processes and --process-id"):
    distributed.start("other:1234")
  assert calls.pop() == (("other:1234", None, None), None)
  monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1234")
  with pytest.raises(ValueError, match="is not known"):
    distributed.start(None, 2, 1)
  assert calls.pop() == (("host:1234", 2, 1), "deactivate")
  distributed.start(num_processes=1)
  monkeypatch.setenv("SLURM_NTASKS", "1")
  distributed.start()
  assert not calls
  assert not distributed.is_joined()
  assert distributed.is_main()


def test_a_process_runs_alone_where_its_number_is_not_detected(monkeypatch):
  def initialize(*place, **options):
    raise ValueError("invalid literal for int() with base 10: 'many'")

  monkeypatch.setattr("jax.distributed.initialize", initialize)
  with pytest.warns(UserWarning, match="runs alone"):
    distributed.start()
  with pytest.raises(ValueError, match="give --coordinator, --num-processes and --process-id"):
    distributed.start("host:1234")


@pytest.mark.parametrize(
  ("error", "waits"),
  [
    (ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer"), 1),
    (ValueError("`train.batch` must be 1: got 2"), 0),
    (ValueError("RESOURCE_EXHAUSTED: 3 GB"), 0),
  ],
)
def test_a_collective_that_fails_waits_for_jax_to_end_the_process(monkeypatch, error, waits):
  calls = []
  monkeypatch.setattr(distributed.time, "sleep", calls.append)
  monkeypatch.setattr(distributed, "_group", [distributed.Group(0, 30.0, print)])
  distributed.await_verdict(error)
  assert len(calls) == waits
