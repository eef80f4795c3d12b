"""Tests of filters: drops, counts, and documents that are in one split only."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from vqjax.lab.data import Filtered, SentencePieceTokenizer, Source, encode_split, fit_tokenizer
from vqjax.lab.data.corpus_files import content_hash, normalised_hash
from vqjax.lab.data.filters import FilterCounts
from vqjax.lab.data.source import SPLITS

ENGLISH = "The river was high that spring, and {} people crossed it by the old stone bridge. " * 2
GERMAN = "Im Frühjahr stand der Fluss hoch, und {} Leute gingen über die alte Brücke. " * 2
LONG = 150


@dataclasses.dataclass(frozen=True)
class Memory(Source):
  """Documents in memory."""

  train: tuple[str, ...] = ("train",)
  valid: tuple[str, ...] = ("valid",)
  test: tuple[str, ...] = ("test",)

  def _documents(self, split: str) -> Iterator[str]:
    yield from getattr(self, split)

  def fingerprint(self) -> str:
    return content_hash([*self.train, "valid", *self.valid, "test", *self.test])


def english(numbers):
  return tuple(ENGLISH.format(n, n) for n in numbers)


def plain(source, **fields):
  """A source with only the filters in `fields`."""
  return Filtered(source, **{"min_chars": 0, "language": None, "deduplicate": False, **fields})


def test_a_corpus_is_filtered_as_in_appendix_a():
  kept = english(range(311))
  noise = (
    *(GERMAN.format(n, n) for n in range(7)),
    *(f"short {n}" for n in range(5)),
    *(text.upper().replace(" ", " \n") for text in kept[:3]),
  )
  mixed = [*kept, *noise]
  np.random.default_rng(0).shuffle(mixed)
  filtered = Filtered(Memory(tuple(mixed)), min_chars=LONG)
  report = FilterCounts()
  documents = list(filtered.filtered("train", report))
  same = lambda text: " ".join(text.lower().split())
  assert report == FilterCounts(326, 0, 5, 3, 7, 311)
  assert sorted(map(same, documents)) == sorted(map(same, kept))
  positions = [mixed.index(document) for document in documents]
  assert positions == sorted(positions)
  assert filtered.report("train") == report


def test_documents_are_kept_by_their_characters_and_their_language():
  texts = ("", "a", "a", "ü")
  assert list(plain(Memory(texts)).documents("train")) == list(texts)
  texts = ("ééé", "éé", "東京都", "abcd")
  assert list(plain(Memory(texts), min_chars=3).documents("train")) == ["ééé", "東京都", "abcd"]
  source = Memory((*english(range(3)), GERMAN.format(1, 1)))
  for language, kept in (("en", 3), ("de", 1), (None, 4)):
    assert len(list(plain(source, language=language).documents("train"))) == kept


def test_no_document_is_in_two_splits():
  source = Memory(train=tuple("abcdef"), valid=("G", "b", "C "), test=("c", "D", "c"))
  filtered = plain(source, deduplicate=True)
  documents = {split: list(filtered.documents(split)) for split in SPLITS}
  assert documents == {"train": ["a", "e", "f"], "valid": ["G", "b"], "test": ["c", "D"]}


def test_a_sample_has_its_share_in_any_order_and_a_smaller_one_is_part_of_it():
  texts = tuple(f"document {n}" for n in range(20_011))
  drawn = {f: set(plain(Memory(texts), fraction=f).documents("train")) for f in (0.013, 0.5, 0.9)}
  for fraction, sample in drawn.items():
    # Five standard deviations of a binomial.
    deviation = (20_011 * fraction * (1 - fraction)) ** 0.5
    assert abs(len(sample) - 20_011 * fraction) < 5 * deviation
  assert set(plain(Memory(texts[::-1]), fraction=0.5).documents("train")) == drawn[0.5]
  assert drawn[0.013] < drawn[0.5]
  # Equal documents are sampled together.
  twins = tuple(text for n in range(499) for text in (f"Document {n}", f"document  {n}"))
  report = plain(Memory(twins), fraction=0.5, deduplicate=True).report("train")
  assert report.duplicates == report.kept


def test_the_fingerprint_changes_with_text_and_settings():
  source = Memory()
  made = [Filtered(source), Filtered(Memory(train=("other",)))]
  made += [Filtered(source, min_chars=2), Filtered(source, language="de")]
  made += [Filtered(source, deduplicate=False), Filtered(source, fraction=0.5)]
  assert len({filtered.fingerprint() for filtered in made}) == len(made)
  assert Filtered(source).fingerprint() == Filtered(source).fingerprint() != source.fingerprint()


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"min_chars": -1}, r"data\.min_chars` must be at least 0; got -1"),
    ({"fraction": 0}, r"data\.fraction` must be in \(0, 1\]; got 0"),
    ({"fraction": 1.5}, r"data\.fraction` must .* got 1\.5"),
    ({"language": "english"}, r"data\.language` must .*\ben\b.* got 'english'"),
    ({"split": "dev"}, r"`split` must be .* got 'dev'"),
    ({}, r"'train' must keep .* got read 2, .*short 2.*data\.min_ch"),
  ],
)
def test_bad_settings_unknown_splits_and_filters_that_leave_nothing_are_refused(fields, message):
  fields = dict(fields)
  split = fields.pop("split", "train")
  with pytest.raises(ValueError, match=message):
    list(Filtered(Memory(("a", "b")), **fields).documents(split))


def test_hashes_ignore_case_and_blanks_only():
  assert normalised_hash("A  Straße\n") == normalised_hash(" a strasse")
  assert len({normalised_hash(text) for text in ("", "a", "b", "ab", "a b", "a.")}) == 6


@pytest.mark.slow
def test_sentencepiece_encodes_filtered_news(real_data):
  file = real_data / "ag_news/test.csv"
  if not file.is_file():
    pytest.skip(f"no {file}")
  lines = tuple(file.read_text(encoding="utf-8").splitlines())
  source = Filtered(Memory(lines, lines[:50], lines[50:99]), min_chars=200)
  report = source.report("train")
  # 99 lines are held out; headlines repeat, and some are too short.
  assert report.read == 7600
  assert report.duplicates >= sum(len(line) >= 200 for line in lines[:99])
  assert report.other_language < 0.01 * report.read
  tokenizer = fit_tokenizer(source, SentencePieceTokenizer(vocab=2003))
  split = encode_split(source, tokenizer, "train")
  assert split.documents == report.kept
  ends = 1 + np.flatnonzero(split.tokens == split.eos)
  documents = np.split(split.tokens, ends)[:-1]
  assert [*map(tokenizer.decode, documents)] == [*source.documents("train")]
