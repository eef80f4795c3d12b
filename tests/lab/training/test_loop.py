"""A run ends with a true result, refuses a folder of another run, and stops at nan."""

import dataclasses
import json
import os
import shutil

import chex
import jax
import jax.numpy as jnp
import pytest

from tests import tiny
from vqjax import CodebookHead
from vqjax.lab.config import config_hash
from vqjax.lab.run_files import read_metrics, read_result
from vqjax.lab.training import NotFiniteError, fit, init_state, loop, optimizer, program
from vqjax.lab.training.checkpoint import Checkpoints
from vqjax.lab.training.run_folder import RunFolder, load_text
from vqjax.lab.training.step import train_step
from vqjax.lm import records


def changed(experiment, **train):
  return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, **train))


@pytest.mark.slow
def test_a_run_learns_and_its_result_is_complete(finished):
  experiment, folder, result = finished
  assert result == read_result(folder)
  assert result["status"] == "finished"
  assert result["config_hash"] == config_hash(experiment)
  assert result["head"]["state_bytes"] == 4 * result["head"]["params"] > 4 * 16 * 50
  first, last = tiny.rows(folder)[0]["loss"], result["train"]["loss"]
  assert last < first - 0.1
  assert 0 < result["valid"]["nats_per_token"] < first
  assert result["loss"]["seconds"] > 0
  assert result["train"]["peak_memory_bytes"] > 0
  assert {"python", "jax", "flax"} <= result["versions"].keys()


@pytest.mark.slow
def test_metrics_have_each_logged_step_and_each_evaluation_once(experiment, tmp_path, monkeypatch):
  made, evaluate = [], loop.evaluate
  monkeypatch.setattr(loop, "evaluate", lambda *given: made.append(given) or evaluate(*given))
  fit(changed(experiment, log_every=3), str(tmp_path))
  steps = [row["step"] for row in tiny.rows(tmp_path) if "loss" in row]
  assert steps == [*range(3, 40, 3), 40]
  evaluations = [row["step"] for row in tiny.rows(tmp_path) if "valid" in row]
  assert evaluations == [20, 40]
  assert len(made) == 3  # and the test split
  assert list((tmp_path / "events").glob("events*"))


@pytest.mark.slow
def test_every_token_of_the_split_is_evaluated(finished):
  _, folder, result = finished
  identity = json.loads((folder / "config.json").read_text())["data"]
  assert result["valid"]["tokens"] == identity["tokens"]["valid"]
  assert result["test"]["tokens"] == identity["tokens"]["test"]


def test_a_finished_run_is_not_run_again(finished, monkeypatch):
  experiment, folder, result = finished
  monkeypatch.setattr(loop, "_Training", None)
  assert fit(experiment, folder) == result


def test_a_run_interrupted_at_any_step_ends_bitwise_the_same(finished, tmp_path):
  experiment, whole, result = finished
  step = 0
  for stop_at in (1, 10, 27):
    message = tiny.fit_and_interrupt(experiment, tmp_path, stop_at - step)
    assert f"SIGINT after step {stop_at}, which is saved" in message
    step = stop_at
  resumed = fit(experiment, tmp_path)
  assert tiny.rows(tmp_path) == tiny.rows(whole)
  for split in ("valid", "test"):
    assert resumed[split] == result[split]
  model = load_text(experiment).experiment.model
  like = init_state(model, optimizer(experiment.train), jax.random.key(5))
  states = []
  for folder in (whole, tmp_path):
    checkpoints = Checkpoints(folder, keep=2)
    assert checkpoints.latest == 40
    states.append(checkpoints.restore(like).state)
    checkpoints.close()
  chex.assert_trees_all_equal(*states)


def test_a_folder_of_another_config_is_refused_and_left_alone(finished):
  experiment, folder, _ = finished
  before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
  other = changed(experiment, learning_rate=0.5)
  with pytest.raises(ValueError, match="belongs to another config") as error:
    fit(other, folder)
  assert "train.learning_rate: 0.5 here, 0.01 there" in str(error.value)
  assert "--run" in str(error.value)
  assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == before


def test_text_that_has_changed_since_is_refused(finished, tmp_path):
  experiment, folder, _ = finished
  text = shutil.copytree(experiment.data.path, tmp_path / "text")
  run = shutil.copytree(folder, tmp_path / "run")
  moved = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, path=str(text)))
  (text / "00.txt").write_text("entirely different words\n" * 40)
  config = json.loads((run / "config.json").read_text())
  config["config"]["data"]["path"] = str(text)
  records.write(run / "config.json", config | {"hash": config_hash(moved)})
  with pytest.raises(ValueError, match="has changed since the run began"):
    fit(moved, run)


def test_another_generator_of_random_numbers_is_refused(finished):
  experiment, folder, _ = finished
  with (
    jax.default_prng_impl("rbg"),
    pytest.raises(ValueError, match=r"the generator of random numbers .*\n.*rbg now, threefry2x32"),
  ):
    fit(experiment, folder)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
  experiment, tmp_path, monkeypatch
):
  def poisoned(*args, **options):
    step = train_step(*args, **options)

    def at_25(state, batch):
      state, metrics = step(state, batch)
      spoilt = jnp.where(state.step == 25, jnp.nan, metrics["loss"])
      return state, metrics | {"loss": spoilt}

    return at_25

  monkeypatch.setattr(program, "train_step", poisoned)
  with pytest.raises(NotFiniteError, match=r"loss is nan at step 25; checkpoint 20 is kept"):
    fit(experiment, tmp_path)
  result = json.loads((tmp_path / "result.json").read_text())
  assert result["status"] == "failed"
  assert "step 25" in result["error"]
  monkeypatch.setattr(program, "train_step", train_step)
  assert fit(experiment, tmp_path)["status"] == "finished"


def test_a_model_of_another_vocabulary_is_refused_before_anything_is_written(experiment, tmp_path):
  head = CodebookHead(50, 16, codes=8)
  wrong = dataclasses.replace(experiment, model=experiment.model.clone(head=head))
  with pytest.raises(ValueError, match=r"model\.head\.vocab` must be .* got 50"):
    fit(wrong, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_a_run_folder_that_is_a_file_names_the_remedy(experiment, tmp_path):
  (tmp_path / "run").write_text("in the way")
  with pytest.raises(OSError, match="--run"):
    fit(experiment, tmp_path / "run")


@pytest.mark.slow
def test_a_second_process_in_the_same_folder_is_refused(finished, tmp_path):
  experiment, run = finished[0], shutil.copytree(finished[1], tmp_path / "run")
  first = RunFolder(run, experiment, json.loads((run / "config.json").read_text())["data"])
  message = rf"another process is running in .*: process {os.getpid()} on"
  with pytest.raises(ValueError, match=message):
    fit(experiment, run)
  first.close()
  assert fit(experiment, run)["status"] == "finished"


@pytest.mark.slow
def test_a_last_update_that_is_not_finite_is_not_saved(experiment, tmp_path):
  wild = changed(experiment, steps=1, warmup=0, learning_rate=3e38)
  with pytest.raises(NotFiniteError, match=r"at step 1.*Try a lower train\.learning_rate"):
    fit(wild, tmp_path)
  assert json.loads((tmp_path / "result.json").read_text())["status"] == "failed"
  assert not [p for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()]


@pytest.fixture(scope="module")
def interrupted(finished, tmp_path_factory):
  """Folder of a run that was interrupted after step 25."""
  folder = tmp_path_factory.mktemp("interrupted") / "run"
  tiny.fit_and_interrupt(finished[0], folder, 25)
  return folder


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["a row lost", "a digit", "half", "removed"])
def test_damaged_metrics_are_kept_beside_and_their_loss_is_told(
  finished, interrupted, tmp_path, damage
):
  experiment, stopped = finished[0], shutil.copytree(interrupted, tmp_path / "run")
  path = stopped / "metrics.jsonl"
  lines = path.read_text().splitlines(keepends=True)
  if damage == "removed":
    path.unlink()
  else:
    first, fourth = lines[:3], lines[3]
    kept = {"a row lost": lines[4:], "a digit": [fourth.replace('"step": 4', '"step": 5')]}
    path.write_text("".join(first + kept.get(damage, [])))
  with pytest.warns(UserWarning, match=r"rows until checkpoint 25 are intact and kept"):
    assert fit(experiment, stopped)["status"] == "finished"
  steps = [row["step"] for row in tiny.rows(stopped) if "loss" in row]
  assert steps == [*([] if damage == "removed" else [1, 2, 3]), *range(26, 41)]
  assert read_metrics(stopped).problem is None
  assert damage == "removed" or (stopped / "damaged" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_damaged_result_is_measured_again(finished, tmp_path):
  experiment, folder, result = finished
  run = shutil.copytree(folder, tmp_path / "run")
  text = (run / "result.json").read_text()
  (run / "result.json").write_text(text.replace(repr(result["test"]["perplexity"]), "1.5"))
  with pytest.warns(UserWarning, match=r"result.json is damaged: its checksum .* goes on"):
    assert fit(experiment, run)["test"] == result["test"]
  assert tiny.rows(run) == tiny.rows(folder)


@pytest.mark.slow
def test_lost_rows_of_a_finished_run_are_named(finished, tmp_path):
  _, folder, _ = finished
  run = shutil.copytree(folder, tmp_path / "run")
  assert read_metrics(run).problem is None
  text = (run / "metrics.jsonl").read_text()
  for kept in (text[:-5], "".join(text.splitlines(keepends=True)[:7]), ""):
    (run / "metrics.jsonl").write_text(kept)
    assert "its last rows are missing" in str(read_metrics(run).problem)
  (run / "metrics.jsonl").unlink()
  assert "its last rows are missing" in str(read_metrics(run).problem)


@pytest.mark.slow
def test_a_lost_config_does_not_hand_a_run_over_to_another(finished, tmp_path):
  experiment, folder, result = finished
  run = shutil.copytree(folder, tmp_path / "run")
  (run / "result.json").unlink()
  (run / "config.json").write_text("{")
  with (
    pytest.warns(UserWarning, match=r"config.json is damaged"),
    pytest.raises(ValueError, match=r"is of another config or other data, and .* was lost"),
  ):
    fit(changed(experiment, learning_rate=5e-3), run)
  shutil.rmtree(run / "damaged")
  (run / "config.json").unlink()
  assert fit(experiment, run)["test"] == result["test"]


@pytest.mark.slow
def test_a_folder_that_is_removed_under_a_run_is_an_error(experiment, tmp_path):
  run = RunFolder(tmp_path / "run", experiment, {})
  run.check()
  shutil.rmtree(tmp_path / "run")
  with pytest.raises(OSError, match="was removed or replaced"):
    run.check()
  RunFolder(tmp_path / "run", experiment, {}).close()
  with pytest.raises(OSError, match="was removed or replaced"):
    run.check()
