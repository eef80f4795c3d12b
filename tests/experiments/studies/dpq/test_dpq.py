"""Tests of the rows, tables, page and measurements of the DPQ study."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from experiments.studies.dpq import report, run
from experiments.studies.dpq.settings import SCALES, ZHANG, CodeSize
from experiments.studies.study_page import DOCS
from vqjax import DPQEmbedding, SoftmaxQuantizer

ROOT = pathlib.Path(__file__).parents[4]
FULL_BYTES = 10_000 * 200 * 4


def kept(perplexity=None, size=FULL_BYTES, accuracy=None, status="finished", **beside):
  """A kept result with the fields that tables read."""
  test = {"perplexity": perplexity} if accuracy is None else {"accuracy": accuracy}
  result = {"status": status, "test": test, "embedding": {"shipped_bytes": size}}
  return {"result": result, **beside}


@pytest.fixture
def results():
  compact = {"formula": 85.1, "bytes": 94_000, "file_bytes": 94_144}
  return {
    "ptb-small/full": kept(114.0),
    "ptb-small/full-s1": kept(116.0),
    "ptb-small/sx": kept(105.0, 94_000, compact=compact),
    "ptb-small/sx-s1": kept(106.0, 94_000, compact=compact),
    "ptb-small/vq": kept(1.0, status="failed"),
    "ptb-small/scalar-8": kept(114.5, FULL_BYTES // 4 + 8),
    "ag-news/full": kept(accuracy=0.9),
    "multi30k/full": kept(9.0, bleu={"score": 31.5}),
  }


def line(results, name, start):
  """The only line of a table whose label starts with `start`."""
  table = report.dpq_table(results, "cpu", name)
  (own,) = table[table.run.str.startswith(start)].to_dict("records")
  return own


def test_a_row_has_its_score_its_paired_difference_and_both_ratios(results):
  row = line(results, "Table 4", "PTB, small: DPQ-SX")
  assert (row["paper"], row["paper's ratio"]) == ("105.8", "85.5")
  assert (row["measured"], row["seeds"]) == ("105.50 ± 0.71", "2")
  assert row["- full"] == "-9.50 ± 0.71"
  assert (row["ratio"], row["formula"], row["bytes"]) == ("85.1", "85.1", "91.9 KiB")


def test_a_row_that_was_not_run_is_in_a_list_and_in_no_table(results):
  tables = [report.dpq_table(results, "cpu", name) for name in report.TABLES]
  labels = {label for table in tables if len(table) for label in table.run}
  assert len(labels) == 9
  listed = {line["setting"]: line for line in report.not_run(results, "cpu").to_dict("records")}
  row = listed["Multi30k, En-De"]
  assert row["tables"] == "3, 11"
  assert row["`--only`"].startswith("`multi30k/sx,multi30k/vq,")
  assert "PTB, small, 3 epochs" in listed


def test_a_derived_row_is_compared_with_the_full_embedding(results):
  row = line(results, "Table 9", "PTB, small †: Scalar quantisation, 8 bits")
  assert (row["measured"], row["- full"], row["ratio"]) == ("114.50", "+0.50", "4.0")


def test_a_failed_run_is_counted_and_has_no_score(results):
  row = line(results, "Table 4", "PTB, small: DPQ-VQ")
  assert (row["measured"], row["seeds"]) == ("failed", "0, 1 failed")


def test_a_score_is_bleu_else_accuracy_else_perplexity(results):
  assert report.scores_by_seed(results, "multi30k/full") == {0: 31.5}
  assert report.scores_by_seed(results, "ag-news/full") == {0: 90.0}
  assert report.scores_by_seed(results, "ptb-small/full") == {0: 114.0, 1: 116.0}


def test_rows_of_a_table_keep_the_papers_order():
  settings = "ptb-medium-tied", "wikitext-medium"
  names = [f"{setting}/{kind}" for setting in settings for kind in ("vq", "sx-tied", "sx")]
  table = report.dpq_table({name: kept(100.0) for name in names}, "paper", "Table 12")
  assert list(table.paper) == ["82.4", "83.5", "83.5", "95.2", "95.8", "97"]


@pytest.mark.parametrize("scale", SCALES)
def test_jobs_have_distinct_names_and_follow_the_jobs_that_they_need(scale):
  seen = set()
  for job in run.jobs(scale):
    assert job.name not in seen
    assert seen.issuperset(job.needs)
    seen.add(job.name)


VOCABULARIES = {
  "ag-news": 69_322,
  "yahoo": 477_522,
  "dbpedia": 612_530,
  "yelp-polarity": 246_739,
  "yelp-full": 268_414,
}
"""Words of the data sets in the paper's Table 2."""


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("kind", ["sx", "vq"])
def test_recovered_codes_have_the_ratio_that_the_paper_prints(name, kind):
  ratio = report.formula_ratio(VOCABULARIES[name], 300, ZHANG[name][kind]) * 301 / 300
  printed = report.PRINTED.query("table == 'Table 3' and column == 'ratio'").set_index("row").value
  # The paper rounds to two decimals, sometimes down.
  assert ratio == pytest.approx(printed[f"{name}/{kind}"], abs=0.011)


@pytest.mark.parametrize("codes", [32, 128])
def test_the_formula_counts_the_bits_of_the_inference_form(codes):
  embedding = DPQEmbedding(32_000, 512, SoftmaxQuantizer(codes, 128))
  exact = 4 * 32_000 * 512 / embedding.inference_size().state_bytes
  ratio = report.formula_ratio(32_000, 512, CodeSize(codes, 128))
  np.testing.assert_allclose(ratio, exact, rtol=1e-6)  # the bits are rounded up to whole bytes


@pytest.mark.parametrize(("codes", "subspaces"), [(2, 3), (4, 5), (7, 2)])
def test_one_hot_codes_do_not_have_full_rank(codes, subspaces):
  drawn = np.random.default_rng(0).integers(0, codes, (50 * codes * subspaces, subspaces))
  blocks = np.eye(codes)[drawn].reshape(len(drawn), -1)
  assert np.linalg.matrix_rank(blocks) == subspaces * (codes - 1) + 1


@pytest.mark.slow
def test_rendering_reproduces_the_page_and_rendering_again_changes_nothing(tmp_path):
  for path in ("results/dpq.md", "results/bench.json"):
    (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
    shutil.copy(DOCS / path, tmp_path / path)

  def render():
    report.update(run.STUDY.read("cpu"), tmp_path)
    return {path.name: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}

  first = render()
  assert first["dpq.md"] == (DOCS / "results" / "dpq.md").read_bytes()
  assert {"dpq-heat.png", "dpq-trade.png", "dpq-codes.png", "dpq-cost.png"} <= first.keys()
  assert render() == first


def test_a_page_without_results_has_its_blocks_and_no_figures(tmp_path):
  (tmp_path / "results").mkdir()
  shutil.copy(DOCS / "results" / "dpq.md", tmp_path / "results")
  page, *figures = report.update({}, tmp_path)
  assert not figures
  assert "PTB, small: Full" not in page.read_text()
  assert "`ptb-small/full,ptb-small/sx,ptb-small/vq,ptb-small/scalar-8," in page.read_text()


def test_codes_that_changed_are_drawn_where_they_were_measured():
  setting = SCALES["cpu"]["ag-news-changes"]
  assert report.changes_figure({}, setting) is None
  measured = {"changes": [(100, 5.0), (150, 2.0)]}
  figure = report.changes_figure({"ag-news-changes/sx-8x32": measured}, setting)
  assert [len(axes.lines) for axes in figure.axes] == [1, 0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_makes_every_kind_of_job_and_keeps_it(smoke, capsys):
  small = "ptb-small/sx,ptb-small/scalar-8,ptb-small/kd-distilled"
  names = f"{small},multi30k/reconstruction-32x256"
  smoke("dpq", names)
  results = run.STUDY.read("smoke")
  json.dumps(results, allow_nan=False)
  assert set(results) == {*names.split(","), "ptb-small/full", "multi30k/full"}
  small = results["ptb-small/sx"]
  assert small["compact"]["bytes"] == small["result"]["embedding"]["shipped_bytes"]
  assert np.sum(small["codes"]["counts"], axis=1).tolist() == [200] * 4
  assert 0 <= results["multi30k/reconstruction-32x256"]["bleu"]["score"] <= 100
  before = run.STUDY.path("smoke").read_bytes()
  assert run.STUDY.main(["--scale", "smoke", "--only", names]) == 0
  assert run.STUDY.path("smoke").read_bytes() == before
  capsys.readouterr()
  assert run.STUDY.main(["--scale", "smoke", "--only", names, "--list"]) == 0
  assert capsys.readouterr().out.count("done") == 6


@pytest.mark.parametrize(
  ("listed", "scale"), [(report.elsewhere("cpu"), "paper"), (report.not_run({}, "cpu"), "cpu")]
)
def test_the_commands_of_rows_that_were_not_run_name_these_rows(listed, scale):
  for line in listed.to_dict("records"):
    names = line["`--only`"].strip("`")
    assert len(names.split(",")) == line["rows"]
    assert run.STUDY.chosen(scale, names)
