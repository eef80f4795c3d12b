"""Several processes train one run, and all of them end with a reason when one dies."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import tiny
from vqjax.lab.training import distributed

ROOT = pathlib.Path(__file__).parents[3]
STEPS = 24
SILENCE = 6.0
"""Seconds without a heartbeat, for these processes on one machine."""

CONFIG = '''
"""A tiny decoder, whose loader records the rows that each process reads."""

import dataclasses
import json
import os

import jax

from vqjax import DenseEmbedding, DenseHead
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Text, Windows, WordTokenizer
from vqjax.lm.models import Transformer


class Recorder:
  def __init__(self, source, rows):
    self.source, self.rows = source, rows

  def __len__(self):
    return len(self.source)

  def __getitem__(self, index):
    found = self.source[index]
    with open(f"{os.environ['RECORD']}.{jax.process_index()}", "a") as file:
      row = {"batch": index, "rows": self.rows.tolist(), "targets": found["targets"].tolist()}
      file.write(json.dumps(row) + "\\n")
    return found


@dataclasses.dataclass(frozen=True)
class Recorded(Windows):
  def _source(self, *arguments):
    return Recorder(super()._source(*arguments), arguments[-1])


def experiment():
  return Experiment(
    name="processes",
    model=Transformer(
      embedding=DenseEmbedding(FROM_TOKENIZER, 16), head=DenseHead(FROM_TOKENIZER, 16),
      dim=16, layers=1, heads=2, context=8, dropout=0.1,
    ),
    data=Text(valid_fraction=0.2, test_fraction=0.2), tokenizer=WordTokenizer(), loader=Recorded(),
    train=Train(
      steps=24, batch=8, log_every=1, eval_every=24, save_every=8, warmup=5, keep=3
    ),
  )
'''


class Launcher:
  """Starts the command in one or several processes, and kills them at the end."""

  def __init__(self, folder):
    self.folder, self.text, self.stack = folder, folder / "text", contextlib.ExitStack()
    (folder / "processes.py").write_text(CONFIG)
    tiny.write_text(self.text)

  def start(self, run, *arguments, processes=2, devices=4, each=lambda i: (), open_mpi=False):
    env = os.environ | {
      # To compile is most of the time that these runs take.
      "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"
      " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
      "JAX_PLATFORMS": "cpu",
      "RECORD": str(self.folder / f"{run}.rows"),
    }
    call = [sys.executable, "-m", "vqjax.cli", "train", str(self.folder / "processes.py")]
    call += [f"data.path={self.text}", "--run", str(self.folder / run), *arguments]
    if processes > 1:
      call += ["--silence", str(SILENCE)]
      if not open_mpi:
        call += ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(processes)]
    started = []
    for i in range(processes):
      place = ["--process-id", str(i)] if processes > 1 and not open_mpi else []
      if open_mpi:
        env |= {
          "OMPI_MCA_orte_hnp_uri": f"{os.getpid()}.0;tcp://127.0.0.1:34911",
          "OMPI_COMM_WORLD_SIZE": str(processes),
          "OMPI_COMM_WORLD_RANK": str(i),
          "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        }
      pipe = subprocess.PIPE
      process = subprocess.Popen(
        [*call, *place, *each(i)], cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=env
      )
      self.stack.callback(process.kill)
      started.append(process)
    return started

  def rows(self, run):
    return tiny.rows(self.folder / run)

  def losses(self, run):
    return [row["loss"] for row in self.rows(run) if "loss" in row]

  def saved(self, run):
    """Returns the steps of the checkpoints."""
    checkpoints = self.folder / run / "checkpoints"
    return {int(path.name) for path in checkpoints.iterdir() if path.name.isdigit()}

  def checkpoint(self, run, step):
    """Returns the checksums and the data position of a checkpoint."""
    path = self.folder / run / "checkpoints" / str(step) / "record" / "metadata"
    record = json.loads(path.read_text())
    return record["arrays"], record["position"]["data"]

  def read(self, run, processes):
    """Returns (batch, row) -> targets; no row is read by two processes."""
    found = {}
    for i in range(processes):
      mine = {}
      for line in (self.folder / f"{run}.rows.{i}").read_text().splitlines():
        batch = json.loads(line)
        mine |= {(batch["batch"], r): t for r, t in zip(batch["rows"], batch["targets"])}
      assert not found.keys() & mine.keys()
      found |= mine
    return found

  def wait_for_step(self, run, step, processes):
    path = self.folder / run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text().count("\n") >= step):
      assert all(process.poll() is None for process in processes), finish(processes)
      assert time.monotonic() < deadline
      time.sleep(0.005)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
  made = Launcher(tmp_path_factory.mktemp("processes"))
  with made.stack:
    yield made


def free_port():
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


def finish(processes, timeout=150):
  """Returns exit code and standard error of each process."""
  deadline = time.monotonic() + timeout
  ended = [p.communicate(timeout=max(deadline - time.monotonic(), 1)) for p in processes]
  return [(p.returncode, err) for p, (_, err) in zip(processes, ended, strict=True)]


def finish_well(processes):
  for code, err in finish(processes):
    assert code == 0, err


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

  # A signal to one stops both after the same step, and any number of devices continues the run.
  processes = launcher.start("stopped")
  launcher.wait_for_step("stopped", 6, processes)
  processes[1].send_signal(signal.SIGTERM)
  (first, err), (second, _) = finish(processes)
  assert (first, second) == (128 + signal.SIGTERM,) * 2
  stopped = max(launcher.saved("stopped"))
  assert f"stopped by SIGTERM after step {stopped}, which is saved" in err
  assert launcher.rows("stopped")[-1]["step"] == stopped < STEPS
  shutil.copytree(launcher.folder / "stopped", launcher.folder / "moved")
  finish_well(launcher.start("moved", processes=1, devices=1))
  np.testing.assert_allclose(launcher.losses("moved"), launcher.losses("one"), rtol=1e-5)

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
