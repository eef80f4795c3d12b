"""Tables in pages: streamed, within their bytes, read at random by every reader, and checked."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted
from vqjax import SmallTable
from vqjax.ops.ngrams import PolynomialHash, XorHash, count_rows
from vqjax.tables import container, entropy_coder
from vqjax.tables.paged import compress_rows
from vqjax.tables.stored import KeptRows, StoredEmbedding

V, D = 6007, 13
RNG = np.random.default_rng(0)
COUNTS = np.minimum(RNG.zipf(1.4, V) - 1, 10**5).astype(np.uint32)
TABLE = (RNG.standard_normal((V, D)) * np.minimum(1, 0.2 + COUNTS[:, None] / 9)).astype(np.float32)
SIZE = V * D * 3 // 8


class Streamed:
  """A table that gives slices of rows, and remembers the largest."""

  def __init__(self, array):
    self.array, self.shape, self.dtype, self.largest = array, array.shape, array.dtype, 0

  def __getitem__(self, rows):
    part = self.array[rows]
    self.largest = max(self.largest, 0 if part.base is self.array and len(part) == V else len(part))
    return part


@functools.lru_cache
def made(path, drop=False, rows_of_block=7):
  report = compress_rows(TABLE, COUNTS, path, size=SIZE, drop=drop, rows_of_block=rows_of_block)
  return report, container.read_table(path)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  return tmp_path_factory.mktemp("paged") / "table.safetensors"


def test_a_table_has_at_most_its_bytes_and_the_errors_of_its_report(path):
  report, table = made(path)
  assert 0.93 * SIZE < report.bytes == table.nbytes <= SIZE
  assert report.bytes <= path.stat().st_size < report.bytes + 5000
  error = ((table.rows() - TABLE) ** 2).sum(axis=1)
  length = (TABLE**2).sum(axis=1)
  assert report.error == pytest.approx((COUNTS @ error) / (COUNTS @ length), rel=1e-3)
  unread = COUNTS == 0
  assert report.unread == unread.sum()
  assert report.unread_error == pytest.approx(error[unread].sum() / length[unread].sum(), rel=1e-3)
  # Where bits are enough, a row that is read n times as often errs an nth.
  often, seldom = (error[(a <= COUNTS) & (b > COUNTS)].mean() for a, b in ((64, 128), (4, 8)))
  assert often == pytest.approx(seldom / 16, rel=0.5)


def test_all_readers_have_the_rows_of_the_whole(path, monkeypatch):
  _, table = made(path)
  rows = table.rows()
  with monkeypatch.context() as parts:
    parts.setattr(container, "DECODED", 300 * D)  # 42 blocks in a part, 859 in all
    ids = RNG.integers(0, V, (2, 2000))
    np.testing.assert_allclose(table[ids], rows[ids], atol=1e-5)
  ids = np.array([[0, V - 1, 448, 447], [449, 3, 3, 6000]])
  np.testing.assert_allclose(table[ids], rows[ids], atol=1e-5)
  small = SmallTable.load(path)
  np.testing.assert_array_equal(small.rows(ids), table[ids])
  np.testing.assert_allclose(table.take(ids, compiled=False), rows[ids], atol=1e-5)
  assert table[np.empty((0, 2), int)].shape == (0, 2, D)
  embedding, variables = small.to_embedding()
  assert isinstance(embedding, StoredEmbedding)
  assert not variables
  np.testing.assert_allclose(jitted.apply(embedding, {}, ids), rows[ids], atol=1e-5)
  with pytest.raises(IndexError, match=rf"\[0, {V}\); got 0 to {V}"):
    table[[0, V]]


def test_rows_are_kept_whatever_was_read_before(path, monkeypatch):
  _, table = made(path)
  rows = table.rows()
  monkeypatch.setattr("vqjax.tables.stored.KEPT", 3 * 4 * D)
  kept = KeptRows(table)
  for ids in ([5, 9, 5], [9], [1, 2, 9, 3, 4, 6000, 4], [V - 1, 9], []):
    np.testing.assert_allclose(kept(np.array(ids, int)), rows[ids], atol=1e-5)


def test_torch_has_the_rows(path):
  torch = pytest.importorskip("torch")
  from vqjax.tables.torch_reader import TorchTable

  _, table = made(path)
  found = TorchTable(path)
  ids = np.array([[0, 447], [V - 1, 3]])
  np.testing.assert_allclose(found(torch.tensor(ids)), table[ids], atol=1e-5)
  assert not list(found.buffers())


def test_rows_that_are_not_read_are_the_mean_row_when_dropped(path):
  kept, _ = made(path)
  dropped, table = made(path.with_name("dropped.safetensors"), drop=True)
  rows = table.rows()[COUNTS == 0]
  np.testing.assert_array_equal(rows, np.broadcast_to(table.mean, rows.shape))
  np.testing.assert_allclose(table.mean, TABLE[COUNTS > 0].mean(axis=0), atol=1e-5)
  assert dropped.error == pytest.approx(kept.error, rel=0.2)
  # These rows are noise around 0.
  assert dropped.unread_error == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("rows", "columns", "of_block"), [(1, 1, None), (3, 5, 1), (777, 2, 64)])
def test_tables_of_any_size_are_compressed(tmp_path, rows, columns, of_block):
  table = RNG.standard_normal((rows, columns), np.float32)
  given = {"size": 4000 + rows * columns, "rows_of_block": of_block}
  report = compress_rows(table, np.ones(rows), tmp_path / "t.safetensors", **given)
  assert report.unread == 0
  found = container.read_table(tmp_path / "t.safetensors")[np.arange(rows)]
  assert ((found - table) ** 2).sum() < 0.1 * (table**2).sum()


def test_a_table_is_read_a_part_at_a_time(path, tmp_path, monkeypatch):
  monkeypatch.setattr("vqjax.tables.paged.LANES", 64)
  monkeypatch.setattr("vqjax.tables.paged.OF_COUNTS", 1000)
  streamed = Streamed(TABLE)
  compress_rows(streamed, COUNTS, tmp_path / "t.safetensors", size=SIZE, rows_of_block=7)
  assert streamed.largest <= 64 * 7
  # Its steps and distributions are those of another sample.
  error = ((container.read_table(tmp_path / "t.safetensors").rows() - TABLE) ** 2).sum(axis=1)
  assert COUNTS @ error / (COUNTS @ (TABLE**2).sum(axis=1)) == pytest.approx(
    made(path)[0].error, rel=0.2
  )


@pytest.mark.parametrize("largest", [3, 2**28])
def test_integers_that_no_sampled_row_had_are_read_as_they_were_written(largest):
  blocks, restart, columns = 5, 9, 4
  index = RNG.integers(-largest, largest + 1, (blocks, restart, columns))
  index[0, 0, 0] = 2 * largest  # the model knows it not
  owner = RNG.integers(0, 2, (blocks, restart)).astype(np.uint8)
  state, levels = np.zeros(blocks, int), np.empty_like(index)
  for row, column in np.ndindex(restart, columns):
    own = index[:, row, column]
    levels[:, row, column] = 2 * own - np.sign(own) * (state % 2)
    state = container.NEXT_STATE[state, own % 2]
  weight = np.array([10.0, 3.0])
  model, _ = entropy_coder.distributions_of(
    levels[1:].reshape(-1, columns), owner[1:].ravel(), 2, restart=restart, weight=weight
  )
  words, lengths = entropy_coder.encode_blocks(levels.astype(np.int32), owner, model)
  assert len(words) == lengths.sum()
  pages = np.zeros(1, container.PAGES)
  pages["lengths"][0, :blocks] = lengths
  pages["crc32"] = container.page_checksum(words, pages["lengths"][0])
  for compiled in (False, True):
    table = container.PagedTable.__new__(container.PagedTable)
    table._model, table.restart, table.shape = model, restart, (blocks * restart, columns)
    table._read({"words": words, "pages": pages.view(np.uint8)})
    found, groups = table._levels_of(np.array([4, 0, 2]), compiled)
    np.testing.assert_array_equal(found, levels[[4, 0, 2]])
    np.testing.assert_array_equal(groups, owner[[4, 0, 2]])


def test_damage_is_named_where_it_is(path, tmp_path):
  made(path)
  content = bytearray(path.read_bytes())
  content[4096 + 40] ^= 1
  damaged = tmp_path / "damaged.safetensors"
  damaged.write_bytes(content)
  table = container.read_table(damaged)
  np.testing.assert_array_equal(table[[V - 1]], made(path)[1][[V - 1]])
  with pytest.raises(container.DamagedTableError, match="checksum of rows 0 to 447"):
    table[[5]]
  damaged.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(container.DamagedTableError, match="ends before"):
    container.read_table(damaged)
  with pytest.raises(ValueError, match=r"truncated|damaged"):
    SmallTable.load(damaged)


@pytest.mark.parametrize("scale", [1e-12, 1e25])
def test_a_table_of_small_or_large_numbers_errs_as_others_do(tmp_path, scale):
  table, counts, out = TABLE[:700].astype(float) * scale, COUNTS[:700], tmp_path / "t.safetensors"
  options = {"size": 5000, "rows_of_block": 157}
  report = compress_rows(table.astype(np.float32), counts.tolist(), out, **options)
  found = SmallTable.load(out).table().astype(float)
  error, length = (counts @ (x**2).sum(axis=1) for x in (found - table, table))
  assert report.error == pytest.approx(error / length, rel=1e-3)
  usual = compress_rows(TABLE[:700], counts, out, **options)
  assert report.error == pytest.approx(usual.error, rel=0.1)


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"counts": COUNTS[:-1]}, rf"each of the {V} rows of the table; got uint32 \({V - 1},\)"),
    ({"counts": ["a"] * V}, "a number for each"),
    ({"counts": np.full(V, 1e308)}, "must have a finite sum; got inf"),
    ({"counts": -COUNTS.astype(float)}, "not negative; got -"),
    ({"counts": 0 * COUNTS}, "must not be all 0: the text reads no row"),
    ({"table": np.where(np.arange(V)[:, None] == 5000, np.nan, TABLE)}, "infinity in row 5000"),
    ({"table": TABLE.astype(int)}, "must be floating-point numbers"),
    ({"size": 900}, "the least size of this table is about"),
    ({"rows_of_block": 2000}, r"must be in \[1, 1260\] for rows of 13 numbers; got 2000"),
  ],
)
def test_bad_input_is_named(tmp_path, given, message):
  given = {"table": TABLE, "counts": COUNTS, "size": SIZE} | given
  with pytest.raises(ValueError, match=message):
    compress_rows(path=tmp_path / "t.safetensors", **given)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "of",
  [XorHash.qwen4(101, 3, heads=2, least=50, order=4), PolynomialHash(101, 3, (53, 59))],
)
def test_rows_are_counted_as_a_text_reads_them_whatever_its_parts(of, monkeypatch):
  text = RNG.integers(0, 101, 500)
  expected = np.bincount(of(text).ravel(), minlength=of.rows)
  np.testing.assert_array_equal(count_rows(of, text), expected)
  for tokens in (1, 2, 7):
    monkeypatch.setattr("vqjax.ops.ngrams.TOKENS", tokens)
    np.testing.assert_array_equal(count_rows(of, text), expected)
  both = count_rows(of, [text, text[:1], text[:0]], rows=of.rows + 3)
  np.testing.assert_array_equal(
    both[: of.rows], expected + np.bincount(of(text[:1]).ravel(), minlength=of.rows)
  )
  assert not both[of.rows :].any()
  windows = text.reshape(4, 5, 25)
  found = count_rows(of, windows)
  np.testing.assert_array_equal(found, np.bincount(of(windows).ravel(), minlength=of.rows))
  np.testing.assert_array_equal(count_rows(of, jnp.asarray(windows)), found)
  np.testing.assert_array_equal(count_rows(of, windows.astype(np.uint64)), found)
  with pytest.raises(ValueError, match=f"at least those of the hash, {of.rows}"):
    count_rows(of, text, rows=of.rows - 1)
