"""Tests of the tables and the published numbers of the VQ-Logits study."""

import pytest

from experiments.studies.vq_logits import page, ptb, web, wikitext
from experiments.studies.vq_logits.page import ABLATIONS, MAIN, PAPER
from vqjax.lab.study.seeds import Spread

FULL_BYTES = 10_000 * 128 * 4


def kept(perplexity, size=FULL_BYTES, head="DenseHead", floors=None):
  """A line of results.jsonl."""
  result = {
    "status": "finished",
    "test": {"perplexity": perplexity},
    "head": {"class": head, "state_bytes": size},
  }
  return {"result": result, "floors": floors}


@pytest.fixture
def results():
  """Two seeds of the full softmax and of a product head, one seed of a codebook."""
  failed = {"status": "failed", "error": "the loss is nan"}
  return {
    "full/run": kept(100.0),
    "full/run-s1": kept(120.0),
    "full/run-s2": {"result": failed},
    "vq-256/run": kept(300.0, 171_072, "CodebookHead", {"uniform": 20.0, "bias": 5.0}),
    "product/run": kept(101.0, FULL_BYTES // 20, "ProductHead"),
    "product/run-s1": kept(118.0, FULL_BYTES // 20, "ProductHead"),
    "product-learned/run": kept(90.0, 99 * FULL_BYTES, "LearnedProductHead"),
    "full-scratch/run": kept(80.0),
    "adaptive/run": kept(88.0),
  }


@pytest.fixture
def measured(results):
  return page.measurements(ptb.study(), results)


def test_loss_of_quality_is_paired_by_seed(measured):
  over = measured["over_full"]
  assert over["product"].mean == pytest.approx((1.0 + 100 * (118 / 120 - 1)) / 2)
  assert over["product"].seeds == 2
  assert over["vq-256"] == Spread(pytest.approx(200.0), None, 1)


def test_a_row_from_scratch_is_compared_with_the_full_softmax_from_scratch(measured):
  assert measured["over_full"]["adaptive"].mean == pytest.approx(10.0)


def test_floors_of_a_codebook_are_those_of_its_run(measured):
  assert measured.loc["vq-256", ["uniform", "bias"]].tolist() == [20.0, 5.0]
  assert measured.loc["product", ["uniform", "bias"]].isna().all()


def test_bytes_of_learned_codes_are_those_of_the_fixed_head(measured):
  assert measured["of_full"]["product-learned"] == pytest.approx(1 / 20)


def test_failed_runs_are_left_out_and_missing_rows_have_the_papers_numbers(measured):
  others = {x.__name__.split(".")[-1]: page.measurements(x.study(), {}) for x in (wikitext, web)}
  table = page.shown_tables({"ptb": measured, **others})["table-10"].set_index("run")
  assert table.loc["Full softmax", "measured"] == "110.0 ± 14.1"
  missing = table.loc["VQ-Logits (K=512)"]
  assert missing["paper, % over full"] == "+3.1"
  assert missing[["measured", "of full", "floor"]].isna().all()


@pytest.mark.parametrize("text", [ptb, wikitext, web])
def test_every_row_of_the_paper_has_a_row_in_both_studies_of_its_text(text):
  name = text.__name__.split(".")[-1]
  titles = MAIN[name], *(ABLATIONS if text is wikitext else ())
  printed = {row for title in titles for row in PAPER[title]}
  assert printed <= text.study().rows.keys()
  assert printed <= text.paper().rows.keys()


def test_published_speedups_are_ratios_of_published_times():
  times = {row: float(cells["ms"]) for row, cells in PAPER["Table 3"].items()}
  for row, time in times.items():
    assert float(PAPER["Table 1"][row]["speedup"]) == pytest.approx(times["full"] / time, rel=0.01)


def test_published_perplexities_of_equal_codes_are_below_their_floor():
  floor = int(PAPER["Setup"]["wikitext"]["vocab"]) / 1024
  for row in ("vq-1024-bins", "vq-1024-random"):
    assert float(PAPER["Table 6"][row]["perplexity"]) < floor
