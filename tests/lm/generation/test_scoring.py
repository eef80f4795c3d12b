"""Scores are log-probabilities of full passes, in windows where the text is longer."""

import numpy as np
import pytest

from tests.lm.generation.reference import PROMPTS, V, family, log_probs
from vqjax.lm.generation import score

CONTEXT, STRIDE = 16, 5


def test_scores_are_the_log_probs_of_full_passes_for_texts_of_any_lengths():
  model, variables = family("llama")
  scores = score(model, variables, PROMPTS, batch=3)
  for row, found in zip(PROMPTS, scores):
    full = log_probs(model, variables, row)[np.arange(len(row) - 1), row[1:]]
    np.testing.assert_allclose(found, full, atol=1e-5)


def test_each_token_of_a_long_text_is_predicted_once_from_the_earliest_window_that_has_it():
  model, variables = family("llama")
  short = model.clone(context=CONTEXT)
  row = [(7 * t * t + 3) % V for t in range(43)]
  found = score(short, variables, [row], stride=STRIDE)[0]
  for number, value in enumerate(found):
    window = max(0, -(-(number + 1 - CONTEXT) // STRIDE))
    before = row[window * STRIDE : number + 1]
    assert len(before) >= min(number + 1, CONTEXT - STRIDE)
    full = log_probs(model, variables, before)[-1, row[number + 1]]
    np.testing.assert_allclose(value, full, atol=1e-5)


def test_a_wrong_stride_is_named():
  model, variables = family("llama")
  with pytest.raises(ValueError, match="`stride` must be in \\[1, context 640\\]; got 641"):
    score(model, variables, PROMPTS, stride=641)
