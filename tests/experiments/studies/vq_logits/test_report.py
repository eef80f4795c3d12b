"""Tests of the tables, the page and the published numbers of the VQ-Logits study."""

import shutil

import pytest

from experiments.studies.study_page import DOCS
from experiments.studies.vq_logits import report
from experiments.studies.vq_logits.report import ABLATIONS, MAIN, PAPER
from experiments.studies.vq_logits.rows import rows
from experiments.studies.vq_logits.settings import SCALES
from vqjax.lab.study.seeds import Spread

FULL_BYTES = 10_000 * 128 * 4
PTB = SCALES["cpu"]["ptb"]


def kept(perplexity, size=FULL_BYTES, head="DenseHead", floors=None):
  """A line of results.jsonl."""
  result = {
    "status": "finished",
    "commit": "c0ffee",
    "device": "cpu",
    "date": "2026-01-02T03",
    "valid": {"perplexity": 1.1 * perplexity},
    "test": {"perplexity": perplexity},
    "head": {"class": head, "params": 1_280_000, "state_bytes": size, "tied": False},
  }
  return {"result": result, "floors": floors}


@pytest.fixture
def results():
  """Two seeds of the full softmax and of a product head, one seed of a codebook."""
  floors = {"uniform": 20.0, "bias": 5.0}
  return {
    "ptb/full": kept(100.0),
    "ptb/full-s1": kept(120.0),
    "ptb/vq-256": kept(300.0, 171_072, "CodebookHead", floors),
    "ptb/product": kept(101.0, FULL_BYTES // 20, "ProductHead"),
    "ptb/product-s1": kept(118.0, FULL_BYTES // 20, "ProductHead"),
  }


@pytest.fixture
def failed():
  made = kept(1.0)["result"] | {"status": "failed", "error": "the loss is nan"}
  return {"name": "ptb/vq-512", "result": made}


@pytest.fixture
def docs(tmp_path):
  """A copy of the page and of the benchmarks' figures that it reads."""
  (tmp_path / "results").mkdir()
  shutil.copy(DOCS / "results" / "bench.json", tmp_path / "results" / "bench.json")
  shutil.copy(DOCS / "results" / "vq_logits.md", tmp_path / "results")
  return tmp_path


def measured(results, name):
  row = next(row for row in rows(PTB) if row.name == name)
  return report.measurement(results, PTB, row)


def row_of(results, label, table="Table 10"):
  """The cells of a row of a table of the page, by column."""
  frame = report.paper_table(results, PTB, table).set_index("run")
  return frame.loc[label]


def test_loss_of_quality_is_paired_by_seed(results):
  over = measured(results, "product").over_full
  assert over.mean == pytest.approx((1.0 + 100 * (118 / 120 - 1)) / 2)
  assert over.seeds == 2
  assert measured(results, "vq-256").over_full == Spread(pytest.approx(200.0), None, 1)


def test_a_row_from_scratch_is_compared_with_the_full_softmax_from_scratch(results):
  results |= {"ptb/full-scratch": kept(80.0), "ptb/adaptive": kept(88.0)}
  assert measured(results, "adaptive").over_full.mean == pytest.approx(10.0)
  assert measured(results, "vq-256").over_full.mean == pytest.approx(200.0)


def test_floors_of_a_codebook_are_those_of_its_run(results):
  assert (measured(results, "vq-256").floor, measured(results, "vq-256").floor_bias) == (20.0, 5.0)
  assert measured(results, "product").floor is None


def test_a_missing_row_has_only_the_papers_numbers(results):
  row = row_of(results, "VQ-Logits (K=512)")
  assert (row["paper"], row["paper, % over full"]) == ("56.9", "+3.1")
  assert row[["measured", "of full", "floor"]].isna().all()


def test_failed_runs_are_counted_and_leave_the_other_seeds(results, failed, docs):
  results |= {"ptb/vq-512": failed, "ptb/full-s1": failed}
  assert row_of(results, "VQ-Logits (K=512)")["measured"] == "1 failed"
  assert row_of(results, "Full softmax")["measured"] == "100.0, 1 failed"
  page, *_ = report.update(results, docs)
  assert "ptb/vq-512 failed: the loss is nan" in page.read_text()


@pytest.mark.parametrize(
  ("row", "head", "shipped"),
  [
    # 1,024 codes of 128 numbers; a bias and a code of four bytes for each of 10,000 tokens.
    ("gumbel-1024", "LearnedCodebookHead", 4 * 1024 * 128 + 10_000 * (4 + 4)),
    # 224 codes of 128 numbers in all; a bias and 16 codes of one byte for each token.
    ("product-learned", "LearnedProductHead", 4 * 224 * 128 + 10_000 * (4 + 16)),
  ],
)
def test_bytes_of_learned_codes_are_those_of_the_fixed_head(results, row, head, shipped):
  learned = measured(results | {f"ptb/{row}": kept(90.0, 99 * FULL_BYTES, head)}, row)
  assert learned.head_bytes == shipped
  assert learned.of_full == pytest.approx(shipped / FULL_BYTES)


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_of_the_paper_has_a_row_at_every_scale(scale):
  for name, table in [*MAIN.items(), *(("wikitext", name) for name in ABLATIONS)]:
    frame = report.paper_table({}, SCALES[scale][name], table)
    printed = [row["perplexity"] for row in PAPER[table].values()]
    assert frame["paper"].dropna().tolist() == printed


@pytest.mark.parametrize("name", MAIN)
def test_published_parameters_are_codes_times_width(name):
  dim, setup = SCALES["paper"][name].dim, PAPER["Setup"][name]
  codebooks = {f"vq-{k}": int(k) * dim for k in setup["codes"].split()}
  for row, count in ({"full": int(setup["vocab"]) * dim} | codebooks).items():
    printed = float(PAPER[MAIN[name]][row]["params_M"])
    # The paper cuts digits (0.786 is 0.78), and prints 205.2 for the 205.6 of WikiText-103.
    assert printed == pytest.approx(count / 1e6, abs=0.01, rel=0.005)


def test_published_speedups_are_ratios_of_published_times():
  times = {row: float(cells["ms"]) for row, cells in PAPER["Table 3"].items()}
  for row, time in times.items():
    assert float(PAPER["Table 1"][row]["speedup"]) == pytest.approx(times["full"] / time, rel=0.01)


def test_published_perplexities_of_equal_codes_are_below_their_floor():
  floor = int(PAPER["Setup"]["wikitext"]["vocab"]) / 1024
  for row in ("vq-1024-bins", "vq-1024-random"):
    assert float(PAPER["Table 6"][row]["perplexity"]) < floor


def test_a_page_without_results_or_benches_has_the_papers_numbers(docs):
  (docs / "results" / "bench.json").unlink()
  page, *others = report.update({}, docs)
  assert [path.name for path in others if path.suffix == ".png"] == ["vq-codes.png"]
  assert "| VQ-Logits (K=1024)" in page.read_text()
