"""Does a real process that is killed, or asked to stop, end bitwise like one that never was?"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[3]

CONFIG = '''
"""What does a tiny decoder learn while it is being killed?"""

from vqjax import DenseEmbedding, GroupedHead
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Text, Windows, WordTokenizer
from vqjax.models import Transformer


def experiment():
  return Experiment(
    name="crash",
    model=Transformer(
      embedding=DenseEmbedding(FROM_TOKENIZER, 16), head=GroupedHead(FROM_TOKENIZER, 16),
      dim=16, layers=1, heads=2, context=8, dropout=0.1,
    ),
    data=Text(), tokenizer=WordTokenizer(), loader=Windows(),
    train=Train(steps=300, batch=4, log_every=1, eval_every=100, save_every=25, warmup=10),
  )
'''


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
  """What is compiled once for all processes: that is most of their time."""
  folder = str(tmp_path_factory.mktemp("compiled"))
  return {
    "JAX_COMPILATION_CACHE_DIR": folder,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }


@pytest.fixture
def command(tmp_path, text_folder, compiled):
  config = tmp_path / "crash.py"
  config.write_text(CONFIG)

  def start(run):
    call = [sys.executable, "-m", "experiments.train", str(config), f"data.path={text_folder}"]
    call += ["data.valid_fraction=0.2", "data.test_fraction=0.2", "--run", str(run)]
    env = os.environ | compiled
    return subprocess.Popen(
      call, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )

  return start


def wait_for_step(run, step, process):
  deadline = time.monotonic() + 120
  while time.monotonic() < deadline and process.poll() is None:
    if (run / "metrics.jsonl").exists() and len(rows(run, whole=False)) >= step:
      return
    time.sleep(0.005)
  assert process.poll() is None, process.communicate()[1]


def rows(run, whole=True):
  lines = (run / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines] if whole else lines


def digests(run):
  """The checksums of all arrays that the newest checkpoint was saved with."""
  newest = max(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())
  record = json.loads((run / "checkpoints" / str(newest) / "record" / "metadata").read_text())
  position = record["position"]
  return newest, record["checksum"], position["data"], position["loss"]


def finish(process):
  out, err = process.communicate(timeout=200)
  assert process.returncode == 0, err
  return out


def test_killed_at_several_moments_a_run_ends_bitwise_as_if_it_never_was(command, tmp_path):
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  finish(command(whole))
  for step in (3, 60, 222):
    process = command(parts)
    wait_for_step(parts, step, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
  finish(command(parts))
  assert rows(parts) == rows(whole)
  assert digests(parts) == digests(whole)
  results = [json.loads((run / "result.json").read_text()) for run in (whole, parts)]
  assert results[0]["test"] == results[1]["test"]
  assert results[0]["train"]["loss"] == results[1]["train"]["loss"]
  # Killed between the last checkpoint and the result, it only measures again.
  (parts / "result.json").unlink()
  finish(command(parts))
  again = json.loads((parts / "result.json").read_text())
  assert again["train"]["loss"] == results[0]["train"]["loss"]
  assert again["train"]["tokens_per_second"] > 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_says_how_to_resume(command, tmp_path, signum):
  run = tmp_path / "run"
  process = command(run)
  wait_for_step(run, 30, process)
  process.send_signal(signum)
  _, err = process.communicate(timeout=100)
  assert process.returncode == 128 + signum
  assert f"stopped by {signum.name} after step" in err
  assert "Run the same command again to resume" in err
  assert "Traceback" not in err
  newest, *_ = digests(run)
  assert f"after step {newest}, which is saved" in err
  assert rows(run)[-1]["step"] == newest
