"""Tests of the loaders of translations and of tasks made of plain text."""

import dataclasses
import gzip

import numpy as np
import pytest

from experiments.studies.dpq.data import (
  Continued,
  Intruded,
  Masked,
  Mirrored,
  Multi30k,
  PairedText,
  Pairs,
)
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
  turned = Multi30k(path=str(folder), source="de", target="en")
  assert next(turned.pairs("test")) == PAIRS[0][::-1]
  assert turned.fingerprint() != source.fingerprint()


def test_any_two_files_are_pairs(folder):
  (folder / "test.en").write_text("plain text\n")
  (folder / "test.de").write_text("ein  Text\n")
  file = lambda name: str(folder / name)
  train, valid = [tuple(file(f"{n}.{x}.gz") for x in ("en", "de")) for n in ("train", "val")]
  source = PairedText(train, valid, test=(file("test.en"), file("test.de")))
  assert list(source.pairs("train")) == PAIRS
  assert list(source.pairs("test")) == [("plain text", "ein Text")]
  turned = dataclasses.replace(source, test=source.test[::-1])
  assert turned.fingerprint() != source.fingerprint()
  with pytest.raises(FileNotFoundError, match=r"`PairedText.valid` must exist .*'absent.en'"):
    list(dataclasses.replace(source, valid=("absent.en", "absent.de")).pairs("valid"))
  with pytest.raises(ValueError, match=r"`PairedText.test` must be two files"):
    list(dataclasses.replace(source, test=("alone",)).pairs("test"))


def test_files_of_different_length_are_refused(folder):
  with gzip.open(folder / "val.de.gz", "at") as file:
    file.write("mehr\n")
  with pytest.raises(ValueError, match=r"as many lines; got 3 .* 4"):
    list(Multi30k(path=str(folder)).pairs("valid"))


def test_a_missing_language_is_named(folder):
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
  split = encode_split(source, fit_tokenizer(source, WordTokenizer()), "train")
  with pytest.raises(ValueError, match="even number of documents, in pairs; got 1"):
    next(iter(Pairs().whole(split, batch=1, context=4)))


def test_mirrored_lines_end_with_their_first_word(tmp_path):
  for name in ("train", "valid", "test"):
    (tmp_path / f"{name}.txt").write_text("one two three four\n\nfive\n")
  source = Mirrored(Text(path=str(tmp_path)), words=3)
  assert list(source.pairs("train")) == [("one two three", "three two one"), ("five", "five")]
  assert source.fingerprint() != Mirrored(source.text, words=4).fingerprint()


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


def test_masks_of_an_evaluation_do_not_depend_on_the_batch(long):
  assert Masked().text_bytes(long) is None
  found = []
  for size in (3, 8):
    batches = [b["targets"] for b in Masked().whole(long, batch=size, context=32)]
    targets = np.concatenate(batches)
    found.append(targets[(targets >= 0).any(axis=1)])
  rows = min(map(len, found))
  assert rows > 100
  np.testing.assert_array_equal(found[0][:rows], found[1][:rows])


@pytest.mark.parametrize("part", [0.0, 1.5])
def test_a_part_outside_its_range_is_refused(part):
  with pytest.raises(ValueError, match=rf"part` must be in \(0, 1\]; got {part}"):
    Masked(part=part)


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


def test_targets_are_the_ends_of_the_foreign_stretch():
  documents = [[20 * d + i for i in range(1, 11)] for d in range(1, 6)]
  batch = next(iter(Intruded().whole(split_of(*documents), batch=6, context=12)))
  for number in range(5):
    row, (first, last) = batch["inputs"][number], batch["targets"][number]
    assert last - first == 1  # a fifth of ten
    own = row[:10] // 20 == number + 1
    assert (~own).nonzero()[0].tolist() == [first, last]
    assert (row[10:] == NONE).all()
  assert (batch["inputs"][5] == NONE).all()
  assert (batch["targets"][5] == NONE).all()


def test_a_document_that_is_too_short_has_no_stretch():
  batch = next(iter(Intruded().whole(split_of([1, 2], [3, 4, 5, 6]), batch=2, context=5)))
  assert batch["targets"][0].tolist() == [NONE, NONE]
  assert batch["inputs"][0].tolist() == [1, 2, NONE, NONE, NONE]


@pytest.mark.parametrize("loader", [Continued(), Intruded()])
def test_one_document_is_not_enough(loader):
  with pytest.raises(ValueError, match="at least two documents"):
    next(iter(loader.whole(split_of([1, 2, 3]), batch=1, context=4)))
