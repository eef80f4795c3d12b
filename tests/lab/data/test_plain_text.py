"""Tests of plain text: documents of files and folders, held-out splits, errors."""

import os
import re
import subprocess
import sys

import pytest

from vqjax.lab.data import PennTreebank, SentencePieceTokenizer, Text, WikiText
from vqjax.lab.data.source import SPLITS


def write(path, *documents):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("\n\n".join(documents), encoding="utf-8")
  return str(path)


def split_of(source):
  return {document: split for split in SPLITS for document in source.documents(split)}


@pytest.mark.slow
def test_docstrings_are_a_corpus_of_a_useful_size():
  words = [
    word
    for split in SPLITS
    for document in Text().documents(split)
    for word in re.findall(r"\w+(?:'\w+)?|[^\w\s]", document)
  ]
  # Loose: Python versions differ. 3.11 has 361,000 and 14,000.
  assert 150_000 < len(words) < 1_000_000
  assert len(set(words)) > 8_000


@pytest.mark.slow
def test_the_splits_do_not_depend_on_the_process(tmp_path):
  path = write(tmp_path / "a.txt", *(f"document {i}" for i in range(50)))
  code = (
    "import sys; from vqjax.lab.data import Text; print(list(Text(sys.argv[1]).documents('valid')))"
  )
  env = {**os.environ, "PYTHONHASHSEED": "17"}
  call = [sys.executable, "-c", code, path]
  other = subprocess.run(call, env=env, capture_output=True, text=True, check=True)
  assert other.stdout.strip() == str(list(Text(path).documents("valid")))


def test_every_paragraph_of_a_file_is_in_one_split(tmp_path):
  documents = [f"paragraph {i}\nof two lines" for i in range(211)]
  source = Text(write(tmp_path / "a.txt", *documents), 0.2, 0.3)
  where = split_of(source)
  assert sorted(where) == sorted(documents)
  order = [documents.index(document) for document in source.documents("train")]
  assert order == sorted(order)
  share = {split: list(where.values()).count(split) / 211 for split in SPLITS}
  # Three standard deviations of a binomial of 211 draws.
  assert share == pytest.approx({"train": 0.5, "valid": 0.2, "test": 0.3}, abs=0.11)


def test_an_added_document_moves_hardly_any_other(tmp_path):
  documents = [f"document {i}" for i in range(97)]
  before = split_of(Text(write(tmp_path / "a.txt", *documents), 0.2, 0.2))
  after = split_of(Text(write(tmp_path / "b.txt", "new", *documents), 0.2, 0.2))
  # Each of the two boundaries may shift by the new document and by a rounding.
  assert sum(after[d] != before[d] for d in before) <= 4


def test_even_a_few_documents_fill_every_split(tmp_path):
  for count in (3, 4, 10):
    source = Text(write(tmp_path / f"{count}.txt", *(f"document {i}" for i in range(count))))
    assert all(list(source.documents(split)) for split in ("train", "valid", "test"))


def test_a_folder_is_read_recursively_without_hidden_and_binary_files(tmp_path):
  for i in range(60):
    write(tmp_path / f"deep/{i % 3}/{i}.md", f"document {i}", "same document")
  write(tmp_path / ".git/x.txt", "hidden")
  (tmp_path / "picture.png").write_bytes(b"\xff\x00")
  where = split_of(Text(str(tmp_path), 0.3, 0.3))
  assert sorted(where) == sorted(f"document {i}\n\nsame document" for i in range(60))


def test_files_named_for_splits_are_the_splits(tmp_path):
  for name, text in (("x.train.txt", "a"), ("x.val.txt", "b"), ("test.txt", "c")):
    write(tmp_path / name, text)
  assert split_of(Text(str(tmp_path))) == {"a": "train", "b": "valid", "c": "test"}


@pytest.mark.parametrize("separator", ["<|endoftext|>", "\n", r"\n"])
def test_a_separator_is_between_documents(tmp_path, separator):
  documents = [f"document {i}" for i in range(20)]
  between = separator.replace(r"\n", "\n")
  text = between.join([*documents, "", " "])
  (tmp_path / "a.txt").write_text(text)
  source = Text(str(tmp_path / "a.txt"), separator=separator)
  assert sorted(split_of(source)) == sorted(documents)
  assert source.fingerprint() != Text(source.path).fingerprint()
  for name in ("train.txt", "test.txt", "more.txt"):
    (tmp_path / name).write_text(text)
  assert list(Text(str(tmp_path), separator=separator).documents("train")) == documents


def test_line_ends_and_byte_order_mark_are_not_text(tmp_path):
  (tmp_path / "train.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree")
  assert list(Text(str(tmp_path)).documents("train")) == ["one\ntwo", "three"]


def test_fingerprint_changes_with_text_and_splits_only(tmp_path):
  documents = [f"document {i}" for i in range(50)]
  path = write(tmp_path / "a.txt", *documents)
  first = Text(path).fingerprint()
  assert Text(write(tmp_path / "b.txt", *documents)).fingerprint() == first
  assert Text(path, valid_fraction=0.1).fingerprint() != first
  assert Text(write(tmp_path / "a.txt", *documents, "x")).fingerprint() != first


def test_a_path_is_also_looked_for_under_the_data_folder(tmp_path, monkeypatch):
  write(tmp_path / "own/train.txt", "hello")
  monkeypatch.setenv("VQJAX_DATA", str(tmp_path))
  assert list(Text("own").documents("train")) == ["hello"]
  monkeypatch.delenv("VQJAX_DATA")
  for make in (Text, PennTreebank, WikiText):
    with pytest.raises(FileNotFoundError, match=r"'nowhere'.*VQJAX_DATA"):
      list(make("nowhere").documents("train"))


SPLIT_BY = "`data.valid_fraction` and `data.test_fraction` must"


@pytest.mark.parametrize(
  ("files", "fields", "split", "message"),
  [
    ({}, (), "train", r"data\.path` must hold a text file"),
    ({"a.txt": b""}, (), "train", r"data\.path` must have a document .* got 0"),
    ({"a.txt": b"caf\xe9"}, (), "train", r"a\.txt must be UTF-8; got byte 0xe9 at offset 3.*iconv"),
    ({"a.txt": b"a"}, (), "dev", "`split` must be one of train, valid, test; got 'dev'"),
    ({"a.txt": b"a\n\nb"}, (0.0,), "valid", r"a document for 'valid'; got 2 .*valid_fraction"),
    ({"train.txt": b"a", "train.md": b"b"}, (), "train", r"got train\.md and train\.txt"),
    (
      {"a.txt": b"a\nb"},
      (),
      "train",
      r"separator=\\\\n .*, lower data\.valid_fraction and data\.test",
    ),
    ({"a.txt": b"a"}, (0.1, 0.1, ""), "train", r"`data\.separator` must be a text .*an empty one"),
    ({"a.txt": b"a"}, (-0.1, 0.1), "train", SPLIT_BY),
    ({"a.txt": b"a"}, (0.5, 0.5), "train", SPLIT_BY),
  ],
)
def test_text_that_cannot_be_split_is_refused_by_name(files, fields, split, message, tmp_path):
  for name, content in files.items():
    (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=message):
    list(Text(str(tmp_path), *fields).documents(split))


def test_lines_of_a_corpus_are_documents_in_order_and_empty_ones_count(corpus):
  expected = ["test 0 é", "", "test 1 é", "", "test 2 é", ""]
  assert list(PennTreebank(str(corpus)).documents("test")) == expected
  (corpus / "ptb.valid.txt").unlink()
  with pytest.raises(FileNotFoundError, match="without valid"):
    list(PennTreebank(str(corpus)).documents("train"))


def test_documents_that_only_mention_a_split_are_documents(tmp_path):
  names = {"train-guide.txt", "test_plan.txt", "dev notes.txt", "other.txt"}
  for name in names:
    write(tmp_path / name, name)
  assert set(split_of(Text(str(tmp_path)))) == names


def test_a_folder_with_one_book_is_read_by_paragraphs_and_an_empty_path_is_no_folder(tmp_path):
  write(tmp_path / "book.txt", *(f"paragraph {i}" for i in range(10)))
  assert len(split_of(Text(str(tmp_path)))) == 10
  with pytest.raises(ValueError, match=r"`data.path` must .* empty"):
    list(Text("").documents("train"))


def test_a_missing_extra_names_the_command_that_installs_it(monkeypatch):
  monkeypatch.setitem(sys.modules, "sentencepiece", None)
  with pytest.raises(ImportError, match=r"sentencepiece must .* pip install 'vqjax\[lab\]'"):
    SentencePieceTokenizer(vocab=300).fit(lambda: ["some text"])
