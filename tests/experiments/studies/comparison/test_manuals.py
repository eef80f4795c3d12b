"""The manual pages of a machine as a text."""

import gzip
import itertools

import pytest

from experiments.studies.comparison import manuals
from experiments.studies.comparison.manuals import Manuals, split_of

LINE = "This line is so long that two pages share it only as a copy of each other.\n"


@pytest.fixture
def installed(monkeypatch, tmp_path):
  """Two pages of each of many families; returns them by split."""
  families = {"train": [], "valid": [], "test": []}
  (tmp_path / "man1").mkdir()
  for letters in itertools.product("abcdefg", repeat=3):
    name = "".join(letters)
    families[split_of(name)].append(name)
    for page in (name, f"{name}-add"):
      text = f".TH X\n\\f(CW{page}\\fR runs Twice in 12 s. It ends.\n{LINE}"
      (tmp_path / "man1" / f"{page}.1.gz").write_bytes(gzip.compress(text.encode()))
  monkeypatch.setattr(manuals, "PAGES", tmp_path)
  caches = manuals._texts, manuals._sentences
  for cache in caches:
    cache.cache_clear()
  yield families
  for cache in caches:
    cache.cache_clear()


def here(**fields):
  """The source of the pages that are installed."""
  return Manuals(Manuals("", **fields).fingerprint(), **fields)


def test_a_family_is_in_one_split_and_held_out_text_has_no_copied_line(installed):
  for split, families in installed.items():
    assert Manuals("").pages()[split] == 2 * len(families)
    documents = list(here().documents(split))
    assert {text.split()[0] for text in documents if "runs" in text} == set(families)
    assert any("copy of each other" in text for text in documents) == (split == "train")


def test_words_are_those_of_penn_treebank(installed):
  first = next(here().documents("train"))
  assert first == f"{min(installed['train'])} add runs twice in N s"


def test_a_family_has_at_most_its_words(installed):
  assert Manuals("", most=5).pages()["train"] == len(installed["train"])
  assert Manuals("", most=5).fingerprint() != Manuals("").fingerprint()


def test_other_pages_are_refused(installed):
  with pytest.raises(ValueError, match=r"`checksum` must be that of the pages .* Set CHECKSUM"):
    list(Manuals("").documents("train"))
