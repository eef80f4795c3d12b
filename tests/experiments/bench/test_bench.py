"""Do the benches run, print every column, write what they print, and say what failed?"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from experiments.bench import codebook as bench_vq
from experiments.bench import heads as bench_heads
from experiments.bench import kmeans as bench_kmeans
from experiments.bench import losses, vq_programs
from experiments.bench import memory as bench_memory
from experiments.bench import options as bench_options
from experiments.bench import quantized_embedding as bench_dpq
from experiments.bench import softmax as bench_softmax
from experiments.bench.losses import Shape
from experiments.studies.vq_logits import report as vq_report
from vqjax import CodebookHead
from vqjax.lab.training import loss_cost

ROOT = pathlib.Path(__file__).parents[2]


def run(bench, tmp_path, capsys):
  """What a bench prints at tiny sizes, and what it writes."""
  file = tmp_path / "new" / "figures.json"
  assert bench.main(["--quick", "--json", str(file)]) == 0
  figures = json.loads(file.read_text())
  assert {"commit", "device", "versions", "date"} <= figures["provenance"].keys()
  return capsys.readouterr().out, figures


def gpu(*arguments):
  """The GPU bench as a machine runs it that has no GPU."""
  return subprocess.run(
    [sys.executable, "-m", "experiments.bench.gpu", *arguments],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "."},
    capture_output=True,
    text=True,
    check=False,
  )


def test_float64_log_probabilities_are_scipys():
  hidden, weight, tokens = losses.arrays(Shape(300, 7, 67))
  scores = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
  expected = log_softmax(scores, axis=1)[np.arange(300), tokens]
  np.testing.assert_allclose(losses.exact_log_prob(hidden, weight, tokens), expected, rtol=1e-12)


def test_softmax_bench_compares_every_loss_with_float64(tmp_path, capsys):
  out, figures = run(bench_softmax, tmp_path, capsys)
  for column in ("ms", "ratio", "temp MiB", "loss", "off float64", "tile 256 x 1280"):
    assert column in out
  assert "WRONG" not in out
  for table in figures["speed"]:
    assert table["rows"]["materialised (optax)"]["time_ratio"] == 1
    assert all(row["error"] < bench_softmax.WRONG for row in table["rows"].values())


def test_a_loss_that_is_off_is_marked():
  row = {"seconds": 1.0, "time_ratio": 1.0, "temp_bytes": 0, "loss": 10.39, "error": 0.0145}
  assert bench_softmax._cells("chunked", row)[-1] == "1e-02 WRONG"


def test_options_bench_is_relative_to_the_plain_loss(tmp_path, capsys):
  out, figures = run(bench_options, tmp_path, capsys)
  assert "time ratio" in out
  assert figures["rows"].keys() == bench_options.functions().keys()
  assert figures["rows"][bench_options.PLAIN]["time_ratio"] == 1


def test_heads_bench_prints_every_head_and_the_growth(tmp_path, capsys):
  out, figures = run(bench_heads, tmp_path, capsys)
  for text in ("times faster", "times smaller", "codebook K=16 + bias", "grouped", "V=4099 takes"):
    assert text in out
  assert figures["heads"][0]["rows"].keys() >= {"dense, tiled", "grouped"}
  assert len(figures["growth"]) == 2


def test_vq_bench_prints_table_3_training_and_decoding(tmp_path, capsys, monkeypatch):
  # Three heads decode: a step of each of the others is in the contract of heads.
  every = vq_programs.decoders
  monkeypatch.setattr(vq_programs, "decoders", lambda s: dict(list(every(s).items())[:3]))
  out, figures = run(bench_vq, tmp_path, capsys)
  for text in ("faster", "temp MiB", "weights MB", "codes MB", "batch 2,", "sample", "top 3"):
    assert text in out
  rows = figures["forward"]
  assert rows.keys() == figures["training"].keys()
  assert rows[vq_programs.FULL]["times_faster"] == 1
  assert rows["codebook K=16"]["weight_bytes_16_bit"] == 2 * 16 * 16
  assert rows["codebook K=16"]["table_bytes"] == 4 * 512
  assert max(figures["differences"].values()) < 1e-4
  assert figures["decoding"]["batch 2"]["codebook K=16 + bias"]["sample"]["seconds"] > 0
  # The page reads what the benchmark writes.
  page = vq_report.speed_block(figures)
  assert all(page.count(f"| {name} ") >= 2 for name in rows)


def test_kmeans_bench_fits_the_same_tables_as_scikit_learn(tmp_path, capsys):
  out, figures = run(bench_kmeans, tmp_path, capsys)
  assert "vqjax / scikit-learn" in out
  for data in figures["data"].values():
    assert data["rows"].keys() == {"scikit-learn", "vqjax"}
    # Two seedings of few points: the same within the luck of them.
    assert 0.9 < data["ratios"]["inertia"] < 1.1


def test_a_slice_divides_the_tokens_and_its_scores_fit():
  assert vq_programs.slice_of(16384, 267_735) == 512
  assert vq_programs.slice_of(32, 512) == 32
  assert vq_programs.slice_of(7, vq_programs.SLICE_SCORES) == 1
  assert vq_programs.slice_of(7, 2 * vq_programs.SLICE_SCORES) == 1


def test_slices_have_the_loss_and_gradient_of_all_tokens_at_once(monkeypatch):
  sizes = vq_programs.Sizes(Shape(12, 6, 31), (5,), (7, 20), 3, (4, 2), (1,), (1,))
  monkeypatch.setattr(vq_programs, "SLICE_SCORES", 4 * 31)
  rows, data = vq_programs.contenders(sizes), vq_programs.batch(sizes.shape)
  same = {vq_programs.FULL: vq_programs.TILED, vq_programs.GATHER: "codebook K=5"}
  for sliced, whole in same.items():
    variables = vq_programs.variables_of([rows[whole].head])[rows[sliced].head]
    for program in (vq_programs.forward, vq_programs.training):
      (found, arguments), (expected, others) = (
        program(rows[name], variables, *data) for name in (sliced, whole)
      )
      jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        found(*arguments),
        expected(*others),
      )


def test_memory_bench_spreads_the_vocabulary_over_devices(tmp_path, capsys):
  out, figures = run(bench_memory, tmp_path, capsys)
  assert "MiB a device" in out
  found = {(r["devices"], r["shape"]["vocab"], r["loss"]): r["temp_bytes"] for r in figures["rows"]}
  for loss in bench_memory.LOSSES:
    assert 0 < found[8, 1024, loss] < found[1, 1024, loss]


def test_gpu_bench_says_that_there_is_no_gpu():
  found = gpu()
  assert found.returncode == 2
  assert "no GPU: jax sees cpu" in found.stderr
  assert found.stdout == ""


def test_gpu_bench_goes_on_after_a_row_that_fails(tmp_path):
  file = tmp_path / "gpu.json"
  found = gpu("--quick", "--json", str(file))
  assert found.returncode == 0, found.stderr
  for column in ("ms", "TFLOP/s", "peak (compiler)", "peak (device)"):
    assert column in found.stdout
  written = json.loads(file.read_text())
  (table,) = written["tables"]
  rows = table["rows"]
  assert written["device"] == "cpu"
  assert list(rows)[-1] == "grouped"
  for name in ("materialised (XLA)", "linear_log_prob", "codebook K=16", "grouped"):
    shape = table["shape"]
    work = 6 * shape["tokens"] * shape["dim"] * shape["vocab"]
    assert rows[name]["tflops"] == pytest.approx(work / rows[name]["seconds"] / 1e12)
  # Without CUDA the peers fail, whether they are installed or not.
  for name in ("Liger", "CCE, all gradients"):
    assert f"{name}: {rows[name]['error']}" in found.stdout


def test_a_run_measures_the_head_that_the_bench_measures():
  cost = loss_cost(CodebookHead(1009, 16, 31), tokens=50, repeats=1)
  assert cost.tokens == 50
  assert cost.seconds > 0
  # At most: scores over the codes, and what is [N]- or [V]-sized; never scores over the tokens.
  assert cost.temp_bytes < 50 * 1009 * 4


def test_dpq_bench_prints_training_look_up_and_export(tmp_path, capsys):
  file = tmp_path / "dpq.json"
  assert bench_dpq.main(["--quick", "--json", str(file)]) == 0
  figures = json.loads(file.read_text())
  assert set(figures["training"]) == {f"{kind} {k}x3" for kind in ("SX", "VQ") for k in (2, 4)}
  assert figures["look_up"]["time"] > 0
  written = figures["export"]["export"]
  # 300 tokens of four codes of four bits, and 4·16·4 values.
  assert written["formula_bytes"] == 300 * 4 * 4 // 8 + 4 * 16 * 16
  assert 0 < written["file_bytes"] - written["formula_bytes"] < 1024
  assert "ratio" in capsys.readouterr().out
