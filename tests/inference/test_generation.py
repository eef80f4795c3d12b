"""Generation with a cache equals repeated full passes, and stops where it should."""

import jax
import numpy as np
import pytest

from tests.inference.reference import PROMPTS, V, family, greedy, log_probs
from vqjax.inference import GREEDY, Sampling, generate, score, stream

KEY = jax.random.key(0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma"])
def test_greedy_tokens_and_log_probs_are_those_of_full_passes(name):
  model, variables = family(name)
  result = generate(model, variables, PROMPTS, KEY, GREEDY, max_tokens=30)
  for row, prompt in enumerate(PROMPTS):
    tokens, scores = greedy(model, variables, prompt, 30)
    assert result.tokens[row].tolist() == tokens
    np.testing.assert_allclose(result.log_probs[row], scores, atol=1e-5)
