"""Tests of token counts."""

import collections

import numpy as np
import pytest

from vqjax.lab.data import PennTreebank, TokenSplit, WordTokenizer, encode_split, fit_encoder
from vqjax.lab.data.cache import count_tokens


@pytest.fixture
def source(corpus):
  return PennTreebank(str(corpus))


def test_counts_are_the_occurrences_of_each_token_of_the_vocabulary(source):
  encoder = fit_encoder(source, WordTokenizer(split=False))
  split = encode_split(source, encoder, "train")
  found = count_tokens(split, encoder)
  expected = collections.Counter(split.tokens.tolist())
  assert found.dtype == np.int64
  assert found.tolist() == [expected[token] for token in range(encoder.vocab)]
  assert found[encoder.eos] == split.documents
  empty = TokenSplit(np.zeros(0, np.uint16), 0, 0, encoder.eos)
  assert count_tokens(empty, encoder).tolist() == [0] * encoder.vocab
  split = TokenSplit(np.array([0, encoder.vocab], np.uint16), 2, 1, encoder.eos)
  with pytest.raises(ValueError, match=rf"tokens in \[0, {encoder.vocab}\); got {encoder.vocab}"):
    count_tokens(split, encoder)
