"""Successive halving on the validation split."""

import math
import pathlib

import pytest

from vqjax.lab.study import tuning
from vqjax.lab.study.jobs import check_same
from vqjax.lab.study.tuning import SearchSpace, Tuning
from vqjax.lab.training import NotFiniteError
from vqjax.lm import records


@pytest.fixture
def tuned(base, monkeypatch, tmp_path):
  """Tunes with given losses: (learning rate, steps) -> nats; returns the result and the runs."""

  def tune(losses, rounds=tuning.ROUNDS):
    ran = []

    def fit(experiment, folder, test, identified):
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
    space = SearchSpace({"train.learning_rate": (1.0, 2.0, 3.0), "model.dropout": (0.0, 0.1)})
    made = Tuning("t", "", base, space, tmp_path / "runs", rounds=rounds).job().make()
    return made, ran

  return tune


def test_the_best_third_trains_longer_and_the_last_round_chooses(base, tuned):
  # The lowest loss of the first round is not the lowest of the second.
  first = base.train.steps // tuning.ROUNDS[0]
  made, ran = tuned(
    lambda rate, steps: {1.0: 3.0, 2.0: 1.0, 3.0: 2.0}[rate] + (steps > first) / rate
  )
  second = base.train.steps // tuning.ROUNDS[1]
  assert [steps for _, steps in ran] == [first] * 6 + [second] * 2
  assert {rate for rate, _ in ran[6:]} == {2.0}
  assert made["chosen"]["train.learning_rate"] == 2.0
  assert made["seconds"] == 16.0


def test_one_round_trains_every_candidate_for_all_steps(base, tuned):
  made, ran = tuned(lambda rate, steps: abs(rate - 2) + 3, rounds=(1,))
  assert [steps for _, steps in ran] == [base.train.steps] * 6
  assert made["chosen"]["train.learning_rate"] == 2.0


def test_a_candidate_that_diverges_is_not_chosen(tuned):
  made, _ = tuned(lambda rate, steps: None if rate > 1 else 5.0)
  assert made["chosen"]["train.learning_rate"] == 1.0
  assert sum(trial["valid"] is None for trial in made["trials"]) == 4


def test_a_tuning_of_which_every_candidate_diverges_has_failed(tuned):
  made, _ = tuned(lambda rate, steps: None)
  assert made["result"]["status"] == "failed"


def test_a_source_that_was_trained_again_and_ended_elsewhere_is_refused():
  ended = lambda nats: {"result": {"test": {"nats_per_token": nats}}}
  check_same(ended(4.0), None)
  check_same(ended(4.0), {"name": "a", **ended(4.0)})
  with pytest.raises(ValueError, match=r"of a; got 4.01 and 4.0 nats. Remove its line"):
    check_same(ended(4.01), {"name": "a", **ended(4.0)})
