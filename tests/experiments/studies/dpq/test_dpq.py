"""Do DPQ's tables say what their runs say, and what the paper prints?"""

import io
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from experiments.studies.dpq import codes as dpq_codes
from experiments.studies.dpq import notes as dpq_notes
from experiments.studies.dpq import page as dpq_page
from experiments.studies.dpq import plots as dpq_plots
from experiments.studies.dpq import report as dpq_report
from experiments.studies.dpq import run as dpq_tables
from experiments.studies.dpq import settings as dpq_settings
from experiments.studies.dpq.measured import measured
from experiments.studies.dpq.paper import PAPER
from experiments.studies.dpq.setting import Codes
from experiments.studies.dpq.settings import SCALES
from vqjax import DPQEmbedding, SoftmaxQuantizer

ROOT = pathlib.Path(__file__).parents[2]
FULL_BYTES = 10_000 * 200 * 4


@pytest.fixture
def kept():
  """What is kept of a run, as a function of what the tests vary."""

  def make(perplexity=None, size=FULL_BYTES, accuracy=None, **beside) -> dict:
    test = {"perplexity": perplexity} if accuracy is None else {"accuracy": accuracy}
    result = {
      **{"status": "finished", "commit": "c0ffee", "device": "cpu", "date": "2026-01-02T03"},
      "test": test,
      "embedding": {"shipped_bytes": size},
    }
    return {"result": result, **beside}

  return make


@pytest.fixture
def results(kept):
  compact = {"formula": 85.1, "bytes": 94_000, "file_bytes": 94_144}
  return {
    "ptb-small/full": kept(114.0),
    "ptb-small/full-s1": kept(116.0),
    "ptb-small/sx": kept(105.0, 94_000, compact=compact),
    "ptb-small/sx-s1": kept(106.0, 94_000, compact=compact),
    "ptb-small/scalar-8": kept(114.5, FULL_BYTES // 4 + 8),
    "ag-news/full": kept(accuracy=0.9),
    "multi30k/full": kept(9.0, bleu={"score": 31.5}),
  }


def cells(table, label):
  """The cells of a row of the Markdown table by the titles of their columns."""
  header, _, *body = table.markdown().splitlines()
  split = lambda line: [cell.strip() for cell in line.strip("|").split(" | ")]
  values = next(line for line in map(split, body) if line[0] == label)
  return dict(zip(split(header), values, strict=True))


def found(results, name, scale="cpu"):
  return next(t for t in dpq_report.tables(results, scale) if t.title.startswith(f"{name}:"))


def test_a_row_says_score_difference_and_both_ratios(results):
  row = cells(found(results, "Table 4"), "PTB, small: DPQ-SX (8x25s)")
  assert (row["paper"], row["its ratio"]) == ("105.8", "85.5")
  assert (row["measured"], row["seeds"]) == ("105.50 ± 0.71", "2")
  assert row["- full"] == "-9.50 ± 0.71"  # paired by seed
  assert (row["ratio"], row["formula"], row["bytes"]) == ("85.1", "85.1", "91.9 KiB")


def test_what_was_not_run_has_the_papers_number_alone(results):
  row = cells(found(results, "Table 4"), "PTB, large: DPQ-VQ")
  assert (row["paper"], row["measured"], row["seeds"]) == ("79.5", "–", "0")


def test_rows_made_afterwards_are_beside_what_was_trained(results):
  label = "PTB, small (paper: PTB, medium): Scalar quantisation (8 bits)"
  row = cells(found(results, "Table 9"), label)
  assert (row["measured"], row["- full"], row["ratio"]) == ("114.50", "+0.50", "4.0")


def test_scores_are_bleu_accuracy_or_perplexity(results):
  assert measured(results, "multi30k/full").score.mean == 31.5
  assert measured(results, "ag-news/full").score.mean == pytest.approx(90.0)
  assert measured(results, "ptb-small/full").score.mean == 115.0
  label = "Multi30k, En-De (paper: WMT19, En-De): Full"
  assert cells(found(results, "Table 3"), label)["measured"] == "31.50"


def test_a_failed_run_says_so(results, kept):
  failed = kept(1.0)
  failed["result"]["status"] = "failed"
  results = {**results, "ptb-small/vq": failed}
  row = cells(found(results, "Table 4"), "PTB, small: DPQ-VQ (32x25s)")
  assert (row["measured"], row["seeds"]) == ("failed", "0, 1 failed")


@pytest.mark.parametrize("scale", SCALES)
def test_tables_print_at_every_scale_within_80_columns(scale, results):
  stream = io.StringIO()
  for table in dpq_report.tables(results if scale == "cpu" else {}, scale):
    Console(file=stream, width=80).print(table.rich())
  assert max(map(len, stream.getvalue().splitlines())) <= 80


@pytest.mark.parametrize("scale", SCALES)
def test_works_have_names_of_their_own_and_come_after_what_they_need(scale):
  seen = set()
  for work in dpq_tables.works(scale):
    assert work.name not in seen
    assert seen.issuperset(work.needs)
    seen.add(work.name)


VOCABULARY = {
  "ag-news": (69_322, dpq_settings.AG_NEWS),
  "yahoo": (477_522, dpq_settings.YAHOO),
  "dbpedia": (612_530, dpq_settings.DBPEDIA),
  "yelp-polarity": (246_739, dpq_settings.YELP_POLARITY),
  "yelp-full": (268_414, dpq_settings.YELP_FULL),
}


@pytest.mark.parametrize("name", VOCABULARY)
@pytest.mark.parametrize("kind", ["sx", "vq"])
def test_recovered_codes_have_the_ratio_that_the_paper_prints(name, kind):
  vocab, both = VOCABULARY[name]
  codes, dim = getattr(both, kind), 300
  values = codes.codes * dim / (codes.subspaces if codes.shared else 1)
  bits = vocab * codes.subspaces * np.log2(codes.codes) + 32 * values
  ratio = 32 * vocab * dim / bits * (dim + 1) / dim
  assert ratio == pytest.approx(PAPER["Table 3"][name][kind].ratio, abs=0.011)


def grid(kept):
  setting = SCALES["cpu"]["ag-news-grid"]
  rows = {"ag-news-grid/full": kept(accuracy=0.88)}
  for i, k in enumerate(setting.grid[0]):
    for j, m in enumerate(setting.grid[1]):
      for kind in ("sx", "vq"):
        for shared in (False, True):
          name = f"ag-news-grid/{kind}-{Codes(k, m, shared)}"
          rows[name] = kept(None, FULL_BYTES // (4 * (i + 1) * (j + 1)), 0.8 + 0.01 * (i + j))
  return rows


def test_the_page_and_its_plots_are_written(results, kept, tmp_path):
  results = results | grid(kept)
  results["ptb-small/sx"] |= {"codes": {"counts": np.ones((25, 8), int).tolist()}}
  written = dpq_page.write(results, tmp_path)
  assert [path.name for path in written] == [
    "dpq.md",
    "dpq-heat.png",
    "dpq-trade.png",
    "dpq-codes.png",
  ]
  page = written[0].read_text()
  for path in written[1:]:
    assert f"(../images/{path.name})" in page
  assert "Table 3: PTB, small in place of PTB, medium" in page


def test_a_page_without_results_has_dashes_and_no_plots(tmp_path):
  page, *plots = dpq_page.write({}, tmp_path)
  assert not plots
  assert "| PTB, small: Full | 114.5 | 1.0 | – | 0 |" in page.read_text()


def test_the_frontier_is_what_no_smaller_one_beats():
  points = [(10.0, 5.0), (8.0, 4.0), (4.0, 7.0), (2.0, 6.0)]
  assert dpq_plots._frontier(points) == [(10.0, 5.0), (4.0, 7.0)]


class Words:
  """An encoder of a few words."""

  words = ("<eos>", "<unk>", "monday", "toronto", "bush")

  def encode(self, word):
    return np.array([self.words.index(word) if word in self.words else 1, 0])

  def decode(self, tokens):
    return " ".join(self.words[token] for token in tokens)


def test_only_words_that_are_one_token_are_shown():
  assert dpq_codes.known(Words(), ("monday", "friday", "toronto")) == {"monday": 2, "toronto": 3}


@pytest.mark.timeout(900)
def command(tmp_path, monkeypatch, names):
  """The results of a command that trains these, and what it printed."""
  arguments = ["--scale", "smoke", "--only", names]
  own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
  done = subprocess.run(
    [sys.executable, "-m", "experiments.studies.dpq.run", *arguments],
    cwd=tmp_path,
    env=os.environ | own,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  monkeypatch.chdir(tmp_path)
  results = dpq_tables.STUDY.read("smoke")
  json.dumps(results, allow_nan=False)
  return results, done.stdout


def test_the_command_trains_keeps_and_prints(tmp_path, monkeypatch, capsys):
  names = "ptb-small/sx,ptb-small/scalar-8,ptb-small/kd-distilled"
  results, printed = command(tmp_path, monkeypatch, names)
  assert "Table 4" in printed
  assert set(results) == {*names.split(","), "ptb-small/full"}
  small = results["ptb-small/sx"]
  assert small["compact"]["bytes"] == small["result"]["embedding"]["shipped_bytes"]
  assert dpq_tables.main(["--scale", "smoke", "--only", names, "--list"]) == 0
  assert capsys.readouterr().out.count("done") == 4


def test_the_command_translates_what_it_rebuilt(tmp_path, monkeypatch):
  results, _ = command(tmp_path, monkeypatch, "multi30k/reconstruction-32x256")
  assert set(results) == {"multi30k/full", "multi30k/reconstruction-32x256"}
  assert 0 <= results["multi30k/reconstruction-32x256"]["bleu"]["score"] <= 100


def test_the_command_begins_tasks_with_an_encoder(tmp_path, monkeypatch):
  results, _ = command(tmp_path, monkeypatch, "bert-pairs/sx,bert-spans/sx")
  assert set(results) == {"bert/sx", "bert-pairs/sx", "bert-spans/sx"}


@pytest.mark.parametrize(("codes", "subspaces"), [(2, 3), (4, 5), (7, 2)])
def test_one_hot_codes_are_never_of_full_rank(codes, subspaces):
  """Every code of every subspace, many times over: the bound is reached, and it is below K·D."""
  drawn = np.random.default_rng(0).integers(0, codes, (50 * codes * subspaces, subspaces))
  blocks = np.eye(codes)[drawn].reshape(len(drawn), -1)
  assert np.linalg.matrix_rank(blocks) == dpq_notes.rank_bound(codes, subspaces)


def test_the_corrected_ratios_are_those_of_an_embedding():
  """Computed from what ships, not by the formula."""
  table = dpq_notes.WMT
  for codes in (32, 128):
    shipped = DPQEmbedding(*table, SoftmaxQuantizer(codes, 128)).shipped().state_bytes
    exact = 4 * table.n * table.d / shipped
    np.testing.assert_allclose(dpq_notes.ratio(table, codes, 128), exact, rtol=1e-6)
