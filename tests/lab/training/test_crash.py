"""A process that is killed or stopped by a signal resumes bitwise."""

import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests import tiny
from vqjax.lab import signals
from vqjax.lab.training.interrupt import deferred_signals

ROOT = pathlib.Path(__file__).parents[3]

CONFIG = '''
"""A tiny decoder."""

from vqjax import DenseEmbedding, GroupedHead
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Text, Windows, WordTokenizer
from vqjax.lm.models import Transformer


def experiment():
  return Experiment(
    name="crash",
    model=Transformer(
      embedding=DenseEmbedding(FROM_TOKENIZER, 16), head=GroupedHead(FROM_TOKENIZER, 16),
      dim=16, layers=1, heads=2, context=8, dropout=0.1,
    ),
    data=Text(), tokenizer=WordTokenizer(), loader=Windows(),
    train=Train(steps=150, batch=4, log_every=1, eval_every=50, save_every=25, warmup=10),
  )
'''


@pytest.fixture(scope="module")
def command(tmp_path_factory):
  """Starts the training command in a process: run folder -> Popen."""
  root = tmp_path_factory.mktemp("crash")
  config, text = root / "crash.py", tiny.write_text(root / "text")
  config.write_text(CONFIG)

  def start(run, *overrides):
    call = [sys.executable, "-m", "vqjax.cli", "train", str(config), f"data.path={text}"]
    call += ["data.valid_fraction=0.2", "data.test_fraction=0.2", *overrides, "--run", str(run)]
    env = os.environ | {"VQJAX_CACHE": str(root / "cache")}
    pipe = subprocess.PIPE
    # A shell makes programs in the background ignore some of the signals.
    default = lambda: [signal.signal(signum, signal.SIG_DFL) for signum in signals.STOPS]
    options = {"cwd": ROOT, "env": env, "text": True, "preexec_fn": default}
    return subprocess.Popen(call, stdout=pipe, stderr=pipe, **options)

  return start


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
  """Folder of a run that was never stopped."""
  run = tmp_path_factory.mktemp("whole") / "run"
  finish(command(run))
  return run


def wait_for_step(run, step, process):
  deadline = time.monotonic() + 120
  while time.monotonic() < deadline and process.poll() is None:
    path = run / "metrics.jsonl"
    if path.exists() and path.read_text().count("\n") >= step:
      return
    time.sleep(0.005)
  assert process.poll() is None, process.communicate()[1]


def digests(run):
  """Returns the step, checksums, data position and loss of the newest checkpoint."""
  newest = max(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())
  record = json.loads((run / "checkpoints" / str(newest) / "record" / "metadata").read_text())
  position = record["position"]
  return newest, record["arrays"], position["data"], position["loss"]


def finish(process):
  out, err = process.communicate(timeout=200)
  assert process.returncode == 0, err
  return out


@pytest.mark.slow
def test_a_model_that_does_not_fit_in_memory_is_one_line(command, tmp_path):
  started = command(tmp_path / "run", "model.layers=100_000_000")
  resource.prlimit(started.pid, resource.RLIMIT_AS, (2**33, 2**33))
  _, err = started.communicate(timeout=200)
  assert started.returncode == 1
  assert err.splitlines()[-1].startswith("error: out of memory (RESOURCE_EXHAUSTED")


@pytest.mark.slow
def test_a_run_killed_twice_ends_bitwise_like_one_that_was_not(command, whole, tmp_path):
  parts = tmp_path / "parts"
  for step in (3, 122):  # before the first checkpoint, and after the fourth
    process = command(parts)
    wait_for_step(parts, step, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
  finish(command(parts))
  assert tiny.rows(parts) == tiny.rows(whole)
  assert digests(parts) == digests(whole)
  results = [json.loads((run / "result.json").read_text()) for run in (whole, parts)]
  assert results[0]["test"] == results[1]["test"]
  assert results[0]["train"]["loss"] == results[1]["train"]["loss"]


@pytest.mark.slow
def test_a_run_killed_before_its_result_only_measures_again(command, whole, tmp_path):
  run = shutil.copytree(whole, tmp_path / "run")
  (run / "result.json").unlink()
  finish(command(run))
  first, again = (json.loads((f / "result.json").read_text())["train"] for f in (whole, run))
  assert again["loss"] == first["loss"]
  assert again["tokens_per_second"] > 0


@pytest.mark.slow
def test_a_signal_finishes_the_step_and_saves(command, tmp_path):
  run, signum = tmp_path / "run", signal.SIGHUP
  process = command(run)
  wait_for_step(run, 30, process)
  process.send_signal(signum)
  _, err = process.communicate(timeout=100)
  assert process.returncode == 128 + signum
  assert f"stopped by {signum.name} after step" in err
  assert "Traceback" not in err
  newest, *_ = digests(run)
  assert f"after step {newest}, which is saved" in err
  assert tiny.rows(run)[-1]["step"] == newest


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
