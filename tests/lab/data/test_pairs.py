"""Tests of translations, and of the loader in which a target follows its inputs."""

import gzip

import numpy as np
import pytest

from vqjax.lab.data import Mirrored, Multi30k, Pairs, Text, WordTokenizer, encode_split, fit_encoder
from vqjax.lab.data.pipeline import NONE

PAIRS = [("a dog runs", "ein hund läuft"), ("two", "zwei"), ("a man and a man", "ein mann")]


@pytest.fixture
def folder(tmp_path):
  for name in ("train", "val", "test_2016_flickr"):
    for side, language in enumerate(("en", "de")):
      with gzip.open(tmp_path / f"{name}.{language}.gz", "wt", encoding="utf-8") as file:
        file.write("".join(f"{pair[side]} \n" for pair in PAIRS))
  return tmp_path


@pytest.fixture
def split(folder):
  source = Multi30k(path=str(folder))
  return encode_split(source, fit_encoder(source, WordTokenizer()), "train")


def test_lines_of_two_files_are_pairs(folder):
  source = Multi30k(path=str(folder))
  assert list(source.pairs("valid")) == PAIRS
  assert list(source.documents("train"))[:3] == ["a dog runs", "ein hund läuft", "two"]
  turned = Multi30k(path=str(folder), source="de", target="en")
  assert next(turned.pairs("test")) == PAIRS[0][::-1]
  assert turned.fingerprint() != source.fingerprint()


def test_files_of_different_length_are_no_pairs(folder):
  with gzip.open(folder / "val.de.gz", "at") as file:
    file.write("mehr\n")
  with pytest.raises(ValueError, match=r"as many lines; got 3 .* 4"):
    list(Multi30k(path=str(folder)).pairs("valid"))


def test_a_language_that_is_not_there_is_named(folder):
  with pytest.raises(FileNotFoundError, match=r"`target` must .* got .*train\.fr\.gz"):
    list(Multi30k(path=str(folder), target="fr").documents("train"))


def test_a_target_follows_the_end_and_the_tokens_before_it(split):
  batch = next(iter(Pairs().whole(split, batch=2, context=5)))
  tokens = split.tokens.astype(int)
  ends = np.flatnonzero(tokens == split.eos)
  source, target = tokens[: ends[0] + 1], tokens[ends[0] + 1 : ends[1] + 1]
  pad = lambda row: [*row, *[NONE] * (5 - len(row))]
  assert batch["inputs"]["source"][0].tolist() == pad(source)
  assert batch["targets"][0].tolist() == pad(target)
  assert batch["inputs"]["target"][0].tolist() == pad([split.eos, *target[:-1]])


def test_long_texts_are_cut_and_the_last_batch_is_filled_with_none(split):
  batches = list(Pairs().whole(split, batch=2, context=3))
  assert len(batches) == 2
  last = batches[1]
  assert (last["inputs"]["source"][0] != NONE).all()  # five words and an end
  for row in (last["inputs"]["source"], last["inputs"]["target"], last["targets"]):
    assert (row[1] == NONE).all()


def test_every_pair_comes_once_an_epoch(split):
  batches = Pairs().batches(split, batch=3, context=8, seed=1)
  seen = sorted(map(tuple, next(batches)["targets"].tolist()))
  whole = next(iter(Pairs().whole(split, batch=3, context=8)))
  assert seen == sorted(map(tuple, whole["targets"].tolist()))
  assert Pairs().text_bytes(split) is None


def test_text_that_is_not_paired_is_refused(tmp_path):
  for name in ("train", "valid", "test"):
    (tmp_path / f"{name}.txt").write_text("one document\n")
  source = Text(path=str(tmp_path))
  split = encode_split(source, fit_encoder(source, WordTokenizer()), "train")
  with pytest.raises(ValueError, match="even number of documents, in pairs; got 1"):
    next(iter(Pairs().whole(split, batch=1, context=4)))


def test_mirrored_lines_end_with_their_first_word(tmp_path):
  for name in ("train", "valid", "test"):
    (tmp_path / f"{name}.txt").write_text("one two three four\n\nfive\n")
  source = Mirrored(Text(path=str(tmp_path)), words=3)
  assert list(source.pairs("train")) == [("one two three", "three two one"), ("five", "five")]
  assert source.fingerprint() != Mirrored(source.text, words=4).fingerprint()
