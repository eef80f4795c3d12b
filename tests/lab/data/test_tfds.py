"""Tests of prepared datasets, built and read in order without TensorFlow."""

import dataclasses
import subprocess
import sys

import pytest

from configs.grouped import lm
from vqjax.lab.data import TFDS, PennTreebank
from vqjax.lab.data.source import SPLITS


def build(name, data_dir, *options):
  command = [
    sys.executable,
    "-m",
    "vqjax.lab.data.build",
    name,
    "--data_dir",
    str(data_dir),
    *options,
  ]
  return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def prepared(corpus, tmp_path):
  done = build("vqjax_penn_treebank", tmp_path / "tfds", "--manual_dir", str(corpus))
  assert done.returncode == 0, done.stderr
  return TFDS(data_dir=str(tmp_path / "tfds"))


@pytest.mark.slow
def test_lines_come_back_in_their_order(prepared, corpus):
  # 3,000 lines of 12 kinds: any shuffling would show, and they are more than are read at once.
  for split in SPLITS:
    expected = list(PennTreebank(str(corpus)).documents(split))
    assert list(prepared.documents(split)) == expected


@pytest.mark.slow
def test_slices_are_splits(prepared):
  sliced = TFDS(train="train[:10]", data_dir=prepared.data_dir)
  assert len(list(sliced.documents("train"))) == 10
  assert sliced.fingerprint() != prepared.fingerprint()


@pytest.mark.slow
def test_one_split_may_serve_as_two(prepared):
  # As for C4, which has no test split.
  halves = TFDS(valid="train[:50%]", test="train[50%:]", data_dir=prepared.data_dir)
  both = [*halves.documents("valid"), *halves.documents("test")]
  assert both == list(prepared.documents("train"))


@pytest.mark.slow
@pytest.mark.parametrize("size", ["2", "103"])
def test_wikitext_is_found_under_the_data_folder(size, corpus, tmp_path, monkeypatch):
  corpus.rename(tmp_path / f"wikitext-{size}")
  monkeypatch.setenv("VQJAX_DATA", str(tmp_path))
  done = build(f"vqjax_wiki_text/{size}", tmp_path / "tfds")
  assert done.returncode == 0, done.stderr
  source = TFDS(f"vqjax_wiki_text/{size}", data_dir=str(tmp_path / "tfds"))
  assert list(source.documents("test"))[:2] == ["test 0 é", ""]


@pytest.mark.slow
def test_tensorflow_is_not_imported(prepared):
  code = (
    "import sys; from vqjax.lab.data import TFDS; early = 'tensorflow_datasets' in sys.modules;"
    f"list(TFDS(data_dir={prepared.data_dir!r}).documents('test'));"
    "assert not early and 'tensorflow' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_unknown_names_are_refused_with_the_known_ones(prepared, tmp_path):
  there = prepared.data_dir
  for source, message in (
    (TFDS("no_such_set", data_dir=there), r"TFDS\.name` must .* got 'no_such_set'"),
    (TFDS(text="words", data_dir=there), r"TFDS\.text` must be one of text; got 'words'"),
    (
      TFDS(train="all", data_dir=there),
      r"TFDS\.train` must be one of train, validation, test.* got 'all'",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      list(source.documents("train"))
  with pytest.raises(FileNotFoundError, match=r"`python -m vqjax\.lab\.data\.build"):
    list(TFDS(data_dir=str(tmp_path / "empty")).documents("train"))


@pytest.mark.slow
def test_a_missing_corpus_names_the_folder_for_it(tmp_path, monkeypatch):
  monkeypatch.delenv("VQJAX_DATA", raising=False)
  done = build("vqjax_penn_treebank", tmp_path / "tfds")
  assert done.returncode != 0
  assert "VQJAX_DATA" in done.stderr


@pytest.mark.slow
def test_tinystories_is_prepared_with_its_validation_halved(tmp_path):
  manual = tmp_path / "manual"
  manual.mkdir()
  (manual / "TinyStories-train.txt").write_text("\none\n\nis long\n<|endoftext|>\ntwo\n")
  (manual / "TinyStories-valid.txt").write_text("three\n<|endoftext|>\nfour\n<|endoftext|>\n")
  done = build("vqjax_tiny_stories", tmp_path / "tfds", "--manual_dir", str(manual))
  assert done.returncode == 0, done.stderr
  source = dataclasses.replace(lm.FULL, data_dir=str(tmp_path / "tfds"))
  assert list(source.documents("train")) == ["one\n\nis long", "two"]
  assert list(source.documents("valid")) == ["three"]
  assert list(source.documents("test")) == ["four"]
