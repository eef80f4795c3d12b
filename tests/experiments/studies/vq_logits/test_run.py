"""Tests of the measurements and the command of the VQ-Logits study."""

import types

import numpy as np
import pytest

from experiments.studies.vq_logits import run
from experiments.studies.vq_logits.rows import rows
from experiments.studies.vq_logits.settings import SCALES
from tests.fakes import FewWords

WORDS = FewWords("Sunday", "Monday", "Tuesday", "the", "km")


def test_the_shared_code_is_the_one_that_most_words_are_on():
  assignment, counts = np.array([0, 0, 1, 2, 2, 2, 1]), np.array([9, 9, 8, 7, 6, 5, 4])
  days = ("Monday", "Tuesday", "Wednesday", "Sunday")
  assert run.shared_code(WORDS, assignment, counts, days) == {
    "words": list(days),
    "known": ["Monday", "Tuesday", "Sunday"],
    "code": 2,
    "held": ["Monday", "Tuesday"],
    "others": ["the"],
    "size": 3,
  }


def test_words_that_are_not_tokens_have_no_code():
  row = run.shared_code(WORDS, np.zeros(6, int), np.ones(6, int), ("=", "=="))
  assert row == {"words": ["=", "=="], "known": []}


def test_the_floor_of_a_learned_assignment_is_that_of_the_highest_choices(monkeypatch, tmp_path):
  # Tokens 0 and 1 choose code 1, token 2 chooses code 0.
  variables = {
    "params": {"head": {"choice": np.array([[0.0, 1.0], [0.0, 2.0], [3.0, 0.0]])}},
    "codes": {"head": {"candidates": np.array([[0, 1], [0, 1], [0, 1]], np.uint8)}},
  }
  test = types.SimpleNamespace(tokens=np.array([0, 0, 0, 1, 2, 2]))
  monkeypatch.setattr(run, "read_run_variables", lambda folder: (variables, {}))
  monkeypatch.setattr(run, "fit_tokenizer", lambda data, tokenizer: None)
  monkeypatch.setattr(run, "encode_split", lambda data, tokenizer, split: test)
  learned = next(row for row in rows(SCALES["smoke"]["ptb"]) if row.name.startswith("gumbel"))
  floors = run.floors(learned.experiment(0), tmp_path)
  # Four of six tokens are on a code of two; of these 3 : 1 are token 0 and token 1.
  assert floors["uniform"] == pytest.approx(2 ** (4 / 6))
  assert floors["bias"] == pytest.approx(np.exp((3 * np.log(4 / 3) + np.log(4)) / 6))
  assert floors["largest_code"] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_smoke_scale_trains_keeps_and_prints(smoke):
  assert "Table 10" in smoke("vq_logits", "ptb/vq-16")
  results = run.STUDY.read("smoke")
  assert set(results) == {"ptb/dense", "ptb/vq-16"}
  assert results["ptb/vq-16"]["floors"]["bias"] <= results["ptb/vq-16"]["floors"]["uniform"]
