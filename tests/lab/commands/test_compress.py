"""`vqjax compress MODEL --kl | --bytes`: a folder that is whole or not there, and loads."""

import errno
import json
import re
import shutil

import jax
import numpy as np
import pytest

from tests import jitted
from tests.checkpoints.families import V, small
from vqjax import checkpoints
from vqjax.checkpoints import table_file
from vqjax.compression import Moments, quantize
from vqjax.lab import compression, records
from vqjax.lab.commands import compress, inspect, score
from vqjax.sharding import MeshShape, make_mesh

pytest.importorskip("tokenizers", reason="the extra `checkpoints` is not installed")


def model_folder(family, folder, vocab=V, **changes):
  from tests.checkpoints.test_tokenizers import words_of

  model, variables = small(family, vocab_size=vocab, **changes)
  checkpoints.save(folder, model, variables)
  words_of(vocab).save(str(folder / "tokenizer.json"))
  return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A tied model of the Gemma family."""
  return model_folder("gemma3_text", tmp_path_factory.mktemp("tied") / "model")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  """Two domains of words."""
  rng = np.random.default_rng(0)
  made = tmp_path_factory.mktemp("texts")
  for name, most in (("a.txt", 90), ("b.txt", 20)):
    (made / name).write_text(" ".join(f"w{n}" for n in rng.integers(0, most, 1500)))
  return [str(made / "a.txt"), str(made / "b.txt")]


def call(model, texts, out, *options):
  words = "--text", *texts, "--out", str(out), "--tokens", "512", "--window", "16", *options
  return compress.main([str(model), *words])


@pytest.fixture(scope="module", params=["gemma3_text", "llama"])
def compressed(request, folder, texts, tmp_path_factory):
  """A tied and an untied model, and the folders in which they are compressed."""
  made = tmp_path_factory.mktemp("compressed")
  model = folder
  if request.param == "llama":
    model = model_folder("llama", made / "model")
  assert call(model, texts, made / "out", "--kl", "0.01") == 0
  return model, made / "out"


def test_the_folder_has_the_logits_of_the_table_in_memory(compressed):
  model, out = compressed
  original, found = checkpoints.load(model), checkpoints.load(out)
  assert found.model == original.model
  names = ["embedding"] if original.model.head.embedding is not None else ["embedding", "head"]
  tables = {name: table_file.read_table(out, name).rows() for name in names}
  variables = compression.with_tables(original.variables, tables)
  jax.tree.map(np.testing.assert_array_equal, found.variables, variables)
  for name, table in tables.items():
    assert not np.array_equal(table, original.variables["params"][name]["weight"])


def test_the_report_has_the_divergence_that_the_folder_has(compressed):
  model, out = compressed
  report = json.loads((out / "vqjax.json").read_text())["report"]
  assert 0 < report["calibration_kl"] <= 0.01
  assert set(report["held_out"]["domains"]) == {"a.txt", "b.txt"}
  assert report["held_out"]["kl"] < 0.03
  page = (out / "report.md").read_text()
  assert f"{report['held_out']['kl']:.5f}" in page
  before, after = checkpoints.load(model), checkpoints.load(out)
  rows = jax.numpy.asarray(np.random.default_rng(2).integers(1, V, (4, 12)))
  log_p, log_q = (jax.nn.log_softmax(x.model.apply(x.variables, rows)) for x in (before, after))
  own = (np.exp(log_p) * (log_p - log_q)).sum(-1)
  # Other text, of a model that is as unsure of any.
  assert own.mean() < 0.05
  stored = sum(
    part.bytes for part in checkpoints.inspect(out).parts if part.name in ("embedding", "head")
  )
  assert stored == report["bytes"]


def test_the_report_has_the_block_types_of_gguf(compressed):
  gguf = pytest.importorskip("gguf", reason="the extra `checkpoints` is not installed")
  _, out = compressed
  made = json.loads((out / "vqjax.json").read_text())
  types = made["report"]["block_types"]
  # Rows of width 32: Q6_K has blocks of 256.
  assert set(types) == {"Q8_0", "Q5_0", "Q4_0", "IQ4_NL"}
  for name, row in types.items():
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert row["bytes"] == len(made["tables"]) * V * 32 // block * size
  assert 0 < types["Q8_0"]["kl"] < types["Q5_0"]["kl"] < types["Q4_0"]["kl"]
  assert (out / "report.md").read_text().count("| IQ4_NL |") == 1


def test_a_mesh_loads_the_folder(compressed):
  _, out = compressed
  tokens = jax.numpy.arange(1, 25).reshape(4, 6)
  expected = jitted.apply(*checkpoints.load(out)[:2], tokens)
  for shape in ((1, 1, 2), (2, 2, 2)):
    mesh = make_mesh(MeshShape(*shape))
    model, variables, _ = checkpoints.load(out, mesh=mesh)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(variables)} == {np.prod(shape)}
    with jax.set_mesh(mesh):
      found = jax.jit(model.apply)(variables, tokens)
    # float32 sums in another order.
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_commands_read_the_folder(compressed, texts, capsys):
  _, out = compressed
  assert inspect.main([str(out)]) == 0
  assert "rANS" in capsys.readouterr().out
  assert score.main([str(out), "--text", texts[0]]) == 0


def test_a_size_is_kept(folder, texts, tmp_path):
  assert call(folder, texts, tmp_path / "out", "--bytes", "6.5KB") == 0
  report = json.loads((tmp_path / "out/vqjax.json").read_text())["report"]
  assert 6000 < report["bytes"] <= 6500


def test_a_damaged_table_is_named(compressed, tmp_path):
  copy = shutil.copytree(compressed[1], tmp_path / "copy")
  (weights,) = copy.glob("*.safetensors")
  data = bytearray(weights.read_bytes())
  source = checkpoints.files._safetensors(weights)
  words = next(t for name, t in source.items() if name.endswith(".words"))
  at = data.find(bytes(words.read(slice(None))))
  data[at + 40] ^= 1
  weights.write_bytes(data)
  with pytest.raises(ValueError, match="damaged"):
    checkpoints.load(copy)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stories260K", "gpt2"])
def test_other_shapes_are_compressed(name, real_data, tmp_path):
  if name == "gpt2":
    # As many rows as GPT-2 has, and a body of one block.
    path = model_folder("gpt2", tmp_path / "model", 50_257, n_embd=16, n_layer=1, n_positions=32)
    text = " ".join(f"w{n}" for n in np.random.default_rng(0).integers(0, 50_000, 3000))
  else:
    path = real_data / "stories260K" / "stories260K.bin"
    text = (real_data / "tinystories" / "gpt2_tokens_val.decoded.txt").read_text("utf-8")[:20_000]
  (tmp_path / "text").write_text(text)
  assert call(path, [str(tmp_path / "text")], tmp_path / "out", "--kl", "0.02") == 0
  made = json.loads((tmp_path / "out/vqjax.json").read_text())
  rows, columns = made["tables"]["embedding"]["shape"]
  assert (rows, columns) == {"gpt2": (50_257, 16), "stories260K": (512, 64)}[name]
  assert made["report"]["calibration_kl"] <= 0.02
  assert made["report"]["bytes"] < 1.5 * rows * columns
  assert checkpoints.load(tmp_path / "out").model == checkpoints.load(path).model


def random_moments(seed=5):
  rng = np.random.default_rng(seed)
  hidden, inputs = rng.normal(size=(2, 64, 32))
  counts = rng.integers(0, 50, V)
  return Moments(hidden.T @ hidden / 64, counts, 64, inputs.T @ inputs / 64)


def test_moments_of_a_file_and_one_step_give_the_integers_of_all_tables(
  texts, tmp_path, monkeypatch
):
  model = model_folder("llama", tmp_path / "model")
  random_moments().save(tmp_path / "moments")
  monkeypatch.setattr(compression, "collect", None)  # nothing is collected
  options = "--bytes", "9KB", "--moments", str(tmp_path / "moments")
  assert call(model, texts, tmp_path / "out", *options) == 0
  made = json.loads((tmp_path / "out/vqjax.json").read_text())
  assert 8500 < sum(table["bytes"] for table in made["tables"].values()) <= 9000
  moments = Moments.load(tmp_path / "moments").of_tables(["embedding", "head"])
  variables = checkpoints.load(model).variables["params"]
  for name in ("embedding", "head"):
    weight = np.asarray(variables[name]["weight"])
    expected = quantize(weight, moments[name], made["report"]["step"])
    found = table_file.read_table(tmp_path / "out", name)
    np.testing.assert_array_equal(found.levels(), expected.levels)


def refused(capsys, code):
  assert code == 2
  return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_compressed_folder_is_not_compressed_again(compressed, texts, tmp_path, capsys):
  line = refused(capsys, call(compressed[1], texts, tmp_path / "out", "--kl", "0.1"))
  assert "`model` must not be compressed already; got" in line
  assert "Give the model that it was made of." in line


def test_a_divergence_that_no_step_reaches_is_refused_with_the_least(
  folder, texts, tmp_path, capsys
):
  line = refused(capsys, call(folder, texts, tmp_path / "out", "--kl", "1e-15"))
  pattern = r"the least divergence of these tables is (\S+) nats a token; got 1e-15. Give at least "
  found = re.search(pattern + r"(\S+), or", line)
  assert 1e-15 < float(found[1]) < float(found[2]) < 1e-3
  assert not (tmp_path / "out").exists()


def test_a_size_that_no_step_reaches_is_refused_with_the_least(folder, texts, tmp_path, capsys):
  line = refused(capsys, call(folder, texts, tmp_path / "out", "--bytes", "1KB"))
  assert re.search(r"the least size of these tables is [\d,]+ bytes; got 1,000", line)


def test_wrong_calls_are_refused(folder, texts, tmp_path, capsys):
  out = tmp_path / "out"
  (tmp_path / "empty.txt").write_text("")
  assert "window" in refused(capsys, call(folder, [str(tmp_path / "empty.txt")], out, "--kl", "1"))
  (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
  assert "UTF-8" in refused(capsys, call(folder, [str(tmp_path / "bytes.txt")], out, "--kl", "1"))
  out.mkdir()
  assert "exists" in refused(capsys, call(folder, texts, out, "--kl", "1"))
  assert "positive" in refused(capsys, call(folder, texts, tmp_path / "o", "--kl", "-1"))


def test_a_table_that_is_not_finite_is_refused(texts, tmp_path, capsys):
  folder = model_folder("gemma3_text", tmp_path / "model")
  model, variables, tokenizer = checkpoints.load(folder)
  weight = variables["params"]["embedding"]["weight"].at[17, 3].set(np.nan)
  shutil.rmtree(folder)
  checkpoints.save(
    folder, model, compression.with_tables(variables, {"embedding": weight}), tokenizer
  )
  line = refused(capsys, call(folder, texts, tmp_path / "out", "--bytes", "9KB"))
  assert "`embedding` must be finite; row 17 has NaN or an infinity" in line
  assert not (tmp_path / "out").exists()


def test_a_text_without_a_known_token_is_refused(folder, tmp_path, capsys):
  unknown = tmp_path / "unknown.txt"
  unknown.write_text("quux " * 900)
  line = refused(capsys, call(folder, [str(unknown)], tmp_path / "out", "--kl", "1"))
  assert "`--text` must hold tokens of the model's tokenizer; got none in unknown.txt" in line
  assert not (tmp_path / "out").exists()


def test_moments_of_another_width_are_refused(folder, texts, tmp_path, capsys):
  Moments(np.eye(31), np.ones(V), 64).save(tmp_path / "moments")
  options = "--bytes", "9KB", "--moments", str(tmp_path / "moments")
  line = refused(capsys, call(folder, texts, tmp_path / "out", *options))
  assert "the moments must have the width of the table, 32; got 31" in line
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_models_with_tables_of_every_block_are_refused_by_their_name(name, texts, tmp_path, capsys):
  transformers = pytest.importorskip("transformers", reason="the extra `parity` is not installed")
  from safetensors.numpy import save_file

  config = transformers.AutoConfig.for_model(name, hidden_size_per_layer_input=4)
  config.save_pretrained(tmp_path)
  save_file({"embed_tokens_per_layer.weight": np.zeros((2, 4))}, tmp_path / "model.safetensors")
  line = refused(capsys, call(tmp_path, texts, tmp_path / "out", "--kl", "1"))
  assert f"got '{name}'. Other architectures are not implemented" in line
  assert not (tmp_path / "out").exists()


def test_no_room_on_the_disk_leaves_no_folder(folder, texts, tmp_path, capsys, monkeypatch):
  usage = shutil.disk_usage(tmp_path)
  monkeypatch.setattr(compression.shutil, "disk_usage", lambda path: usage._replace(free=10))
  line = refused(capsys, call(folder, texts, tmp_path / "out", "--bytes", "9KB"))
  assert re.search(r"`--out` must be on a disk with [\d,]+ bytes free; got 10. Free some", line)
  assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_while_the_folder_is_written_leaves_no_folder(
  folder, texts, tmp_path, capsys, monkeypatch
):
  def full(*args, **fields):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(compression.checkpoints, "save", full)
  line = refused(capsys, call(folder, texts, tmp_path / "out", "--bytes", "9KB"))
  assert "free some space" in line.lower()
  assert not (tmp_path / "out").exists()


def test_a_call_that_is_interrupted_while_it_writes_leaves_no_folder(
  folder, texts, tmp_path, monkeypatch
):
  def stop(*args):
    raise KeyboardInterrupt

  with monkeypatch.context() as patched:
    patched.setattr(records, "write_text", stop)
    assert call(folder, texts, tmp_path / "out", "--bytes", "9KB") == 130
  assert not (tmp_path / "out").exists()
  assert call(folder, texts, tmp_path / "out", "--bytes", "9KB") == 0
  assert (tmp_path / "out" / "report.md").is_file()


def test_an_interrupted_call_goes_on_where_it_was(folder, texts, tmp_path, monkeypatch):
  out, measured = tmp_path / "out", []
  point = compression.Compression.point

  def stop_at_the_third(self, step, reference):
    measured.append(step)
    if len(measured) == 3:
      raise KeyboardInterrupt
    return point(self, step, reference)

  monkeypatch.setattr(compression.Compression, "point", stop_at_the_third)
  assert call(folder, texts, out, "--kl", "0.003") == 130
  assert not out.exists()
  monkeypatch.setattr(compression, "collect", None)  # the moments are kept
  first = measured[:2]
  assert call(folder, texts, out, "--kl", "0.003") == 0
  assert not set(first) & set(measured[3:])
  assert not (tmp_path / ".out.partial").exists()
