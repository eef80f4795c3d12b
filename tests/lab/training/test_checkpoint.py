"""Checkpoints come back bitwise, damage is noticed, and other runs start from them."""

import dataclasses
import errno
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vqjax.lab.config import config_hash, describe
from vqjax.lab.training import fit
from vqjax.lab.training.checkpoint import (
  Checkpoints,
  FromPart,
  FromRun,
  read_variables,
  saved_steps,
)
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.run import load_text
from vqjax.lab.training.step import TrainState
from vqjax.lm import records
from vqjax.sharding import MeshShape, make_mesh


def state_at(step, width=64):
  params = {"w": jax.random.normal(jax.random.key(step), (300, width)), "b": jnp.zeros(3)}
  model_state = {"codes": {"assignment": jnp.arange(9)}}
  return TrainState(jnp.int32(step), params, model_state, optax.adamw(1.0).init(params))


@pytest.fixture
def saved(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=3)
  for step in (1, 2):
    checkpoints.save(state_at(step), {"next": step})
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
  return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))


def test_state_and_position_come_back_bitwise(saved):
  restored = Checkpoints(saved, keep=3).restore(state_at(0))
  assert restored.position == {"next": 2}
  assert equal(restored.state, state_at(2))


def test_a_folder_without_checkpoints_restores_nothing(tmp_path):
  assert Checkpoints(tmp_path, keep=3).restore(state_at(0)) is None


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, remove_a_file, damage_the_record, empty])
def test_a_damaged_newest_checkpoint_is_moved_aside_with_a_warning(saved, damage):
  damage(saved / "checkpoints" / "2")
  with pytest.warns(UserWarning, match=r"checkpoint 2 in .* is damaged"):
    restored = Checkpoints(saved, keep=3).restore(state_at(0))
  assert restored.position == {"next": 1}
  assert equal(restored.state, state_at(1))
  assert (saved / "damaged" / "2").is_dir()
  assert not (saved / "checkpoints" / "2").exists()


def change_json(path, change):
  """Writes a file again with a change to its object, and its checksum as it was."""
  value = json.loads(path.read_text())
  change(value)
  path.write_text(json.dumps(value))


RECORD_DAMAGE = {
  "another position": lambda record: record["position"].update(next=7),
  "no position": lambda record: record.update(position={}),
  "another loss": lambda record: record["metrics"].update(nats_per_token=0.5),
  "no checksum": lambda record: record.pop("checksum"),
}


@pytest.mark.parametrize("damage", RECORD_DAMAGE)
def test_a_record_that_was_changed_is_not_resumed_from(evaluated, damage):
  change_json(evaluated / "checkpoints" / "2" / "record" / "metadata", RECORD_DAMAGE[damage])
  with pytest.warns(UserWarning, match=r"checkpoint 2 in .* is damaged .* the run goes on"):
    restored = Checkpoints(evaluated, keep=3).restore(state_at(0))
  assert restored.position == {"next": 1}


@pytest.fixture
def evaluated(tmp_path):
  """Run folder with checkpoints 1 and 2, of which the first has the least loss."""
  checkpoints = Checkpoints(tmp_path, keep=3)
  for step in (1, 2):
    checkpoints.save(state_at(step), {"next": step}, {"nats_per_token": float(step)})
  checkpoints.close()
  return tmp_path


METRICS_DAMAGE = {
  "truncated": lambda content: content[:20],
  "empty": lambda content: b"",
  "one bit": lambda content: content.replace(b"1", b"3", 1),
  "no text": lambda content: b"\xff" + content,
}


@pytest.mark.parametrize("damage", METRICS_DAMAGE)
def test_damaged_metrics_of_the_best_checkpoint_do_not_stop_a_run(evaluated, damage):
  path = evaluated / "checkpoints" / "1" / "metrics" / "metrics"
  path.write_bytes(METRICS_DAMAGE[damage](path.read_bytes()))
  assert saved_steps(evaluated) == [1, 2]
  with pytest.warns(UserWarning, match=r"checkpoint 1 in .* is damaged"):
    restored = Checkpoints(evaluated, keep=3).restore(state_at(0))
  assert restored.position == {"next": 2}
  assert (evaluated / "damaged" / "1").is_dir()


def test_a_run_whose_checkpoints_are_gone_is_refused_and_left_alone(saved):
  for step in (1, 2):
    shutil.rmtree(saved / "checkpoints" / str(step))
  with pytest.raises(ValueError, match=r"must hold checkpoint 2, .*got none.* remove .* or give"):
    Checkpoints(saved, keep=3)
  assert (saved / "progress.json").exists()


def test_metrics_tell_that_a_run_has_lost_its_checkpoints(tmp_path):
  row = records.sealed({"step": 9})
  (tmp_path / "metrics.jsonl").write_text(records.dumps(row))
  assert Checkpoints(tmp_path, keep=1, complete_by=9).latest is None
  with pytest.raises(ValueError, match=r"must hold the first checkpoint, .* To start over, remove"):
    Checkpoints(tmp_path, keep=1, complete_by=8)


def test_a_run_whose_newest_checkpoint_is_gone_goes_on_with_a_warning(saved):
  shutil.rmtree(saved / "checkpoints" / "2")
  with pytest.warns(UserWarning, match=r"checkpoint 2 in .* is missing; the run goes on from 1"):
    assert Checkpoints(saved, keep=3).restore(state_at(0)).position == {"next": 1}


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
  assert Checkpoints(saved, keep=3).restore(state_at(0)).position == {"next": 2}


def test_a_run_without_an_intact_checkpoint_is_refused(saved):
  for step in (1, 2):
    truncate(saved / "checkpoints" / str(step))
  with (
    pytest.warns(UserWarning, match="is damaged"),
    pytest.raises(ValueError, match=r"no checkpoint in .* is intact: \[1, 2\] are moved"),
  ):
    Checkpoints(saved, keep=3).restore(state_at(0))
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
    Checkpoints(saved, keep=3).restore(state_at(0))
  assert not (saved / "damaged").exists()


def test_a_checkpoint_of_another_shape_is_refused_and_left_alone(saved):
  before = sorted(p for p in saved.rglob("*"))
  with pytest.raises(ValueError, match=r"is of another model:") as error:
    Checkpoints(saved, keep=3).restore(state_at(0, width=65))
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
  restored = Checkpoints(tmp_path, keep=1).restore(state_at(0))
  jax.tree.map(np.testing.assert_array_equal, restored.state, expected)


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


def test_other_errors_are_returned_unchanged():
  error = ValueError("something else")
  assert records.disk_error(error, pathlib.Path("x")) is error


@dataclasses.dataclass(frozen=True)
class Changed:
  """Returns the fresh variables with a change to those of the head."""

  change: str

  def __call__(self, text, model, variables):
    head = dict(variables["params"]["head"])
    wide = np.zeros((9, 16), np.float32)
    codebook = head.pop("codebook")
    head |= {
      "twice": {"codebook": 2 * codebook},
      "renamed": {"codes": codebook},
      "reshaped": {"codebook": wide},
      "recast": {"codebook": codebook.astype("bfloat16")},
      "nan": {"codebook": codebook.at[3, 2].set(np.nan)},
    }[self.change]
    return variables | {"params": variables["params"] | {"head": head}}


def starting_from(experiment, init_from, **train):
  settings = dataclasses.replace(experiment.train, **train)
  return dataclasses.replace(experiment, init_from=init_from, train=settings)


def program_of(experiment, *mesh):
  return Program(load_text(experiment).experiment, make_mesh(MeshShape(*(mesh or (1, 1, 1)))))


@pytest.fixture
def trained(experiment, tmp_path):
  """Run folder with checkpoints 10 and 20, the first of lower validation loss."""
  on = program_of(experiment)
  state = on.init(keys(0)[0])
  checkpoints = Checkpoints(tmp_path / "trained", keep=2)
  for step, nats in ((10, 1.0), (20, 2.0)):
    state = state.replace(
      step=jax.numpy.int32(step), params=jax.tree.map(lambda x: x + 1, state.params)
    )
    checkpoints.save(state, {}, {"nats_per_token": nats})
  checkpoints.close()
  identity = load_text(experiment).identity
  records.write(tmp_path / "trained" / "config.json", {"hash": "", "config": {}, "data": identity})
  return tmp_path / "trained"


@pytest.mark.slow
def test_the_newest_or_the_best_variables_of_a_folder_are_read_without_its_model(
  experiment, trained
):
  fresh = jax.device_get(program_of(experiment).init(keys(0)[0]).variables)
  for best, number, more in ((False, 20, 2), (True, 10, 1)):
    found, step = read_variables(trained, best)
    assert step == number
    assert found.keys() == {"params", "codes"}
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(found))
    by_steps = jax.tree.map(lambda x: x + 1, fresh["params"])
    expected = by_steps if more == 1 else jax.tree.map(lambda x: x + 1, by_steps)
    jax.tree.map(np.testing.assert_array_equal, found["params"], expected)
    jax.tree.map(np.testing.assert_array_equal, found["codes"], fresh["codes"])


def test_a_damaged_checkpoint_of_another_run_is_skipped_and_not_moved(trained):
  newest = trained / "checkpoints" / "20"
  flip_a_bit(newest)
  with pytest.warns(UserWarning, match="checkpoint 20 .* is damaged"):
    assert read_variables(trained)[1] == 10
  assert newest.is_dir()


def test_the_best_checkpoint_stays_when_a_run_goes_on(experiment, trained):
  checkpoints = Checkpoints(trained, keep=1)
  state = program_of(experiment).init(keys(0)[0])
  checkpoints.save(state.replace(step=state.step + 30), {})
  checkpoints.close()
  assert read_variables(trained, best=True)[1] == 10
  assert read_variables(trained)[1] == 30


def test_a_folder_without_checkpoints_is_an_error(tmp_path):
  for folder in (tmp_path, tmp_path / "absent"):
    with pytest.raises(FileNotFoundError, match="must be a run folder with checkpoints; got"):
      read_variables(folder)
  (tmp_path / "checkpoints").mkdir()
  for best, kind in ((False, "complete"), (True, "evaluated")):
    with pytest.raises(FileNotFoundError, match=f"must have one {kind} checkpoint"):
      read_variables(tmp_path, best)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_a_state_begins_with_the_given_variables_on_their_devices(experiment, trained, mesh):
  on = program_of(experiment, *mesh)
  variables, _ = read_variables(trained)
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
  expected = read_variables(trained)[0]
  jax.tree.map(np.testing.assert_array_equal, read_variables(tmp_path / "run")[0], expected)
  (tmp_path / "run" / "result.json").unlink()
  (trained / "config.json").unlink()  # a second start would fail without it
  assert fit(begun, tmp_path / "run")["status"] == "finished"


def test_another_tokenizer_is_refused(experiment, trained, tmp_path):
  config = json.loads((trained / "config.json").read_text())
  config["data"]["tokenizer"] = "other"
  records.write(trained / "config.json", config)
  with pytest.raises(ValueError, match=r"`tokenizer` must be .*other; got"):
    fit(starting_from(experiment, FromRun(str(trained))), tmp_path / "run")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ("renamed", "params.head.codebook: absent given, float32"),
    ("reshaped", r"codebook: float32\[9, 16\] given, float32\[8, 16\] in this model"),
    ("recast", r"codebook: bfloat16\[8, 16\] given, float32\[8, 16\]"),
    ("nan", "finite numbers; got others in head.codebook"),
  ],
)
def test_variables_that_do_not_fit_are_refused_by_name(experiment, change, message):
  on = program_of(experiment)
  fresh = on.init(keys(0)[0]).variables
  with pytest.raises(ValueError, match=message):
    on.begin(Changed(change)(None, None, fresh))


@pytest.mark.slow
def test_arrays_that_are_the_models_own_may_be_given_back(experiment):
  on = program_of(experiment)
  fresh = on.init(keys(0)[0])
  state = on.begin(Changed("twice")(None, None, fresh.variables))
  batch = np.zeros((4, 8), np.int32)
  state, _ = on.step(state, on.place({"inputs": batch, "targets": batch}))
  assert int(state.step) == 1
  assert np.isfinite(jax.device_get(fresh.params["head"]["codebook"])).all()


def test_init_from_is_part_of_an_experiments_identity(experiment):
  begun = starting_from(experiment, FromRun("runs/a"))
  assert describe(begun)["init_from"]["folder"] == "runs/a"
  hashes = {config_hash(e) for e in (experiment, begun, starting_from(begun, FromRun("runs/b")))}
  assert len(hashes) == 3


def test_a_checkpoint_is_read_by_its_step(trained):
  steps = saved_steps(trained)
  assert steps == sorted(steps)
  for step in steps:
    assert read_variables(trained, at=step)[1] == step
  with pytest.raises(FileNotFoundError, match="complete checkpoint of step 7; got none"):
    read_variables(trained, at=7)
  assert saved_steps(trained / "nowhere") == []


def test_a_run_may_begin_with_a_part_of_another(experiment, trained, tmp_path):
  other = read_variables(trained)[0]["params"]
  part = dataclasses.replace(experiment, init_from=FromPart(str(trained), "blocks"))
  text = load_text(part)
  init_key, _ = keys(experiment.seed)
  fresh = program_of(experiment).init(init_key).variables
  begun = part.init_from(text, text.experiment.model, fresh)
  jax.tree.map(np.testing.assert_array_equal, begun["params"]["blocks"], other["blocks"])
  kept = {name: tree for name, tree in begun["params"].items() if name != "blocks"}
  jax.tree.map(np.testing.assert_array_equal, kept, {name: fresh["params"][name] for name in kept})
  with pytest.raises(ValueError, match=r"`part` must be one of .*; got 'encoder'"):
    FromPart(str(trained), "encoder")(text, text.experiment.model, fresh)
