"""Tests of prepared datasets, built and read in order without TensorFlow."""

import dataclasses
import subprocess
import sys

import pytest

from vqjax.lab.data import TFDS
from vqjax.lab.data.source import SPLITS

LINES = {
  "train": [f"line {i} é" for i in range(3000)],  # more than are read at once
  "validation": ["", "a line"],
  "test": ["one", "two"],
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  folder = tmp_path_factory.mktemp("tfds")
  for name, lines in LINES.items():
    (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
  command = [sys.executable, "-m", "vqjax.lab.data.build", "vqjax_lines"]
  command += ["--imports", "tests.lab.data.lines_builder"]
  command += ["--manual_dir", str(folder), "--data_dir", str(folder / "tfds")]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return TFDS("vqjax_lines", data_dir=str(folder / "tfds"))


@pytest.mark.slow
def test_lines_come_back_in_their_order(prepared):
  for split, name in zip(SPLITS, LINES):
    assert list(prepared.documents(split)) == LINES[name]


@pytest.mark.slow
def test_slices_are_splits(prepared):
  sliced = dataclasses.replace(prepared, train="train[:10]")
  assert len(list(sliced.documents("train"))) == 10
  assert sliced.fingerprint() != prepared.fingerprint()


@pytest.mark.slow
def test_one_split_may_serve_as_two(prepared):
  # As for C4, which has no test split.
  halves = dataclasses.replace(prepared, valid="train[:50%]", test="train[50%:]")
  both = [*halves.documents("valid"), *halves.documents("test")]
  assert both == list(prepared.documents("train"))


@pytest.mark.slow
def test_tensorflow_is_not_imported(prepared):
  code = (
    "import sys; from vqjax.lab.data import TFDS; early = 'tensorflow_datasets' in sys.modules;"
    f"list({prepared!r}.documents('test'));"
    "assert not early and 'tensorflow' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_unknown_names_are_refused_with_the_known_ones(prepared, tmp_path):
  there = lambda **fields: dataclasses.replace(prepared, **fields)
  for source, message in (
    (there(name="no_such_set"), r"TFDS\.name` must .* got 'no_such_set'"),
    (there(text="words"), r"TFDS\.text` must be one of text; got 'words'"),
    (
      there(train="all"),
      r"TFDS\.train` must be one of train, validation, test.* got 'all'",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      list(source.documents("train"))
  with pytest.raises(FileNotFoundError, match=r"`python -m vqjax\.lab\.data\.build"):
    list(TFDS("mnist", data_dir=str(tmp_path / "empty")).documents("train"))
