"""Are lines of JSON read whole, in order, and in the split that their file's name says?"""

import gzip
import json

import pytest

from vqjax.lab.data import Filtered, JSONLines, files
from vqjax.lab.data.source import SPLITS


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


def test_files_come_in_the_order_of_their_names_and_half_of_validation_is_the_test(folder):
  assert documents(folder) == {
    "train": ["a", "b", "c\nd", "é"],
    "valid": ["v0", "v1", "v2"],
    "test": ["t0", "t1"],
  }


def test_files_for_the_test_leave_validation_whole(folder):
  (folder / "test.jsonl").write_text("\n" + line("T"))
  found = documents(folder)
  assert found["valid"] == ["v0", "t0", "v1", "t1", "v2"]
  assert found["test"] == ["T"]


def test_another_member_may_hold_the_text(folder):
  assert documents(folder, text="url")["test"] == ["x", "x"]


@pytest.mark.parametrize("large", [False, True])
def test_the_fingerprint_changes_with_the_text(folder, large, monkeypatch):
  if large:
    monkeypatch.setattr(files, "LARGE", 2**20)
  path = folder / "c4-train.00000-of-01024.json.gz"
  padding = "".join(str(i * i) for i in range(400_000))  # packed, two MiB
  before = None
  for text in ("a", "b"):
    path.write_bytes(gzip.compress(line(text + padding).encode(), 1, mtime=0))
    assert path.stat().st_size > 2**20
    assert JSONLines(str(folder)).fingerprint() != before
    before = JSONLines(str(folder)).fingerprint()
  assert before == JSONLines(str(folder)).fingerprint()


def test_filters_take_it(folder):
  filtered = Filtered(JSONLines(str(folder)), min_chars=2, language=None)
  assert list(filtered.documents("train")) == ["c\nd"]


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


PACKED = gzip.compress(line("a").encode(), mtime=0)


@pytest.mark.parametrize(
  "content",
  [b"no gzip", PACKED[:-9], PACKED[:10] + b"?" * 20],
  ids=["another format", "cut off", "garbled"],
)
def test_damaged_files_are_named(folder, content):
  (folder / "train.json.gz").write_bytes(content)
  with pytest.raises(ValueError, match=r"train\.json\.gz must be whole"):
    documents(folder)


def test_a_folder_without_files_is_named(tmp_path):
  with pytest.raises(
    FileNotFoundError, match=r"data\.path` must hold files for train and validation"
  ):
    documents(tmp_path)
