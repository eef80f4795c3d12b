"""Tests of corpora in their published formats, and their published counts."""

import gzip
import json

import pytest

from vqjax.lab.data import (
  Filtered,
  JSONLines,
  PennTreebank,
  Stories,
  WikiText,
  WordTokenizer,
  corpus_files,
  encode_split,
  fit_tokenizer,
)
from vqjax.lab.data.corpora import END
from vqjax.lab.data.source import SPLITS


def test_lines_are_read_one_by_one_and_a_byte_that_is_not_utf8_is_named(tmp_path):
  for split in SPLITS:
    (tmp_path / f"{split}.txt").write_bytes("\ufeffa\r\n\n b\u2028c\x0cd \né".encode())
  assert list(WikiText(str(tmp_path)).documents("test")) == ["a", "", "b\u2028c\x0cd", "é"]
  (tmp_path / "train.txt").write_bytes(b"first\nsec\xffond\n")
  message = r"train\.txt must be UTF-8; got byte 0xff at offset 9\. Convert"
  with pytest.raises(ValueError, match=message):
    list(WikiText(str(tmp_path)).documents("train"))


PUBLISHED = {
  PennTreebank: ("ptb", 10_000, (929_589, 73_760, 82_430)),
  WikiText: ("wikitext-2", 33_278, (2_088_628, 217_646, 245_569)),
}


@pytest.mark.slow
@pytest.mark.parametrize("corpus", PUBLISHED)
def test_tokens_and_vocabulary_are_as_published(corpus, real_data):
  folder, vocab, tokens = PUBLISHED[corpus]
  if not (real_data / folder).is_dir():
    pytest.skip(f"no {folder} in {real_data}")
  source = corpus(str(real_data / folder))
  tokenizer = fit_tokenizer(source, WordTokenizer(split=False))
  splits = [encode_split(source, tokenizer, split) for split in SPLITS]
  assert tokenizer.vocab == vocab
  assert tuple(len(split.tokens) for split in splits) == tokens


def line(text):
  return json.dumps({"text": text, "url": "x"}) + "\n"


@pytest.fixture
def folder(tmp_path):
  """Two files to train on and one to validate, named and packed as C4's."""
  for name, texts in (
    ("c4-train.00001-of-01024", ["c\nd", "é"]),
    ("c4-train.00000-of-01024", ["a", "b"]),
    ("c4-validation.00000-of-00008", ["v0", "t0", "v1", "t1", "v2"]),
  ):
    packed = gzip.compress("".join(map(line, texts)).encode(), mtime=0)
    (tmp_path / f"{name}.json.gz").write_bytes(packed)
  (tmp_path / "train.txt").write_text("no JSON")
  return tmp_path


def documents(folder, **fields):
  return {split: list(JSONLines(str(folder), **fields).documents(split)) for split in SPLITS}


def test_files_come_in_order_and_half_of_validation_is_the_test_unless_it_has_files(folder):
  found = documents(folder)
  assert found["train"] == ["a", "b", "c\nd", "é"]
  assert (found["valid"], found["test"]) == (["v0", "v1", "v2"], ["t0", "t1"])
  assert documents(folder, text="url")["test"] == ["x", "x"]  # another member holds the text
  filtered = Filtered(JSONLines(str(folder)), min_chars=2, language=None)
  assert list(filtered.documents("train")) == ["c\nd"]
  (folder / "test.jsonl").write_text("\n" + line("T"))
  found = documents(folder)
  assert (found["valid"], found["test"]) == (["v0", "t0", "v1", "t1", "v2"], ["T"])


@pytest.mark.parametrize("large", [False, True])
def test_the_fingerprint_changes_with_the_text(folder, large, monkeypatch):
  if large:
    monkeypatch.setattr(corpus_files, "LARGE", 2**20)
  path = folder / "c4-train.00000-of-01024.json.gz"
  padding = "".join(str(i * i) for i in range(400_000))  # packed, two MiB
  before = None
  for text in ("a", "b"):
    path.write_bytes(gzip.compress(line(text + padding).encode(), 1, mtime=0))
    assert path.stat().st_size > 2**20
    assert JSONLines(str(folder)).fingerprint() != before
    before = JSONLines(str(folder)).fingerprint()
  assert before == JSONLines(str(folder)).fingerprint()


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"{]", r"line 1 must be JSON; got"),
    (b'{"body": "a"}', r"line 1 must .* 'text'; got body \(str\)\. Set data\.text"),
    (b'{"text": 3}', r"line 1 must .* 'text'; got text \(int\)"),
    (b"{}", r"line 1 must .* 'text'; got no members"),
    (b'\n{"text": "a"}\n \n\n[1]', r"line 5 must be an object"),
    (b'{"text": "a \\ud800 b"}', r"line 1 must be Unicode; got half a surrogate"),
    (b"3", r"line 1 must be an object"),
    (b'\xff{"text"', r"line 1 must be JSON"),
  ],
)
def test_bad_lines_are_named(folder, content, message):
  (folder / "train.json").write_bytes(content)
  with pytest.raises(ValueError, match=rf"train\.json, {message}"):
    documents(folder)


def test_damaged_files_and_a_folder_without_files_are_named(folder, tmp_path):
  packed = gzip.compress(line("a").encode(), mtime=0)
  for content in (b"no gzip", packed[:-9], packed[:10] + b"?" * 20):
    (folder / "train.json.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.json\.gz must be whole"):
      documents(folder)
  (tmp_path / "empty").mkdir()
  message = r"data\.path` must hold files for train and validation"
  with pytest.raises(FileNotFoundError, match=message):
    documents(tmp_path / "empty")


COPY = "This paragraph is long enough that two stories do not share it by chance."


@pytest.fixture
def stories(tmp_path):
  def make(train, held_out, **fields):
    names = []
    for number, text in enumerate((*train, held_out)):
      path = tmp_path / f"{number}.txt"
      path.write_text(text, encoding="utf-8")
      names.append(str(path))
    return Stories(tuple(names[:-1]), names[-1], **fields)

  return make


HELD_OUT = f"one\n{END}\ntwo\n{COPY}\n{END}\nthree\n{END}\n"


def test_stories_are_separated_and_every_second_is_for_the_test(stories):
  source = stories(["a\n\nb", f"c{END}\n d "], HELD_OUT)
  assert list(source.documents("train")) == ["a\n\nb", "c", "d"]
  assert list(source.documents("valid")) == ["one", "three"]
  assert list(source.documents("test")) == [f"two\n{COPY}"]
  first = stories(["a"], HELD_OUT)
  few = stories(["a"], HELD_OUT, most=1)
  assert list(few.documents("valid")) == ["one"]
  assert few.fingerprint() != first.fingerprint() != stories(["b"], HELD_OUT).fingerprint()
  with pytest.raises(ValueError, match=r"`held_out` must have a story for 'test'"):
    list(stories(["a"], "one").documents("test"))


def test_a_paragraph_of_a_held_out_story_is_not_trained_on(stories):
  source = stories([f"before\n\n{COPY}\n\nbehind{END}{COPY}{END}one"], HELD_OUT)
  assert list(source.documents("train")) == ["before\n\nbehind", "one"]
