"""Mappings of tokens to codes use the counts, neighbours or vectors that they name."""

import numpy as np
import pytest

from vqjax import convert


def test_tokens_with_the_same_neighbours_have_near_embeddings():
  """Words of two kinds that alternate: a word's neighbours tell its kind."""
  rng = np.random.default_rng(0)
  tokens = np.empty(20_000, np.int64)
  tokens[::2] = rng.integers(0, 10, 10_000)
  tokens[1::2] = rng.integers(10, 20, 10_000)
  counts = np.bincount(tokens, minlength=20)
  stats = convert.TokenStats(tokens, counts, None, None)
  code = convert.ContextKMeans(width=4)(stats, 2)
  assert len(set(code[:10])) == len(set(code[10:])) == 1
  assert code[0] != code[10]


def test_vectors_of_contexts_have_equal_lengths_or_those_of_their_mean():
  tokens = np.random.default_rng(0).zipf(1.5, 5_000) % 40  # of a vocabulary of 60
  stats = convert.TokenStats(tokens, np.bincount(tokens, minlength=60), None, None)
  lengths, equal = (
    np.linalg.norm(convert.ContextVectors(equal_lengths=one)(stats, 8), axis=1)
    for one in (False, True)
  )
  np.testing.assert_allclose((lengths**2).mean(), 1)
  assert lengths.max() > 2  # of frequent tokens
  np.testing.assert_allclose(equal, stats.counts > 0, atol=1e-12)


def test_vectors_of_equal_texts_are_computed_once(monkeypatch):
  tokens = np.random.default_rng(1).integers(0, 20, 500)
  stats = convert.TokenStats(tokens, np.bincount(tokens), None, None)
  first = convert.ContextVectors()(stats, 4)
  monkeypatch.setattr(convert.mappings.assign, "context_vectors", None)
  np.testing.assert_array_equal(
    convert.ContextVectors()(stats._replace(tokens=tokens.copy()), 4), first
  )


@pytest.mark.parametrize(
  ("tokens", "vocab", "error"), [([0] * 9, 2, "9 tokens of which none"), ([0] * 9, 1, "got 1")]
)
def test_a_text_that_tells_nothing_is_refused(tokens, vocab, error):
  stats = convert.TokenStats(np.array(tokens), np.bincount(tokens, minlength=vocab), None, None)
  with pytest.raises(ValueError, match=error):
    convert.ContextVectors()(stats, 4)


def test_a_clustering_without_vectors_is_refused():
  stats = convert.TokenStats(np.arange(9), np.ones(9, int), None, None)
  with pytest.raises(ValueError, match=r"`stats.output` or `stats.inputs` must .*; got None"):
    convert.KMeans()(stats, 2)
