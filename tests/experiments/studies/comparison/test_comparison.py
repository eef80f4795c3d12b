"""The comparison of heads: intervals, tuning, tables, the page and the command."""

import math
import pathlib
import shutil

import numpy as np
import pytest
import scipy.special
import scipy.stats

from experiments.studies import tuning
from experiments.studies.comparison import report, run
from experiments.studies.comparison.compressed import InFile, InMemory, TrainedTable
from experiments.studies.comparison.report import Interval
from experiments.studies.comparison.rows import SCALES, rows
from experiments.studies.lstm import LSTM
from experiments.studies.study import StudyJob
from experiments.studies.study_page import DOCS
from experiments.studies.tuning import SearchSpace
from tests import jitted
from vqjax import DenseEmbedding, DenseHead, convert
from vqjax.convert import part_of
from vqjax.lab.config import config_hash
from vqjax.lab.data import fit_tokenizer
from vqjax.lab.training import NotFiniteError
from vqjax.lm import records
from vqjax.tables import Moments

PTB, MANUALS, STORIES = SCALES["cpu"]
ROOT = pathlib.Path(__file__).parents[4]


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


def test_an_interval_is_that_of_students_t_in_per_cent():
  nats = [0.01, 0.03, 0.02, 0.05]
  found = Interval.of(nats)
  half = scipy.stats.sem(nats) * scipy.stats.t.ppf(0.975, 3)
  np.testing.assert_allclose(found, 100 * np.expm1(np.mean(nats) + half * np.array([0, -1, 1])))


@pytest.mark.parametrize(
  ("nats", "verdict"),
  [
    ([0.001, -0.002, 0.0, 0.001], "equal"),
    ([-0.05, -0.06, -0.04], "better"),
    ([0.05, 0.06, 0.04], "worse"),
    ([-0.1, 0.1, 0.05], None),
    ([0.2], None),
  ],
)
def test_a_verdict_needs_an_interval(nats, verdict):
  assert Interval.of(nats).verdict == verdict


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
  run.check_same(kept(4.0), None)
  run.check_same(kept(4.0), {"name": "a", **kept(4.0)})
  with pytest.raises(ValueError, match=r"of a; got 4.01 and 4.0 nats. Remove its line"):
    run.check_same(kept(4.01), {"name": "a", **kept(4.0)})


def test_heads_are_ranked_and_those_that_were_not_run_are_named():
  s, reference = PTB, PTB.rows[0]
  scores = {"dense-contexts": (5.0, 5000), "product": (4.9, 310), reference: (5.2, 40)}
  results = {f"ptb/{name}": kept(*score) for name, score in scores.items()}
  results["ptb/starts"] = {"nats": {reference: 9.213}}
  table = report.comparison_table(results, s, {reference: {"step": 1.5, "sample": 0.5}})
  assert list(table["training"]) == [None, None, "1.50×"]
  behind = report.runs_table(results, s)
  assert list(behind["nats at the start"]) == [None, None, "9.21"]
  assert list(behind["head"]) == list(table["head"])
  assert list(table["test perplexity"]) == ["134.3", "148.4", "181.3"]
  missing = report.not_run(results, s)
  assert "grouped (`ptb/grouped`); " in missing
  assert not any(f"`ptb/{name}`" in missing for name in scores)
  first, second, third = table.to_dict("records")
  assert (first["% from the reference"], first["of the reference"]) == ("-25.9", "0.062×")
  assert third["% from the reference"] is None
  # A tied table is the head's and the inputs', and counts once.
  assert (third["bytes"], third["with the inputs"]) == ("4.92 KiB", "4.92 KiB")
  assert second["with the inputs"] == "9.77 KiB"


def test_hours_are_those_of_trainings_and_tunings_of_a_setting():
  on_gpu = kept(1.0) | {"seconds": 7200.0}
  on_gpu["result"] |= {"device": "1 x NVIDIA H100 (gpu)"}
  trained = kept(1.0)
  trained["result"]["train"] = {"seconds": 5400.0}
  results = {"ptb/a-tuning": on_gpu, "ptb/a": trained, "ptb/b": trained, "stories/a": trained}
  assert report.hours(results, PTB) == (
    "Trainings and tunings took 3.0 hours of processes on CPUs and 2.0 hours of processes on GPUs."
  )


def test_learned_codes_have_the_bytes_of_the_head_that_they_become():
  (row,) = (row for row in rows(PTB) if row.name == "product-learned")
  result = {"head": {"state_bytes": 10**9}, "embedding": {"params": 10_000 * 200}}
  size = report.head_bytes(row, result, PTB)
  # Tables, codes of a byte, and biases.
  assert size == 256 * 200 * 4 + 10_000 * 25 + 10_000 * 4 <= 10_000 * 200 * 4 / 16


def test_a_distilled_row_learns_from_the_teacher_of_its_seed():
  jobs = {job.name: job for job in run.jobs("cpu")}
  assert "ptb/dense-contexts-s2" in jobs["ptb/product-distilled-s2"].needs
  assert "ptb/dense-contexts" in jobs["ptb/product-distilled-tuning"].needs
  needs = {"ptb/tied-contexts-s1", "ptb/tied-contexts-tuning"}
  assert set(jobs["ptb/tied-distilled-s1"].needs) == needs
  (row,) = (row for row in rows(PTB) if row.name == "product-distilled")
  assert row.experiment(PTB, 2).init_from.folder == "runs/comparison/cpu/ptb/dense-contexts-s2"


def test_a_row_may_have_the_tuning_of_another():
  jobs = {job.name: job for job in run.jobs("cpu")}
  for row in ("dense-contexts", "product-learned"):
    assert jobs[f"stories/{row}"].needs == ("stories/dense-tuning",)
    assert f"stories/{row}-tuning" not in jobs


@pytest.mark.parametrize(("s", "equal"), [(PTB, False), (STORIES, True)], ids=["ptb", "stories"])
def test_vectors_have_equal_lengths_where_hidden_states_are_normalised(s, equal):
  (row,) = (row for row in rows(s) if row.name == "dense-contexts")
  assert row.experiment(s, 3).init_from.start.vectors == convert.ContextVectors(3, equal)


def test_a_row_of_twice_the_steps_has_a_schedule_as_long():
  jobs, by_name = {job.name: job for job in run.jobs("cpu")}, {row.name: row for row in rows(PTB)}
  assert jobs["ptb/tied-longer"].needs == ("ptb/tied-contexts-tuning",)
  assert "ptb/tied-longer-tuning" not in jobs
  longer, plain = (by_name[n].experiment(PTB, 0).train for n in ("tied-longer", "tied-contexts"))
  assert (longer.steps, longer.eval_every) == (2 * plain.steps, 2 * plain.eval_every)
  schedules = [train.optimizer.learning_rate(train) for train in (longer, plain)]
  steps = np.arange(0, plain.steps, 97)
  np.testing.assert_allclose(*(f(times * steps) for f, times in zip(schedules, (2, 1))), rtol=1e-6)


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


@pytest.mark.parametrize("scale", SCALES)
def test_jobs_have_distinct_names_and_a_row_follows_its_tuning(scale):
  seen = set()
  for job in run.jobs(scale):
    assert job.name not in seen
    assert seen.issuperset(job.needs)
    seen.add(job.name)


def test_rows_below_a_sixteenth_have_at_most_its_bytes():
  s = PTB
  sizes = {
    row.name: row.head().clone(vocab=10_000).size().state_bytes
    for row in rows(s)
    if row.name in ("dense", "product", "residual", "codebook-exchange", "low-rank")
  }
  dense = sizes.pop("dense")
  assert len(sizes) == 4
  assert all(size <= dense / 16 for size in sizes.values())


def test_the_mixture_has_at_most_the_parameters_of_the_full_softmax():
  sizes = {
    row.name: row.head().clone(vocab=10_000).size().params
    for row in rows(PTB)
    if row.name in ("dense", "mixture")
  }
  assert 0.99 * sizes["dense"] < sizes["mixture"] <= sizes["dense"]


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

    def fit(experiment, folder):
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
    return tuning.tuning("t", "", row, space, tmp_path / "runs").make(), ran

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


def test_a_tuning_of_which_every_candidate_diverges_has_no_result(tuned):
  with pytest.raises(NotFiniteError, match=r"`space` must .* for t"):
    tuned(lambda rate, steps: None)


def test_a_space_of_one_value_is_chosen_without_a_trial(tmp_path):
  row = rows(MANUALS)[0].experiment(MANUALS, 0)
  made = tuning.tuning("t", "", row, MANUALS.space, tmp_path).make()
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
  assert made.identity() == config_hash(tuning.with_fields(row, chosen)) != config_hash(row)


@pytest.mark.slow
def test_rendering_reproduces_the_page_and_rendering_again_changes_nothing(tmp_path):
  (tmp_path / "results").mkdir()
  for name in ("comparison.md", "bench.json"):
    shutil.copy(DOCS / "results" / name, tmp_path / "results")
  results = run.STUDY.current("cpu")
  report.update(results, tmp_path)
  page = (tmp_path / "results" / "comparison.md").read_bytes()
  assert page == (DOCS / "results" / "comparison.md").read_bytes()
  report.update(results, tmp_path)
  assert (tmp_path / "results" / "comparison.md").read_bytes() == page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_tunes_and_trains_and_repeats_nothing(smoke, capsys, monkeypatch):
  names = "ptb/dense-s1"
  smoke("comparison", names)
  kept = run.STUDY.read("smoke")
  ran = names.split(",")
  assert set(kept) == {*ran, *(f"{name.removesuffix('-s1')}-tuning" for name in ran)}
  arguments = ["--scale", "smoke", "--only", names]
  assert run.STUDY.main([*arguments, "--list"]) == 0
  assert capsys.readouterr().out.count("done") == 2
  # A tuning that was stopped before its result finds the trials that have ended.
  run.STUDY.path("smoke").unlink()
  again = {job.name: job for job in run.jobs("smoke")}["ptb/dense-tuning"].make()
  timeless = lambda row: [{k: v for k, v in t.items() if k != "seconds"} for t in row["trials"]]
  assert again["chosen"] == kept["ptb/dense-tuning"]["chosen"]
  assert timeless(again) == timeless(kept["ptb/dense-tuning"])
