"""Compact files in PyTorch: the vectors of NumPy's reader, and the scores of the JAX head."""

import pathlib
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import bfloat16

import vqjax
from tests import tiny
from tests.jitted import initial_variables, results
from vqjax import convert
from vqjax.embeddings import ProductEmbedding, ScalarEmbedding, table_file

torch = pytest.importorskip("torch")

from vqjax.tables import torch_reader  # noqa: E402

V, D = 101, 12
FORMS = {
  "product": ProductEmbedding(V, D, 6, 4),
  "shared": ProductEmbedding(V, D, 6, 4, shared=True),
  "clusters": ProductEmbedding(V, D, 9, 1),
  "additive": ProductEmbedding(V, D, 6, 3, additive=True),
  "rotated": ProductEmbedding(V, D, 6, 5, rotated=True),
}


@pytest.fixture(scope="module", params=FORMS)
def written(request, tmp_path_factory):
  """The file of a form, and the compact embedding in it, with a bias in every second one."""
  embedding, tmp_path = FORMS[request.param], tmp_path_factory.mktemp("written")
  small = embedding.compact(initial_variables(embedding, np.arange(3)))
  bias = np.random.default_rng(0).normal(size=V).astype(np.float32)
  small = small.__class__(**vars(small) | {"bias": bias if small.subspaces != 4 else None})
  small.save(tmp_path / "small.safetensors")
  return tmp_path / "small.safetensors", small


@pytest.fixture
def saved(written, tmp_path):
  """A copy that a test may damage."""
  path, small = written
  return shutil.copy(path, tmp_path / "small.safetensors"), small


def test_vectors_are_those_of_the_reader_in_numpy(saved):
  path, small = saved
  tokens = np.random.default_rng(0).integers(0, V, (3, 5))
  found = torch_reader.TorchTable(path)(torch.tensor(tokens))
  assert found.dtype == torch.float32
  expected = table_file.open_table(path)[tokens]
  # A mean, or a product with a basis, may be added in another order.
  is_exact = not small.additive and small.basis is None
  np.testing.assert_allclose(found, expected, rtol=0, atol=0 if is_exact else 1e-6)


@pytest.mark.parametrize("batch", [(), (2, 0), (3, 5)])
def test_scores_are_products_with_the_vectors_plus_the_bias(saved, batch):
  path, small = saved
  hidden = np.random.default_rng(0).normal(size=(*batch, D)).astype(np.float32)
  found = torch_reader.TorchTable(path).scores(torch.tensor(hidden))
  expected = hidden.astype(np.float64) @ results(small.table).astype(np.float64).T
  expected = expected if small.bias is None else expected + small.bias
  assert found.dtype == torch.float32
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_model_in_bfloat16_has_scores(saved):
  path, _ = saved
  exact, narrow = (torch_reader.TorchTable(path) for _ in range(2))
  hidden = torch.randn(3, D, generator=torch.Generator().manual_seed(0))
  found = narrow.to(torch.bfloat16).scores(hidden.to(torch.bfloat16))
  # Eight bits of D products of order one.
  np.testing.assert_allclose(found, exact.scores(hidden), atol=0.1)


@pytest.mark.parametrize("bits", range(1, 9))
def test_scalar_codes_are_read_at_their_bits(bits, tmp_path):
  embedding = ScalarEmbedding(V, 7, bits)
  rows = np.random.default_rng(0).normal(size=(V, 7))
  small = embedding.compact(convert.to_levels(embedding, rows))
  small.save(tmp_path / "small.safetensors")
  found = torch_reader.TorchTable(tmp_path / "small.safetensors")(torch.arange(V))
  np.testing.assert_array_equal(found, results(small.table))


def test_vectors_are_rounded_to_the_dtype_of_the_embedding(tmp_path):
  embedding = ProductEmbedding(V, D, 6, 4, dtype=jnp.bfloat16)
  small = embedding.compact(initial_variables(embedding, np.arange(3)))
  small.save(tmp_path / "small.safetensors")
  found = torch_reader.TorchTable(tmp_path / "small.safetensors")(torch.arange(V))
  assert found.dtype == torch.bfloat16
  np.testing.assert_array_equal(found.float(), results(small.table).astype(np.float32))


@pytest.mark.programs(60)  # methods run operation by operation
@pytest.mark.parametrize(
  ("method", "size"), [(None, "4KB"), (vqjax.Packed(), "4KB"), (vqjax.Int8(group=4), None)]
)
def test_tables_of_every_codec_have_their_rows_and_scores(method, size, tmp_path):
  rng = np.random.default_rng(0)
  table, bias = rng.normal(size=(V, D)).astype(np.float32), rng.normal(size=V).astype(np.float32)
  small = vqjax.compress(table, bytes=size, method=method, bias=bias)
  small.save(tmp_path / "small.safetensors")
  found = torch_reader.TorchTable(tmp_path / "small.safetensors")
  rows = small.table()
  np.testing.assert_allclose(found(torch.arange(V)), rows, atol=1e-5)
  hidden = rng.normal(size=(3, D)).astype(np.float32)
  scores = found.scores(torch.tensor(hidden))
  np.testing.assert_allclose(scores, hidden @ rows.T + small.bias, atol=1e-4)
  assert f"codec={small.codec}" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("copied", [True, False])
def test_neither_the_module_nor_a_copy_of_its_file_imports_jax(copied, tmp_path):
  embedding = FORMS["product"]
  small = embedding.compact(initial_variables(embedding, np.arange(3)))
  small.save(tmp_path / "small.safetensors")
  (tmp_path / "reader.py").write_text(pathlib.Path(torch_reader.__file__).read_text())
  script = (
    "import sys\n"
    f"from {'reader' if copied else torch_reader.__name__} import TorchTable\n"
    f"import torch\nsmall = TorchTable({str(tmp_path / 'small.safetensors')!r})\n"
    f"print(*small.scores(small(torch.arange(5))).shape)\n"
    "assert not {'jax', 'flax'} & set(sys.modules)\n"
  )
  folder = tmp_path if copied else pathlib.Path(vqjax.__file__).parents[1]
  done = subprocess.run(
    [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ["5", str(V)]


def test_printing_shows_the_sizes(saved):
  assert f"{V}, {D}, codec=codes, codes=" in str(torch_reader.TorchTable(saved[0]))


def test_tokens_outside_and_hidden_states_of_another_width_are_refused(saved):
  small = torch_reader.TorchTable(saved[0])
  for token in (-1, V):
    with pytest.raises(IndexError, match=rf"`tokens` must be in \[0, {V}\)"):
      small(torch.tensor([0, token]))
  with pytest.raises(ValueError, match=f"`hidden` .*{D}.*; got 5"):
    small.scores(torch.zeros(2, 5))


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    (b'"version":"1"', b'"version":"9"', "`version` .*'1'.*'9'"),
    (b'"format":"vqjax-t', b'"format":"other-t', "`format` .*other-t"),
    (b'"codec":"codes"', b'"codec":"other"', "`codec` .*other"),
    (b'"V":"101"', b'"V":"900"', "bytes of codes"),
  ],
)
def test_a_file_that_contradicts_itself_is_refused(saved, old, new, message):
  path, _ = saved
  whole = path.read_bytes()
  assert old in whole
  path.write_bytes(whole.replace(old, new))
  tiny.with_new_checksum(path)
  with pytest.raises(ValueError, match=message):
    torch_reader.TorchTable(path)


@pytest.mark.programs(40)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_table_of_torch_is_compressed_as_one_of_numpy(dtype):
  table = torch.nn.Parameter(torch.randn(V, D, generator=torch.manual_seed(0)).to(dtype))
  own = table.detach().double().numpy()
  own = own.astype(bfloat16 if dtype == torch.bfloat16 else str(dtype).removeprefix("torch."))
  counts, hidden = torch.arange(V), torch.randn(2, 9, D, generator=torch.manual_seed(1)).to(dtype)
  method = vqjax.Product(codes=8, subspaces=3)
  for transposed in (False, True):
    given = table.T.contiguous().T if transposed else table
    found = vqjax.compress(given, method=method, counts=counts, hidden=hidden, bias=table[:, 0])
    wanted = vqjax.compress(
      own,
      method=method,
      counts=counts.numpy(),
      hidden=hidden.double().numpy(),
      bias=own[:, 0].astype(np.float32),
    )
    np.testing.assert_array_equal(found.form.data, wanted.form.data)
    np.testing.assert_array_equal(found.bias, wanted.bias)


def test_a_tensor_on_another_device_is_refused():
  with pytest.raises(ValueError, match=r"`table` must be in the memory .*table.cpu\(\)"):
    vqjax.compress(torch.zeros(5, 3, device="meta"), bytes=1 / 2)
