"""Do the VQ-Logits tables say what their runs say, and what the paper prints?"""

import io
import json
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest
from rich.console import Console

from experiments.studies.seeds import Spread
from experiments.studies.vq_logits import clusters as vq_clusters
from experiments.studies.vq_logits import findings as vq_findings
from experiments.studies.vq_logits import report as vq_report
from experiments.studies.vq_logits import results as vq_results
from experiments.studies.vq_logits import run as vq_tables
from experiments.studies.vq_logits import speed as vq_speed
from experiments.studies.vq_logits.measured import measured
from experiments.studies.vq_logits.notes import notes
from experiments.studies.vq_logits.paper import PAPER
from experiments.studies.vq_logits.rows import tables
from experiments.studies.vq_logits.settings import RUNS
from vqjax.lab.config import config_hash

ROOT = pathlib.Path(__file__).parents[2]
FULL_BYTES = 10_000 * 128 * 4


@pytest.fixture
def kept():
  """What is kept of a run, as a function of what the tests vary."""

  def make(perplexity, size=FULL_BYTES, head="DenseHead", floors=None, **config) -> dict:
    nats = {"valid": {"perplexity": 1.1 * perplexity}, "test": {"perplexity": perplexity}}
    result = {
      **{"status": "finished", "commit": "c0ffee", "device": "cpu", "date": "2026-01-02T03"},
      **nats,
      "head": {"class": head, "params": 1_280_000, "state_bytes": size, "tied": False},
      "loss": {"seconds": 0.5, "tokens": 64},
      "train": {"tokens_per_second": 100.0},
    }
    model = {"dim": 128, "head": config}
    return {"result": result, "config": {"model": model}, "floors": floors}

  return make


@pytest.fixture
def failed(kept):
  made = kept(1.0)
  return made | {"result": {"status": "failed", "error": "the loss is nan", **_origin(made)}}


def _origin(made):
  return {name: made["result"][name] for name in ("commit", "device", "date")}


@pytest.fixture
def results(kept):
  """Two seeds of the full softmax and of a product head, one codebook."""
  floors = {"uniform": 20.0, "bias": 5.0, "largest_code": 99, "dead_codes": 0}
  return {
    "ptb/full": kept(100.0),
    "ptb/full-s1": kept(120.0),
    "ptb/vq-256": kept(300.0, 171_072, "CodebookHead", floors, codes=256, token_bias=False),
    "ptb/product": kept(101.0, FULL_BYTES // 20, "ProductHead"),
    "ptb/product-s1": kept(118.0, FULL_BYTES // 20, "ProductHead"),
  }


@pytest.fixture
def speed():
  """Some rows as the benchmark writes them."""
  sizes = {"temp_bytes": 2**20, "weight_bytes_16_bit": 2**20, "table_bytes": 0}
  rows = {
    "full, in slices": {"seconds": 40.0, "calls": 1, "times_faster": 1.0, **sizes},
    "codebook K=1024": {"seconds": 1.0, "calls": 30, "times_faster": 40.0, **sizes},
  }
  return {
    "sizes": {"shape": {"tokens": 64, "dim": 8, "vocab": 100}},
    "slice": 16,
    "forward": rows,
    "training": rows,
    "decoding": {"batch 1": {"dense": {"sample": {"seconds": 0.002, "times_faster": 1.0}}}},
    "provenance": {"device": "cpu", "commit": "c0ffee"},
  }


def found(results, name, scale="cpu"):
  return next(table for table in tables(results, scale) if table.name == name)


def row_of(table, label):
  """The cells of a row of the Markdown table by the titles of their columns."""
  header, _, *body = table.markdown().splitlines()
  cells = lambda line: [cell.strip() for cell in line.strip("|").split(" | ")]
  values = next(line for line in map(cells, body) if line[0] == label)
  return dict(zip(cells(header), values, strict=True))


def printed(table):
  stream = io.StringIO()
  Console(file=stream, width=80).print(table.rich())
  return stream.getvalue()


def test_perplexity_is_the_mean_and_deviation_over_the_seeds_that_there_are(results):
  row = row_of(found(results, "Table 10"), "Full softmax")
  assert (row["measured"], row["seeds"]) == ("110.0 ± 14.1", "2")  # |120 - 100| / sqrt 2


def test_loss_of_quality_is_paired_by_seed(results):
  over = measured(results, "ptb/product").over_full
  assert over.mean == pytest.approx((1.0 + 100 * (118 / 120 - 1)) / 2)
  assert over.seeds == 2


def test_a_row_of_one_seed_is_compared_with_the_full_softmax_of_that_seed(results):
  assert measured(results, "ptb/vq-256").over_full == Spread(pytest.approx(200.0), None, 1)


def test_a_row_from_scratch_is_compared_with_the_full_softmax_from_scratch(results, kept):
  results = results | {"ptb/full-scratch": kept(80.0), "ptb/adaptive": kept(88.0)}
  table = found(results, "Table 10")
  assert row_of(table, "Adaptive softmax")["% over full"] == "+10.0"
  assert row_of(table, "VQ-Logits (K=256)")["% over full"] == "+200.0"


def test_the_aim_is_missed_where_the_other_full_softmax_is_lower(results, kept):
  results = results | {"ptb/full-scratch": kept(80.0), "ptb/full-scratch-s1": kept(80.0)}
  told = vq_findings.best(found(results, "All heads").lines)
  assert "fine-tuned 110.0 ± 14.1 over 2 seeds, from scratch 80.0 ± 0.0 over 2 seeds" in told
  assert "not reached" in told


def test_a_number_in_a_row_name_is_no_seed(results, kept):
  results = results | {"ptb/product-s1-more": kept(7.0), "ptb/product-x": kept(8.0)}
  assert measured(results, "ptb/product").perplexity.seeds == 2


def test_missing_rows_are_dashes_beside_what_the_paper_prints(results):
  row = row_of(found(results, "Table 10"), "VQ-Logits (K=512)")
  assert (row["paper"], row["paper, % over full"]) == ("56.9", "+3.1")
  assert row["measured"] == row["head bytes"] == row["floor"] == "–"


def test_failed_rows_say_so_and_give_the_reason(results, failed, tmp_path):
  results = results | {"ptb/vq-512": failed}
  row = row_of(found(results, "Table 10"), "VQ-Logits (K=512)")
  assert (row["measured"], row["seeds"], row["paper"]) == ("failed", "0, 1 failed", "56.9")
  page, *_ = vq_report.write(results, tmp_path)
  assert "ptb/vq-512 failed: the loss is nan" in page.read_text()


def test_a_failed_seed_leaves_the_others(results, failed):
  row = row_of(found(results | {"ptb/full-s1": failed}, "Table 10"), "Full softmax")
  assert (row["measured"], row["seeds"]) == ("100.0", "1, 1 failed")


def test_rows_tell_bytes_and_floors(results):
  row = row_of(found(results, "Table 10"), "VQ-Logits (K=256)")
  assert (row["head bytes"], row["of full"]) == ("167 KiB", "0.033×")
  assert (row["floor"], row["floor, best bias"], row["largest code"]) == ("20.0", "5.0", "99")


@pytest.mark.parametrize(
  ("head", "params", "config", "shipped"),
  [
    # 1,024 codes of 128 numbers, and a bias and a code of four bytes for each of 10,000 tokens;
    # while it learns, 8 scores a token more.
    (
      "LearnedCodebookHead",
      1024 * 128 + 10_000 * 9,
      {"codes": 1024, "candidates": 8},
      4 * 1024 * 128 + 10_000 * (4 + 4),
    ),
    # 224 codes of 128 numbers in all, a bias and 16 codes of one byte; 128 numbers a token more.
    (
      "LearnedProductHead",
      224 * 128 + 10_000 * 129,
      {"codes": 224, "subspaces": 16},
      4 * 224 * 128 + 10_000 * (4 + 16),
    ),
  ],
)
def test_bytes_of_a_head_that_learns_its_codes_are_those_it_ships_with(
  results, kept, head, params, config, shipped
):
  row = kept(90.0, 99 * FULL_BYTES, head, dim=128, token_bias=True, **config)
  row["result"]["head"]["params"] = params
  found = measured(results | {"ptb/learned": row}, "ptb/learned")
  assert found.head_bytes == shipped
  assert found.of_full == pytest.approx(shipped / FULL_BYTES)


def test_measured_perplexity_is_split_into_codes_and_what_is_inside(results):
  told = " ".join(notes(found(results, "Table 10"), results))
  assert "300.0 = 20.0 inside the codes × 15.0 for the code" in told
  assert "The paper prints 58.1: at this floor 2.9 would be left" in told


def test_a_published_number_below_the_floor_is_named(results):
  results["ptb/vq-256"]["floors"]["uniform"] = 58.2
  told = " ".join(notes(found(results, "Table 10"), results))
  assert "The paper prints 58.1: below the floor of these codes" in told


def test_codes_of_equal_size_rule_out_the_paper_without_any_run():
  told = " ".join(notes(found({}, "Table 6"), {}))
  assert "267,735/1,024 = 261, whatever the body is: the paper's 21.5 cannot come" in told
  assert "the paper's 19.7 cannot come" in told


@pytest.mark.parametrize("scale", ["smoke", "cpu", "paper"])
def test_every_row_of_the_paper_has_a_run_at_every_scale(scale):
  for name, rows in PAPER.items():
    lines = [line for line in found({}, name, scale).lines if line.paper]
    assert [line.paper for line in lines] == list(rows.values())
    for line in lines:
      assert f"{found({}, name, scale).setting.name}/{line.name}" in vq_tables.RUNS[scale]


def test_consoles_show_the_tables(results):
  shown = printed(found(results, "Table 10"))
  assert "Table 10: main results, Penn Treebank" in shown
  assert "300.0" in shown
  assert max(map(len, shown.splitlines())) <= 80


def test_the_best_small_head_is_chosen_on_the_validation_text(results, kept):
  lucky = kept(90.0, FULL_BYTES // 20, "ProductHead")  # on the test text alone
  lucky["result"]["valid"]["perplexity"] = 500.0
  told = vq_findings.best(found(results | {"ptb/product-learned": lucky}, "All heads").lines)
  assert "**product codes, + bias**" in told
  assert "1/20.0" in told
  assert "test perplexity 109.5 ± 12.0 (2 seeds), -0.3 ± 1.9 %" in told
  assert "is reached" in told


def test_a_head_without_bytes_of_its_own_is_not_the_best_small_one(results, kept):
  tied = kept(50.0, 0)
  tied["result"]["head"]["tied"] = True
  lines = found(results | {"ptb/tied": tied}, "All heads").lines
  assert "product codes" in vq_findings.best(lines)
  assert "tied" not in vq_findings.better(lines)


def test_better_heads_are_named_with_the_noise_of_the_full_softmax(results):
  lines = found(results, "All heads").lines
  assert "fine-tuned 110.0 ± 14.1 over 2 seeds" in vq_findings.better(lines)
  assert "product codes, + bias -0.3" in vq_findings.better(lines)
  del results["ptb/product-s1"]
  assert "No other head" in vq_findings.better(found(results, "All heads").lines)


def test_findings_do_without_results():
  lines = found({}, "All heads").lines
  assert "measured beside it yet" in vq_findings.best(lines)
  assert "not measured yet" in vq_findings.better(lines)
  assert "H(token | code)" in vq_findings.bias(lines)


def test_the_page_and_its_plots_are_written(results, speed, tmp_path):
  (tmp_path / "results" / "vq").mkdir(parents=True)
  (tmp_path / "results" / "vq" / "speed.json").write_text(json.dumps(speed))
  written = vq_report.write(results, tmp_path)
  assert [path.relative_to(tmp_path).as_posix() for path in written] == [
    "results/vq_logits.md",
    "images/vq-bytes.png",
    "images/vq-codes.png",
    "images/vq-speed.png",
  ]
  page = written[0].read_text()
  assert page.count("| codebook K=1024 | 1,000 | 30 | 40.00× | 1.00 MiB |") == 2
  assert page.count("| full, in slices | 40,000 | 1 | 1.00× | 1.00 MiB |") == 2
  assert "| dense | 2.00 (1.00×) |" in page
  for path in written[1:]:
    assert f"(../images/{path.name})" in page


def test_a_page_without_results_has_dashes(tmp_path):
  page, *plots = vq_report.write({}, tmp_path)
  assert [path.name for path in plots] == ["vq-codes.png"]
  assert "| VQ-Logits (K=1024) | 19.2 | +6.7 | – | 0 |" in page.read_text()


def test_a_benchmark_that_was_not_run_has_no_rows(tmp_path):
  assert vq_speed.read(tmp_path / "none.json") is None
  assert vq_speed.figure(None) is None
  assert "has not been run" in vq_speed.section(None)


class Words:
  """An encoder of a few words."""

  words = ("<unk>", "Sunday", "Monday", "Tuesday", "the", "km")

  def encode(self, word):
    return np.array([self.words.index(word) if word in self.words else 0, 0])

  def decode(self, tokens):
    return " ".join(self.words[token] for token in tokens)


def test_clusters_are_the_codes_that_most_words_of_a_row_are_on():
  code, counts = np.array([0, 1, 2, 2, 2, 1]), np.array([9, 8, 7, 6, 5, 4])
  days = ("Monday", "Tuesday", "Wednesday", "Sunday")
  row = vq_clusters.shared(Words(), code, counts, days)
  assert row["known"] == ["Monday", "Tuesday", "Sunday"]
  assert (row["code"], row["held"], row["others"]) == (2, ["Monday", "Tuesday"], ["the"])
  assert row["size"] == 3


def test_words_that_the_tokenizer_lacks_have_no_code():
  row = vq_clusters.shared(Words(), np.zeros(6, int), np.ones(6, int), ("=", "=="))
  assert row == {"words": ["=", "=="], "known": []}


@pytest.mark.timeout(900)
def test_the_command_trains_keeps_and_prints(tmp_path, monkeypatch, capsys):
  arguments = ["--scale", "smoke", "--only", "ptb/vq-16"]
  # A process of its own: the batches of the smoke scale are smaller than our simulated devices.
  own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
  command = [sys.executable, "-m", "experiments.studies.vq_logits.run", *arguments]
  done = subprocess.run(
    command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "Table 10" in done.stdout
  monkeypatch.chdir(tmp_path)
  results = vq_tables.STUDY.read("smoke")
  assert set(results) == {"ptb/dense", "ptb/vq-16"}
  assert results["ptb/vq-16"]["floors"]["bias"] <= results["ptb/vq-16"]["floors"]["uniform"]
  assert vq_tables.main([*arguments, "--list"]) == 0
  assert capsys.readouterr().out.count("done") == 2
  assert not (vq_report.DOCS / "results" / "vq" / "smoke").exists()


def test_the_floor_of_a_learned_mapping_is_that_of_the_codes_it_chose(monkeypatch, tmp_path):
  # Tokens 0 and 1 choose code 1, token 2 chooses code 0.
  variables = {
    "params": {"head": {"choice": np.array([[0.0, 1.0], [0.0, 2.0], [3.0, 0.0]])}},
    "codes": {"head": {"candidates": np.array([[0, 1], [0, 1], [0, 1]], np.uint8)}},
  }
  monkeypatch.setattr(vq_results, "read_variables", lambda folder: (variables, {}))
  monkeypatch.setattr(vq_results, "fit_encoder", lambda data, tokenizer: None)
  text = types.SimpleNamespace(tokens=np.array([0, 0, 0, 1, 2, 2]))
  monkeypatch.setattr(vq_results, "encode_split", lambda data, encoder, split: text)
  smoke = vq_tables.RUNS["smoke"]
  gumbel = next(run for name, run in smoke.items() if name.startswith("ptb/gumbel"))
  found = vq_results.floors(gumbel, tmp_path)
  # Four of six tokens are on a code of two; of these 3 : 1 are token 0 and token 1.
  assert found["uniform"] == pytest.approx(2 ** (4 / 6))
  inside = (3 * np.log(4 / 3) + np.log(4)) / 6
  assert found["bias"] == pytest.approx(np.exp(inside))
  assert found["largest_code"] == 2


def test_a_result_of_another_configuration_is_left_out(kept, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  now = config_hash(vq_tables.RUNS["smoke"]["ptb/full"])
  for name, perplexity, digest in (("ptb/full", 77.5, now), ("ptb/dense", 88.5, "of old")):
    row = kept(perplexity) | {"name": name}
    row["result"]["config_hash"] = digest
    path = tmp_path / RUNS / "smoke" / "kept" / f"{name.replace('/', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row))
  assert vq_tables.main(["--scale", "smoke", "--render"]) == 0
  said = capsys.readouterr()
  assert "77.5" in said.out
  assert "88.5" not in said.out
  assert "ptb/dense is left out: its result is of another configuration" in said.err


def test_the_command_names_a_run_that_is_not_there(capsys):
  assert vq_tables.main(["--scale", "smoke", "--only", "ptb/vq-17"]) == 2
  assert "no run ptb/vq-17 at scale smoke" in capsys.readouterr().err
