"""Tables on the host: rows, steps, and files that go on where they were flushed."""

import errno
import io
import os
import shutil
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from tests.jitted import results
from vqjax.ops.ngrams import XorHash
from vqjax.row_updates import update_rows
from vqjax.tables import HostTable, tensor_files
from vqjax.tables.host_table import _steps, _undo_file

V, D = 1_009, 5
RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((V, D), np.float32)
IDS = RNG.integers(0, 60, (6, 2, 9)) * (V // 60)
GRADIENTS = RNG.standard_normal((6, 2, 9, D), np.float32)


def created(folder, **options):
  return HostTable.create(folder, V, D, init=lambda first, last: TABLE[first:last], **options)


def stepped(table, first, last):
  for ids, gradients in zip(IDS[first:last], GRADIENTS[first:last]):
    table.update(ids, gradients, 0.1)
  return table


def state(table):
  return np.array(table.weight), np.array(table.moment)


def in_memory(steps, dtype=np.float32):
  return state(stepped(HostTable(TABLE.astype(dtype), np.zeros(V, np.float32)), 0, steps))


def check_equal(found, expected):
  for one, other in zip(found, expected):
    np.testing.assert_array_equal(one.view(f"u{one.itemsize}"), other.view(f"u{other.itemsize}"))


@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_steps_in_memory_and_in_files_are_those_of_devices(dtype, decay, tmp_path, monkeypatch):
  monkeypatch.setattr("vqjax.tables.host_table.BLOCK", 100)
  # Pages are given back after each row, and changes of rows are kept.
  filed = created(tmp_path / "table", dtype=dtype, resident=1)
  table = HostTable(TABLE.astype(dtype), np.zeros(V, np.float32))
  with filed:
    for ids, gradients in zip(IDS, GRADIENTS):
      filed.prefetch(ids)
      for one in (table, filed):
        one.update(ids, gradients, 0.1, decay=decay)

    def on_device(weight, moment):
      for ids, gradients in zip(IDS, GRADIENTS):
        weight, moment = update_rows(weight, moment, ids, gradients, 0.1, decay=decay)
      return weight, moment

    weight, moment = results(on_device, TABLE.astype(dtype), np.zeros(V, np.float32))
    # Roundings of six steps of float32; a bfloat16 that is near the middle may go either way.
    np.testing.assert_allclose(table.moment, moment, rtol=1e-5)
    limit = 2e-6 if dtype == np.float32 else 2**-6
    np.testing.assert_allclose(
      table.weight.astype(np.float32), weight.astype(np.float32), atol=limit
    )
    check_equal(state(filed), state(table))
    found = filed.rows(IDS[0])
    assert found.shape == (*IDS[0].shape, D)
    check_equal([found], [table.weight[IDS[0]]])
    untouched = np.setdiff1d(np.arange(V), IDS)
    check_equal([filed.rows(untouched)], [TABLE.astype(dtype)[untouched]])


def test_a_table_goes_on_at_either_of_the_last_two_flushes(tmp_path):
  with created(tmp_path / "table") as table:
    for step in (1, 3, 4):
      stepped(table, {1: 0, 3: 1, 4: 3}[step], step).flush(step)
    stepped(table, 4, 6)
  for step, to in ((None, 4), (3, 3)):
    shutil.copytree(tmp_path / "table", tmp_path / f"at {to}")
    with HostTable.open(tmp_path / f"at {to}", step) as table:
      check_equal(state(table), in_memory(to))
      stepped(table, to, 6).flush(6)
    with HostTable.open(tmp_path / f"at {to}", rows=V) as table:
      check_equal(state(table), in_memory(6))
  with pytest.raises(ValueError, match=r"such as 3 or 4; got 1\. Load the checkpoint"):
    HostTable.open(tmp_path / "table", 1)


def test_a_process_that_is_killed_while_it_opens_a_step_leaves_that_step(tmp_path, monkeypatch):
  with stepped(created(tmp_path / "table"), 0, 1) as table:
    table.flush(1)
    stepped(table, 1, 3).flush(2)
    stepped(table, 3, 4)

  def killed(table):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(HostTable, "_written", killed)
    with pytest.raises(KeyboardInterrupt):
      HostTable.open(tmp_path / "table", 1)
  with HostTable.open(tmp_path / "table") as table:
    check_equal(state(table), in_memory(1))
  assert _steps(tmp_path / "table") == [1]


def test_the_pages_of_rows_are_read_ahead(tmp_path, monkeypatch):
  asked = []
  note = lambda file, first, size, advice: asked.append((os.fstat(file).st_ino, first, size))
  monkeypatch.setattr(os, "posix_fadvise", note, raising=False)
  ids = np.array([[3, V - 1], [3, 700]])
  with created(tmp_path / "table") as table:
    table.prefetch(ids)
  for name, width in (("weight", 4 * D), ("moment", 4)):
    path = tmp_path / "table" / f"{name}.safetensors"
    begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    own = [(first, size) for node, first, size in asked if node == path.stat().st_ino]
    bytes_of = {byte for first, size in own for byte in range(first, first + size)}
    assert bytes_of >= {begin + width * row + i for row in ids.flat for i in range(width)}
    assert len(own) <= 6


def test_a_full_disk_leaves_the_rows_and_the_records_before_it(tmp_path):
  class Full(io.FileIO):
    left = 300

    def write(self, data):
      if not self.left:
        raise OSError(errno.ENOSPC, "No space left on device")
      count, self.left = min(self.left, len(data)), max(0, self.left - len(data))
      return super().write(data[:count])

  with stepped(created(tmp_path / "table"), 0, 1) as table:
    before = state(table)
    whole, table._undo = table._undo, Full(table._undo.name, "r+")
    table._undo.seek(0, os.SEEK_END)
    with pytest.raises(OSError, match="No space left"):
      stepped(table, 1, 2)
    check_equal(state(table), before)
    table._undo.left = 2**20
    check_equal(state(stepped(table, 1, 2)), in_memory(2))
    whole.close()
  with HostTable.open(tmp_path / "table") as table:
    check_equal(state(table), in_memory(0))


def test_a_record_that_was_not_written_to_its_end_is_of_rows_that_did_not_change(tmp_path):
  with stepped(created(tmp_path / "table"), 0, 2) as table:
    table.flush(2)
    stepped(table, 2, 3)
    undo = _undo_file(tmp_path / "table", 2)
    size, before = undo.stat().st_size, state(table)
    stepped(table, 3, 4)
    table.weight[:], table.moment[:] = before
  os.truncate(undo, (size + undo.stat().st_size) // 2)
  with HostTable.open(tmp_path / "table") as table:
    check_equal(state(table), in_memory(2))


KILLED = """
import os, pathlib, sys
import numpy as np
from vqjax.tables import HostTable
table = HostTable.create(sys.argv[1], 1009, 5)
rng = np.random.default_rng(0)
for step in range(1, 10_000):
  ids = rng.integers(0, 1009, (64, 4))
  table.update(ids, rng.standard_normal((64, 4, 5), np.float32), 0.1)
  if step % 50 == 0:
    table.flush(step)
    np.save(sys.argv[2], np.array(table.weight))
    os.replace(sys.argv[2], pathlib.Path(sys.argv[2]).with_name(f"{step}.npy"))
    print(step, flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_loses_what_was_done_after_the_last_flush(tmp_path):
  arguments = [sys.executable, "-c", KILLED, str(tmp_path / "table"), str(tmp_path / "new.npy")]
  with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
    for _ in range(3):
      process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
  # The last flush may have been its last act, before it kept the rows for this test.
  step = _steps(tmp_path / "table")[-2]
  with HostTable.open(tmp_path / "table", step) as table:
    np.testing.assert_array_equal(table.weight, np.load(tmp_path / f"{step}.npy"))


def test_a_table_is_open_once(tmp_path):
  with created(tmp_path / "table") as table:
    stepped(table, 0, 2).flush(2)
    with pytest.raises(ValueError, match=r"not open; got .*table, which is, here or in another"):
      HostTable.open(tmp_path / "table")
    stepped(table, 2, 3).flush(3)
  # `kept` holds the traceback.
  with pytest.raises(ValueError, match="`step` must be one") as kept:
    HostTable.open(tmp_path / "table", 1)
  with HostTable.open(tmp_path / "table") as table:
    check_equal(state(table), in_memory(3))
  assert kept.tb


def test_a_closed_table_leaves_the_files_as_they_are(tmp_path):
  with created(tmp_path / "table") as closed:
    stepped(closed, 0, 2).flush(2)
  with HostTable.open(tmp_path / "table") as table:
    for change in (lambda: closed.flush(3), lambda: stepped(closed, 2, 3)):
      with pytest.raises(ValueError, match="must be open; got one that was closed"):
        change()
    check_equal(state(table), in_memory(2))
    assert _steps(tmp_path / "table")[-1] == 2


def test_a_table_in_a_file_of_others_is_read_and_not_trained(tmp_path):
  tensor_files.save_file({"memory": TABLE}, tmp_path / "model.safetensors")
  tensors, _ = tensor_files.open_file(tmp_path / "model.safetensors")
  table = HostTable(tensors["memory"].array)
  table.prefetch(IDS.astype(np.uint64))
  np.testing.assert_array_equal(table.rows(IDS), TABLE[IDS])
  assert table.rows(np.zeros((3, 0), int)).shape == (3, 0, D)
  with pytest.raises(ValueError, match="must only be read"):
    stepped(table, 0, 1)
  with pytest.raises(ValueError, match="got no folder"):
    table.flush(1)


def test_a_new_table_is_zeros_that_take_no_space(tmp_path):
  with HostTable.create(tmp_path / "table", 10_000_019, 8) as table:
    table.update(np.array([3]), np.ones((1, 8), np.float32), 0.5)
    np.testing.assert_allclose(table.rows(np.array([3, 10_000_018]))[:, 0], [-0.5, 0])
  held = sum(512 * path.stat().st_blocks for path in (tmp_path / "table").iterdir())
  assert held < 2**20


def test_what_does_not_fit_is_refused_by_name(tmp_path):
  folder = tmp_path / "table"
  with created(folder) as table:
    for wrong in ([-1], [V]):
      with pytest.raises(
        IndexError, match=rf"in \[0, {V}\), the rows of the table; got {wrong[0]}"
      ):
        table.rows(np.array(wrong))
    with pytest.raises(ValueError, match=r"`gradients` \[\*B, 5\]; got int64 \(2,\) and \(2, 4\)"):
      table.update(np.array([1, 2]), np.ones((2, 4)), 0.1)
    with pytest.raises(ValueError, match="above the last one, 0; got 0"):
      table.flush(0)
    table.update(np.zeros((0, 3), int), np.ones((0, 3, D)), 0.1)
    check_equal(state(table), in_memory(0))
  rows = XorHash.qwen4(101, 3, heads=4, least=200).rows
  with pytest.raises(
    ValueError, match=rf"each of the hash, {rows}; got {V}\. .*rows={rows}, dim=5"
  ):
    HostTable.open(folder, rows=rows)
  with pytest.raises(FileExistsError, match="`folder` must be new"):
    created(folder)
  for given, message in (
    ({"rows": 0, "dim": D}, "at least 1; got 0 and 5"),
    ({"rows": V, "dim": 0}, "at least 1; got 1009 and 0"),
    ({"rows": V, "dim": D, "dtype": np.int8}, "`dtype` must be float32 or bfloat16"),
    (
      {"rows": V, "dim": 4, "init": lambda a, b: TABLE[a:b]},
      r"`init` .* \(1009, 4\) .* \(1009, 5\)",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      HostTable.create(tmp_path / "other", **given)
  assert not (tmp_path / "other").exists()
  with pytest.raises(ValueError, match="float32 or bfloat16 table"):
    HostTable(TABLE.astype(np.float64))
  with pytest.raises(FileNotFoundError, match="must be a safetensors file; got no file"):
    HostTable.open(tmp_path)
  os.truncate(folder / "weight.safetensors", 4 * V * D)
  with pytest.raises(ValueError, match="truncated or damaged"):
    HostTable.open(folder)
