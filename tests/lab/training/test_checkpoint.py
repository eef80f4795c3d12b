"""Is a damaged checkpoint noticed, whatever the damage, and the one before used?"""

import errno
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vqjax.lab.training.checkpoint import Checkpoints, disk_error
from vqjax.lab.training.step import TrainState


def state_at(step, width=64):
  params = {"w": jax.random.normal(jax.random.key(step), (300, width)), "b": jnp.zeros(3)}
  tables = {"codes": {"assignment": jnp.arange(9)}}
  return TrainState(jnp.int32(step), params, tables, optax.adamw(1.0).init(params))


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
def test_a_damaged_newest_one_is_set_aside_with_a_warning(saved, damage):
  damage(saved / "checkpoints" / "2")
  with pytest.warns(UserWarning, match=r"checkpoint 2 in .* is damaged"):
    restored = Checkpoints(saved, keep=3).restore(state_at(0))
  assert restored.position == {"next": 1}
  assert equal(restored.state, state_at(1))
  assert (saved / "damaged" / "2").is_dir()
  assert not (saved / "checkpoints" / "2").exists()


def test_after_a_fall_back_the_same_step_is_saved_again(saved):
  truncate(saved / "checkpoints" / "2")
  checkpoints = Checkpoints(saved, keep=3)
  with pytest.warns(UserWarning, match="is damaged"):
    checkpoints.restore(state_at(0))
  checkpoints.save(state_at(2), {"next": 2})
  checkpoints.close()
  assert Checkpoints(saved, keep=3).restore(state_at(0)).position == {"next": 2}


def test_with_all_damaged_nothing_starts_over_before_it_is_said(saved):
  for step in (1, 2):
    truncate(saved / "checkpoints" / str(step))
  with (
    pytest.warns(UserWarning, match="is damaged"),
    pytest.raises(ValueError, match=r"no checkpoint in .* is intact: \[2, 1\] are moved"),
  ):
    Checkpoints(saved, keep=3).restore(state_at(0))
  assert Checkpoints(saved, keep=3).restore(state_at(0)) is None


@pytest.mark.parametrize(
  "error", [MemoryError(), PermissionError(), ValueError("RESOURCE_EXHAUSTED")]
)
def test_trouble_of_the_machine_sets_no_checkpoint_aside(saved, error, monkeypatch):
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
  ],
)
def test_trouble_with_the_disk_says_what_to_do_and_what_is_safe(error, message):
  explained = disk_error(error, pathlib.Path("runs/x"), last_good=20)
  assert isinstance(explained, OSError)
  assert message in str(explained)
  assert "Checkpoint 20 is complete and kept" in str(explained)


def test_other_errors_stay_what_they_are():
  error = ValueError("something else")
  assert disk_error(error, pathlib.Path("x")) is error
