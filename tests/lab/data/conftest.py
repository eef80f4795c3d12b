"""Fixtures of the tests of data: a numbered split, and a corpus in three files."""

import numpy as np
import pytest

from vqjax.lab.data import TokenSplit

EOS = 0


@pytest.fixture
def numbered():
  """Make a split whose tokens are 1, 2, ..., so that a token is its position."""

  def make(tokens: int) -> TokenSplit:
    return TokenSplit(np.arange(1, tokens + 1, dtype=np.uint16), tokens, 1, EOS)

  return make


@pytest.fixture
def corpus(tmp_path):
  """A folder of three files in Mikolov's layout, with odd lines."""
  folder = tmp_path / "corpus"
  folder.mkdir()
  for name, lines in (("train", 1500), ("valid", 7), ("test", 3)):
    text = "".join(f" {name} {i % 11} é \n \n" for i in range(lines))
    (folder / f"ptb.{name}.txt").write_text(text, encoding="utf-8")
  return folder
