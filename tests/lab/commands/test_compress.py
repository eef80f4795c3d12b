"""`vqjax compress MODEL --kl | --bytes`: a folder that is whole or not there, and loads."""

import json
import shutil

import jax
import numpy as np
import pytest

from tests.checkpoints.families import V, small
from vqjax import checkpoints
from vqjax.checkpoints import table_file
from vqjax.compression import Moments
from vqjax.lab import compression
from vqjax.lab.commands import compress, inspect, score

pytest.importorskip("tokenizers", reason="the extra `checkpoints` is not installed")


def model_folder(family, folder):
  from tests.checkpoints.test_tokenizers import words_of

  model, variables = small(family)
  checkpoints.save(folder, model, variables)
  words_of(V).save(str(folder / "tokenizer.json"))
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


def test_moments_replace_the_calibration(folder, texts, tmp_path):
  rng = np.random.default_rng(5)
  hidden = rng.normal(size=(64, 32))
  path = tmp_path / "moments.safetensors"
  Moments(hidden.T @ hidden / 64, np.ones(V), 64).save(path)
  assert call(folder, texts, tmp_path / "out", "--bytes", "9KB", "--moments", str(path)) == 0
  other = np.eye(31)
  Moments(other, np.ones(V), 64).save(path)
  assert call(folder, texts, tmp_path / "other", "--bytes", "9KB", "--moments", str(path)) == 2
  assert not (tmp_path / "other").exists()


def refused(capsys, code):
  assert code == 2
  return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_compressed_folder_is_not_compressed_again(compressed, texts, tmp_path, capsys):
  line = refused(capsys, call(compressed[1], texts, tmp_path / "out", "--kl", "0.1"))
  assert "compressed already" in line


def test_a_divergence_that_no_step_reaches_is_refused_with_the_least(
  folder, texts, tmp_path, capsys
):
  line = refused(capsys, call(folder, texts, tmp_path / "out", "--kl", "1e-15"))
  assert "least" in line
  assert not (tmp_path / "out").exists()


def test_a_size_that_no_step_reaches_is_refused_with_the_least(folder, texts, tmp_path, capsys):
  line = refused(capsys, call(folder, texts, tmp_path / "out", "--bytes", "1KB"))
  assert "least size" in line


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
  assert "17" in line or "finite" in line
  assert not (tmp_path / "out").exists()


def test_a_text_without_a_known_token_is_refused(folder, tmp_path, capsys):
  unknown = tmp_path / "unknown.txt"
  unknown.write_text("quux " * 900)
  line = refused(capsys, call(folder, [str(unknown)], tmp_path / "out", "--kl", "1"))
  assert "token" in line
  assert "unknown.txt" in line


def test_no_room_on_the_disk_leaves_no_folder(folder, texts, tmp_path, capsys, monkeypatch):
  usage = shutil.disk_usage(tmp_path)
  monkeypatch.setattr(compression.shutil, "disk_usage", lambda path: usage._replace(free=10))
  line = refused(capsys, call(folder, texts, tmp_path / "out", "--bytes", "9KB"))
  assert "bytes free" in line
  assert not (tmp_path / "out").exists()


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
