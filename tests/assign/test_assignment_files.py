"""Assignments are read back from their files, and wrong files are refused by line."""

import re

import numpy as np
import pytest

from vqjax import assign

TABLE = np.array([2, 0, 1, 1, 0, 3, 2])
FINGERPRINT = "0123abcd"


@pytest.fixture
def path(tmp_path):
  path = tmp_path / "new" / "table.txt"
  assign.save_assignment(TABLE, path, codes=5, fingerprint=FINGERPRINT)
  return path


def test_an_assignment_comes_back_from_its_file(path):
  for fingerprint in (None, FINGERPRINT):
    table = assign.load_assignment(path, 7, 5, fingerprint=fingerprint)
    assert table.dtype == np.int32
    np.testing.assert_array_equal(table, TABLE)


def test_the_file_is_a_header_and_a_line_a_token(path):
  header, *lines = path.read_text().splitlines()
  assert header == "vocab 7 codes 5 tokenizer 0123abcd"
  assert lines == [f"{token} {code}" for token, code in enumerate(TABLE)]


def test_lines_may_be_in_any_order_and_end_as_on_other_systems(path):
  header, *lines = path.read_text().splitlines()
  path.write_bytes("\r\n".join([header, *lines[::-1]]).encode())
  np.testing.assert_array_equal(assign.load_assignment(path, 7, 5), TABLE)


@pytest.mark.parametrize(
  ("line", "text", "message"),
  [
    (4, "1 0", "line 4: `token` must occur once; got 1 as in line 3"),
    (4, None, "got none for token 2 (1 such tokens) in 7 lines. Add a line `2 CODE`"),
    (4, "7 0", "line 4: `token` must be in [0, 7); got 7"),
    (4, "-1 0", "line 4: `token` must be in [0, 7); got -1"),
    (4, "2 5", "line 4: `code` must be in [0, 5); got 5 for token 2"),
    (4, "2 -1", "line 4: `code` must be in [0, 5); got -1"),
    (4, "2 1.5", "line 4: a line must be `token code`, two integers; got '2 1.5'"),
    (4, "2", "two integers; got '2'"),
    (4, "2 1 1", "two integers; got '2 1 1'"),
    (4, "", "two integers; got ''"),
    (4, "two \xff", "two integers; got 'two"),
    (8, "6 2 # half", "line 8: a line must be `token code`, two integers; got '6 2 # half'"),
    (1, "7 5", "line 1: the header must be `vocab 7 codes 5 tokenizer FINGERPRINT`; got '7 5'"),
    (1, "vocab 8 codes 5 tokenizer 0123abcd", "line 1: `vocab` must be 7; got 8"),
    (1, "vocab 7 codes 6 tokenizer 0123abcd", "line 1: `codes` must be 5; got 6"),
    (1, "vocab 7 codes 5 tokenizer ffff", "`tokenizer` must be 0123abcd; got ffff"),
  ],
)
def test_a_wrong_file_is_refused_with_its_line(path, line, text, message):
  lines = path.read_text().splitlines()
  lines[line - 1 : line] = [] if text is None else [text]
  path.write_bytes("\n".join(lines).encode("latin-1"))
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    assign.load_assignment(path, 7, 5, fingerprint=FINGERPRINT)
  assert str(path) in str(error.value)


def test_an_empty_file_has_no_header(path):
  path.write_text("")
  with pytest.raises(ValueError, match=r"line 1: the header must be .*; got ''"):
    assign.load_assignment(path, 7, 5)


def test_an_invalid_assignment_is_not_saved(tmp_path):
  path = tmp_path / "table.txt"
  for table, fingerprint, message in (
    (TABLE, "x", r"`assignment` must hold codes in \[0, 3\); got 3 for token 5"),
    (TABLE / 2, "x", "`assignment` must hold integers; got float64"),
    (TABLE % 3, "two words", "`fingerprint` must be one word; got 'two words'"),
    (TABLE % 3, "", "`fingerprint` must be one word; got ''"),
  ):
    with pytest.raises(ValueError, match=message):
      assign.save_assignment(table, path, codes=3, fingerprint=fingerprint)
  assert not path.exists()
