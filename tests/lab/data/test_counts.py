"""Tests of token counts, and of their file, which belongs to one tokenizer."""

import collections
import re

import numpy as np
import pytest

from vqjax.lab.data import PennTreebank, TokenSplit, WordTokenizer, encode_split, fit_encoder
from vqjax.lab.data.cache import count_tokens, load_counts


@pytest.fixture
def source(corpus):
  return PennTreebank(str(corpus))


@pytest.fixture
def encoder(source):
  return fit_encoder(source, WordTokenizer(split=False))


def test_counts_are_the_occurrences_of_each_token(source, encoder):
  split = encode_split(source, encoder, "train")
  found = count_tokens(split, encoder)
  expected = collections.Counter(split.tokens.tolist())
  assert found.counts.dtype == np.int64
  assert found.counts.tolist() == [expected[token] for token in range(encoder.vocab)]
  assert found.counts[encoder.eos] == split.documents


def test_counts_come_back_from_their_file(source, encoder, tmp_path):
  found = count_tokens(encode_split(source, encoder, "valid"), encoder)
  assert 0 in found.counts
  found.save(tmp_path / "new" / "counts.npz")
  again = load_counts(tmp_path / "new" / "counts.npz", encoder)
  np.testing.assert_array_equal(again.counts, found.counts)
  assert again.fingerprint == found.fingerprint == encoder.fingerprint()


def test_an_empty_split_has_a_zero_for_each_token(encoder):
  empty = TokenSplit(np.zeros(0, np.uint16), 0, 0, encoder.eos)
  assert count_tokens(empty, encoder).counts.tolist() == [0] * encoder.vocab


def test_a_token_outside_the_vocabulary_is_refused(encoder):
  split = TokenSplit(np.array([0, encoder.vocab], np.uint16), 2, 1, encoder.eos)
  with pytest.raises(ValueError, match=rf"tokens in \[0, {encoder.vocab}\); got {encoder.vocab}"):
    count_tokens(split, encoder)


def test_counts_of_another_tokenizer_are_refused(source, encoder, tmp_path):
  path = tmp_path / "counts.npz"
  count_tokens(encode_split(source, encoder, "train"), encoder).save(path)
  other = fit_encoder(source, WordTokenizer(split=False, min_count=200))
  with pytest.raises(ValueError, match=f"tokenizer {other.fingerprint()}") as error:
    load_counts(path, other)
  for part in (str(path), encoder.fingerprint(), "Count the tokens again"):
    assert part in str(error.value)


@pytest.mark.parametrize("content", ["text", "nothing", "array", "other", "cut", "shape"])
def test_a_file_without_counts_is_refused(source, encoder, tmp_path, content):
  path = tmp_path / "counts.npz"
  found = count_tokens(encode_split(source, encoder, "train"), encoder)
  found.save(path)
  if content == "cut":
    path.write_bytes(path.read_bytes()[:-100])
  elif content in ("array", "other", "shape"):
    with path.open("wb") as file:
      if content == "array":
        np.save(file, found.counts)
      elif content == "other":
        np.savez(file, numbers=found.counts)
      else:
        np.savez(file, counts=found.counts[1:], fingerprint=np.array(found.fingerprint))
  else:
    path.write_text("0 1\n" if content == "text" else "")
  with pytest.raises(ValueError, match=re.escape(str(path))) as error:
    load_counts(path, encoder)
  assert "Count the tokens again" in str(error.value)
