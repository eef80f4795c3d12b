"""A compressed array has the size that was allowed, the least error, and the scores of its rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from scipy.special import log_softmax

import vqjax
from tests import reference
from vqjax import convert, nnx
from vqjax.embeddings import ProductEmbedding, table_file
from vqjax.tables import Moments, byte_budget, compressing, container
from vqjax.tables.tensor_files import RowShards

pytestmark = pytest.mark.programs(100)  # methods and layers run operation by operation

V, D = 101, 12
CODES = {
  "product": vqjax.Product(codes=8, subspaces=3),
  "clusters": vqjax.Clusters(codes=8),
  "scalar": vqjax.Scalar(bits=3),
}
METHODS = CODES | {"int8": vqjax.Int8(), "integers": vqjax.Integers(), "packed": vqjax.Packed()}
BOUNDS = {"integers": "3KB", "packed": "4KB"}
"""Sizes of the methods that need one."""

every_method = pytest.mark.parametrize("name", METHODS)


TABLE = np.random.default_rng(0).normal(size=(V, D)).astype(np.float32)
BIAS = np.random.default_rng(2).normal(size=V).astype(np.float16).astype(np.float32)
"""Biases as they are kept."""

_rng = np.random.default_rng(1)
HIDDEN = (_rng.normal(size=(300, D)) * np.arange(1, D + 1)) @ _rng.normal(size=(D, D))
"""Hidden states with strongly correlated components, as those of a model."""


@functools.cache
def compressed(name, with_bias=False):
  bias = BIAS if with_bias else None
  return vqjax.compress(TABLE, bytes=BOUNDS.get(name), method=METHODS[name], bias=bias)


def relative_error(found, table, weights=None, hidden=None):
  """float64: sum of w_v E[(h · (found - row))²] over that of the rows; h unit vectors if None."""
  hidden = np.eye(table.shape[1]) if hidden is None else hidden
  weights = np.ones(len(table)) if weights is None else weights
  energy = lambda rows: weights @ ((np.asarray(rows, np.float64) @ hidden.T) ** 2).sum(axis=1)
  return energy(np.asarray(found, np.float64) - table) / energy(table)


def rows_of(small):
  return small.rows(np.arange(small.shape[0]))


@pytest.mark.fast_cases(2)
@every_method
def test_the_report_has_the_size_and_the_error_of_the_result(name):
  counts, method = np.arange(V), METHODS[name]
  small = vqjax.compress(TABLE, bytes=BOUNDS.get(name), method=method, counts=counts, hidden=HIDDEN)
  report, found = small.report, rows_of(small)
  np.testing.assert_allclose(report.error, relative_error(found, TABLE), rtol=1e-5)
  weighted = relative_error(found, TABLE, counts + 1.0, HIDDEN)
  np.testing.assert_allclose(report.weighted_error, weighted, rtol=1e-4)
  assert report.bytes == small.nbytes
  assert report.bits_per_weight == 8 * report.bytes / TABLE.size
  assert report.ratio == TABLE.nbytes / report.bytes
  assert report.method == method
  assert report.seconds > 0
  log_p = log_softmax(HIDDEN @ TABLE.T.astype(np.float64), axis=-1)
  log_q = log_softmax(HIDDEN @ found.T.astype(np.float64), axis=-1)
  divergence = (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()
  # float32 scores of some hundreds.
  np.testing.assert_allclose(report.kl, divergence, rtol=1e-2)
  assert method.__class__.__name__ in str(report)
  assert "of float32" in str(report)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "int8"])
def test_hidden_states_lower_the_error_of_the_scores(name):
  counts, plain = np.arange(V), rows_of(compressed(name))
  options = {"bytes": BOUNDS.get(name), "method": METHODS[name], "counts": counts}
  guided = rows_of(vqjax.compress(TABLE, hidden=HIDDEN, **options))
  of = lambda rows: relative_error(rows, TABLE, counts + 1.0, HIDDEN)
  assert of(guided) < 0.9 * of(plain)


def test_counts_lower_the_error_of_frequent_tokens():
  counts = np.where(np.arange(V) < 10, 1000, 0)
  weighted = vqjax.compress(TABLE, method=METHODS["product"], counts=counts)
  of = lambda small: relative_error(rows_of(small)[:10], TABLE[:10])
  assert of(weighted) < 0.5 * of(compressed("product"))


def test_no_other_code_of_a_number_lowers_the_error_of_the_scores():
  small = vqjax.compress(TABLE, method=vqjax.Scalar(3), hidden=HIDDEN)
  # What is minimised: the second moment, shrunk to the identity by D / (N + D).
  share, moment = D / (len(HIDDEN) + D), HIDDEN.T @ HIDDEN / len(HIDDEN)
  second = (1 - share) * moment + share * np.trace(moment) / D * np.eye(D)
  found = np.float64(rows_of(small))
  error = found - TABLE
  for m in range(D):
    for level in small.form.values[0, :, 0]:
      other = error.copy()
      other[:, m] += level - found[:, m]
      cost = lambda e: ((e @ second) * e).sum(axis=1)
      assert (cost(other) > cost(error) * (1 - 1e-4)).all()


@pytest.mark.slow
def test_more_bytes_lower_the_error():
  small = [vqjax.compress(TABLE, bytes=fraction) for fraction in (1 / 8, 1 / 4, 1 / 2)]
  errors = [each.report.error for each in small]
  assert errors[0] > errors[1] > errors[2]


def test_integers_are_the_default_and_err_less_than_codes():
  table = np.random.default_rng(0).normal(size=(1500, 24)).astype(np.float32)
  small = vqjax.compress(table, bytes=1 / 8)
  assert small.report.method == vqjax.Integers()
  codes = vqjax.compress(table, bytes=1 / 8, method=vqjax.Product())
  assert 0.985 / 8 * table.nbytes < small.nbytes <= table.nbytes / 8
  assert small.report.error < 0.5 * codes.report.error


def test_codes_are_the_default_where_the_map_of_integers_does_not_fit():
  small = vqjax.compress(TABLE, bytes=1 / 6)
  assert small.codec == "codes"
  with pytest.raises(ValueError, match="the least size of these tables is"):
    vqjax.compress(TABLE, bytes=1 / 6, method=vqjax.Integers())


@pytest.mark.parametrize("method", [None, vqjax.Packed()])
def test_a_divergence_is_a_bound_too(method):
  hidden = HIDDEN / np.abs(HIDDEN).max()
  small = vqjax.compress(TABLE, kl=0.01, method=method, hidden=hidden, bias=BIAS)
  # So few rows have few widths of packed bits.
  assert (0.005 if method is None else 0) < small.report.kl <= 0.01
  log_p, log_q = (
    log_softmax(hidden @ rows.T.astype(np.float64) + BIAS, axis=-1)
    for rows in (TABLE, rows_of(small))
  )
  divergence = (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()
  np.testing.assert_allclose(small.report.kl, divergence, rtol=1e-3)


def test_moments_are_those_of_counts_and_hidden_states():
  counts = np.arange(V)
  moments = Moments(HIDDEN.T @ HIDDEN / len(HIDDEN), counts, len(HIDDEN))
  wanted = vqjax.compress(TABLE, bytes="4KB", counts=counts, hidden=HIDDEN, method=vqjax.Integers())
  found = vqjax.compress(TABLE, bytes="4KB", moments=moments, method=vqjax.Integers())
  np.testing.assert_array_equal(rows_of(found), rows_of(wanted))


@pytest.mark.parametrize(("dtype", "with_bias"), [(np.float32, True), (bfloat16, False)])
def test_the_tensors_of_the_file_are_within_the_bytes(dtype, with_bias, tmp_path):
  bias = BIAS if with_bias else None
  small = vqjax.compress(TABLE.astype(dtype), bytes=1 / 3, method=vqjax.Product(), bias=bias)
  small.save(tmp_path / "small.safetensors")
  tensors = load_file(tmp_path / "small.safetensors")
  assert tensors.keys() - {"basis"} == {"codes", "values"} | ({"bias"} if with_bias else set())
  size = sum(x.nbytes for x in tensors.values())
  assert size == small.nbytes <= TABLE.astype(dtype).nbytes / 3


def test_a_bias_takes_two_bytes_where_they_hold_it():
  small = compressed("int8", with_bias=True)
  assert small.bias.dtype == np.float16
  for large in (BIAS * 2**17, BIAS + 1000):
    kept = vqjax.compress(TABLE, method=vqjax.Int8(), bias=large)
    np.testing.assert_array_equal(kept.bias, large)
    assert kept.nbytes - small.nbytes == 2 * V


def test_bytes_are_a_fraction_or_a_number():
  wanted = {1 / 8: 100, "1/8": 100, 0.1: 80, "0.1": 80, 1: 800, 65: 65, "65MB": 65_000_000}
  wanted |= {"1.5 kib": 1536, "1e3": 1000, 6.5e7: 65_000_000, "7B": 7, "1MB": 10**6}
  assert {given: byte_budget(given, 800) for given in wanted} == wanted
  for given in ("9" * 400, "-5MB", "nanMB", ".", "3EB", "0", 0, -1, "1/0", "0.5B", None):
    with pytest.raises(ValueError, match=r"`bytes` must be a fraction .*, or a number of bytes"):
      byte_budget(given, 800)


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize(("vocab", "dim"), [(101, 12), (10_007, 64), (50_257, 768), (997, 7)])
def test_a_budget_is_used_and_has_the_most_bits_of_equal_parts(vocab, dim, dtype):
  rows = np.broadcast_to(np.zeros((), dtype), (vocab, dim))
  for fraction in (0.06, 0.1, 0.26, 0.9):
    try:
      chosen = compressing._product_within(fraction * rows.nbytes, rows)
    except ValueError:
      continue

    def size(codes, subspaces, rotated=False):
      width = -(-dim // subspaces) * subspaces
      packed = -(-vocab * subspaces * int(codes - 1).bit_length() // 8)
      return packed + 4 * codes * width + rotated * 2 * width * dim

    def bits(codes, subspaces, rotated=False):
      return subspaces * np.log2(codes)

    assert size(*chosen) <= fraction * rows.nbytes
    if vocab * dim > 10**5 and fraction * rows.itemsize <= 1:  # at most 8 bits a number
      assert size(*chosen) > 0.9 * fraction * rows.nbytes
    for subspaces in (m for m in range(1, dim + 1) if dim % m == 0):
      for codes in (2, 4, 8, 16, 32, 64, 128, 256):
        if codes <= vocab and size(codes, subspaces) <= fraction * rows.nbytes:
          # A basis has the worth of some bits.
          assert bits(codes, subspaces) <= 1.1 * bits(*chosen)


def test_a_basis_lowers_the_error_and_every_form_has_the_rows(tmp_path):
  rng, vocab = np.random.default_rng(5), 3001
  mixed = np.linalg.qr(rng.normal(size=(D, D)))[0]
  table = (rng.normal(size=(vocab, D)) * np.arange(1, D + 1) @ mixed).astype(np.float32)
  plain = convert.to_clusters(ProductEmbedding(vocab, D, 16, 4), table, key=jax.random.key(0))
  plain = ProductEmbedding(vocab, D, 16, 4).compact(plain)
  small = vqjax.compress(table, method=vqjax.Product(16, 4))
  assert small.report.error < 0.9 * relative_error(vqjax.SmallTable(plain).table(), table)
  guided = vqjax.compress(table, method=vqjax.Product(16, 4), hidden=HIDDEN)
  assert guided.report.weighted_error < 0.9 * relative_error(small.table(), table, hidden=HIDDEN)
  # The number of parts need not divide the width.
  small = vqjax.compress(table, method=vqjax.Product(16, 5), bias=rng.normal(size=vocab))
  assert (small.form.basis.dtype, small.form.basis.shape) == (np.float16, (15, D))
  rows, hidden = small.table(), rng.normal(size=(3, D)).astype(np.float32)
  np.testing.assert_allclose(small.report.error, relative_error(rows, table), rtol=1e-5)
  small.save(tmp_path / "small.safetensors")
  loaded = vqjax.SmallTable.load(tmp_path / "small.safetensors")
  assert loaded.nbytes == small.nbytes
  np.testing.assert_array_equal(loaded.table(), rows)
  read = table_file.open_table(tmp_path / "small.safetensors")
  np.testing.assert_allclose(read[np.arange(vocab)], rows, atol=1e-4)
  scores = log_softmax(hidden @ rows.T + small.bias, axis=-1)[range(3), range(3)]
  head, embedding = loaded.to_nnx(), loaded.to_nnx("embedding")
  found = jax.jit(lambda hidden: (head.log_prob(hidden, np.arange(3)), embedding.table()))(hidden)
  np.testing.assert_allclose(found[0], scores, atol=1e-3)
  np.testing.assert_allclose(found[1], rows, atol=1e-4)


def test_the_least_fraction_of_the_message_is_reachable():
  product = vqjax.Product()
  with pytest.raises(ValueError, match="`bytes` must be at least") as caught:
    vqjax.compress(TABLE, bytes=0.001, method=product)
  least = float(str(caught.value).split("at least ")[1].split()[0])
  assert vqjax.compress(TABLE, bytes=least, method=product).nbytes <= least * TABLE.nbytes
  with pytest.raises(ValueError, match="must be at least"):
    vqjax.compress(TABLE, bytes=0.95 * least, method=product)


@pytest.mark.fast_cases(2)
@every_method
@pytest.mark.parametrize("with_bias", [True, False])
def test_what_is_loaded_has_the_rows_the_bias_and_the_layers(name, with_bias, tmp_path):
  path, saved = tmp_path / "small.safetensors", compressed(name, with_bias)
  saved.save(path)
  small, rows = vqjax.SmallTable.load(path), rows_of(saved)
  assert (small.codec, small.shape, small.nbytes) == (saved.codec, (V, D), saved.nbytes)
  np.testing.assert_array_equal(rows_of(small), rows)
  np.testing.assert_array_equal(small.table(), rows)
  np.testing.assert_array_equal(small.rows([[5, 7]]), rows[[[5, 7]]])
  np.testing.assert_array_equal(small.bias, BIAS if with_bias else None)
  if name == "integers":
    np.testing.assert_array_equal(container.read_table(path).rows(), rows)
  else:
    read = table_file.open_table(path)
    # Packed rows are summed in another order.
    np.testing.assert_allclose(read[np.arange(V)], rows, atol=1e-6 if name == "packed" else 0)
    np.testing.assert_array_equal(read.bias, BIAS if with_bias else None)
  embedding, own = small.to_embedding()
  np.testing.assert_allclose(jax.jit(embedding.apply)(own, np.arange(V)), rows, atol=1e-6)
  assert isinstance(small.to_nnx("embedding"), nnx.Embedding)
  assert isinstance(small.to_nnx(), nnx.Head)
  head, variables = small.to_head()
  hidden = np.random.default_rng(3).normal(size=(2, 9, D)).astype(np.float32)
  tokens = np.arange(18).reshape(2, 9) * 5

  @jax.jit
  def run(hidden):
    linen, in_nnx = head.bind(variables), nnx.from_linen(head, variables)
    log_probs = linen.log_prob(hidden, tokens), in_nnx.log_prob(hidden, tokens)
    best = linen.top_k(hidden[0], 3), in_nnx.top_k(hidden[0], 3)
    return log_probs, best, linen.sample(hidden, jax.random.key(1))

  log_probs, best, drawn = jax.device_get(run(hidden))
  expected = reference.linear_log_prob(hidden, rows, tokens, small.bias)
  np.testing.assert_allclose(log_probs[0], expected, atol=1e-5)
  jax.tree.map(np.testing.assert_array_equal, log_probs[1], log_probs[0])
  jax.tree.map(np.testing.assert_array_equal, best[1], best[0])
  assert drawn.shape == (2, 9)
  fresh = jax.eval_shape(head.init, jax.random.key(0), hidden)
  assert jax.tree.map(np.shape, variables) == jax.tree.map(np.shape, fresh)


@pytest.mark.parametrize("name", ["int8", "integers", "packed"])
def test_a_flipped_bit_or_a_missing_end_is_an_error(name, tmp_path):
  path = tmp_path / "small.safetensors"
  compressed(name).save(path)
  whole = path.read_bytes()
  for at in np.linspace(8, len(whole) - 1, 12).astype(int):
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
    with pytest.raises(ValueError, match=r"small\.safetensors"):
      vqjax.SmallTable.load(path)
    path.write_bytes(whole[:at])
    with pytest.raises(ValueError, match=r"small\.safetensors"):
      vqjax.SmallTable.load(path)


@pytest.mark.parametrize("ids", [[-1], [V], [1.0]])
def test_ids_outside_the_table_are_refused(ids):
  with pytest.raises(IndexError, match=r"`ids` must be integers in \[0, 101\)"):
    compressed("int8").rows(ids)


def memory_mapped(table, tmp_path):
  path = tmp_path / "table.bin"
  table.astype(bfloat16).tofile(path)
  return np.memmap(path, bfloat16, "r", shape=table.shape)


def slice_of_a_file(table, tmp_path):
  save_file({"weight": table.astype(bfloat16)}, tmp_path / "table.safetensors")
  with safe_open(tmp_path / "table.safetensors", framework="np") as file:
    return file.get_slice("weight")


@pytest.mark.parametrize(
  ("given", "dtype"),
  [
    (lambda table, path: jnp.asarray(table), np.float32),
    (lambda table, path: np.asfortranarray(table), np.float32),
    (lambda table, path: table.tolist(), np.float32),
    (lambda table, path: jnp.asarray(table, jnp.bfloat16), bfloat16),
    (memory_mapped, bfloat16),
    (slice_of_a_file, bfloat16),
  ],
)
def test_arrays_of_all_kinds_give_the_same_result(given, dtype, tmp_path):
  method = METHODS["product"]
  wanted = vqjax.compress(TABLE.astype(dtype).astype(np.float32), method=method)
  found = vqjax.compress(given(TABLE, tmp_path), method=method)
  np.testing.assert_array_equal(found.form.data, wanted.form.data)
  np.testing.assert_array_equal(found.form.values, wanted.form.values)


def test_a_result_is_the_same_again_and_another_with_another_seed():
  first = compressed("product")
  again, other = (vqjax.compress(TABLE, method=METHODS["product"], seed=seed) for seed in (0, 1))
  np.testing.assert_array_equal(first.form.data, again.form.data)
  assert (np.asarray(first.form.data) != np.asarray(other.form.data)).any()


@pytest.mark.parametrize("method", [vqjax.Clusters(2), vqjax.Scalar(3)])
def test_equal_rows_are_kept_exactly(method):
  small = vqjax.compress(np.full((5, 3), 2.5, np.float32), method=method)
  np.testing.assert_array_equal(rows_of(small), np.full((5, 3), 2.5))
  assert small.report.error == 0


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"table": np.zeros(7)}, r"`table` must have shape \[V, D\].*\[7\]"),
    ({"table": np.zeros((0, 7))}, r"`table` must have shape \[V, D\].*\[0, 7\]"),
    ({"table": np.zeros((5, 3), int)}, "`table` must hold floating-point .*int64"),
    ({"table": np.array([[1.0], [np.nan]])}, "`table` must be finite.*row 1"),
    ({"table": np.array([[1.0], [1e300]])}, "`table` must be finite in float32.*row 1"),
    (
      {"table": 1e6 * TABLE, "method": vqjax.Packed(), "bytes": 0.5},
      "`table` must have means and scales that float16 holds",
    ),
    ({"bytes": 1 / 16}, "`bytes` must be left out for a method that has its own size"),
    ({"bytes": 1 / 16, "kl": 0.1}, "one of `bytes` and `kl` .*both"),
    ({"method": None}, "one of `bytes` and `kl` .*neither"),
    ({"method": vqjax.Integers()}, r"one of `bytes` and `kl` must be given with Integers\(\)"),
    ({"method": vqjax.Product()}, "`codes` and `subspaces` must be given without `bytes`"),
    ({"method": None, "kl": 0.1}, "`kl` must be positive, with a sample `hidden`"),
    ({"method": None, "bytes": -16}, r"`bytes` must be a fraction .*16"),
    ({"method": None, "bytes": 1e-9}, "`bytes` must be at least"),
    ({"method": vqjax.Int8(group=5)}, "`group` must divide the width of the table, 12; got 5"),
    (
      {"moments": Moments(np.eye(D), np.ones(V), 1), "counts": np.ones(V)},
      "`moments` must be given without `counts` and `hidden`",
    ),
    ({"moments": Moments(np.eye(D), np.ones(V + 1), 1)}, "an entry for each of the 101 rows"),
    ({"method": vqjax.Product(8, 5)}, "`subspaces` must divide dim 12; got 5"),
    ({"method": vqjax.Clusters(102)}, r"`codes` must be in \[1, vocab\]; got 102"),
    ({"counts": np.arange(7)}, r"`counts` must have shape \(101,\); got \(7,\)"),
    ({"hidden": np.ones((5, 7))}, r"`hidden` must have shape \[..., 12\].*\[5, 7\]"),
    ({"hidden": np.full((5, D), np.inf)}, "`hidden` must be finite"),
    ({"bias": np.ones(7)}, r"`bias` must be 101 finite numbers.*\(7,\)"),
  ],
)
def test_bad_input_is_refused(change, message):
  options = {"table": TABLE, "method": METHODS["product"]} | change
  with pytest.raises(ValueError, match=message):
    vqjax.compress(options.pop("table"), **options)


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_outside_their_range_are_refused(bits):
  with pytest.raises(ValueError, match=rf"`bits` must be in \[1, 8\]; got {bits}"):
    vqjax.Scalar(bits)


def test_a_bias_of_another_length_in_a_file_is_refused(tmp_path):
  compressed("scalar", with_bias=True).save(tmp_path / "small.safetensors")
  whole = (tmp_path / "small.safetensors").read_bytes()
  assert b'"shape":[101]' in whole
  (tmp_path / "small.safetensors").write_bytes(whole.replace(b'"shape":[101]', b'"shape":[100]'))
  with pytest.raises(ValueError, match="bias"):
    table_file.open_table(tmp_path / "small.safetensors")


def test_a_long_row_does_not_hide_the_errors_of_the_others():
  table = np.random.default_rng(0).standard_normal((300, 16), np.float32)
  table[7] *= 1e4
  report = vqjax.compress(table, method=vqjax.Scalar(bits=3)).report
  assert report.error < report.median_error / 10
  assert report.median_error < report.worst_error
  assert report.worst_row != 7
  assert "an outlier" in str(report)
  table[7] /= 100
  assert "an outlier" in str(vqjax.compress(table, method=vqjax.Product(16, 8)).report)
  even = vqjax.compress(table[8:], method=vqjax.Scalar(bits=3)).report
  assert even.median_error == pytest.approx(even.error, rel=0.2)
  assert "an outlier" not in str(even)


def test_a_long_column_does_not_hide_the_errors_of_the_others():
  table = np.random.default_rng(0).standard_normal((300, 16), np.float32)
  table[:, 3] *= 1e3
  small = vqjax.compress(table, method=vqjax.Scalar(bits=3))
  found = np.asarray(small.rows(np.arange(300)), np.float64)
  of_columns = ((found - table) ** 2).sum(axis=0) / (np.float64(table) ** 2).sum(axis=0)
  assert small.report.median_column_error == pytest.approx(np.median(of_columns), rel=1e-6)
  assert "an outlier among the columns" in str(small.report)


def test_a_mean_row_that_all_share_does_not_hide_the_error():
  report = vqjax.compress(TABLE + 50, method=vqjax.Scalar(bits=4)).report
  assert report.centred_error > 100 * report.error
  assert f"is {report.centred_error:.3g} about the mean row" in str(report)
  plain = compressed("scalar").report
  centred = ((TABLE - TABLE.mean(axis=0, dtype=np.float64)) ** 2).sum()
  expected = plain.error * np.square(TABLE, dtype=np.float64).sum() / centred
  assert plain.centred_error == pytest.approx(expected, rel=1e-6)
  assert "mean row" not in str(plain)


def test_the_shards_of_a_table_are_compressed_as_the_whole():
  shards = RowShards([TABLE[:50], TABLE[50:]])
  found = vqjax.compress(shards, method=METHODS["int8"])
  whole = compressed("int8")
  np.testing.assert_array_equal(rows_of(found), rows_of(whole))
  assert found.report.centred_error == whole.report.centred_error


def test_the_scale_of_a_table_does_not_matter():
  plain = vqjax.compress(TABLE, bytes=1 / 4).report
  tiny = vqjax.compress(TABLE * np.float32(2**-30), bytes=1 / 4).report
  assert tiny.error == pytest.approx(plain.error, rel=0.1)
