"""Trackers get the numbers of a run by its own library, and go on where a run folder does."""

import importlib.util
import json
import sys
import types

import pytest

from tests import tiny
from vqjax.lab.config import Train, config_hash, override
from vqjax.lab.training import fit
from vqjax.lab.training.log import MetricsLog
from vqjax.lab.training.trackers import TRACKERS
from vqjax.lm import records

ROWS = [{"step": 1, "loss": 3.5}, {"step": 2, "loss": 3.0}, {"step": 2, "valid": {"nats": 2.5}}]


@pytest.fixture
def folder(tmp_path):
  """A run folder with a config."""
  config = {"hash": "0123456789ab", "config": {"name": "dense", "seed": 3}, "data": {}}
  records.write(tmp_path / "config.json", config)
  return tmp_path


def log(folder, tracker, rows=ROWS, step=0, last=None):
  """Write rows and return the checksum of the last."""
  written = MetricsLog(folder, step, last, tracker)
  for row in rows:
    written.write(dict(row), {"tokens_per_second": 7.0} if "loss" in row else None)
  written.close()
  return written.last


class FakeRun:
  """A run of a fake wandb, with what was logged."""

  def __init__(self, **settings):
    self.settings, self.logged, self.ended = settings, [], False

  def log(self, values, step):
    self.logged.append((step, values))

  def finish(self):
    self.ended = True


def test_wandb_gets_every_row_with_its_step_and_one_run_a_folder(folder, monkeypatch):
  runs = []

  def init(**settings):
    runs.append(FakeRun(**settings))
    return runs[-1]

  monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
  last = log(folder, "wandb")
  log(folder, "wandb", [{"step": 3, "loss": 2.0}], 2, last)
  first, second = runs
  assert first.logged == [
    (1, {"train/loss": 3.5, "speed/tokens_per_second": 7.0}),
    (2, {"train/loss": 3.0, "speed/tokens_per_second": 7.0}),
    (2, {"valid/nats": 2.5}),
  ]
  assert first.settings["config"] == {"name": "dense", "seed": 3}
  assert first.settings["id"] == second.settings["id"]
  assert first.ended


def test_a_tracker_is_no_part_of_a_runs_identity_and_is_one_option(experiment):
  tracked = override(experiment, ["train.tracker=mlflow"])
  assert tracked.train.tracker == "mlflow"
  assert config_hash(tracked) == config_hash(experiment)
  with pytest.raises(
    ValueError, match=r"`train\.tracker` must be wandb, mlflow or None; got 'comet'"
  ):
    Train(tracker="comet")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_library_names_its_extra_before_a_folder_is_made(
  name, experiment, tmp_path, monkeypatch
):
  monkeypatch.setitem(sys.modules, name, None)
  with pytest.raises(ImportError, match=rf"pip install 'vqjax\[{name}\]'"):
    fit(override(experiment, [f"train.tracker={name}"]), tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_a_finished_run_needs_no_library_of_its_tracker(finished, monkeypatch):
  run, folder, result = finished
  monkeypatch.setitem(sys.modules, "wandb", None)
  with tiny.own_cache(folder.parent / "cache"):
    assert fit(override(run, ["train.tracker=wandb"]), folder) == result


def needs(name):
  missing = importlib.util.find_spec(name) is None
  return pytest.mark.skipif(missing, reason=f"{name} is an extra")


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_has_the_metrics_of_one_run_a_folder(folder, monkeypatch):
  import mlflow

  monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'tracked.db'}")
  monkeypatch.chdir(folder)
  mlflow.set_tracking_uri(None)
  last = log(folder, "mlflow")
  log(folder, "mlflow", [{"step": 3, "loss": 2.0}], 2, last)
  client = mlflow.MlflowClient()
  (run,) = client.search_runs([client.get_experiment_by_name("vqjax").experiment_id])
  losses = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")]
  assert losses == [(1, 3.5), (2, 3.0), (3, 2.0)]
  assert run.info.status == "FINISHED"


@needs("wandb")
@pytest.mark.slow
def test_wandb_keeps_a_run_offline(folder, monkeypatch):
  monkeypatch.setenv("WANDB_MODE", "offline")
  log(folder, "wandb")
  (kept,) = (folder / "wandb").glob("offline-run-*")
  assert list(kept.glob("*.wandb"))
  summary = kept / "files" / "wandb-summary.json"
  if summary.exists():
    assert json.loads(summary.read_text())["train/loss"] == 3.0
