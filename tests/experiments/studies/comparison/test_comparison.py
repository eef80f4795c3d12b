"""The comparison of heads: its rows, its compressed tables, and its kept results."""

import numpy as np
import pytest
import scipy.special

from experiments.studies.comparison import dropout, manuals, page, ptb, small_tables, stories
from experiments.studies.comparison.compressed import InFile, InMemory, TrainedTable
from experiments.studies.lstm import LSTM
from tests import jitted
from vqjax import DenseEmbedding, DenseHead
from vqjax.convert import part_of
from vqjax.lab.data import fit_tokenizer
from vqjax.tables import Moments


def test_a_distilled_row_learns_from_the_teacher_of_its_seed():
  jobs = {job.name: job for job in page.works()["ptb"].job_list().jobs}
  assert "dense-contexts/run-s2" in jobs["product-distilled/run-s2"].needs
  assert "dense-contexts/run" in jobs["product-distilled/tuning"].needs
  needs = {"tied-contexts/run-s1", "tied-contexts/tuning"}
  assert set(jobs["tied-distilled/run-s1"].needs) == needs
  assert "tied-distilled/tuning" not in jobs
  for row in ("dense-contexts", "tied", "tied-contexts", "tied-distilled"):
    for form in ("file", "memory"):
      assert jobs[f"{row}-{form}/run-s3"].needs == (f"{row}/run-s3",)


def test_a_teacher_and_its_student_share_no_layer():
  model = ptb.study().experiment("dense-distilled").model
  assert model.student.embedding is not model.teacher.embedding


@pytest.mark.parametrize(
  ("row", "of_number", "of_row"),
  # Values and moments of float32; a moment a row; a scale and a moment a row. Of the bias 12 each.
  [("adamw", 12, 0), ("rowwise", 4, 4), ("int8", 1, 8)],
)
def test_a_table_in_training_has_its_values_and_moments(row, of_number, of_row):
  exact = 4096 * (128 * of_number + of_row + 12)
  assert 0 <= page.training_bytes(small_tables.study(), row) - exact < 100


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("row", [InFile("a"), InMemory("a")])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_compressed_table_takes_its_bytes_and_is_near_the_dense_one(is_tied, row):
  rng = np.random.default_rng(0)
  weight, bias = rng.normal(size=(2000, 12)).astype(np.float32), rng.normal(size=2000)
  hidden = rng.normal(size=(300, 12)) * np.linspace(0.2, 2, 12)
  counts = (20_000 / np.arange(1, 2001)).astype(int)
  moments = Moments(hidden.T @ hidden / 300, counts, 300)
  embedding = DenseEmbedding(2000, 12)
  head = DenseHead(2000, 12, use_bias=True, embedding=embedding if is_tied else None)
  model = LSTM(embedding=embedding, head=head, dim=12, layers=1, context=5)
  params = {"embedding": {"weight": weight}, "head": {"bias": bias}}
  if not is_tied:
    params = {"embedding": {"weight": 0 * weight}, "head": {"bias": bias, "weight": weight}}
  size = 25_000  # a quarter; biases and the transform take a sixth of it
  model, variables, used = row.compressed(TrainedTable(model, {"params": params}, moments, size))
  assert 0.97 * size < used <= size
  of_head = part_of(variables, "head")
  if is_tied:
    of_table = part_of(variables, "embedding")
    of_head = {c: {"embedding": of_table[c], **of_head.get(c, {})} for c in of_table}
    rows = jitted.apply(model.embedding, of_table, np.arange(2000))
    np.testing.assert_allclose(rows, weight, atol=1.5)
  found = jitted.apply(model.head, of_head, hidden)
  logits = hidden @ weight.T + bias
  both = [scipy.special.log_softmax(x, axis=-1) for x in (logits, np.float64(found))]
  divergence = (np.exp(both[0]) * (both[0] - both[1])).sum(axis=-1).mean()
  assert 0 < divergence < 0.05


@pytest.mark.slow
def test_the_row_of_seen_tokens_has_a_code_for_each(real_data, monkeypatch):
  monkeypatch.setenv("VQJAX_DATA", str(real_data))
  base = stories.base()
  tokenizer = fit_tokenizer(base.data, base.tokenizer)
  seen = {token for text in base.data.documents("train") for token in tokenizer.encode(text)}
  assert len(seen) == stories.SIZES.seen


def test_learning_rates_beside_dropout_are_those_that_penn_treebank_chose():
  rate, kept = "train.learning_rate", page.works()["ptb"].results.read()
  found = {
    job.split("/")[0]: each["chosen"][rate] for job, each in kept.items() if "chosen" in each
  }
  most = max([*found.values()], key=[*found.values()].count)
  for study, rates in ((manuals.study(), {}), (dropout.study(), found)):
    for name in study.trained:
      assert study.space(name).values[rate] == (rates.get(name, most),)
