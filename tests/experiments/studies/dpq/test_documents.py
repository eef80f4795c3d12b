"""Tests of the loaders of translations and of tasks made of plain text."""

import gzip

import numpy as np
import pytest

from experiments.studies.dpq.data.documents import Continued, Pairs
from experiments.studies.dpq.data.masked import Masked
from experiments.studies.dpq.data.pairs import Multi30k
from experiments.studies.dpq.models.bert import MASKED
from vqjax.lab.data import Text, TokenSplit, WordTokenizer, encode_split, fit_tokenizer
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
  return encode_split(source, fit_tokenizer(source, WordTokenizer()), "train")


def test_lines_of_two_files_are_pairs(folder):
  source = Multi30k(path=str(folder))
  assert list(source.pairs("valid")) == PAIRS
  assert list(source.documents("train"))[:3] == ["a dog runs", "ein hund läuft", "two"]
  before = source.fingerprint()
  (folder / "val.en.gz").write_bytes((folder / "val.de.gz").read_bytes())
  assert source.fingerprint() != before


def test_files_of_different_length_are_refused(folder):
  with gzip.open(folder / "val.de.gz", "at") as file:
    file.write("mehr\n")
  with pytest.raises(ValueError, match=r"as many lines; got 3 .* 4"):
    list(Multi30k(path=str(folder)).pairs("valid"))


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
  split = encode_split(source, fit_tokenizer(source, WordTokenizer()), "train")
  with pytest.raises(ValueError, match="even number of documents, in pairs; got 1"):
    next(iter(Pairs().whole(split, batch=1, context=4)))


EOS = 0


def split_of(*documents):
  tokens = np.concatenate([[*words, EOS] for words in documents]).astype(np.uint16)
  return TokenSplit(tokens, text_bytes=1, documents=len(documents), eos=EOS)


@pytest.fixture
def long():
  return split_of(*np.random.default_rng(0).integers(1, 500, (40, 250)).tolist())


def test_masks_have_the_published_proportions(long):
  batches = Masked().batches(long, batch=16, context=64, seed=3)
  found = [next(batches) for _ in range(30)]
  inputs, targets = (np.concatenate([b[name] for b in found]) for name in ("inputs", "targets"))
  chosen = targets != NONE
  assert abs(chosen.mean() - 0.15) < 0.01
  hidden, same = inputs[chosen] == MASKED, inputs[chosen] == targets[chosen]
  assert abs(hidden.mean() - 0.8) < 0.03
  assert abs(same.mean() - 0.1) < 0.03
  assert (inputs[~chosen] >= 0).all()


def test_masks_of_a_step_are_the_same_in_any_process(long):
  options = {"batch": 8, "context": 32, "seed": 1}
  whole = next(Masked().batches(long, **options))
  for rows in (np.arange(4), np.arange(4, 8)):
    part = next(Masked().batches(long, **options, rows=rows))
    for name in ("inputs", "targets"):
      np.testing.assert_array_equal(part[name], whole[name][rows])


def test_masks_of_an_evaluation_are_the_same_each_time(long):
  assert Masked().text_bytes(long) is None
  first, second = (list(Masked().whole(long, batch=8, context=32)) for _ in range(2))
  for one, other in zip(first, second, strict=True):
    np.testing.assert_array_equal(one["inputs"], other["inputs"])


def test_half_of_the_pairs_are_halves_of_one_document():
  documents = [[10 * d + i for i in range(1, 6)] for d in range(1, 8)]
  batches = list(Continued().whole(split_of(*documents), batch=4, context=3))
  rows = [
    (first, second, int(target))
    for batch in batches
    for (first, second), target in zip(batch["inputs"].tolist(), batch["targets"], strict=True)
    if target != NONE
  ]
  assert len(rows) == 14
  for first, second, target in rows:
    real = lambda half: [t for t in half if t != NONE]
    assert (real(first)[0] // 10 == real(second)[0] // 10) == bool(target)
    assert [t % 10 for t in real(first)] == [1, 2, 3]
    assert [t % 10 for t in real(second)] == [4, 5]
  assert sum(target for *_, target in rows) == 7


def test_one_document_is_not_enough():
  with pytest.raises(ValueError, match="at least 2 documents; got 1"):
    next(iter(Continued().whole(split_of([1, 2, 3]), batch=1, context=4)))
