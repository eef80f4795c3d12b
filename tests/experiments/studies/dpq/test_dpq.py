"""Tests of the rows, tables, page and measurements of the DPQ study."""

import dataclasses
import json

import jax
import numpy as np
import pandas as pd
import pytest

from experiments.studies.dpq import report, run
from experiments.studies.dpq.rows import rows
from experiments.studies.dpq.settings import SCALES, CodeSize
from experiments.studies.study_page import DOCS
from tests import tiny
from vqjax import DPQEmbedding, SoftmaxQuantizer
from vqjax.lab.training import read_run_variables

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


def formula_ratio(vocab, dim, codes):
  """The paper's compression ratio of a product code, in bits (Section 3)."""
  k, m, shared = codes
  return 32 * vocab * dim / (vocab * m * np.log2(k) + 32 * k * dim / (m if shared else 1))


# Words of the data sets in the paper's Table 2.
@pytest.mark.parametrize(("name", "vocab"), [("ag-news", 69_322), ("dbpedia", 612_530)])
@pytest.mark.parametrize("kind", ["sx", "vq"])
def test_recovered_codes_have_the_ratio_that_the_paper_prints(name, vocab, kind):
  ratio = formula_ratio(vocab, 300, getattr(SCALES["cpu"][name], kind)) * 301 / 300
  printed = report.PRINTED.query("table == 'Table 3' and column == 'ratio'").set_index("row").value
  # The paper rounds to two decimals, sometimes down.
  assert ratio == pytest.approx(printed[f"{name}/{kind}"], abs=0.011)


def test_the_ratios_of_the_page_are_those_of_the_formula():
  table = pd.read_csv(DOCS / "results" / "dpq-ratios.csv")
  sizes = table.row.str.extract(r"\((\d+)x(\d+)(s?)\)")
  for row, (k, m, shared) in zip(table.to_dict("records"), sizes.to_numpy(), strict=True):
    vocab, dim = (32_000, 512) if row["table"] == "Table 11" else (10_000, 650)
    ratio = formula_ratio(vocab, dim, CodeSize(int(k), int(m), bool(shared)))
    assert row["formula"] == pytest.approx(ratio, abs=0.005)
    assert row["formula · (d + 1)/d"] == pytest.approx(ratio * (dim + 1) / dim, abs=0.005)


@pytest.mark.parametrize("codes", [32, 128])
def test_the_formula_counts_the_bits_of_the_inference_form(codes):
  embedding = DPQEmbedding(32_000, 512, SoftmaxQuantizer(codes, 128))
  exact = 4 * 32_000 * 512 / embedding.inference_size().state_bytes
  ratio = formula_ratio(32_000, 512, CodeSize(codes, 128))
  np.testing.assert_allclose(ratio, exact, rtol=1e-6)  # the bits are rounded up to whole bytes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_makes_every_kind_of_job_and_keeps_it(smoke):
  names = "ptb-small/sx,ptb-small/scalar-8,bert-pairs/sx"
  smoke("dpq", names)
  results = run.STUDY.read("smoke")
  json.dumps(results, allow_nan=False)
  assert set(results) == {*names.split(","), "ptb-small/full", "bert/sx"}
  small = results["ptb-small/sx"]
  assert np.sum(small["codes"]["counts"], axis=1).tolist() == [200] * 4
  assert 1 <= small["codes"]["perplexity"]["least"] <= 4
  setting, folder = SCALES["smoke"]["bert-pairs"], "runs/dpq/smoke/bert/sx-0"
  tuned = setting.make("sx", rows(setting)[1].embedding, seed=0)
  tuned = dataclasses.replace(tuned, init_from=run.FromPart(folder, "encoder"))
  begun, trained = tiny.begun(tuned)[1], read_run_variables(folder)[0]
  encoders = [tree["params"]["encoder"] for tree in (begun, trained)]
  jax.tree.map(np.testing.assert_array_equal, *encoders)
