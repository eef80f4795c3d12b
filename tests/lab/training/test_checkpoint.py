"""Checkpoints come back bitwise, damage is noticed, and other runs start from them."""

import dataclasses
import errno
import json
import pathlib
import shutil

import jax
import numpy as np
import optax
import pytest

from vqjax.lab.training import fit
from vqjax.lab.training.checkpoint import (
  Checkpoints,
  FromRun,
  read_run_variables,
  saved_steps,
)
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.run_folder import load_text
from vqjax.lab.training.step import TrainState
from vqjax.lm import records
from vqjax.sharding import MeshShape, make_mesh


def filled(like, seed):
  """A state with random numbers in place of shapes."""
  draw = np.random.default_rng(seed)
  integers = lambda x: draw.integers(8, size=x.shape)
  numbers = lambda x: integers(x) if x.dtype.kind in "iu" else draw.normal(size=x.shape)
  fresh = lambda x: np.asarray(numbers(x)).astype(x.dtype)
  return jax.device_put(jax.tree.map(fresh, like)).replace(step=jax.device_put(np.int32(seed)))


def state_at(step, width=64):
  shape = lambda *sizes, dtype=np.float32: jax.ShapeDtypeStruct(sizes, dtype)
  params = {"w": shape(300, width), "b": shape(3)}
  model_state = {"codes": {"assignment": shape(9, dtype=np.int32)}}
  opt_state = jax.eval_shape(optax.adamw(1.0).init, params)
  return filled(TrainState(shape(dtype=np.int32), params, model_state, opt_state), step)


def restored(folder, like=None, **options):
  checkpoints = Checkpoints(folder, keep=3, **options)
  try:
    return checkpoints.restore(like or state_at(0))
  finally:
    checkpoints.close()


@pytest.fixture
def saved(tmp_path):
  """Run folder with checkpoints 1 and 2, of which the first has the least loss."""
  checkpoints = Checkpoints(tmp_path, keep=3)
  for step in (1, 2):
    checkpoints.save(state_at(step), {"next": step}, {"nats_per_token": float(step)})
  checkpoints.close()
  return tmp_path


def largest_file(folder):
  return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip_a_bit(folder):
  path = largest_file(folder)
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def truncate(folder):
  path = largest_file(folder)
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_a_file(folder):
  largest_file(folder).unlink()


def damage_the_record(folder):
  for path in (folder / "record").rglob("*"):
    if path.is_file():
      path.write_bytes(b"{")


def empty(folder):
  shutil.rmtree(folder / "state")
  shutil.rmtree(folder / "record")


def equal(a, b):
  return jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(a), jax.device_get(b)))


def test_state_and_position_come_back_bitwise(saved, tmp_path_factory):
  found = restored(saved)
  assert found.position == {"next": 2}
  assert equal(found.state, state_at(2))
  assert restored(tmp_path_factory.mktemp("empty")) is None


def change(path, change):
  """Writes a file again with a change to its object, and its checksum as it was."""
  value = json.loads(path.read_text())
  change(value)
  path.write_text(json.dumps(value))


def of_record(change_record):
  return lambda folder: change(folder / "record" / "metadata", change_record)


def of_metrics(change_bytes):
  def damage(folder):
    path = folder / "metrics" / "metrics"
    path.write_bytes(change_bytes(path.read_bytes()))

  return damage


DAMAGE = {
  "flipped": (2, flip_a_bit),
  "truncated": (2, truncate),
  "a file less": (2, remove_a_file),
  "no record": (2, damage_the_record),
  "empty": (2, empty),
  "another position": (2, of_record(lambda record: record["position"].update(next=7))),
  "no position": (2, of_record(lambda record: record.update(position={}))),
  "another loss": (2, of_record(lambda record: record["metrics"].update(nats_per_token=0.5))),
  "no checksum": (2, of_record(lambda record: record.pop("checksum"))),
  # Those of the best checkpoint are read too.
  "metrics truncated": (1, of_metrics(lambda content: content[:20])),
  "metrics empty": (1, of_metrics(lambda content: b"")),
  "metrics flipped": (1, of_metrics(lambda content: content.replace(b"1", b"3", 1))),
  "metrics no text": (1, of_metrics(lambda content: b"\xff" + content)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_moved_aside_with_a_warning(saved, damage):
  step, act = DAMAGE[damage]
  act(saved / "checkpoints" / str(step))
  if step == 1:
    assert saved_steps(saved) == [1, 2]
  with pytest.warns(UserWarning, match=rf"checkpoint {step} in .* is damaged"):
    found = restored(saved)
  assert found.position == {"next": 3 - step}
  assert equal(found.state, state_at(3 - step))
  assert (saved / "damaged" / str(step)).is_dir()
  assert not (saved / "checkpoints" / str(step)).exists()


def test_a_run_whose_checkpoints_are_gone_is_refused_and_left_alone(saved):
  for step in (1, 2):
    shutil.rmtree(saved / "checkpoints" / str(step))
  with pytest.raises(ValueError, match=r"must hold checkpoint 2, .*got none.* remove .* or give"):
    Checkpoints(saved, keep=3)
  assert (saved / "progress.json").exists()


def test_progress_names_only_checkpoints_that_have_their_final_name(tmp_path, monkeypatch):
  write = Checkpoints._write_progress
  seen = []

  def spy(self, step):
    seen.append((tmp_path / "checkpoints" / str(step)).is_dir())
    write(self, step)

  monkeypatch.setattr(Checkpoints, "_write_progress", spy)
  checkpoints = Checkpoints(tmp_path, keep=1)
  checkpoints.save(state_at(1), {})
  checkpoints.save(state_at(2), {})
  checkpoints.close()
  assert seen == [True, True]
  assert json.loads((tmp_path / "progress.json").read_text())["checkpoint"] == 2


def test_metrics_tell_that_a_run_has_lost_its_checkpoints(tmp_path):
  row = records.sealed({"step": 9})
  (tmp_path / "metrics.jsonl").write_text(records.dumps(row))
  assert Checkpoints(tmp_path, keep=1, complete_by=9).latest is None
  with pytest.raises(ValueError, match=r"must hold the first checkpoint, .* To start over, remove"):
    Checkpoints(tmp_path, keep=1, complete_by=8)


def test_a_run_whose_newest_checkpoint_is_gone_goes_on_with_a_warning(saved):
  shutil.rmtree(saved / "checkpoints" / "2")
  with pytest.warns(UserWarning, match=r"checkpoint 2 in .* is missing; the run goes on from 1"):
    assert restored(saved).position == {"next": 1}


def test_checkpoints_do_not_go_over_to_another_run(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=1, owner="mine")
  checkpoints.save(state_at(1), {})
  checkpoints.close()
  with pytest.raises(ValueError, match=r"checkpoint 1 in .* is of another config or other data"):
    Checkpoints(tmp_path, keep=1, owner="yours")


def test_the_step_of_a_damaged_checkpoint_is_saved_again(saved):
  truncate(saved / "checkpoints" / "2")
  checkpoints = Checkpoints(saved, keep=3)
  with pytest.warns(UserWarning, match="is damaged"):
    checkpoints.restore(state_at(0))
  checkpoints.save(state_at(2), {"next": 2})
  checkpoints.close()
  assert restored(saved).position == {"next": 2}


def test_a_run_without_an_intact_checkpoint_is_refused(saved):
  for step in (1, 2):
    truncate(saved / "checkpoints" / str(step))
  with (
    pytest.warns(UserWarning, match="is damaged"),
    pytest.raises(ValueError, match=r"no checkpoint in .* is intact: \[1, 2\] are moved"),
  ):
    restored(saved)
  with pytest.raises(ValueError, match=r"must hold checkpoint 2, .* To start over, remove"):
    Checkpoints(saved, keep=3)


@pytest.mark.parametrize(
  "error", [MemoryError(), PermissionError(), ValueError("RESOURCE_EXHAUSTED")]
)
def test_errors_of_the_machine_move_no_checkpoint(saved, error, monkeypatch):
  def fail(*args):
    raise error

  monkeypatch.setattr(Checkpoints, "_read", fail)
  with pytest.raises(type(error)):
    restored(saved)
  assert not (saved / "damaged").exists()


def test_a_checkpoint_of_another_shape_is_refused_and_left_alone(saved):
  before = sorted(p for p in saved.rglob("*"))
  with pytest.raises(ValueError, match=r"is of another model:") as error:
    restored(saved, state_at(0, width=65))
  assert "params.w: float32[300, 64] saved, float32[300, 65] in this model" in str(error.value)
  assert sorted(p for p in saved.rglob("*")) == before


def test_the_newest_and_the_best_stay(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=2)
  for step, nats in enumerate([5.0, 1.0, 4.0, None, 3.0, 2.0], start=1):
    metrics = None if nats is None else {"nats_per_token": nats}
    checkpoints.save(state_at(step), {}, metrics)
  checkpoints.close()
  kept = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
  assert kept == [2, 5, 6]


def test_the_next_step_may_overwrite_the_state_while_it_is_saved(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=1)
  state, expected = state_at(7), jax.device_get(state_at(7))
  overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  checkpoints.save(state, {})
  overwrite(state)
  checkpoints.close()
  assert equal(restored(tmp_path).state, expected)


@pytest.mark.parametrize(
  ("error", "message"),
  [
    (OSError(errno.ENOSPC, "No space left on device"), "the disk is full. Free some space"),
    (ValueError("INTERNAL: write failed: No space left on device"), "the disk is full"),
    (ValueError("OUT_OF_RANGE: Failed to write 4673536 bytes"), "the limit on file sizes"),
    (PermissionError(errno.EACCES, "Permission denied"), "Choose a folder with --run"),
    # Of Orbax, whose text ends with a specification in several lines.
    (
      ValueError(
        "Save failed: 2/9 params are missing in checkpoint:\na\nb.\nTensorstore KvStore: {\n}."
      ),
      "a file is gone (Save failed: 2/9 params are missing in checkpoint): the folder was removed",
    ),
  ],
)
def test_disk_errors_name_the_remedy_and_the_last_good_checkpoint(error, message):
  explained = records.disk_error(error, pathlib.Path("runs/x"), last_good=20)
  assert isinstance(explained, OSError)
  assert message in str(explained)
  assert "Checkpoint 20 is complete and kept" in str(explained)
  other = ValueError("something else")
  assert records.disk_error(other, pathlib.Path("x")) is other


def starting_from(experiment, init_from, **train):
  settings = dataclasses.replace(experiment.train, **train)
  return dataclasses.replace(experiment, init_from=init_from, train=settings)


def program_of(experiment, *mesh):
  return Program(load_text(experiment).experiment, make_mesh(MeshShape(*(mesh or (1, 1, 1)))))


@pytest.fixture
def trained(experiment, tmp_path):
  """Run folder with checkpoints 10 and 20, the first of lower validation loss."""
  on, folder = program_of(experiment), tmp_path / "trained"
  checkpoints = Checkpoints(folder, keep=2)
  for step, nats in ((10, 1.0), (20, 2.0)):
    checkpoints.save(filled(on.abstract_state, step), {}, {"nats_per_token": nats})
  checkpoints.close()
  identity = load_text(experiment).identity
  records.write(folder / "config.json", {"hash": "", "config": {}, "data": identity})
  return folder


def test_the_newest_or_the_best_variables_of_a_folder_are_read_without_its_model(
  experiment, trained
):
  shapes = program_of(experiment).abstract_state
  assert saved_steps(trained) == [10, 20]
  assert saved_steps(trained / "nowhere") == []
  for how, number in (({}, 20), ({"best": True}, 10), ({"at": 10}, 10), ({"at": 20}, 20)):
    found, step = read_run_variables(trained, **how)
    assert step == number
    assert found.keys() == {"params", "codes"}
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(found))
    assert equal(found, filled(shapes, number).variables)
  with pytest.raises(FileNotFoundError, match="complete checkpoint of step 7; got none"):
    read_run_variables(trained, at=7)


def test_a_damaged_checkpoint_of_another_run_is_skipped_and_not_moved(trained):
  newest = trained / "checkpoints" / "20"
  # All of its numbers: a part may be the optimiser's, which is not read.
  for file in (newest / "state").rglob("d/*"):
    file.unlink()
  with pytest.warns(UserWarning, match="checkpoint 20 .* is damaged"):
    assert read_run_variables(trained)[1] == 10
  assert newest.is_dir()


def test_the_best_checkpoint_stays_when_a_run_goes_on(experiment, trained):
  checkpoints = Checkpoints(trained, keep=1)
  checkpoints.save(filled(program_of(experiment).abstract_state, 30), {})
  checkpoints.close()
  assert read_run_variables(trained, best=True)[1] == 10
  assert read_run_variables(trained)[1] == 30


def test_a_folder_without_checkpoints_is_an_error(tmp_path):
  for folder in (tmp_path, tmp_path / "absent"):
    with pytest.raises(FileNotFoundError, match="must be a run folder with checkpoints; got"):
      read_run_variables(folder)
  (tmp_path / "checkpoints").mkdir()
  for best, kind in ((False, "complete"), (True, "evaluated")):
    with pytest.raises(FileNotFoundError, match=f"must have one {kind} checkpoint"):
      read_run_variables(tmp_path, best)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_a_state_begins_with_the_given_variables_on_their_devices(experiment, trained, mesh):
  on = program_of(experiment, *mesh)
  variables, _ = read_run_variables(trained)
  state = on.begin(variables)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.variables), variables)
  assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, state, on.abstract_state))
  assert int(state.step) == 0


@pytest.mark.slow
def test_a_run_starts_from_another_only_where_it_has_no_checkpoint_yet(
  experiment, trained, tmp_path
):
  still = {"learning_rate": 1e-30, "warmup": 0, "steps": 2}
  begun = starting_from(experiment, FromRun(str(trained)), **still)
  fit(begun, tmp_path / "run")
  expected = read_run_variables(trained)[0]
  jax.tree.map(np.testing.assert_array_equal, read_run_variables(tmp_path / "run")[0], expected)
  (tmp_path / "run" / "result.json").unlink()
  (trained / "config.json").unlink()  # a second start would fail without it
  assert fit(begun, tmp_path / "run")["status"] == "finished"


def test_another_tokenizer_is_refused(experiment, trained, tmp_path):
  config = json.loads((trained / "config.json").read_text())
  config["data"]["tokenizer"] = "other"
  records.write(trained / "config.json", config)
  with pytest.raises(ValueError, match=r"`tokenizer` must be .*other; got"):
    fit(starting_from(experiment, FromRun(str(trained))), tmp_path / "run")


def test_variables_that_do_not_fit_are_refused_by_name(experiment):
  on = program_of(experiment)
  fresh = jax.device_get(filled(on.abstract_state, 0).variables)
  codebook = fresh["params"]["head"].pop("codebook")
  spoilt = codebook.copy()
  spoilt[3, 2] = np.nan
  for own, message in (
    ({"codes": codebook}, "params.head.codebook: absent given, float32"),
    (
      {"codebook": codebook[:, :9]},
      r"codebook: float32\[8, 9\] given, float32\[8, 16\] in this model",
    ),
    (
      {"codebook": codebook.astype("bfloat16")},
      r"codebook: bfloat16\[8, 16\] given, float32\[8, 16\]",
    ),
    ({"codebook": spoilt}, "finite numbers; got others in head.codebook"),
  ):
    params = fresh["params"] | {"head": fresh["params"]["head"] | own}
    with pytest.raises(ValueError, match=message):
      on.begin(fresh | {"params": params})


@pytest.mark.slow
def test_arrays_that_are_the_models_own_may_be_given_back(experiment):
  on = program_of(experiment)
  fresh = on.init(keys(0)[0])
  state = on.begin(fresh.variables)
  batch = np.zeros((4, 8), np.int32)
  state, _ = on.step(state, on.place({"inputs": batch, "targets": batch}))
  assert int(state.step) == 1
  assert np.isfinite(jax.device_get(fresh.params["head"]["codebook"])).all()
