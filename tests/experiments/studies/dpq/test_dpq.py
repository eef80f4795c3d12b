"""Tests of the rows, tables, page and measurements of the DPQ study."""

import json

import numpy as np
import pytest

from experiments.studies.dpq import report, run
from experiments.studies.dpq.settings import ZHANG, CodeSize
from vqjax import DPQEmbedding, SoftmaxQuantizer

FULL_BYTES = 10_000 * 200 * 4


def kept(perplexity=None, size=FULL_BYTES, accuracy=None, status="finished", **beside):
  """A kept result with the fields that tables read."""
  test = {"perplexity": perplexity} if accuracy is None else {"accuracy": accuracy}
  result = {"status": status, "test": test, "embedding": {"shipped_bytes": size}}
  return {"result": result, **beside}


@pytest.fixture
def results():
  return {
    "ptb-small/full": kept(114.0),
    "ptb-small/full-s1": kept(116.0),
    "ptb-small/sx": kept(105.0, 94_000),
    "ptb-small/sx-s1": kept(106.0, 94_000),
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
  assert (row["measured"], row["- full"]) == ("105.50 ± 0.71", "-9.50 ± 0.71")
  assert row["ratio"] == "85.1"


def test_a_failed_run_is_counted_and_has_no_score(results):
  row = line(results, "Table 4", "PTB, small: DPQ-VQ")
  assert row["measured"] == "1 failed"


def test_a_score_is_bleu_else_accuracy_else_perplexity(results):
  assert report.scores_by_seed(results, "multi30k/full") == {0: 31.5}
  assert report.scores_by_seed(results, "ag-news/full") == {0: 90.0}
  assert report.scores_by_seed(results, "ptb-small/full") == {0: 114.0, 1: 116.0}


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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_makes_every_kind_of_job_and_keeps_it(smoke):
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
