"""Tests of the measurements and the command of the VQ-Logits study."""

import numpy as np
import pytest

from experiments.studies.vq_logits import run
from tests.fakes import FewWords


def test_words_that_are_tokens_have_the_first_tokens_of_their_code():
  tokenizer = FewWords("Sunday", "Monday", "the")
  assignment = np.array([0, 0, 2, 1, 2])
  assert run.code_words(tokenizer, assignment, ("Monday", "Tuesday", "Sunday")) == {
    "Monday": ["Monday"],
    "Sunday": ["Sunday", "the"],
  }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_smoke_scale_trains_keeps_and_prints(smoke):
  assert "table-10" in smoke("vq_logits", "ptb/vq-256")
  results = run.STUDY.read("smoke")
  assert set(results) == {"ptb/dense", "ptb/vq-256"}
  assert results["ptb/vq-256"]["floors"]["bias"] <= results["ptb/vq-256"]["floors"]["uniform"]
