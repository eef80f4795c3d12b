"""Completions of stories against the model's own distribution, token by token."""

import jax
import numpy as np
import pytest

from experiments.studies.grouped.stories import beginnings, complete
from tests import jitted
from vqjax import DenseEmbedding, DenseHead
from vqjax.lab.data import BPETokenizer, WordTokenizer
from vqjax.lm.models import Transformer

VOCAB, CONTEXT = 23, 7
PROMPTS = [[3], [5, 1, 4, 1, 2], list(range(11))]
NEVER = -7
"""An `eos` that no model samples."""


@pytest.fixture(scope="module")
def trained():
  """A decoder with weights large enough for its most likely tokens to vary."""
  model = Transformer(
    *(DenseEmbedding(VOCAB, 8), DenseHead(VOCAB, 8), 8), layers=1, heads=2, context=CONTEXT
  )
  variables = jitted.init(model, jax.random.key(0), np.zeros((1, CONTEXT), np.int32))
  return model, jax.tree.map(lambda x: 3 * np.asarray(x) + 0.1, variables)


@pytest.fixture(scope="module")
def scores(trained):
  """Tokens -> float64 logits of the next token, of one row at full length."""

  def call(row):
    seen = row[-CONTEXT:]
    filled = np.array([seen + [VOCAB - 1] * (CONTEXT - len(seen))])
    return np.asarray(jitted.apply(*trained, filled), np.float64)[0, len(seen) - 1]

  return call


@pytest.mark.slow
def test_greedy_tokens_depend_on_no_other_prompt_or_shorter_window_and_stop_at_eos(trained, scores):
  greedy = []
  for prompt in PROMPTS:
    row = list(prompt)
    for _ in range(6):
      row.append(int(np.argmax(scores(row))))
    greedy.append(row[len(prompt) :])
  write = lambda prompts, tokens, eos: complete(
    *trained, prompts, jax.random.key(1), tokens=tokens, eos=eos, temperature=0
  )
  assert len({token for row in greedy for token in row}) > 3
  assert write(PROMPTS, 6, NEVER) == greedy
  # A window that is shorter than the context.
  assert write(PROMPTS[:1], 3, NEVER) == [greedy[0][:3]]
  end = greedy[1][2]
  cut = [row[: row.index(end)] if end in row else row for row in greedy]
  assert min(map(len, cut)) < 6
  assert write(PROMPTS, 6, end) == cut


def test_invalid_arguments_and_a_model_that_diverged_are_named(trained):
  model, variables = trained
  diverged = jax.tree.map(lambda x: x * np.nan, variables)
  for given, prompts, tokens, names in (
    (variables, [], 3, "`prompts`"),
    (variables, [[1], []], 3, "`prompts`.*prompt 1"),
    (variables, [[1, 23]], 3, "`prompts`.*23 in prompt 0"),
    (variables, [[-1]], 3, "`prompts`.*-1"),
    (variables, [[1]], 0, "`tokens`.*0"),
    (diverged, [[1]], 1, r"`variables`.*prompt 0"),
  ):
    with pytest.raises(ValueError, match=names):
      complete(model, given, prompts, jax.random.key(0), tokens=tokens, eos=NEVER)


@pytest.mark.slow
def test_completions_are_a_function_of_the_key(trained):
  options = {"tokens": 12, "eos": NEVER, "top_k": 5}
  first, again, other = (
    complete(*trained, PROMPTS[:2], jax.random.key(seed), **options) for seed in (2, 2, 3)
  )
  assert first == again
  assert first != other
  assert [len(row) for row in first] == [12, 12]


def test_samples_have_the_heads_probabilities(trained, scores):
  expected = np.exp(scores(PROMPTS[1]) / 0.7)
  expected /= expected.sum()
  rows = 4000
  drawn = complete(
    *trained, [PROMPTS[1]] * rows, jax.random.key(4), tokens=1, eos=NEVER, temperature=0.7
  )
  share = np.bincount(np.ravel(drawn), minlength=VOCAB) / rows
  # Five standard deviations of a share.
  assert np.all(np.abs(share - expected) <= 5 * np.sqrt(expected * (1 - expected) / rows) + 1e-9)


STORIES = [
  "Once upon a time there was.",
  "Lone",
  "",
  "Tom\n\nran a long way.",
  "overmuch it",
]
HALVES = ["Once upon a", "Tom\n\nran a", "overmuch"]


@pytest.mark.parametrize("tokenizer", [WordTokenizer(), BPETokenizer(260)])
def test_a_beginning_is_the_first_half_in_whole_words(tokenizer):
  tokenizer = tokenizer.fit(lambda: STORIES)
  prompts = beginnings(iter(STORIES), tokenizer, 3)
  assert prompts == [tokenizer.encode(half, special=False) for half in HALVES]
  assert beginnings(iter(STORIES), tokenizer, 1) == prompts[:1]
  with pytest.raises(ValueError, match=r"`count`.*\[1, 3\].*4"):
    beginnings(STORIES, tokenizer, 4)
  with pytest.raises(ValueError, match=r"`count`.*0"):
    beginnings(STORIES, tokenizer, 0)


def test_byte_pairs_of_beginning_and_rest_spell_the_story():
  tokenizer = BPETokenizer(270).fit(lambda: STORIES)
  prompts = beginnings(STORIES, tokenizer, 2)
  whole = [tokenizer.encode(STORIES[place], special=False) for place in (0, 3)]
  rest = [tokens[len(prompt) :] for tokens, prompt in zip(whole, prompts)]
  assert [prompt + end for prompt, end in zip(prompts, rest)] == whole
  texts = [(tokenizer.decode(a), tokenizer.decode(b)) for a, b in zip(prompts, rest)]
  assert texts == [("Once upon a", " time there was."), ("Tom\n\nran a", " long way.")]
