"""Tests of beam search against an exhaustive search, and of translations and their BLEU."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies.dpq import translation
from experiments.studies.dpq.translation import beam_search
from tests.fakes import FewWords

WORDS = FewWords("monday", "toronto", "bush")
V, EOS = 4, 0


def model(seed, length):
  """Log-probabilities [T, V, V] of the next token, given the position and the token before."""
  scores = np.random.default_rng(seed).normal(size=(length, V, V)) * 2
  return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def search(tables, *, beams, length, penalty=0.6):
  """`beam_search` in one program; each row has a table of its own."""
  tables = np.repeat(np.float32(tables), beams, axis=0)

  def run(tables):
    def step(tokens, n):
      before = jnp.where(n == 0, EOS, tokens[:, n - 1])
      return jax.lax.top_k(tables[jnp.arange(len(tables)), n, before], V)

    rows = len(tables) // beams
    return beam_search(step, rows=rows, beams=beams, length=length, eos=EOS, penalty=penalty)

  return np.asarray(jax.jit(run)(tables)).tolist()


def exhaustive(table, length, penalty):
  """The best of all sequences that end within the length, filled up with -1."""
  found = []
  for n in range(1, length + 1):
    for words in itertools.product(range(1, V), repeat=n - 1):
      sequence = (*words, EOS)
      before = (EOS, *sequence)
      log_prob = sum(table[t, before[t], sequence[t]] for t in range(n))
      found.append((log_prob / ((5 + n) / 6) ** penalty, [*words, *[-1] * (length - n + 1)]))
  return max(found)[1]


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
def test_a_wide_beam_finds_the_best_of_all_sequences_of_each_row(penalty):
  length, tables = 4, [model(seed, 4) for seed in range(5)]
  found = search(tables, beams=V**4, length=length, penalty=penalty)
  assert found == [exhaustive(table, length, penalty) for table in tables]


def test_one_beam_is_greedy_while_nothing_ends():
  table = model(3, 5)
  table[..., EOS] = -50.0
  greedy, token = [], EOS
  for t in range(5):
    token = int(np.argmax(table[t, token]))
    greedy.append(token)
  assert search([table], beams=1, length=5) == [greedy]


def test_a_sequence_that_ends_at_once_is_empty():
  table = np.full((3, V, V), -20.0)
  table[..., EOS] = -1e-6
  assert search([table], beams=2, length=3) == [[-1, -1, -1]]


@pytest.fixture
def copied(monkeypatch):
  """Makes the beam search return its sources."""
  monkeypatch.setattr(translation, "translate", lambda model, variables, batch, eos: batch)
  return types.SimpleNamespace(context=7)


def test_translations_are_in_the_order_of_their_sources(copied):
  lengths = np.random.default_rng(0).integers(1, 6, translation.SENTENCES + 3)
  sources = [
    " ".join(["monday", "bush", "toronto"][(i + j) % 3] for j in range(n))
    for i, n in enumerate(lengths)
  ]
  assert translation.translations(copied, {}, WORDS, sources) == sources


def test_bleu_of_the_references_is_100_and_of_other_words_less(copied, monkeypatch):
  monkeypatch.setattr(translation, "fit_tokenizer", lambda data, tokenizer: WORDS)

  def score(*pairs):
    data = types.SimpleNamespace(pairs=lambda split: pairs)
    experiment = types.SimpleNamespace(data=data, tokenizer=None)
    return translation.bleu(experiment, copied, {})["score"]

  text = "monday toronto bush monday toronto"
  assert score((text, text), (text, text)) == pytest.approx(100)
  assert 0 < score((text, text), (text, "monday toronto bush toronto monday")) < 100
