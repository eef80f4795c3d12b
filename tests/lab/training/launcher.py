"""The training command in processes of its own, which a test may stop or kill."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from tests import tiny
from vqjax.lab import signals

ROOT = pathlib.Path(__file__).parents[3]
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


@dataclasses.dataclass(frozen=True)
class Recorded(Windows):
  def _batch_at(self, split, batch, context, seed, rows):
    at = super()._batch_at(split, batch, context, seed, rows)

    def recorded(index):
      found = at(index)
      with open(f"{os.environ['RECORD']}.{jax.process_index()}", "a") as file:
        row = {"batch": index, "rows": rows.tolist(), "targets": found["targets"].tolist()}
        file.write(json.dumps(row) + "\\n")
      return found

    return recorded


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
      # A shell makes programs in the background ignore some of the signals.
      default = lambda: [signal.signal(signum, signal.SIG_DFL) for signum in signals.STOPS]
      options = {"cwd": ROOT, "text": True, "env": env, "preexec_fn": default}
      process = subprocess.Popen([*call, *place, *each(i)], stdout=pipe, stderr=pipe, **options)
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
