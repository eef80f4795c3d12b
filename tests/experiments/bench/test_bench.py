"""The benchmarks run at tiny sizes, keep their figures, and count as the papers count."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from experiments.bench import __main__ as command
from experiments.bench import (
  codebook,
  dpq,
  gpu,
  grouped,
  kmeans,
  loop,
  losses,
  measure,
  ngrams,
  softmax,
  speculation,
)
from experiments.bench.grouped import CONTENDERS, Decoder, experiment, macs
from experiments.bench.losses import LossShape
from experiments.bench.registry import BENCHMARKS, Benchmark
from tests import tiny
from vqjax import DenseHead, GroupedHead
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.training.program import Program
from vqjax.sharding import MeshShape, make_mesh


@pytest.fixture
def figures(request, tmp_path, monkeypatch, capsys):
  """The figures that a benchmark writes at tiny sizes."""
  few = {name: CONTENDERS[name] for name in ("gpt-2", "grouped")}
  monkeypatch.setattr(grouped, "CONTENDERS", few)
  monkeypatch.setattr("experiments.bench.measure.MIN_SECONDS", 0.0)
  text = tiny.write_text(tmp_path / "text")
  monkeypatch.setattr(
    loop, "load_config", lambda path: tiny.experiment(text, DenseHead(FROM_TOKENIZER, 16))
  )
  # A process for each row is a claim of `plan/test_isolated.py`.
  for module in (dpq, gpu, kmeans, ngrams):
    monkeypatch.setattr(module, "isolated", lambda call, *arguments: call(*arguments))
  file = tmp_path / "new" / "figures.json"
  assert command.main([request.param, "--quick", "--json", str(file)]) == 0
  (result,) = json.loads(file.read_text()).values()
  assert {"commit", "device", "versions", "date"} <= result["provenance"].keys()
  assert capsys.readouterr().out
  return result


def of(name, slow=False):
  marks = [pytest.mark.slow] if slow else []
  return pytest.mark.parametrize("figures", [pytest.param(name, marks=marks)], indirect=True)


def test_tables_are_printed_whole(capsys):
  cells = ["of all columns " * 5, "1.25x (the median)", *["tokens/s, bound " * 2] * 3]
  measure.show_rows("", cells, [cells])
  lines = capsys.readouterr().out.splitlines()
  assert all(sum(cell.strip() in line for line in lines) == 2 for cell in cells)


@pytest.mark.slow
@of("softmax")
def test_the_softmax_benchmark_compares_every_loss_with_float64(figures):
  for table in figures["speed"]:
    assert table["rows"][softmax.MATERIALISED]["time_ratio"] == 1
    assert all(row["error"] < softmax.MAX_ERROR for row in table["rows"].values())
  wrong = {"seconds": 1.0, "time_ratio": 1.0, "temp_bytes": 0, "loss": 10.39, "error": 0.0145}
  assert "WRONG" in softmax.loss_cells("chunked", wrong)[-1]


@pytest.mark.slow
@of("memory")
def test_the_memory_benchmark_shards_the_vocabulary(figures):
  temp = {(r["devices"], r["shape"]["vocab"], r["loss"]): r["temp_bytes"] for r in figures["rows"]}
  for loss in softmax.SHARDED_LOSSES:
    assert 0 < temp[8, 1024, loss] < temp[1, 1024, loss]


def positive(figures, key=""):
  """Whether all numbers with a unit in their names are finite and above zero."""
  if isinstance(figures, dict | list):
    items = figures.items() if isinstance(figures, dict) else ((key, x) for x in figures)
    return all(positive(value, name) for name, value in items)
  units = "seconds", "bytes", "ratio", "per_s", "per_pass", "slower", "of_step", "macs"
  has_unit = key.endswith(units) and not isinstance(figures, bool | str | None)
  return not has_unit or 0 < figures < np.inf


SMOKE = "options", "gradients", "heads", "loop", "starts", "medusa", "speculation-long", "pages"
SMOKE += tuple(f"grouped-{part}" for part in ("loss", "steps", "sizes", "images"))


@pytest.mark.slow
@pytest.mark.parametrize("figures", SMOKE, indirect=True)
def test_a_benchmark_runs_and_keeps_figures_above_zero(figures):
  assert positive(figures)


@of("kmeans", slow=True)
def test_the_kmeans_benchmark_fits_the_same_tables_as_scikit_learn(figures):
  for data in figures["data"].values():
    assert data["rows"].keys() == {"scikit-learn", "vqjax"}
    # Two seedings of few points have different luck.
    assert 0.9 < data["ratios"]["inertia"] < 1.1


@of("codebook", slow=True)
def test_the_codebook_benchmark_has_table_3_and_training(figures):
  rows = figures["forward"]
  assert rows.keys() == figures["training"].keys()
  assert rows[codebook.FULL]["times_faster"] == 1
  assert rows["codebook K=16"]["weight_bytes_16_bit"] == 2 * 16 * 16
  assert rows["codebook K=16"]["table_bytes"] == 4 * 512
  assert max(figures["differences"].values()) < 1e-4


@of("whole-models", slow=True)
def test_whole_models_differ_in_the_parameters_of_their_heads(figures):
  full, small = figures["quick"]["full"], figures["quick"]["vq-16"]
  assert full["times_faster"] == 1
  assert full["params"] - small["params"] == (512 - 16) * 16
  assert full["params"] == full["body_params"] + full["head_params"] + 512 * 16


@of("speculation", slow=True)
def test_the_speculation_benchmark_has_every_head_and_sampling(figures):
  assert figures["parts"]["draft head, routed"] > 0
  assert len(figures["stories"]) == 2
  for rows in figures["stories"].values():
    assert rows.keys() >= {speculation.PLAIN, speculation.ADAPTIVE, speculation.FREQUENT}
    assert all(row["tokens_per_pass"] >= 1 and row["speed_ratio"] > 0 for row in rows.values())
    plain, drafted = rows[speculation.PLAIN], rows[speculation.FREQUENT]
    more = figures["bytes"][speculation.FREQUENT] * figures["sizes"]["settings"]["length"]
    per_pass = plain["bytes_per_token"] + more
    assert np.isclose(drafted["bytes_per_token"] * drafted["tokens_per_pass"], per_pass)


@pytest.mark.slow
def test_the_decoder_of_the_bake_off_is_trained_here():
  target = speculation.run_target(speculation.QUICK, quick=True)
  ((prompt,),) = target.prompts.values()
  tokens = [*target.tokens, *prompt]
  assert 0 <= min(tokens) <= max(tokens) < target.model.head.vocab


@of("dpq", slow=True)
def test_the_dpq_benchmark_has_training_lookup_and_export(figures):
  assert set(figures["training"]) == {"SX 4x3", "VQ 4x3"}
  assert figures["look_up"]["time"] > 0
  written = figures["export"]["export"]
  # 300 tokens of four codes of four bits, and 4·16·4 values.
  assert written["formula_bytes"] == 300 * 4 * 4 // 8 + 4 * 16 * 16
  assert 0 < written["file_bytes"] - written["formula_bytes"] < 1024


def test_benchmarks_on_a_gpu_name_a_missing_one(capsys, monkeypatch):
  monkeypatch.setattr(gpu, "isolated", lambda call, *arguments: call(*arguments))
  for name in ("gpu", "gpu-decoding"):
    assert command.main([name]) == 2
    assert "cpu" in capsys.readouterr().err


@of("gpu", slow=True)
def test_the_gpu_benchmark_keeps_rows_after_one_that_fails(figures):
  (table,) = figures["tables"]
  rows, shape = table["rows"], table["shape"]
  work = 6 * shape["tokens"] * shape["dim"] * shape["vocab"]
  dense = gpu.STORED, "mean", "mean, half of the tokens masked", "log_prob"
  for name in (*dense, "codebook K=1024", "grouped"):
    assert rows[name]["tflops"] == pytest.approx(work / rows[name]["seconds"] / 1e12)
  # The PyTorch peers need CUDA, whether they are installed or not.
  for name in ("Liger", "CCE, all gradients"):
    assert rows[name]["error"]


@of("gpu-decoding", slow=True)
def test_decoding_on_a_gpu_is_compared_with_the_same_step_of_bfloat16(figures):
  rows = figures["V=1031 D=16"]["batch 1"]
  assert rows["certified: best"]["in_doubt"] >= 1
  for step in ("best", "50 best", "draw"):
    ratio = rows[f"bfloat16: {step}"]["seconds"] / rows[f"grouped: {step}"]["seconds"]
    assert rows[f"grouped: {step}"]["times_faster"] == pytest.approx(ratio)


def test_float64_log_probabilities_equal_scipys():
  draw = np.random.default_rng(0)
  hidden, weight = draw.normal(size=(300, 7)), draw.normal(size=(67, 7))
  tokens = draw.integers(0, 67, 300)
  scores = hidden @ weight.T
  expected = log_softmax(scores, axis=1)[np.arange(300), tokens]
  np.testing.assert_allclose(losses.exact_log_prob(hidden, weight, tokens), expected, rtol=1e-12)


@pytest.mark.slow
def test_slices_have_the_loss_and_gradient_of_all_tokens_at_once(monkeypatch):
  sizes = codebook.CodebookSizes(LossShape(12, 6, 31), (5,), (7, 20), 3)
  monkeypatch.setattr(codebook, "SLICE_SCORES", 4 * 31)
  rows, data = codebook.contenders(sizes), codebook.batch(sizes.shape)
  equal = {codebook.FULL: codebook.TILED, codebook.GATHER: "codebook K=5"}
  for sliced, whole in equal.items():
    variables = codebook.variables_of([rows[whole].head])[rows[sliced].head]
    for program in (codebook.forward, codebook.training_program):
      results = []
      for name in (sliced, whole):
        function, arguments = program(rows[name], variables, *data)
        results.append(jax.jit(function)(*arguments))
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results)


@pytest.mark.parametrize(("dim", "millions"), [(128, 8.1), (2048, 506.8)])
def test_decoders_have_the_papers_parameters(dim, millions):
  one = make_mesh(MeshShape(), jax.devices()[:1])
  state = Program(experiment(Decoder(dim), CONTENDERS["gpt-2"]), one).abstract_state
  count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  assert count / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize(
  ("name", "dim", "attention", "billions"),
  [
    ("gpt-2", 128, False, 4.10),
    ("gpt-neo", 128, True, 4.64),
    ("gpt-neo", 1024, True, 82.0),
    ("grouped", 128, False, 0.83),
    ("grouped", 1024, False, 52.0),
  ],
)
def test_operations_are_those_of_table_3(name, dim, attention, billions):
  decoder = Decoder(dim)
  work = macs(decoder, experiment(decoder, CONTENDERS[name]).model.head)
  counted = work["weights"] + attention * work["attention"]
  assert counted / 1e9 == pytest.approx(billions, rel=0.01)


def test_sizes_near_the_least_memory_are_reported():
  peaks = {3: 200, 5: 101, 7: 100, 11: 102, 13: 103}
  rows = [
    {"size": s, "peak_bytes": p, "head_temp_bytes": s, "untiled_temp_bytes": 2 * p}
    for s, p in peaks.items()
  ]
  result = grouped.least(100, rows)
  assert result["step"] == {"size": 7, "bytes": 100, "near": [5, 11]}
  assert result["head"] == {"size": 3, "bytes": 3, "near": [3, 3]}
  assert (result["sqrt"], result["corrected"]) == (10, 5)


def test_untiled_and_materialised_losses_equal_those_of_the_heads():
  hidden = np.random.default_rng(0).normal(size=(11, 6)).astype(np.float32)
  tokens = np.random.default_rng(1).integers(0, 31, 11)
  groups = grouped.equal(31, 7)
  pairs = (
    (grouped.UntiledHead(31, 6, sizes=groups), GroupedHead(31, 6, sizes=groups)),
    (grouped.MaterialisedHead(31, 6), DenseHead(31, 6)),
  )

  def both(own, head):
    variables = head.init(jax.random.key(0), hidden)
    return tuple(one.apply(variables, hidden, tokens, method="log_prob") for one in (own, head))

  for own, expected in jax.jit(lambda: [both(*pair) for pair in pairs])():
    np.testing.assert_allclose(own, expected, atol=1e-5)  # float32 sums of 31 terms


def test_steps_beyond_the_budget_or_the_device_are_only_compiled(monkeypatch):
  class Fake:
    peak_bytes, temp_bytes, params = 10, 5, 1

    def __init__(self, run):
      self.large = run.model.dim > 16

    def __call__(self):
      assert not self.large
      return 100.0

    def end(self):
      pass

  monkeypatch.setattr(grouped, "TrainingStep", Fake)
  small, large = (Decoder(dim, layers=1, heads=2, vocab=509) for dim in (8, 32))
  *_, rows = grouped.tables_2_and_3([small, large], budget_seconds=1e-9)
  assert "tokens_per_s" in rows["8"]["grouped"]
  assert rows["32"]["grouped"]["peak_bytes"] == 10
  assert "tokens_per_s" not in rows["32"]["grouped"]
  monkeypatch.setattr(grouped, "device_bytes", lambda: 9)
  *_, rows = grouped.tables_2_and_3([small], budget_seconds=100)
  assert "tokens_per_s" not in rows["8"]["grouped"]


def test_an_interrupted_benchmark_keeps_its_parts_and_the_other_benchmarks(tmp_path, monkeypatch):
  def interrupted(quick):
    yield {"part": 1}
    raise KeyboardInterrupt

  benchmarks = {
    "first": Benchmark("", lambda quick: iter([{"part": 7}])),
    "second": Benchmark("", interrupted),
  }
  monkeypatch.setattr(command, "BENCHMARKS", benchmarks)
  file = tmp_path / "figures.json"
  with pytest.raises(KeyboardInterrupt):
    command.main(["first", "second", "--json", str(file)])
  kept = json.loads(file.read_text())
  assert (kept["first"]["part"], kept["second"]["part"]) == (7, 1)
  monkeypatch.setitem(benchmarks, "second", Benchmark("", lambda quick: iter([{"part": 2}])))
  assert command.main(["second", "--json", str(file)]) == 0
  again = json.loads(file.read_text())
  assert (again["first"], again["second"]["part"]) == (kept["first"], 2)


def test_a_wrong_name_and_a_file_of_something_else_are_refused(tmp_path, capsys):
  with pytest.raises(SystemExit):
    command.main(["softmaxx"])
  assert "softmaxx" in capsys.readouterr().err
  file = tmp_path / "other.json"
  for text in ("{", "[1]", '{"name": 1}'):
    file.write_text(text)
    with pytest.raises(SystemExit, match="2"):
      command.main(["softmax", "--quick", "--json", str(file)])
    assert "other.json" in capsys.readouterr().err
    assert file.read_text() == text


def test_every_benchmark_is_listed_and_the_documents_name_benchmarks_that_exist(capsys):
  assert command.main(["--list"]) == 0
  listed = capsys.readouterr().out
  assert all(name in listed for name in BENCHMARKS)
  assert any(benchmark.is_default for benchmark in BENCHMARKS.values())
  root = pathlib.Path(__file__).parents[3]
  text = "".join(path.read_text() for path in [root / "README.md", *(root / "docs").glob("*.md")])
  named = re.findall(r"make bench ARGS=(\w[\w-]*)", text)
  assert len(named) > 5
  assert set(named) <= BENCHMARKS.keys()


@of("ngrams", slow=True)
def test_tables_of_ngrams_learn_on_disk_and_on_devices_and_are_read_in_every_form(figures):
  assert positive(figures)
  assert figures["devices"]["not_in_place"] < 1000
  for part in ("disk", "devices"):
    first, last = figures[part]["loss"]
    assert np.isfinite([first, last]).all()
  assert all(row.keys() == {"1", "4096"} for row in figures["lookups"].values())
