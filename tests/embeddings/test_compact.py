"""The compact form equals the evaluation forward; damaged files are refused."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted, reference, tiny
from tests.embeddings.quantized import QUANTIZERS, D, K, M, V, after_a_batch, vectors_of
from vqjax import DPQEmbedding, ProductEmbedding
from vqjax.embeddings import table_file
from vqjax.embeddings.compact import CompactEmbedding
from vqjax.ops import bit_packing


@pytest.mark.fast_cases(1)
def test_the_compact_form_is_the_evaluation_bit_for_bit(embedding, variables, tmp_path):
  tokens = np.arange(V).reshape(1, V)
  compact = embedding.compact(variables)
  expected = np.asarray(jitted.apply(embedding, variables, tokens))
  np.testing.assert_array_equal(vectors_of(compact, tokens), expected)
  file = tmp_path / "embedding.safetensors"
  compact.save(file)
  np.testing.assert_array_equal(vectors_of(CompactEmbedding.load(file), tokens), expected)
  with_numpy = table_file.open_table(file)[tokens]
  if embedding.quantizer.additive:
    # NumPy may add in another order.
    np.testing.assert_allclose(with_numpy, expected, atol=1e-6)
  else:
    np.testing.assert_array_equal(with_numpy, expected)


@pytest.mark.slow
def test_the_file_has_codes_and_values_and_nothing_else(embedding, variables, tmp_path):
  file = tmp_path / "embedding.safetensors"
  compact = embedding.compact(variables)
  compact.save(file)
  q = embedding.quantizer
  header = int.from_bytes(file.read_bytes()[:8], "little")
  # Eq. in Appendix E.2 where tables are shared; additive ones have whole vectors.
  tables = 1 / M if q.shared else q.subspaces if q.additive else 1
  values = int(K * D * tables)
  codes = -(-V * q.subspaces * 3 // 8)
  assert file.stat().st_size == 8 + header + codes + 4 * values
  assert compact.nbytes == codes + 4 * values == embedding.inference_size().state_bytes
  meta = json.loads(file.read_bytes()[8 : 8 + header])["__metadata__"]
  assert {meta[key] for key in "V"} == {str(V)}
  assert (meta["d"], meta["K"], meta["M"]) == (str(D), str(K), str(q.subspaces))


def test_an_average_of_packed_codes_is_refused():
  data, values = np.arange(6, dtype=np.uint8), np.ones((2, 3, 2), np.float32)
  small = CompactEmbedding(data, values, 11, 4, codes=3, subspaces=2, additive=False)
  with pytest.raises(ValueError, match=r"`data` .* got float32\. Average and cast"):
    jax.tree.map(lambda x: np.float32(0.9) * x, small)(np.arange(2))


def test_a_file_has_the_usual_permissions_and_replaces_one_that_is_read(tmp_path):
  (tmp_path / "usual").touch()
  path = tmp_path / "small.safetensors"
  embedding = ProductEmbedding(101, 12, 5, 4)
  small = embedding.compact(jitted.init(embedding, jax.random.key(0), np.arange(3)))
  small.save(path)
  assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode
  CompactEmbedding.load(path).save(path)
  again = CompactEmbedding.load(path)
  for name in ("data", "values"):
    np.testing.assert_array_equal(getattr(again, name), getattr(small, name))
  assert {file.name for file in tmp_path.iterdir()} == {"usual", "small.safetensors"}


def test_the_ratio_is_that_of_the_paper():
  """Table 4, small: 85.5 for K=8, M=25 shared, 51.1 for K=32; d + 1 for d."""
  for codes, printed in ((8, 85.5), (32, 51.1)):
    compact = CompactEmbedding(
      data=np.zeros(
        bit_packing.bit_packed_bytes(10_000, 25, bit_packing.bits_for(codes)), np.uint8
      ),
      values=np.zeros((1, codes, 8), np.float32),
      vocab=10_000,
      dim=200,
      codes=codes,
      subspaces=25,
      additive=False,
    )
    np.testing.assert_allclose(compact.compression_ratio() * 201 / 200, printed, atol=0.05)


@pytest.fixture
def saved(tmp_path):
  embedding = DPQEmbedding(V, D, QUANTIZERS["vq"])
  file = tmp_path / "embedding.safetensors"
  embedding.compact(after_a_batch(embedding)).save(file)
  return file


def test_the_reader_needs_only_numpy(saved, tmp_path):
  (tmp_path / "reader.py").write_text(pathlib.Path(table_file.__file__).read_text())
  script = (
    "import sys; sys.modules['jax'] = sys.modules['safetensors'] = None\n"
    "import numpy, reader\n"
    f"table = reader.open_table({str(saved)!r})\n"
    "print(table[[3, 0, 52]].sum(), len(table))\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
  )
  total, count = done.stdout.split()
  expected = vectors_of(CompactEmbedding.load(saved), np.array([3, 0, 52])).sum()
  np.testing.assert_allclose(float(total), expected, rtol=1e-5)
  assert int(count) == V


@pytest.mark.parametrize("kept", [0, 7, 50, -1])
def test_a_truncated_file_is_refused(saved, kept):
  whole = saved.read_bytes()
  saved.write_bytes(whole[:kept])
  with pytest.raises(ValueError, match="truncated"):
    CompactEmbedding.load(saved)


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    (b'"version":"1"', b'"version":"9"', "`version` .*'1'.*'9'"),
    (b'"format":"vqjax-t', b'"format":"other-t', "`format` .*other-t"),
    (b'"V":"53"', b'"V":"54"', r"codes .* must be uint8 of shape \(61,\)"),
    (b'"d":"12"', b'"d":"15"', "values .*shape"),
    (b'"K":"6"', b'"K":"x"', "`K` .*'x'"),
  ],
)
def test_a_file_that_contradicts_itself_is_refused(saved, old, new, message):
  whole = saved.read_bytes()
  assert old in whole
  saved.write_bytes(whole.replace(old, new))
  with pytest.raises(ValueError, match=message):
    CompactEmbedding.load(saved)


def test_codes_of_k_and_above_are_refused(saved):
  table = table_file.open_table(saved)
  whole = bytearray(saved.read_bytes())
  codes = np.asarray(table.data).tobytes()
  at = bytes(whole).index(codes)
  whole[at : at + len(codes)] = b"\xff" * len(codes)
  saved.write_bytes(bytes(whole))
  tiny.with_new_checksum(saved)
  with pytest.raises(ValueError, match=r"codes .*K=6"):
    CompactEmbedding.load(saved)


def test_tokens_outside_are_nan_in_jax_and_an_error_in_numpy(saved):
  small = CompactEmbedding.load(saved)
  assert np.isnan(vectors_of(small, np.array([V, -1]))).all()
  assert vectors_of(small, np.zeros((2, 0), int)).shape == (2, 0, D)
  with pytest.raises(IndexError, match=f"`tokens` .*{V}"):
    table_file.open_table(saved)[[V]]


LOW = [
  {"dtype": jnp.bfloat16},
  {"param_dtype": jnp.bfloat16},
  pytest.param({"param_dtype": jnp.float16}, marks=reference.needs_float16),
]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("quantizer", ["sx additive", "vq"])
@pytest.mark.parametrize("fields", [*LOW, {"dtype": jnp.float32, "param_dtype": jnp.bfloat16}])
def test_it_is_rounded_as_the_embedding_is(quantizer, fields, tmp_path):
  embedding, tokens = DPQEmbedding(V, D, QUANTIZERS[quantizer], **fields), np.arange(V)
  variables = jitted.init(embedding, jax.random.key(0), tokens)
  expected = jitted.apply(embedding, variables, tokens)
  embedding.compact(variables).save(tmp_path / "small.safetensors")
  found = vectors_of(CompactEmbedding.load(tmp_path / "small.safetensors"), tokens)
  assert found.dtype == expected.dtype
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"additive": True}, {"rotated": True}])
@pytest.mark.parametrize("fields", [{}, *LOW])
def test_fixed_codes_have_a_compact_form(options, fields):
  embedding = ProductEmbedding(V, D, K, M, **options, **fields)
  tokens = np.arange(V)
  variables = jitted.init(embedding, jax.random.key(0), tokens)
  compact, expected = embedding.compact(variables), jitted.apply(embedding, variables, tokens)
  np.testing.assert_array_equal(vectors_of(compact, tokens), expected)
  assert embedding.inference_size().state_bytes == compact.nbytes


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda header: header.update(__metadata__=None), "not a small table"),
    (lambda header: header["__metadata__"].update(K=6), "not a small table"),
    (lambda header: header["codes"].pop("shape"), "describe a tensor 'codes'"),
    (lambda header: header["codes"].update(data_offsets=[-60, 0]), "describe a tensor 'codes'"),
    (lambda header: header["codes"].update(data_offsets=["0", "60"]), "describe a tensor 'codes'"),
    (lambda header: header["codes"].update(data_offsets=[0, 60]), "overlap"),
  ],
)
def test_a_header_without_tensors_is_refused(saved, change, message):
  whole = saved.read_bytes()
  end = 8 + int.from_bytes(whole[:8], "little")
  header = json.loads(whole[8:end])
  change(header)
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  saved.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])
  with pytest.raises(ValueError, match=message):
    table_file.open_table(saved)


def test_the_reader_refuses_codes_of_k_and_tokens_that_are_not_integers(saved):
  table = table_file.open_table(saved)
  table.data = np.full_like(table.data, 255)
  with pytest.raises(ValueError, match=r"codes .*K=6"):
    table[[0]]
  for tokens in ([1.7], [True, False]):
    with pytest.raises(IndexError, match=r"`tokens` .*integers"):
      table[tokens]


def test_no_damaged_file_loads(saved):
  """A bit is flipped anywhere, and each byte of the header is another one."""
  whole, draw = saved.read_bytes(), np.random.default_rng(0)
  end = 8 + int.from_bytes(whole[:8], "little")
  expected = table_file.open_table(saved)[np.arange(V)]
  flipped = [*range(0, end, 5), *range(end, len(whole), 3)]
  damage = [(at, whole[at] ^ 1 << at % 8) for at in flipped]
  for at, byte in damage + [(at, draw.integers(32, 127)) for at in range(8, end)]:
    damaged = bytearray(whole)
    damaged[at] = byte
    saved.write_bytes(damaged)
    try:
      found, message = table_file.open_table(saved)[np.arange(V)], None
    except ValueError as error:
      found, message = expected, str(error)
    # The same byte, and a blank of another kind at the end of the header, are read as before.
    assert whole[at] in (*b" ", byte) if message is None else str(saved) in message
    np.testing.assert_array_equal(found, expected)


def test_a_file_may_be_opened_without_reading_all_of_it(saved):
  whole = bytearray(saved.read_bytes())
  whole[-1] ^= 64
  saved.write_bytes(whole)
  with pytest.raises(ValueError, match="is damaged: it does not have the checksum"):
    table_file.open_table(saved)
  assert len(table_file.open_table(saved, verify=False)) == V


def test_only_floating_dtypes_are_saved_and_loaded(saved, tmp_path):
  compact = CompactEmbedding.load(saved)
  with pytest.raises(ValueError, match=r"`dtype` must be one of float32, .*; got 'int8'"):
    dataclasses.replace(compact, dtype="int8").save(tmp_path / "other")
  assert not (tmp_path / "other").exists()
  saved.write_bytes(saved.read_bytes().replace(b'"dtype":"float32"', b'"dtype":"int8"   '))
  tiny.with_new_checksum(saved)
  with pytest.raises(ValueError, match=r"`dtype` of .* must be one of float32, .*; got 'int8'"):
    CompactEmbedding.load(saved)
