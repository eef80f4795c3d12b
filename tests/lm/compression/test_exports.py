"""Other runtimes load what is exported, and compute with the numbers that were fitted."""

import json
import shutil
import struct

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests.jitted import apply
from tests.lm.checkpoints.families import V, small
from tests.lm.checkpoints.test_gguf import plain, written
from vqjax.cli import main
from vqjax.lm import checkpoints
from vqjax.lm.compression import exports
from vqjax.tables import Moments

gguf = pytest.importorskip("gguf", reason="the extra `checkpoints` is not installed")

TOKENS = np.array([[1, 5, 60, 7, 20, 3, 96, 44]])


@pytest.fixture(scope="module")
def moments():
  states = np.random.default_rng(2).normal(size=(200, 32)) * np.linspace(0.2, 3, 32)
  return Moments(states.T @ states / 200, np.ones(V), 200)


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def model_file(request, tmp_path_factory):
  """A GGUF of a small model with an untied head, or with a tied one."""
  folder = tmp_path_factory.mktemp("model")
  checkpoints.save(folder / "folder", *plain(request.param))
  written(folder / "model.gguf", request.param, folder / "folder")
  return folder / "model.gguf"


def metadata(path):
  """The bytes between the counts and the names of tensors."""
  reader = gguf.GGUFReader(path)
  return path.read_bytes()[8 : min(tensor.field.offset for tensor in reader.tensors)]


@pytest.mark.parametrize("kind", ["Q4_0", "IQ4_NL"])
def test_a_gguf_has_other_tables_and_all_else_byte_for_byte(kind, model_file, moments, tmp_path):
  out = tmp_path / "out.gguf"
  sizes = exports.export_gguf(model_file, out, kind, head_kind="Q8_0", moments=moments)
  before, after = (
    {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors} for path in (model_file, out)
  )
  assert metadata(out) == metadata(model_file)
  assert list(before) == list(after)
  tables = {"token_embd.weight": kind}
  tables |= {"output.weight": "Q8_0"} if "output.weight" in before else {}
  for name, tensor in after.items():
    if name in tables:
      assert tensor.tensor_type.name == tables[name]
      assert tensor.n_bytes == sizes[name]
    else:
      assert tensor.data.tobytes() == before[name].data.tobytes()
  assert list(sizes) == list(tables)


def test_what_is_read_back_has_the_values_that_were_fitted(model_file, moments, tmp_path):
  errors = {}
  table = np.asarray(checkpoints.load(model_file).variables["params"]["embedding"]["weight"])
  names = {tensor.name for tensor in gguf.GGUFReader(model_file).tensors}
  tables = ["embedding", *(["head"] if "output.weight" in names else [])]
  metric = moments.of_tables(tables)["embedding"].metric()
  for name, given in {"plain": None, "fitted": moments}.items():
    out = tmp_path / f"{name}.gguf"
    exports.export_gguf(model_file, out, "Q4_0", moments=given)
    wrong = np.asarray(checkpoints.load(out).variables["params"]["embedding"]["weight"]) - table
    errors[name] = np.einsum("rd,de,re->", wrong, metric, wrong)
  assert errors["fitted"] < errors["plain"]


def test_llama_cpp_computes_with_the_exported_tables(moments, tmp_path):
  llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
  checkpoints.save(tmp_path / "folder", *plain("llama"))
  written(tmp_path / "model.gguf", "llama", tmp_path / "folder")
  exports.export_gguf(tmp_path / "model.gguf", tmp_path / "out.gguf", "Q5_0", moments=moments)
  other = llama_cpp.Llama(str(tmp_path / "out.gguf"), n_ctx=64, logits_all=True, verbose=False)
  other.eval(TOKENS[0].tolist())
  model, variables, _ = checkpoints.load(tmp_path / "out.gguf")
  found = np.asarray(apply(model, variables, jnp.asarray(TOKENS)))[0]
  # llama.cpp rounds the inputs of the head to 8 bits, 1/127 of the largest of 32 numbers.
  np.testing.assert_allclose(np.array(other.scores[:8]), found, atol=0.02 * np.abs(found).max())


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 16), (4, None), (4, 8)])
def test_packed_words_unpack_to_rows_near_the_table(bits, group, moments, tmp_path):
  model, variables = small("llama")
  checkpoints.save(tmp_path / "folder", model, variables)
  sizes = exports.export_compressed_tensors(
    tmp_path / "folder", tmp_path / "out", bits, group=group, moments=moments
  )
  assert list(sizes) == ["lm_head.weight", "model.embed_tokens.weight"]
  tensors = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
  weights = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
  weights = weights["config_groups"]["group_0"]["weights"]
  assert weights["strategy"] == ("channel" if group is None else "group")
  found = checkpoints.load(tmp_path / "out").variables["params"]
  for module, table in (("lm_head", "head"), ("model.embed_tokens", "embedding")):
    packed, scale = tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]
    assert tensors[f"{module}.weight_shape"].tolist() == [V, 32]
    # The reference: bits of little-endian words, one after another.
    words = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little").reshape(V, 32, bits)
    level = (words * 2 ** np.arange(bits)).sum(-1) - 2 ** (bits - 1)
    rows = level * np.repeat(scale, 32 // scale.shape[1], axis=1)
    np.testing.assert_array_equal(found[table]["weight"], rows.astype(np.float32))
    expected = np.asarray(variables["params"][table]["weight"])
    assert np.abs(rows - expected).max() < (0.05 if bits == 8 else 0.6)
    assert sizes[f"{module}.weight"] == packed.nbytes + scale.nbytes + 16


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("bits", [8, 4])
def test_transformers_loads_the_packed_tables(name, bits, tmp_path):
  torch = pytest.importorskip("torch", reason="`make parity` installs PyTorch")
  transformers = pytest.importorskip("transformers", reason="`make parity` installs transformers")
  pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
  model, variables = small(name)
  checkpoints.save(tmp_path / "folder", model, variables)
  exports.export_compressed_tensors(tmp_path / "folder", tmp_path / "out", bits)
  other = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
  ).eval()
  # The reference: the same integers, unpacked here.
  tensors = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
  params = dict(variables["params"])
  for key, packed in tensors.items():
    if key.endswith("weight_packed"):
      scale = tensors[key.replace("packed", "scale")]
      words = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little")
      level = (words.reshape(V, 32, bits) * 2 ** np.arange(bits)).sum(-1) - 2 ** (bits - 1)
      rows = level * np.repeat(scale, 32 // scale.shape[1], axis=1)
      params["head" if "lm_head" in key else "embedding"] = {"weight": rows.astype(np.float32)}
  with torch.no_grad():
    found = other(torch.tensor(TOKENS)).logits.numpy()
  expected = apply(model, {"params": params}, jnp.asarray(TOKENS))
  np.testing.assert_allclose(found, expected, atol=2e-4)


def test_a_gguf_becomes_a_folder_of_packed_tables(model_file, tmp_path):
  exports.export_compressed_tensors(model_file, tmp_path / "out", 8)
  names = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
  assert "model.embed_tokens.weight_packed" in names
  assert (tmp_path / "out" / "tokenizer.model").is_file()


def test_impossible_exports_are_refused_and_leave_nothing(model_file, moments, tmp_path):
  out = tmp_path / "out"
  with pytest.raises(ValueError, match="multiple of 256; got width 32"):
    exports.export_gguf(model_file, out, "Q6_K")
  other = Moments(np.eye(7), np.ones(V), 10)
  with pytest.raises(ValueError, match="width of the table, 32; got 7"):
    exports.export_gguf(model_file, out, "Q4_0", moments=other)
  with pytest.raises(ValueError, match="`bits` must be 8 or 4; got 3"):
    exports.export_compressed_tensors(model_file, out, 3)
  with pytest.raises(ValueError, match="`group` must divide the width of the table, 32"):
    exports.export_compressed_tensors(model_file, out, 8, group=5)
  with pytest.raises(ValueError, match="got -8 with 8 bits"):
    exports.export_compressed_tensors(model_file, out, 8, group=-8)
  with pytest.raises(ValueError, match="`path` must be a GGUF"):
    exports.export_gguf(model_file.parent / "folder", out, "Q4_0")
  with pytest.raises(FileNotFoundError, match="folder that exists"):
    exports.export_gguf(model_file, tmp_path / "no" / "out", "Q4_0")
  (tmp_path / "there").write_text("kept")
  with pytest.raises(FileExistsError, match="`out` must be new"):
    exports.export_gguf(model_file, tmp_path / "there", "Q4_0")
  assert (tmp_path / "there").read_text() == "kept"
  assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_link_that_leads_out_of_the_folder_is_not_copied(model_file, tmp_path):
  folder = shutil.copytree(model_file.parent / "folder", tmp_path / "model")
  (tmp_path / "private").write_text("key")
  (folder / "notes.txt").symlink_to(tmp_path / "private")
  with pytest.raises(ValueError, match=r"notes.txt must be a file of its folder; got a link to"):
    exports.export_compressed_tensors(folder, tmp_path / "out", 8)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "private"]
  (folder / "notes.txt").unlink()
  (folder / "notes.txt").symlink_to("config.json")
  exports.export_compressed_tensors(folder, tmp_path / "out", 8)
  assert not (tmp_path / "out" / "notes.txt").is_symlink()


def test_a_table_with_nan_is_refused_and_leaves_nothing(model_file, tmp_path):
  content = bytearray(model_file.read_bytes())
  tensor = {t.name: t for t in gguf.GGUFReader(model_file).tensors}["token_embd.weight"]
  at = int(tensor.data_offset) + 4 * (11 * 32 + 5)
  content[at : at + 4] = struct.pack("<f", np.nan)
  (tmp_path / "broken.gguf").write_bytes(content)
  with pytest.raises(ValueError, match="must be finite; row 11"):
    exports.export_gguf(tmp_path / "broken.gguf", tmp_path / "out.gguf", "Q4_0")
  assert [path.name for path in tmp_path.iterdir()] == ["broken.gguf"]


@pytest.mark.programs(35)  # those of a model that is loaded, judged and saved
def test_the_command_fits_tables_to_a_text(model_file, tmp_path, capsys):
  (tmp_path / "text").write_text("words of letters, and their sums: 12+3=15.\n" * 30)
  call = lambda *more: main(["export", str(model_file), *more])
  text = ["--text", str(tmp_path / "text"), "--tokens", "300"]
  assert call("--to", "Q4_0", "--out", str(tmp_path / "fitted.gguf"), *text) == 0
  assert f"token_embd.weight: {V * 18:,} bytes" in capsys.readouterr().out
  assert call("--to", "Q4_0", "--out", str(tmp_path / "plain.gguf")) == 0
  first, second = (gguf.GGUFReader(tmp_path / f"{n}.gguf").tensors for n in ("fitted", "plain"))
  differing = {a.name for a, b in zip(first, second) if a.data.tobytes() != b.data.tobytes()}
  assert differing == {"token_embd.weight", "output.weight"} & {tensor.name for tensor in first}
  capsys.readouterr()
  assert call("--to", "int4", "--out", str(tmp_path / "packed")) == 0
  assert call("--to", "Q4_0", "--out", str(tmp_path / "text")) == 2
  assert "`--out` must be new" in capsys.readouterr().err
  assert call("--to", "Q4_0", "--out", str(tmp_path / "o"), "--moments", str(tmp_path / "no")) == 2
  assert "`--moments` must be a file" in capsys.readouterr().err
