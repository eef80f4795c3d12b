"""Tests of token counts."""

import collections

import numpy as np
import pytest

from vqjax.lab.data import PennTreebank, TokenSplit, WordTokenizer, encode_split, fit_tokenizer
from vqjax.lab.data.token_cache import count_tokens


@pytest.fixture
def source(corpus):
  return PennTreebank(str(corpus))


def test_counts_are_the_occurrences_of_each_token_of_the_vocabulary(source):
  tokenizer = fit_tokenizer(source, WordTokenizer(split=False))
  split = encode_split(source, tokenizer, "train")
  found = count_tokens(split, tokenizer)
  expected = collections.Counter(split.tokens.tolist())
  assert found.dtype == np.int64
  assert found.tolist() == [expected[token] for token in range(tokenizer.vocab)]
  assert found[tokenizer.eos[0]] == split.documents
  empty = TokenSplit(np.zeros(0, np.uint16), 0, 0, tokenizer.eos[0])
  assert count_tokens(empty, tokenizer).tolist() == [0] * tokenizer.vocab
  split = TokenSplit(np.array([0, tokenizer.vocab], np.uint16), 2, 1, tokenizer.eos[0])
  vocab = tokenizer.vocab
  with pytest.raises(ValueError, match=rf"tokens in \[0, {vocab}\); got {vocab}"):
    count_tokens(split, tokenizer)
