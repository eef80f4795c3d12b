"""Tokens are drawn from the distribution that the options say, for any head."""

import jax
import numpy as np
import pytest
from scipy import stats

from tests.lm.generation.reference import V, family, log_softmax, logits
from vqjax.lm.generation import Sampling, generate

DRAWS = 3001
PROMPT = [5, 3, 11, 3]

OPTIONS = {
  "all": Sampling(0.7, top_k=23, top_p=0.8, min_p=0.02, repetition_penalty=1.7),
  "min-p": Sampling(1.3, min_p=0.1),
  "top-p": Sampling(top_p=0.6),
}


def distribution(logits, options, seen):
  """Probabilities [V] by the definitions, float64."""
  logits = logits.astype(np.float64).copy()
  for token in seen:
    penalty = options.repetition_penalty
    logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
  p = np.exp(log_softmax(logits / options.temperature))
  if options.min_p:
    p[p < options.min_p * p.max()] = 0
  order = np.argsort(-p)
  p[order[options.top_k :]] = 0 if options.top_k else p[order[options.top_k :]]
  p /= p.sum()
  if options.top_p:
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= options.top_p]] = 0
  return p / p.sum()


@pytest.mark.parametrize("name", OPTIONS)
def test_draws_have_the_frequencies_of_the_definition(name):
  model, variables = family("llama")
  options = OPTIONS[name]
  drawn = generate(
    *(model, variables, [PROMPT] * DRAWS, jax.random.key(1), options), max_tokens=1, log_probs=False
  )
  # The penalty depends on the sign of the logits themselves.
  p = distribution(logits(model, variables, PROMPT)[-1], options, {*PROMPT})
  counts = np.bincount(drawn.tokens[:, 0], minlength=V)
  assert counts[p == 0].sum() == 0
  # Cells with fewer than five expected draws are one cell.
  rare = p * DRAWS < 5
  cells = lambda x: [*x[~rare], *([x[rare].sum()] if p[rare].sum() else [])]
  assert stats.chisquare(cells(counts), cells(p * DRAWS)).pvalue > 1e-4
  assert (p > 0).sum() > 2


def test_the_penalty_counts_the_prompt_and_what_was_generated():
  model, variables = family("llama")
  options = Sampling(0, repetition_penalty=3.0)
  result = generate(model, variables, [PROMPT, [7]], jax.random.key(0), options, max_tokens=12)
  for prompt, tokens in zip([PROMPT, [7]], result.tokens.tolist()):
    row = [*prompt, *tokens]
    scores = logits(model, variables, row)
    for at, token in enumerate(tokens):
      seen = {*row[: len(prompt) + at]}
      last = scores[len(prompt) + at - 1].astype(np.float64)
      for known in seen:
        last[known] = last[known] / 3 if last[known] > 0 else last[known] * 3
      assert token == last.argmax()
