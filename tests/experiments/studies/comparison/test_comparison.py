"""The comparison of heads: intervals, tuning, tables, the page and the command."""

import math
import pathlib

import numpy as np
import pytest
import scipy.special
import scipy.stats

from experiments.studies.comparison import report, run
from experiments.studies.comparison.compressed import InFile, InMemory, TrainedTable
from experiments.studies.comparison.rows import SCALES, rows
from experiments.studies.lstm import LSTM
from tests import jitted
from vqjax import DenseEmbedding, DenseHead
from vqjax.convert import part_of
from vqjax.lab.config import config_hash, with_fields
from vqjax.lab.data import fit_tokenizer
from vqjax.lab.study import tuning
from vqjax.lab.study.jobs import StudyJob, check_same
from vqjax.lab.study.tuning import SearchSpace
from vqjax.lab.training import NotFiniteError
from vqjax.lm import records
from vqjax.tables import Moments

PTB, MANUALS, STORIES = SCALES["cpu"]


def kept(nats, size=100, seconds=0.1):
  return {
    "result": {
      "status": "finished",
      "device": "x86_64 CPU, 1 cores",
      "test": {"nats_per_token": nats, "perplexity": math.exp(nats)},
      "head": {"state_bytes": size},
      "embedding": {"state_bytes": 5000},
      "train": {"step_seconds": seconds},
    }
  }


def test_differences_are_paired_by_seed():
  results = {
    "a": kept(4.0),
    "a-s1": kept(5.0),
    "b": kept(4.1),
    "b-s1": kept(5.1),
    "b-s2": kept(9.0),
  }
  found = report.paired(results, "b", "a")
  np.testing.assert_allclose(found, 100 * math.expm1(0.1))
  assert report.paired(results, "c", "a") is None


def test_a_row_of_one_seed_is_compared_with_the_mean_of_the_reference():
  results = {"a": kept(4.0), "a-s1": kept(5.0), "b": kept(4.6)}
  # What is made of a run is compared with that run.
  np.testing.assert_allclose(report.paired(results, "b", "a")[0], 100 * math.expm1(0.6))
  found = report.from_reference(results, "b", "a")
  np.testing.assert_allclose(found[0], 100 * math.expm1(0.1))
  assert found.low is None


def test_a_source_that_was_trained_again_and_ended_elsewhere_is_refused():
  check_same(kept(4.0), None)
  check_same(kept(4.0), {"name": "a", **kept(4.0)})
  with pytest.raises(ValueError, match=r"of a; got 4.01 and 4.0 nats. Remove its line"):
    check_same(kept(4.01), {"name": "a", **kept(4.0)})


def test_a_distilled_row_learns_from_the_teacher_of_its_seed():
  jobs = {job.name: job for job in run.jobs("cpu")}
  assert "ptb/dense-contexts-s2" in jobs["ptb/product-distilled-s2"].needs
  assert "ptb/dense-contexts" in jobs["ptb/product-distilled-tuning"].needs
  needs = {"ptb/tied-contexts-s1", "ptb/tied-contexts-tuning"}
  assert set(jobs["ptb/tied-distilled-s1"].needs) == needs
  (row,) = (row for row in rows(PTB) if row.name == "product-distilled")
  assert row.experiment(PTB, 2).init_from.folder == "runs/comparison/cpu/ptb/dense-contexts-s2"


def test_a_compressed_row_measures_the_run_of_its_seed():
  jobs = {job.name: job for job in run.jobs("cpu")}
  for row in ("dense-contexts", "tied", "tied-contexts", "tied-distilled"):
    for form in ("file", "memory"):
      assert jobs[f"ptb/{row}-{form}-s3"].needs == (f"ptb/{row}-s3",)
      assert f"ptb/{row}-{form}-tuning" not in jobs


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("method", [InFile(), InMemory(classes=6)])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_compressed_table_takes_its_bytes_and_is_near_the_dense_one(is_tied, method):
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
  model, variables, used = method(TrainedTable(model, {"params": params}, moments, size))
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
  data, tokenizer = STORIES.data, fit_tokenizer(STORIES.data, STORIES.tokenizer)
  seen = {token for text in data.documents("train") for token in tokenizer.encode(text)}
  assert len(seen) == STORIES.seen


@pytest.fixture
def tuned(monkeypatch, tmp_path):
  """Tunes with given losses: (learning rate, steps) -> nats; returns the result and the runs."""

  def tune(losses):
    ran = []

    def fit(experiment, folder, test):
      assert not test
      rate, steps = experiment.train.learning_rate, experiment.train.steps
      ran.append((rate, steps))
      nats, folder = losses(rate, steps), pathlib.Path(folder)
      folder.mkdir(parents=True, exist_ok=True)
      status = "failed" if nats is None else "finished"
      valid = None if nats is None else {"nats_per_token": nats, "perplexity": math.exp(nats)}
      result = {"status": status, "valid": valid, "train": {"seconds": 2.0}}
      records.write(folder / "result.json", result)
      if nats is None:
        raise NotFiniteError("the loss is nan")

    monkeypatch.setattr(tuning, "fit", fit)
    row = rows(SCALES["smoke"][0])[0].experiment(SCALES["smoke"][0], 0)
    space = SearchSpace({"train.learning_rate": (1.0, 2.0, 3.0), "model.dropout": (0.0, 0.1)})
    return tuning.Tuning("t", "", row, space, tmp_path / "runs").job().make(), ran

  return tune


def test_the_best_third_trains_longer_and_the_last_round_chooses(tuned):
  # The lowest loss of the first round is not the lowest of the second.
  made, ran = tuned(lambda rate, steps: {1.0: 3.0, 2.0: 1.0, 3.0: 2.0}[rate] + (steps > 1) / rate)
  assert [steps for _, steps in ran] == [1] * 6 + [3] * 2
  assert {rate for rate, _ in ran[6:]} == {2.0}
  assert made["chosen"]["train.learning_rate"] == 2.0
  assert made["seconds"] == 16.0


def test_a_candidate_that_diverges_is_not_chosen(tuned):
  made, _ = tuned(lambda rate, steps: None if rate > 1 else 5.0)
  assert made["chosen"]["train.learning_rate"] == 1.0
  assert sum(trial["valid"] is None for trial in made["trials"]) == 4


def test_a_tuning_of_which_every_candidate_diverges_has_failed(tuned):
  made, _ = tuned(lambda rate, steps: None)
  assert made["result"]["status"] == "failed"


def test_a_space_of_one_value_is_chosen_without_a_trial(tmp_path):
  row = rows(MANUALS)[0].experiment(MANUALS, 0)
  made = tuning.Tuning("t", "", row, MANUALS.space, tmp_path).job().make()
  assert (made["chosen"], made["trials"]) == ({"train.learning_rate": 40.0}, [])


def test_the_learning_rate_of_manual_pages_is_what_most_tunings_of_penn_treebank_chose():
  kept = run.STUDY.read("cpu")
  names = [f"ptb/{row.name}-tuning" for row in rows(MANUALS)]
  chosen = [tuple(kept[name]["chosen"].items()) for name in names if name in kept]
  (fields,) = MANUALS.space.candidates()
  assert max(set(chosen), key=chosen.count) == tuple(fields.items())


def test_a_row_has_no_identity_before_its_tuning_and_then_that_of_the_chosen_fields():
  row = rows(SCALES["smoke"][0])[0].experiment(SCALES["smoke"][0], 0)
  job = lambda experiment: StudyJob("r", "", lambda: config_hash(experiment), dict)
  before, chosen = StudyJob("r/tuning", "", str, dict), {}
  made = tuning.tuned(job, row, before, lambda: chosen or None)
  assert made.identity() == ""
  assert made.needs == ("r/tuning",)
  chosen["model.dropout"] = 0.05
  assert made.identity() == config_hash(with_fields(row, chosen)) != config_hash(row)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_tunes_and_trains_and_repeats_no_trial(smoke):
  names = "ptb/dense-s1"
  smoke("comparison", names)
  kept = run.STUDY.read("smoke")
  assert set(kept) == {names, "ptb/dense-tuning"}
  # A tuning that was stopped before its result finds the trials that have ended.
  run.STUDY.results("smoke").path.unlink()
  again = {job.name: job for job in run.jobs("smoke")}["ptb/dense-tuning"].make()
  timeless = lambda row: [{k: v for k, v in t.items() if k != "seconds"} for t in row["trials"]]
  assert again["chosen"] == kept["ptb/dense-tuning"]["chosen"]
  assert timeless(again) == timeless(kept["ptb/dense-tuning"])
