"""Tests of the rows, tables, page and measurements of the DPQ study."""

import dataclasses
import json

import jax
import numpy as np
import pandas as pd
import pytest

from experiments.studies.dpq import page, tasks
from experiments.studies.dpq.rows import CodeSize, FromPart
from experiments.studies.study_page import DOCS
from tests import tiny
from vqjax import DPQEmbedding, SoftmaxQuantizer
from vqjax.commands.models import load_model
from vqjax.lab.study import load_study
from vqjax.lab.training import read_run_variables

FULL_BYTES = 10_000 * 200 * 4


def kept(perplexity=None, size=FULL_BYTES, accuracy=None, status="finished", **beside):
  """A kept result with the fields that tables read."""
  test = {"perplexity": perplexity} if accuracy is None else {"accuracy": accuracy}
  result = {"status": status, "test": test, "embedding": {"shipped_bytes": size}}
  return {"result": result, **beside}


@pytest.fixture
def results():
  """Results of the small LSTM."""
  return {
    "full/run": kept(114.0),
    "full/run-s1": kept(116.0),
    "sx/run": kept(105.0, 94_000),
    "sx/run-s1": kept(106.0, 94_000),
    "vq/run": kept(1.0, status="failed"),
  }


def line(results, name, start):
  """The only line of a table whose label starts with `start`."""
  table = page.dpq_table({"ptb_small": (tasks.ptb_small(), results)}, name)
  (own,) = table[table.run.str.startswith(start)].to_dict("records")
  return own


def test_a_row_has_its_score_its_paired_difference_and_both_ratios(results):
  row = line(results, "Table 4", "PTB, small: DPQ-SX")
  assert (row["paper"], row["paper's ratio"]) == ("105.8", "85.5")
  assert (row["measured"], row["- full"]) == ("105.50 ± 0.71", "-9.50 ± 0.71")
  assert row["ratio"] == "85.1"


def test_a_failed_run_is_counted_and_has_no_score(results):
  assert line(results, "Table 4", "PTB, small: DPQ-VQ")["measured"] == "1 failed"


def test_a_study_that_stands_in_for_the_papers_has_a_dagger(results):
  assert line(results, "Table 3", "PTB, small †: DPQ-SX")["paper"] == "83.17"


def test_a_score_is_bleu_else_accuracy_else_perplexity(results):
  assert page.scores_by_seed({"full/run": kept(9.0, bleu={"score": 31.5})}, "full") == {0: 31.5}
  assert page.scores_by_seed({"full/run": kept(accuracy=0.9)}, "full") == {0: 90.0}
  assert page.scores_by_seed(results, "full") == {0: 114.0, 1: 116.0}


def formula_ratio(vocab, dim, codes):
  """The paper's compression ratio of a product code, in bits (Section 3)."""
  k, m, shared = codes
  return 32 * vocab * dim / (vocab * m * np.log2(k) + 32 * k * dim / (m if shared else 1))


# Words of the data sets in the paper's Table 2.
@pytest.mark.parametrize(
  ("name", "vocab", "sizes"),
  [("ag-news", 69_322, tasks.AG_NEWS), ("dbpedia", 612_530, tasks.DBPEDIA)],
)
def test_recovered_codes_have_the_ratio_that_the_paper_prints(name, vocab, sizes):
  printed = page.PRINTED.query("table == 'Table 3' and column == 'ratio'").set_index("row").value
  for kind, codes in zip(("sx", "vq"), sizes, strict=True):
    ratio = formula_ratio(vocab, 300, codes) * 301 / 300
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


SMOKE = """\
from configs.dpq import bert
from configs.dpq.lstm import LSTMSize
from experiments.studies.dpq import rows, tasks
from experiments.studies.dpq.rows import CodeSize
from vqjax.lab.config import Train
from vqjax.lab.data import Text, WordTokenizer

FEW_HELD_OUT = Text(valid_fraction=0.005, test_fraction=0.005)


def lstm():
  size = LSTMSize(16, 8, 0.0, 0.1, 0.5, 1, 1, 3.0)
  task = tasks.lstm((FEW_HELD_OUT, 8 * 20 * 6), size, WordTokenizer(vocab=200))
  sizes = CodeSize(4, 4, shared=True), CodeSize(4, 4)
  return rows.study(task, *sizes, further=rows.compressed(task), words=True)


def encoder():
  size, text = bert.EncoderSize(16, 1, 2, 32, 12), (FEW_HELD_OUT, WordTokenizer(vocab=200))
  train = Train(steps=3, batch=8, warmup=1, eval_every=3, save_every=3)
  return tasks.pretrained(size, bert.Corpus(*text), train, train, CodeSize(4, 4))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_codes_and_errors_are_kept_and_a_task_begins_from_its_encoder(process, tmp_path):
  (tmp_path / "smoke.py").write_text(SMOKE)
  run = lambda name, only: process(
    "vqjax.cli", "study", f"smoke.py:{name}", "--only", only, "--out", name
  )
  run("lstm", "sx/run,scalar-8/run")
  run("encoder", "sx/run")
  read = lambda path: [json.loads(line) for line in path.read_text().splitlines()]
  results = {line["name"]: line for line in read(tmp_path / "lstm/results.jsonl")}
  json.dumps(results, allow_nan=False)
  codes = results["sx/run"]["codes"]
  assert np.sum(codes["counts"], axis=1).tolist() == [200] * 4
  assert 1 <= codes["perplexity"]["least"] <= 4
  assert 0 < results["scalar-8/run"]["result"]["embedding"]["lost"] < 0.01
  (source,) = (tmp_path / "encoder/runs").glob("before-sx-*")
  study = load_study(tmp_path / "smoke.py", "encoder")
  tuned = dataclasses.replace(study.experiment("sx"), init_from=FromPart(str(source), "encoder"))
  begun, trained = tiny.begun(tuned)[1], read_run_variables(source)[0]
  encoders = [tree["params"]["encoder"] for tree in (begun, trained)]
  jax.tree.map(np.testing.assert_array_equal, *encoders)
  # The run knows the function of its file.
  assert load_model(str(next((tmp_path / "lstm/runs").glob("full-*")))).tokenizer.vocab == 200
