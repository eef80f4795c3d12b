"""`vqjax compress MODEL --kl | --bytes`: a folder that is whole or not there, and loads."""

import dataclasses
import errno
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

import vqjax
from tests import jitted
from tests.lm.checkpoints.families import V, small
from vqjax import DenseHead, Int8Embedding, PackedEmbedding
from vqjax.commands import compress, export, inspect, score, trim
from vqjax.lm import checkpoints, jobs, records, tokenizers
from vqjax.lm.checkpoints import RUNTIMES
from vqjax.lm.compression import decoder_tables, folders, judging
from vqjax.lm.compression.calibration import zipf_counts
from vqjax.lm.generation import EarlyExit, Sampling, generate
from vqjax.lm.sources import readers
from vqjax.lm.texts import TextWindows, encode_text
from vqjax.sharding import MeshShape, make_mesh
from vqjax.tables import Moments, coded_table, container, search
from vqjax.tables.stored import StoredEmbedding

pytest.importorskip("tokenizers", reason="the extra `checkpoints` is not installed")


def model_folder(family, folder, vocab=V, **changes):
  from tests.lm.tokenizers.test_tokenizers import words_of

  model, variables = small(family, vocab_size=vocab, **changes)
  checkpoints.save(folder, model, jax.tree.map(np.asarray, variables))
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


@pytest.fixture(
  scope="module", params=["gemma3_text", pytest.param("llama", marks=pytest.mark.slow)]
)
def compressed(request, folder, texts, tmp_path_factory):
  """A tied and an untied model, and the folders in which they are compressed."""
  made = tmp_path_factory.mktemp("compressed")
  model = folder
  if request.param == "llama":
    model = model_folder("llama", made / "model")
  assert call(model, texts, made / "out", "--kl", "0.01", "--compare") == 0
  return model, made / "out"


def test_the_folder_has_the_logits_of_the_table_in_memory(compressed):
  model, out = compressed
  original, found = checkpoints.load(model), checkpoints.load(out)
  assert found.model == original.model
  names = ["embedding"] if original.model.head.embedding is not None else ["embedding", "head"]
  tables = {name: container.read_table(out, name).rows() for name in names}
  variables = judging.with_tables(original.variables, tables)
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
  rows = np.random.default_rng(2).integers(1, V, (4, 12))
  log_p, log_q = (log_softmax(jitted.apply(*x[:2], rows), axis=-1) for x in (before, after))
  own = (np.exp(log_p) * (log_p - log_q)).sum(-1)
  # Other text, of a model that is as unsure of any.
  assert own.mean() < 0.05
  stored = sum(
    part.bytes for part in checkpoints.inspect(out).parts if part.name in ("embedding", "head")
  )
  assert stored == report["bytes"]
  # All files may be read by whom other new files may.
  assert len({file.stat().st_mode for file in out.iterdir()}) == 1


@pytest.mark.parametrize(("kl", "says"), [(0.02, True), (0.01, False)])
def test_a_bound_that_other_text_misses_comes_with_a_smaller_one(
  kl, says, folder, texts, tmp_path, capsys, monkeypatch
):
  held = {"kl": kl, "kl_p99": 0.1, "top1": 1.0, "nats": 2.0, "nats_before": 2.0, "tokens": 9}
  sizes = {"bytes": 1, "bytes_before": 2, "formats_before": ["F32"], "seconds": 1, "peak_bytes": 1}
  found = {"held_out": held, "calibration_kl": 0.0098} | sizes
  monkeypatch.setattr(compress, "compress_model", lambda *_: found)
  assert call(folder, texts, tmp_path / "out", "--kl", "0.01") == 0
  assert ("for this held-out text, give --kl 0.005" in capsys.readouterr().out) == says


def test_the_report_has_the_block_types_of_gguf(compressed):
  gguf = pytest.importorskip("gguf", reason="the extra `checkpoints` is not installed")
  _, out = compressed
  made = json.loads((out / "vqjax.json").read_text())
  types = made["report"]["block_types"]
  # Rows of width 32: Q6_K has blocks of 256.
  even = {"Q5_0", "Q4_0"}
  assert set(types) == {"Q8_0", "IQ4_NL", *even, *(f"{name}, fitted" for name in even)}
  for name, row in types.items():
    own = gguf.GGMLQuantizationType[name.partition(",")[0]]
    block, size = gguf.GGML_QUANT_SIZES[own]
    assert row["bytes"] == len(made["tables"]) * V * 32 // block * size
  assert 0 < types["Q8_0"]["kl"] < types["Q5_0"]["kl"] < types["Q4_0"]["kl"]
  if len(made["tables"]) == 2:  # a tied table is fitted to its inputs too
    assert all(types[f"{name}, fitted"]["kl"] < types[name]["kl"] for name in even)
  assert (out / "report.md").read_text().count("| IQ4_NL |") == 1


@pytest.mark.slow
def test_a_mesh_loads_the_folder(compressed):
  _, out = compressed
  tokens = np.arange(1, 25).reshape(4, 6)
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


def in_form(name, family, folder, texts, made):
  """A model, and the folder of its tables for a form in memory."""
  model = folder if family == "gemma3_text" else model_folder(family, made / "model")
  out = made / "out"
  bound = ("--bytes", "8KB") if family == "gemma3_text" else ("--kl", "0.01")
  assert call(model, texts, out, *bound, "--runtime", name) == 0
  return out


@pytest.fixture(
  scope="module",
  params=[
    ("int8", "gemma3_text"),
    ("packed", "gemma3_text"),
    pytest.param(("int8", "llama"), marks=pytest.mark.slow),
    pytest.param(("packed", "llama"), marks=pytest.mark.slow),
    pytest.param(("rows", "llama"), marks=pytest.mark.slow),
  ],
  ids="-".join,
)
def form(request, folder, texts, tmp_path_factory):
  """The name of a form in memory, and a folder that has it."""
  name, family = request.param
  return name, in_form(name, family, folder, texts, tmp_path_factory.mktemp(name))


def test_a_folder_loads_in_the_form_of_its_report(form):
  name, out = form
  found = checkpoints.load(out)
  dense = checkpoints.load(out, runtime=RUNTIMES["unpacked"])
  kinds = {"int8": Int8Embedding, "packed": PackedEmbedding, "rows": StoredEmbedding}
  assert isinstance(found.model.embedding, kinds[name])
  tables = judging.tables_of(dense.model, dense.variables)
  rounded = {own: RUNTIMES[name].rounded(table) for own, table in tables.items()}
  expected = judging.with_tables(dense.variables, rounded)
  tokens = np.array([[3, 1, 96, 41, 3]])
  # float32 in another order; a table of packed rows is unpacked through its coordinates.
  np.testing.assert_allclose(
    jitted.apply(found.model, found.variables, tokens),
    jitted.apply(dense.model, expected, tokens),
    atol=2e-4,
  )
  report = json.loads((out / "vqjax.json").read_text())["report"]
  assert 0 < report["held_out"]["kl"] < 0.03
  stored = {part.name: part for part in checkpoints.inspect(out).parts}
  assert sum(stored[own].bytes for own in tables) == report["bytes"]


@pytest.mark.slow
def test_a_form_in_memory_generates_drafts_and_trains_what_it_can(form):
  name, out = form
  model, variables, _ = checkpoints.load(out)
  given = model, variables, [[3, 5, 8]], jax.random.key(0), Sampling(temperature=0)
  plain = generate(*given, max_tokens=5)
  drafted = generate(*given, max_tokens=5, drafter=EarlyExit(1))
  np.testing.assert_array_equal(plain.tokens, drafted.tokens)
  tokens = np.array([[3, 1, 4, 1]])
  others = {name: tree for name, tree in variables.items() if name != "params"}

  def loss(params):
    return -model.apply({"params": params, **others}, tokens, tokens, method="log_prob").sum()

  gradient = jax.jit(jax.grad(loss))(variables["params"])
  for own in gradient:
    assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(gradient[own]))
  assert ("embedding" in gradient) == (name != "rows")


@pytest.mark.fast_cases(1)
def test_a_mesh_loads_a_form_in_memory(form):
  _, out = form
  tokens = np.arange(1, 25).reshape(4, 6)
  expected = jitted.apply(*checkpoints.load(out)[:2], tokens)
  mesh = make_mesh(MeshShape(2, 2, 2))
  model, variables, _ = checkpoints.load(out, mesh=mesh)
  assert {len(x.sharding.device_set) for x in jax.tree.leaves(variables)} == {8}
  with jax.set_mesh(mesh):
    found = jax.jit(model.apply)(variables, tokens)
  np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.slow
def test_commands_read_each_form(form, texts, capsys):
  _, out = form
  assert inspect.main([str(out), "--vocabulary", "--nearest", "w5"]) == 0
  assert score.main([str(out), "--text", texts[0]]) == 0
  assert export.main([str(out), "--to", "int8", "--out", str(out) + "-again"]) == 2
  assert "must not be compressed already" in capsys.readouterr().err


def test_work_for_one_form_or_other_moments_is_not_taken_for_another(folder, tmp_path):
  job = folders.CompressionJob(folder, {"a": "b"}, tmp_path / "out", kl=0.01)
  others = [dataclasses.replace(job, runtime=name).identity() for name in RUNTIMES]
  assert len(set(others)) == len(RUNTIMES)
  assert others[0] == job.identity()
  job = dataclasses.replace(job, moments=tmp_path / "moments")
  random_moments().save(tmp_path / "moments")
  first = job.identity()
  assert job.identity() == first
  random_moments(6).save(tmp_path / "moments")
  assert job.identity() != first


@pytest.mark.slow
def test_packed_tables_fill_a_size_or_say_the_least(folder, texts, tmp_path, capsys):
  assert call(folder, texts, tmp_path / "a", "--bytes", "7KB", "--runtime", "packed") == 0
  report = json.loads((tmp_path / "a/vqjax.json").read_text())["report"]
  assert 6990 <= report["bytes"] <= 7000
  assert call(folder, texts, tmp_path / "b", "--bytes", "5KB", "--runtime", "packed") == 2
  line = capsys.readouterr().err
  least = re.search(r"packed tables need ([0-9,]+) bytes", line)[1].replace(",", "")
  assert call(folder, texts, tmp_path / "b", "--bytes", least, "--runtime", "packed") == 0


def test_a_form_is_refused_that_tables_or_other_arguments_do_not_allow(folder, texts, compressed):
  _, out = compressed
  with pytest.raises(ValueError, match="whose embedding is rANS"):
    checkpoints.load(out, runtime=RUNTIMES["packed"])
  with pytest.raises(ValueError, match="`runtime` must be None with a `head`"):
    checkpoints.load(out, head=DenseHead(V, 32), runtime=RUNTIMES["int8"])
  arguments = [str(folder), "--bytes", "9KB", "--out", "a", "--table", "b", "c"]
  for others in (
    ["--runtime", "int8"],
    ["--table", "b", "d"],
    ["--table", "e", "d", "f"],
    ["--held-out", texts[0]],
  ):
    with pytest.raises(SystemExit):
      compress.main([*arguments, *others])


@pytest.mark.programs(30)  # those of a model that is loaded, judged and saved
def test_damaged_parts_of_packed_tables_are_named(folder, texts, tmp_path):
  out = in_form("packed", "gemma3_text", folder, texts, tmp_path)
  manifest = out / "vqjax.json"
  text = manifest.read_text()
  records.write(manifest, json.loads(text) | {"runtime": "cubes"})
  with pytest.raises(ValueError, match="no header"):
    checkpoints.load(out)
  manifest.write_text(text)
  with pytest.raises(ValueError, match="are packed bits"):
    container.read_table(out)
  weights = out / "model.safetensors"
  content = bytearray(weights.read_bytes())
  source = readers.open_source(out)
  bits = source.tensors["model.embed_tokens.weight"].table.stream
  content[content.index(np.asarray(bits).tobytes()) + 40] ^= 4
  weights.write_bytes(content)
  with pytest.raises(ValueError, match=r"vqjax\.stream .* must have the checksum"):
    checkpoints.load(out)


def test_a_size_is_kept(folder, texts, tmp_path):
  assert call(folder, texts, tmp_path / "out", "--bytes", "6.5KB") == 0
  report = json.loads((tmp_path / "out/vqjax.json").read_text())["report"]
  assert 6000 < report["bytes"] <= 6500


def test_a_damaged_table_is_named(compressed, tmp_path):
  copy = shutil.copytree(compressed[1], tmp_path / "copy")
  (weights,) = copy.glob("*.safetensors")
  data = bytearray(weights.read_bytes())
  source = readers._safetensors(weights)
  words = next(t for name, t in source.items() if name.endswith(".words"))
  at = data.find(bytes(words.read(slice(None))))
  data[at + 40] ^= 1
  weights.write_bytes(data)
  with pytest.raises(ValueError, match="damaged"):
    checkpoints.load(copy)


def without_text(model, out, *options):
  words = "--out", str(out), "--tokens", "512", "--window", "16", *options
  return compress.main([str(model), *words])


def bytes_of_others(folder):
  """Number format and bytes of the tensors of a folder that are not compressed, by name."""
  tensors = {}
  for file in folder.glob("*.safetensors"):
    tensors |= readers._safetensors(file)
  return {
    name: (tensor.format, tensor.read(slice(None)).tobytes())
    for name, tensor in tensors.items()
    if container.SEPARATOR not in name
  }


@pytest.mark.programs(30)  # those of a model that is loaded, judged and saved
@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_without_a_text_the_model_writes_its_own(has_tokenizer, folder, tmp_path, capsys):
  model = shutil.copytree(folder, tmp_path / "model")
  if not has_tokenizer:
    (model / "tokenizer.json").write_text('{"model": {"type": "unknown"}}')
  assert without_text(model, tmp_path / "out", "--bytes", "1/2") == 0
  printed = capsys.readouterr()
  assert ("without its tokenizer" in printed.err + printed.out) != has_tokenizer
  assert "text that the model wrote itself: KL" in printed.out
  report = json.loads((tmp_path / "out/vqjax.json").read_text())["report"]
  assert report["bytes_before"] == 4 * V * 32
  assert 0.48 * 4 * V * 32 < report["bytes"] <= 2 * V * 32
  assert report["held_out"]["kl"] < 0.1
  assert f"{4 * V * 32:,} of the model's file (F32)" in (tmp_path / "out/report.md").read_text()


@pytest.mark.programs(30)  # those of a model that is loaded, judged and saved
def test_the_other_tensors_are_copied_byte_for_byte(texts, tmp_path):
  from safetensors.numpy import save_file

  model = model_folder("llama", tmp_path / "model")
  tensors = {
    name: tensor.read(slice(None)).astype(
      "bfloat16" if "mlp" in name else tensor.read(slice(0)).dtype
    )
    for name, tensor in readers._safetensors(model / "model.safetensors").items()
  }
  save_file(tensors, model / "model.safetensors", {"format": "pt"})
  assert call(model, texts, tmp_path / "out", "--bytes", "9KB") == 0
  before, after = bytes_of_others(model), bytes_of_others(tmp_path / "out")
  tables = "model.embed_tokens.weight", "lm_head.weight"
  assert after == {name: tensor for name, tensor in before.items() if name not in tables}
  assert {kind for kind, _ in after.values()} == {"F32", "BF16"}
  for name in ("config.json", "tokenizer.json"):
    assert (model / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.programs(40)  # those of two models that are loaded, judged and saved
@pytest.mark.parametrize("runtime", ["unpacked", "packed"])
def test_a_gguf_stays_one_with_all_else_byte_for_byte(runtime, tmp_path):
  gguf = pytest.importorskip("gguf", reason="the extra `checkpoints` is not installed")
  from tests.lm.checkpoints.test_gguf import plain, written

  checkpoints.save(tmp_path / "folder", *plain("llama"))
  written(tmp_path / "model.gguf", "llama", tmp_path / "folder")
  options = "--bytes", "14KB", "--runtime", runtime
  assert without_text(tmp_path / "model.gguf", tmp_path / "out", *options) == 0
  file = tmp_path / "out" / "model.gguf"
  assert file.stat().st_size < (tmp_path / "model.gguf").stat().st_size
  before, after = (
    {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for path in (tmp_path / "model.gguf", file)
  )
  others = [name for name in after if container.SEPARATOR not in name]
  assert others == [n for n in before if n not in ("token_embd.weight", "output.weight")]
  for name in others:
    assert after[name].tensor_type == before[name].tensor_type
    np.testing.assert_array_equal(after[name].data, before[name].data)
  tokens = np.array([[3, 1, 96, 41, 3]])
  logits = [jitted.apply(*checkpoints.load(path)[:2], tokens) for path in (tmp_path / "out", file)]
  np.testing.assert_array_equal(*logits)
  original = jitted.apply(*checkpoints.load(tmp_path / "model.gguf")[:2], tokens)
  assert 0 < np.abs(logits[0] - original).max() < 1
  content = bytearray(file.read_bytes())
  content[
    file.read_bytes().index(np.asarray(after["output.weight.vqjax.inverse"].data).tobytes())
  ] ^= 1
  file.write_bytes(content)
  with pytest.raises(ValueError, match=r"another checksum of output.weight.vqjax.inverse"):
    checkpoints.load(file)


def test_tables_that_would_not_be_smaller_are_refused(folder, tmp_path, capsys):
  line = refused(capsys, without_text(folder, tmp_path / "out", "--bytes", "50KB"))
  assert re.search(r"must give tables of less than the 12,416 bytes .* \(F32\)", line)
  assert not (tmp_path / "out").exists()


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


@pytest.mark.programs(30)  # those of a model that is loaded, judged and saved
def test_moments_of_a_file_and_one_step_give_the_integers_of_all_tables(
  texts, tmp_path, monkeypatch
):
  model = model_folder("llama", tmp_path / "model")
  random_moments().save(tmp_path / "moments")
  monkeypatch.setattr(folders, "collect", None)  # nothing is collected
  options = "--bytes", "9KB", "--moments", str(tmp_path / "moments")
  assert call(model, texts, tmp_path / "out", *options) == 0
  made = json.loads((tmp_path / "out/vqjax.json").read_text())
  assert 8500 < sum(table["bytes"] for table in made["tables"].values()) <= 9000
  # The counts of the texts and those of the file weigh alike.
  tokenizer = tokenizers.load_tokenizer(model)
  begin = tokenizer.encode("")
  tokens = [tokenizer.encode(pathlib.Path(path).read_text())[len(begin) :] for path in texts]
  # Four fifths are not held out. Texts count alike, and what begins every window once in 16.
  mass = sum(len(own) * 4 // 5 for own in tokens) / len(tokens)
  share = lambda own: np.bincount(own[: len(own) * 4 // 5], minlength=V) / (len(own) * 4 // 5)
  counts = mass * sum(share(own) for own in tokens)
  counts[begin] += counts.sum() / 16
  own = Moments.load(tmp_path / "moments")
  counts = (counts / counts.sum() + own.counts / own.counts.sum()) * counts.sum() / 2
  moments = dataclasses.replace(own, counts=counts).of_tables(["embedding", "head"])
  variables = small("llama", vocab_size=V)[1]["params"]
  for name in ("embedding", "head"):
    weight = np.asarray(variables[name]["weight"])
    expected = coded_table(weight, moments[name], made["report"]["step"])
    found = container.read_table(tmp_path / "out", name)
    np.testing.assert_array_equal(found.levels(), expected.levels)


def refused(capsys, code):
  assert code == 2
  return capsys.readouterr().err.strip().splitlines()[-1]


def searched(divergence, bound, points=()):
  """The point that a search of a divergence finds, and all points that it knows."""
  return search.search(
    lambda step: search.Point(step, 100, divergence(step)), kl=bound, points=points
  )


def test_a_divergence_that_no_step_reaches_is_refused_with_the_least():
  pattern = (
    r"the least divergence of these tables is 0\.0123 nats .*; got 0\.01. Give at least 0\.013"
  )
  for _ in range(2):
    with pytest.raises(ValueError, match=pattern):
      searched(lambda step: 0.0123 + step**2, 0.01)


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_a_divergence_that_some_step_reaches_is_found_whatever_its_slope(power, scale):
  # Large divergences grow no more, as those of models that know nothing any more.
  divergence = lambda step: 8 * np.tanh(scale * step**power / 8)
  best, points = searched(divergence, 0.01)
  assert 0.9 * 0.01 < best.kl <= 0.01
  assert len(points) <= 24
  # Going on from what is known is the same.
  assert searched(divergence, 0.01, points)[0] == best


def test_texts_of_one_name_are_domains_by_their_paths(folder, texts, tmp_path):
  for name, text in zip("xy", texts):
    (tmp_path / name).mkdir()
    shutil.copy(text, tmp_path / name / "t.txt")
  paths = [str(tmp_path / name / "t.txt") for name in "xy"]
  assert call(folder, paths, tmp_path / "out", "--kl", "0.05") == 0
  report = json.loads((tmp_path / "out/vqjax.json").read_text())["report"]
  assert list(report["held_out"]["domains"]) == paths


BEFORE_LOADING = {
  "--kl 1 --text {a} --window -5": "`--window` must be at least .* got -5",
  "--kl 1 --text {a} --window 2": "`--window` must be at least .* got 2",
  "--kl 1 --text {a} --tokens 0": "`--tokens` must be at least .* got 0",
  "--kl 1 --text {a} --tokens -5": "`--tokens` must be at least .* got -5",
}
REFUSED = BEFORE_LOADING | {
  "--kl -1 --text {a}": "positive",
  "--kl 1 --text {a} --out {files}": "exists",
  "--kl 1 --text {a} --out .": r"`--out` must be new; got \.",
  "--kl 1 --text {files}/empty.txt": "window",
  "--kl 1 --text {files}/bytes.txt": "UTF-8",
  "--kl 1 --text {a} {files}/short.txt": "got 3 in short.txt. Give more text",
  "--kl 1 --text {a} --held-out {files}/short.txt": "each text of `--held-out` must have",
  "--kl 1 --text {a} {a}": "a.txt twice",
  "--kl 1 --text {a} --held-out {a}": "a.txt twice",
  "--kl 1 --text {files}": "is a folder. Give the files in it",
  "--kl 1 --text {files}/unknown.txt": "`--text` must hold tokens of .*; got none in unknown.txt",
  "--kl 1 --text {a} --held-out {files}/unknown.txt": "`--held-out` must hold tokens of .*; got",
  "--bytes 9KB --text {a} --moments {files}/moments": "the width of the table, 32; got 31",
  "--bytes 1KB --text {a}": r"the least size of these tables is [\d,]+ bytes; got 1,000",
  # Of a tied model, the input rows are not decoded on demand.
  "--kl 0.01 --text {a} --runtime rows": "the form rows must be that of a model whose head has",
}


@pytest.mark.parametrize("options", REFUSED)
def test_a_wrong_call_is_refused_and_leaves_no_folder(
  options, folder, texts, tmp_path, capsys, monkeypatch
):
  files, here = tmp_path / "files", tmp_path / "here"
  files.mkdir()
  here.mkdir()
  monkeypatch.chdir(here)
  for name, text in (("empty", ""), ("short", "w1 w2 w3"), ("unknown", "quux " * 900)):
    (files / f"{name}.txt").write_text(text)
  (files / "bytes.txt").write_bytes(b"\xff\xfe")
  Moments(np.eye(31), np.ones(V), 64).save(files / "moments")
  if options in BEFORE_LOADING:
    monkeypatch.setattr(compress, "load_model", None)
  given = "--out out --tokens 512 --window 16", options.format(a=texts[0], files=files)
  line = refused(capsys, compress.main([str(folder), *" ".join(given).split()]))
  assert re.search(REFUSED[options], line)
  assert not (here / "out").exists()


@pytest.mark.parametrize(
  "options", ["", "--counts zipf", "--counts {files}/counts.npy --hidden {files}/hidden.npy"]
)
def test_one_table_is_compressed_as_the_function_does(options, tmp_path, capsys):
  from safetensors.numpy import save_file

  rng = np.random.default_rng(0)
  table, hidden = rng.normal(size=(1500, 16)).astype(np.float32), rng.normal(size=(50, 16))
  counts = rng.integers(0, 9, 1500)
  for name, array in (("table", table), ("counts", counts), ("hidden", hidden)):
    np.save(tmp_path / f"{name}.npy", array)
  save_file({"a.weight": table, "b": hidden}, tmp_path / "model.safetensors")
  words = options.format(files=tmp_path).split()
  for number, given in enumerate(("table.npy", "model.safetensors:a.weight")):
    out = tmp_path / f"{number}.safetensors"
    assert compress.main([f"{tmp_path}/{given}", "--bytes", "1/8", "--out", str(out), *words]) == 0
    assert "bits a weight" in capsys.readouterr().out
  of = {"counts": counts, "hidden": hidden} if "hidden" in options else {}
  if "zipf" in options:
    of = {"counts": zipf_counts(1500)}
  expected = vqjax.compress(table, bytes=1 / 8, **of).table()
  for number in range(2):
    found = vqjax.SmallTable.load(tmp_path / f"{number}.safetensors")
    np.testing.assert_array_equal(found.table(), expected)


def test_one_table_is_streamed_by_the_counts_of_its_rows(tmp_path, capsys):
  from safetensors.numpy import save_file

  rng = np.random.default_rng(0)
  table = rng.normal(size=(3001, 8)).astype(np.float32)
  np.save(tmp_path / "counts.npy", rng.integers(0, 9, 3001))
  (tmp_path / "model").mkdir()
  shards = {f"n.shard_{i}.weight": x for i, x in enumerate(np.split(table, [7, 2000, 2001]))}
  save_file(shards, tmp_path / "model" / "a.safetensors")
  save_file({"n.weight": table}, tmp_path / "model.safetensors")
  given = "--pages", "--counts", str(tmp_path / "counts.npy"), "--drop", "--block", "16"
  found = []
  for number, name in enumerate(("model:n", "model.safetensors:n.weight")):
    out = tmp_path / f"{number}.small"
    size = ("--bits", "2") if number else ("--bytes", "1/16")
    assert compress.main([f"{tmp_path}/{name}", *size, "--out", str(out), *given]) == 0
    assert "are the mean row" in capsys.readouterr().out
    found.append(out.read_bytes())
    assert len(found[-1]) < 3001 * 8 // 4 + 5000
  assert found[0] == found[1]
  wrong = f"{tmp_path}/model:n", "--bits", "40", "--out", str(tmp_path / "o"), *given[:3]
  assert "must be in (0, 32]" in refused(capsys, compress.main(list(wrong)))
  (tmp_path / "model" / "a.safetensors").unlink()
  save_file({"n.shard_1.weight": table}, tmp_path / "model" / "a.safetensors")
  wrong = f"{tmp_path}/model:n", "--bits", "2", "--out", str(tmp_path / "o"), *given[:3]
  assert "without shard 0" in refused(capsys, compress.main(list(wrong)))
  flat, text = str(tmp_path / "counts.npy"), ["--text", str(tmp_path / "a.txt")]
  sized = ["--bits", "2", "--pages", "--out", str(tmp_path / "o")]
  line = refused(capsys, compress.main([flat, *sized, "--counts", flat]))
  assert "must be a table [V, D]; got shape (3001,)" in line
  np.save(tmp_path / "table.npy", table)
  line = refused(capsys, compress.main([str(tmp_path / "table.npy"), *sized, *text]))
  assert "`--text` needs FOLDER:TENSOR" in line
  rows = str(tmp_path / "table.npy")
  line = refused(capsys, compress.main([rows, *sized, "--counts", "zipf", "--block", "10000"]))
  assert "`--block` must be in" in line
  np.save(tmp_path / "table.npy", table.astype(jax.numpy.bfloat16))
  line = refused(capsys, compress.main([rows, *sized, "--counts", "zipf"]))
  assert "as NumPy writes bfloat16. Write float32" in line
  for options in (["--drop"], ["--pages"], ["--pages", "--counts", "zipf", "--hidden", "h.npy"]):
    with pytest.raises(SystemExit):
      compress.main([f"{tmp_path}/model:n", "--bits", "2", "--out", "o", *options])


def test_a_wrong_table_is_refused(folder, tmp_path, capsys):
  out = str(tmp_path / "out")
  near = f"{folder}/model.safetensors:model.embed.weight"
  line = refused(capsys, compress.main([near, "--bytes", "1/8", "--out", out]))
  assert "Similar names: model.embed_tokens.weight" in line
  with pytest.raises(SystemExit):
    compress.main(["a.npy", "--bytes", "1/8", "--out", out, "--text", "b"])
  with pytest.raises(SystemExit):
    compress.main(["a.npy", "--bytes", "-1", "--out", out])


def of_numbers(vocab=512, dim=64, scale=1.0):
  """A table of normal numbers, and moments of it."""
  rng = np.random.default_rng(0)
  hidden = rng.normal(size=(1000, dim))
  moments = Moments(hidden.T @ hidden / 1000, rng.zipf(1.3, vocab).clip(0, 10**6), 1000)
  table = (scale * rng.normal(size=(vocab, dim))).astype(np.float32)
  return search.Tables({"t": table}, {"t": moments})


def fitted(made, size):
  """The bytes and the step of tables that are searched for and coded."""
  measure = lambda step: search.Point(step, made.size(step), None)
  best, points = search.search(measure, size=size, limits=made.limits)
  assert len(points) < 25
  step, quantized, coded = made.coded(best.step, size)
  np.testing.assert_array_equal(
    container.CompressedTable(coded["t"]).levels(), quantized["t"].levels
  )
  return sum(array.nbytes for array in coded["t"].values()), step


@pytest.mark.slow
@pytest.mark.parametrize("size", [10_100, 11_000, 20_000, 30_000])
def test_a_size_is_filled_from_below(size):
  found, _ = fitted(of_numbers(), size)
  assert 0.985 * size < found <= size


def test_the_least_size_is_that_of_the_file():
  made = of_numbers()
  coded = made.coded(made.limits[1], None)[2]
  least = sum(array.nbytes for array in coded["t"].values())
  # Histograms of zeros and a few ones may be deflated to some bytes less.
  assert least - 10 < fitted(made, least)[0] <= least
  # The sample has fewer bytes than the file: a size between them cannot be kept.
  for size in (100, least - 50):
    with pytest.raises(ValueError, match=f"the least size of these tables is {least:,} bytes"):
      fitted(made, size)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
  ("part", "scale"), [(0.995, 1e3), (0.97, 1e3), (0.01, 1.0), (1.05, 1.0), (1.02, 1.0)]
)
def test_few_steps_are_coded_until_a_size_near_the_least_is_refused_or_filled(
  part, scale, monkeypatch
):
  monkeypatch.setattr("vqjax.tables.coded.SAMPLE", 256)
  made = of_numbers(521, 32, scale)
  coded = made.coded(made.limits[1], None)[2]
  least = sum(array.nbytes for array in coded["t"].values())
  size, steps, quantized = int(part * least), [], made.tables_at
  monkeypatch.setattr(made, "tables_at", lambda step: steps.append(step) or quantized(step))
  if part < 1:
    with pytest.raises(ValueError, match=f"the least size of these tables is {least:,} bytes"):
      fitted(made, size)
    assert len(steps) <= 3
  else:
    assert 0.985 * size < fitted(made, size)[0] <= size
    assert len(steps) <= 5


def test_the_integers_are_those_that_were_coded_where_a_finer_step_is_too_large(monkeypatch):
  made = of_numbers(64, 8)
  size = sum(array.nbytes for array in made.coded(1.0, None)[2]["t"].values()) + 200
  steps = iter([0.01, 1.0])
  monkeypatch.setattr(made, "_next_step", lambda totals, size: next(steps))
  step, quantized, coded = made.coded(1.0, size)
  assert step == 1.0
  found = container.CompressedTable(coded["t"])
  np.testing.assert_array_equal(found.levels(), quantized["t"].levels)


@pytest.mark.slow
def test_tables_of_large_numbers_are_fitted_too():
  plain, step = fitted(of_numbers(), 20_000)
  found, larger = fitted(of_numbers(scale=1e6), 20_000)
  assert found == pytest.approx(plain, rel=0.02)
  assert larger == pytest.approx(1e6 * step, rel=0.1)
  made = of_numbers()
  made.tables["t"][3] *= 1e6
  assert 0.985 * 30_000 < fitted(made, 30_000)[0] <= 30_000


def test_intervals_hold_the_mean_and_shrink_with_more_windows():
  rng = np.random.default_rng(0)

  def interval(count):
    kl = rng.exponential(size=(count, 8))
    found = dict.fromkeys(("kl", "agrees", "log_prob", "teacher_log_prob"), kl)
    of = TextWindows(np.zeros((count, 10), np.int32), np.zeros(count, np.int64), ("a",))
    made = judging.summary(found, of)
    low, high = made["kl_interval"]
    assert low < made["kl"] < high
    assert made["domains"]["a"]["kl_interval"] == [low, high]
    # Four standard errors of a mean of unit variance.
    assert high - low == pytest.approx(4 / (8 * count) ** 0.5, rel=0.4)

  interval(20)
  interval(320)


def test_long_texts_are_encoded_in_whole_words():
  class Words:
    def encode(self, text):
      return [len(word) for word in text.split()]

  text = "abcdef ghi\n" * 20_000
  assert encode_text(Words(), text) == ([], [6, 3] * 20_000)


def test_a_compressed_file_is_not_compressed_trimmed_or_exported(
  compressed, texts, tmp_path, capsys
):
  _, out = compressed
  where = ["--out", str(tmp_path / "out")]
  weights = out / "model.safetensors"
  codes = [
    call(weights, texts, tmp_path / "out", "--kl", "0.1"),
    trim.main([str(out), "--keep-tokens", "60", "--text", texts[0], *where]),
    export.main([str(out), "--to", "int8", *where]),
    export.main([str(out), "--to", "Q8_0", *where]),
  ]
  assert codes == [2] * 4
  lines = capsys.readouterr().err.strip().splitlines()
  assert sum("`model` must not be compressed already" in line for line in lines) == 4
  assert list(tmp_path.iterdir()) == []


def test_exports_are_refused_before_anything_is_computed(
  folder, texts, tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(export, "load_model", None)
  given = [str(folder), "--out", str(tmp_path / "out"), "--text", *texts]
  for options, words in (
    (["--to", "Q4_0"], "must be a GGUF"),
    (["--to", "int8", "--group", "5"], "must divide the width of the table, 32"),
    (["--to", "int8", "--tokens", "0"], "`--tokens` must be at least 1"),
  ):
    assert words in refused(capsys, export.main([*given, *options]))


def test_work_is_of_one_process_and_of_this_command(tmp_path):
  work = tmp_path / ".out.partial"
  with jobs.open_work(work, "a"):
    (work / "kept").write_text("")
    second = jobs.open_work(work, "a")
    with pytest.raises(ValueError, match="another process is working"):
      second.__enter__()
  with jobs.open_work(work, "a"):
    assert (work / "kept").exists()
  with jobs.open_work(work, "b"):
    assert not (work / "kept").exists()
  other = tmp_path / "other"
  other.mkdir()
  (other / "mine").write_text("")
  with pytest.raises(ValueError, match="what an interrupted call left"):
    jobs.open_work(other, "a").__enter__()
  assert (other / "mine").exists()


@pytest.mark.programs(30)  # those of a model that is loaded and saved
def test_a_table_that_is_not_finite_is_refused(texts, tmp_path, capsys):
  folder = model_folder("gemma3_text", tmp_path / "model")
  model, variables, tokenizer = checkpoints.load(folder)
  weight = variables["params"]["embedding"]["weight"].at[17, 3].set(np.nan)
  shutil.rmtree(folder)
  checkpoints.save(folder, model, judging.with_tables(variables, {"embedding": weight}), tokenizer)
  line = refused(capsys, call(folder, texts, tmp_path / "out", "--bytes", "9KB"))
  assert "`embedding` must be finite; row 17 has NaN or an infinity" in line
  assert not (tmp_path / "out").exists()


def test_a_body_that_is_not_finite_is_refused():
  params = {"embedding": {"weight": np.ones(3)}, "blocks": {"up": np.array([1, np.nan])}}
  with pytest.raises(ValueError, match="`blocks/up` must be finite; got NaN or an infinity"):
    judging.check_finite({"params": params})


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_models_with_tables_of_every_block_are_refused_by_their_name(name, texts, tmp_path, capsys):
  transformers = pytest.importorskip("transformers", reason="the extra `parity` is not installed")
  from safetensors.numpy import save_file

  config = transformers.AutoConfig.for_model(name, hidden_size_per_layer_input=4)
  config.save_pretrained(tmp_path)
  save_file({"embed_tokens_per_layer.weight": np.zeros((2, 4))}, tmp_path / "model.safetensors")
  line = refused(capsys, call(tmp_path, texts, tmp_path / "out", "--kl", "1"))
  assert f"got '{name}'. Other architectures are not run here" in line
  for words in ("collect(", "--table TENSOR", "vqjax.torch.load_tables("):
    assert words in line
  assert not (tmp_path / "out").exists()


def room(monkeypatch, free):
  """Leaves so many bytes free on every disk."""
  usage = shutil.disk_usage("/")._replace(free=free)
  monkeypatch.setattr(jobs.shutil, "disk_usage", lambda path: usage)


@pytest.mark.parametrize(("bound", "least"), [(("--kl", "1"), 0), (("--bytes", "2KB"), 1970)])
def test_no_room_is_told_before_anything_is_computed(
  bound, least, folder, texts, tmp_path, capsys, monkeypatch
):
  body = sum(p.params for p in checkpoints.inspect(folder).parts if p.name != "embedding")
  # The body is copied in the format of its file, whatever it is run in.
  needed = 4 * body + least + jobs.OTHER_FILES
  room(monkeypatch, needed - 1)
  monkeypatch.setattr(compress, "load_model", None)
  given = *bound, "--dtype", "bfloat16"
  line = refused(capsys, call(folder, texts, tmp_path / "out", *given))
  assert f"`--out` must be on a disk with {needed:,} bytes free; got {needed - 1:,}. Free" in line
  assert list(tmp_path.iterdir()) == []


def test_half_a_model_of_an_interrupted_call_is_room(folder, tmp_path, monkeypatch):
  half = tmp_path / ".out.partial" / "model" / "model.safetensors"
  half.parent.mkdir(parents=True)
  half.write_bytes(bytes(1000))
  body = sum(p.params for p in checkpoints.inspect(folder).parts if p.name != "embedding")
  job = folders.CompressionJob(folder, {}, tmp_path / "out", kl=1.0)
  room(monkeypatch, 4 * body + jobs.OTHER_FILES - 1000)
  folders.check_paths(job)
  room(monkeypatch, 4 * body + jobs.OTHER_FILES - 1001)
  with pytest.raises(OSError, match="bytes free"):
    folders.check_paths(job)


def test_room_for_tables_of_unknown_bytes_is_told_when_they_are_known(
  folder, texts, tmp_path, capsys, monkeypatch
):
  body = sum(p.params for p in checkpoints.inspect(folder).parts if p.name != "embedding")
  room(monkeypatch, 4 * body + jobs.OTHER_FILES)
  line = refused(capsys, call(folder, texts, tmp_path / "out", "--kl", "0.05"))
  assert re.search(r"a disk with [\d,]+ bytes free; got [\d,]+. Free", line)
  assert (tmp_path / ".out.partial" / "moments.safetensors").is_file()
  assert not (tmp_path / "out").exists()


def test_no_room_for_a_tensor_is_told_before_it_is_read(folder, tmp_path, capsys, monkeypatch):
  random_moments().save(tmp_path / "moments")
  name = "model.embed_tokens.weight"
  tensors = readers.open_source(folder).tensors
  others = sum(tensor.nbytes for own, tensor in tensors.items() if own != name)
  # Never above a byte a number, however large the bound.
  needed = others + V * 32 + jobs.OTHER_FILES
  room(monkeypatch, needed - 1)
  monkeypatch.setattr(readers, "verify_tensor", None)
  given = "--bytes", "1GB", "--out", str(tmp_path / "out"), "--table", name
  line = refused(capsys, compress.main([str(folder), *given, str(tmp_path / "moments")]))
  assert f"`--out` must be on a disk with {needed:,} bytes free; got {needed - 1:,}. Free" in line


def test_a_call_that_ends_while_it_writes_leaves_no_folder(
  folder, texts, tmp_path, capsys, monkeypatch
):
  def full(*args, **fields):
    raise OSError(errno.ENOSPC, "No space left on device")

  def stop(*args):
    raise KeyboardInterrupt

  for place, name, end, code in (
    (folders, "copy_folder", full, 2),
    (records, "write_text", stop, 130),
  ):
    with monkeypatch.context() as patched:
      patched.setattr(place, name, end)
      assert call(folder, texts, tmp_path / "out", "--bytes", "9KB") == code
    assert not (tmp_path / "out").exists()
  assert "free some space" in capsys.readouterr().err.lower()
  assert call(folder, texts, tmp_path / "out", "--bytes", "9KB") == 0
  assert (tmp_path / "out" / "report.md").is_file()


@pytest.mark.parametrize("runtime", ["unpacked", pytest.param("packed", marks=pytest.mark.slow)])
def test_an_interrupted_call_goes_on_where_it_was(runtime, folder, texts, tmp_path, monkeypatch):
  out, measured = tmp_path / "out", []
  point = decoder_tables.DecoderTables.point

  def stop_at_the_second(self, step, reference):
    measured.append(step)
    if len(measured) == 2:
      raise KeyboardInterrupt
    return point(self, step, reference)

  monkeypatch.setattr(decoder_tables.DecoderTables, "point", stop_at_the_second)
  assert call(folder, texts, out, "--kl", "0.003", "--runtime", runtime) == 130
  assert not out.exists()
  monkeypatch.setattr(folders, "collect", None)  # the moments are kept
  first = measured[:1]
  assert call(folder, texts, out, "--kl", "0.003", "--runtime", runtime) == 0
  assert not set(first) & set(measured[2:])
  assert not (tmp_path / ".out.partial").exists()
