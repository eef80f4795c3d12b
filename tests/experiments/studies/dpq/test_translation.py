"""Tests of translations and their BLEU, with a search that copies its sources."""

import types
from typing import Any, NamedTuple

import numpy as np
import pytest

from experiments.studies.dpq import translation
from tests.fakes import FewWords

WORDS = FewWords("monday", "toronto", "bush")


class Found(NamedTuple):
  """The result of a search."""

  tokens: Any


@pytest.fixture
def copied(monkeypatch):
  """Makes the beam search return its sources."""
  search = lambda model, variables, batch, *, eos, beams, penalty: Found(batch)
  monkeypatch.setattr(translation, "translate", search)
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
