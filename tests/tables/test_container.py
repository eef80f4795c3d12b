"""What is coded is decoded bit for bit, in any part, at about the ideal size; damage is named."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vqjax.lm import records
from vqjax.tables import container, entropy_coder, ideal_bits
from vqjax.tables.stored import KeptRows, StoredEmbedding

RNG = np.random.default_rng(0)


def of_trellis(index):
  """The integers with these indices, which lead each stream from state to state."""
  rows, columns = index.shape
  lanes = container.lanes_of(columns)
  index = np.pad(index.astype(np.int64), ((0, -rows % container.RESTART), (0, -columns % lanes)))
  index = index.reshape(-1, container.RESTART, index.shape[1])
  levels, state = np.empty_like(index), np.zeros((len(index), lanes), int)
  for row in range(container.RESTART):
    for column in range(index.shape[2]):
      own, lane = index[:, row, column], column % lanes
      levels[:, row, column] = 2 * own - np.sign(own) * (state[:, lane] % 2)
      state[:, lane] = container.NEXT_STATE[state[:, lane], own % 2]
  return levels.reshape(-1, index.shape[2])[:rows, :columns].astype(np.int32)


def table(index, row_group=None, classes=1):
  """A quantised table whose integers have these indices."""
  rows, columns = index.shape
  levels = of_trellis(index)
  return types.SimpleNamespace(
    levels=levels,
    row_group=np.zeros(rows, np.uint8) if row_group is None else row_group.astype(np.uint8),
    steps=0.5 ** np.arange(classes, dtype=np.float32),
    inverse=RNG.normal(size=(columns, columns)).astype(np.float16),
    mean=RNG.normal(size=columns).astype(np.float32),
    shape=levels.shape,
  )


def laplace(rows, columns, scale, classes=1):
  """Integers whose columns and classes have other widths."""
  row_group = RNG.integers(0, classes, rows)
  width = scale * np.exp(-2 * np.arange(columns) / columns) * 0.7 ** row_group[:, None]
  return table(np.rint(RNG.laplace(size=(rows, columns)) * width), row_group, classes)


AWKWARD = {
  "one number": lambda: table(np.array([[-7]])),
  "one row": lambda: laplace(1, 37, 5.0),
  "one class": lambda: laplace(523, 19, 3.0),
  "a class of one row": lambda: table(
    np.rint(RNG.normal(size=(301, 5)) * 4), np.arange(301) == 17, classes=2
  ),
  "a class without rows": lambda: table(np.ones((3, 2)), np.array([0, 2, 2]), classes=3),
  "outliers beyond 16 bits": lambda: table(
    np.where(RNG.random((777, 31)) < 0.01, RNG.integers(-(2**29), 2**29, (777, 31)), 1)
  ),
  "wide levels": lambda: laplace(600, 16, 3e6),
  "all zeros": lambda: table(np.zeros((257, 33))),
  "the ends of int32": lambda: table(np.array([[2**30 - 1, -(2**30) + 1], [0, -1]])),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_a_table_is_read_as_it_was_written(name, monkeypatch):
  quantized = AWKWARD[name]()
  found = container.CompressedTable(entropy_coder.encode_table(quantized))
  np.testing.assert_array_equal(found.levels(), quantized.levels)
  with monkeypatch.context() as m:  # as a copy of the reader does it
    m.setattr(entropy_coder, "decoded", container.decoded)
    np.testing.assert_array_equal(found.levels(), quantized.levels)
  np.testing.assert_array_equal(found.row_group, quantized.row_group)
  step = quantized.steps[quantized.row_group].astype(np.float64)[:, None]
  rows = (quantized.levels * step) @ quantized.inverse.astype(np.float64) + quantized.mean
  # Products of D float32 numbers, against those in float64.
  size = np.abs(quantized.levels * step) @ np.abs(quantized.inverse.astype(np.float64)) + 1
  assert (np.abs(found.rows() - rows) / size).max() < 1e-6 * quantized.shape[1] ** 0.5 + 1e-6


def test_parts_of_a_table_are_those_of_the_whole():
  quantized = laplace(1031, 21, 4.0, classes=3)
  found = container.CompressedTable(entropy_coder.encode_table(quantized))
  for first, last in ((0, 1), (255, 257), (256, 512), (700, 1031), (1030, 1031), (5, 5)):
    np.testing.assert_array_equal(found.levels(first, last), quantized.levels[first:last])
  blocks = list(found.blocks(300))
  assert [len(rows) for rows in blocks] == [300, 300, 300, 131]
  # Products of other shapes may be added in another order.
  np.testing.assert_allclose(np.concatenate(blocks), found.rows(), atol=1e-4)
  with pytest.raises(IndexError, match="1031"):
    found.levels(0, 1032)


def test_rows_are_decoded_when_they_are_looked_up_whatever_is_kept(monkeypatch):
  found = container.CompressedTable(entropy_coder.encode_table(laplace(1031, 21, 4.0, classes=3)))
  # Two blocks of 256 rows.
  monkeypatch.setattr("vqjax.tables.stored.KEPT", 2 * 4 * 256 * 21)
  embedding = StoredEmbedding(1031, 21, KeptRows(found))
  look_up = jax.jit(lambda tokens: embedding.apply({}, tokens))
  # A product of a whole table and one of a block round their sums otherwise.
  whole = found.rows()
  for tokens in ([[7, 1030, 300, 600], [7, 900, -1, 1031]], [[3, 3, 2, 5], [260, 700, 0, 9]]):
    rows = np.asarray(look_up(jnp.array(tokens)))
    for token, row in zip(np.ravel(tokens), rows.reshape(8, 21)):
      expected = whole[token] if 0 <= token < 1031 else np.full(21, np.nan)
      np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)
  assert embedding.size() == (0, 0, 0)


@pytest.mark.parametrize("scale", [1.5, 12.0])
def test_the_size_is_within_two_hundredths_of_the_ideal(scale):
  quantized = laplace(40_009, 96, scale, classes=5)
  stored = entropy_coder.encode_table(quantized)
  # The ideal bits are those of the integers, and those of the classes.
  share = np.bincount(quantized.row_group) / len(quantized.levels)
  bits = ideal_bits(quantized).sum() - len(quantized.levels) * (share * np.log2(share)).sum()
  size = sum(array.nbytes for array in stored.values())
  own = size - stored["inverse"].nbytes - stored["mean"].nbytes
  assert own < 1.02 * bits / 8
  assert entropy_coder.coded_bytes(quantized) == pytest.approx(size, rel=0.02)


def test_distributions_are_few_and_their_bytes_count():
  stored = entropy_coder.encode_table(laplace(4001, 64, 6.0, classes=4))
  assert sum(array.nbytes for array in stored.values()) > stored["words"].nbytes
  tables = sum(stored[n].nbytes for n in ("frequencies", "distribution", "shift"))
  assert tables < 0.05 * stored["words"].nbytes


@pytest.mark.parametrize("part", ["words", "lengths", "header", "mean", "row_group", "sums"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damage_is_named(part, damage):
  stored = entropy_coder.encode_table(laplace(600, 18, 4.0, classes=2))
  array = stored[part].copy()
  if damage == "flipped":
    array[len(array) // 2] ^= 4
  stored[part] = array if damage == "flipped" else array[:-1]
  if damage == "missing":
    del stored[part]
  with pytest.raises(ValueError, match=r"damaged|as it was written"):
    container.CompressedTable(stored).levels()


def test_every_flipped_word_is_noticed_where_it_lies():
  quantized = laplace(1000, 18, 4.0)
  stored = entropy_coder.encode_table(quantized)
  stored["words"] = stored["words"].copy()
  stored["words"][-9] ^= 1
  found = container.CompressedTable(stored)
  np.testing.assert_array_equal(found.levels(0, 256), quantized.levels[:256])
  with pytest.raises(container.DamagedTableError, match="rows 768 to 1023"):
    found.levels(990, 991)


def test_integers_that_the_trellis_does_not_have_are_refused():
  quantized = laplace(300, 5, 4.0)
  quantized.levels[0, 0] = 1  # the first quantiser has even ones
  with pytest.raises(ValueError, match="`levels` must be those of the trellis"):
    entropy_coder.encode_table(quantized)


def test_another_version_is_refused():
  stored = entropy_coder.encode_table(laplace(5, 3, 1.0))
  sealed = json.loads(bytes(stored["header"]))
  sealed["header"]["version"] = 99
  text = json.dumps(sealed["header"], sort_keys=True)
  sealed["crc32"] = container.zlib.crc32(text.encode())
  stored["header"] = np.frombuffer(json.dumps(sealed).encode(), np.uint8)
  with pytest.raises(ValueError, match="99"):
    container.CompressedTable(stored)


def manifest(**changes):
  """The text of a `vqjax.json` of one table."""
  fields = {"format": container.FORMAT, "version": container.VERSION}
  return json.dumps(records.sealed(fields | {"tables": {"embedding": {"tensor": "w"}}} | changes))


@pytest.fixture(scope="module")
def stored_folder(tmp_path_factory):
  """A folder of one table."""
  import safetensors.numpy

  folder = tmp_path_factory.mktemp("stored")
  tensors = entropy_coder.encode_table(laplace(300, 3, 4.0))
  tensors = {f"w.vqjax.{name}": array for name, array in tensors.items()}
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  (folder / "vqjax.json").write_text(manifest())
  return folder


def test_a_file_that_is_cut_or_has_a_flipped_bit_in_its_header_is_named(stored_folder, tmp_path):
  expected = container.read_table(stored_folder).rows()
  data = (stored_folder / "model.safetensors").read_bytes()
  (tmp_path / "vqjax.json").write_text(manifest())
  start = 8 + int.from_bytes(data[:8], "little")
  damaged = [data[:size] for size in (0, 4, 8, 20, start, len(data) - 1)]
  for place in (*range(8), *np.random.default_rng(3).integers(8, start, 120)):
    flipped = bytearray(data)
    flipped[place] ^= 1 << place % 8
    damaged.append(bytes(flipped))
  for content in damaged:
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    (tmp_path / "model.safetensors").write_bytes(content)
    try:
      found = container.read_table(tmp_path).rows()
    except container.DamagedTableError:
      continue
    # What says how the arrays of other readers look may be anything.
    np.testing.assert_array_equal(found, expected)


def test_a_damaged_manifest_and_one_of_another_version_are_named(tmp_path):
  path, nested = tmp_path / "vqjax.json", b'{"tables":' * 20_000
  for content in (b"", b"{", b"[]", b"{}", b"\xff", b'{"tables": {"a": 1}}', nested):
    path.write_bytes(content)
    with pytest.raises(container.DamagedTableError, match="that does not name the tables"):
      container.read_table(tmp_path)
  records.write(path, json.loads(manifest(report={"bytes": 12})))
  path.write_text(path.read_text().replace("12", "13"))
  with pytest.raises(container.DamagedTableError, match=r"vqjax.json with another checksum"):
    container.read_table(tmp_path)
  (tmp_path / "vqjax.json").write_text(manifest(version=99))
  with pytest.raises(ValueError, match=r"must be \('vqjax-compressed-table', 3\); got"):
    container.read_table(tmp_path)


def test_the_reader_runs_without_the_library(tmp_path):
  """A copy of the file, in a process that has NumPy only."""
  import pathlib
  import subprocess
  import sys

  import safetensors.numpy

  quantized = laplace(300, 12, 4.0)
  tensors = {
    f"w.vqjax.{name}": array for name, array in entropy_coder.encode_table(quantized).items()
  }
  safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
  (tmp_path / "vqjax.json").write_text(manifest())
  (tmp_path / "reader.py").write_text(pathlib.Path(container.__file__).read_text())
  code = (
    "import sys, reader; t = reader.read_table('.'); print(t.levels(280, 300).sum(), t.shape,"
    " [m for m in ('jax', 'vqjax', 'torch') if m in sys.modules])"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
  )
  assert done.stdout.split("\n")[0] == f"{quantized.levels[280:].sum()} (300, 12) []"
