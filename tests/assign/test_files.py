"""Does an assignment come back from its file, and is a file that is not right refused?"""

import re

import numpy as np
import pytest

from vqjax import CodebookHead, assign

TABLE = np.array([2, 0, 1, 1, 0, 3, 2])
FINGERPRINT = "0123abcd"


@pytest.fixture
def path(tmp_path):
  path = tmp_path / "new" / "table.txt"
  assign.save(TABLE, path, codes=5, fingerprint=FINGERPRINT)
  return path


def test_an_assignment_comes_back_from_its_file(path):
  for fingerprint in (None, FINGERPRINT):
    table = assign.load(path, 7, 5, fingerprint=fingerprint)
    assert table.dtype == np.int32
    np.testing.assert_array_equal(table, TABLE)


def test_the_file_is_a_header_and_a_line_a_token(path):
  header, *lines = path.read_text().splitlines()
  assert header == "vocab 7 codes 5 tokenizer 0123abcd"
  assert lines == [f"{token} {code}" for token, code in enumerate(TABLE)]


def test_lines_may_be_in_any_order_and_end_as_on_other_systems(path):
  header, *lines = path.read_text().splitlines()
  path.write_bytes("\r\n".join([header, *lines[::-1]]).encode())
  np.testing.assert_array_equal(assign.load(path, 7, 5), TABLE)


def test_a_head_takes_its_codes_from_a_file(path):
  head = CodebookHead(7, 4, 5, assign.FromFile(str(path), FINGERPRINT))
  np.testing.assert_array_equal(head.assignment_init(7, 5), TABLE)
  with pytest.raises(ValueError, match="made for the tokenizer 0123abcd, not for other"):
    assign.FromFile(str(path), "other")(7, 5)


@pytest.mark.parametrize(
  ("line", "text", "message"),
  [
    (4, "1 0", "line 4: token 1 has a code in line 3 already; keep one"),
    (4, None, "token 2 has no code (1 such tokens), and line 7 is the last; add a line `2 CODE`"),
    (4, "7 0", "line 4: token 7 is outside [0, 7); remove the line"),
    (4, "-1 0", "line 4: token -1 is outside [0, 7)"),
    (4, "2 5", "line 4: code 5 is outside [0, 5); give token 2 another"),
    (4, "2 -1", "line 4: code -1 is outside"),
    (4, "2 1.5", "line 4: '2 1.5' is not `token code`; write two integers"),
    (4, "2", "line 4: '2' is not `token code`"),
    (4, "2 1 1", "line 4: '2 1 1' is not `token code`"),
    (4, "", "line 4: '' is not `token code`"),
    (4, "two \xff", "line 4: 'two"),
    (8, "6 2 # half", "line 8: '6 2 # half' is not"),
    (1, "7 5", "line 1: '7 5' is no header; write it with assign.save: `vocab 7 codes 5"),
    (1, "vocab 8 codes 5 tokenizer 0123abcd", "line 1: vocab 8, where 7 is wanted; take a file"),
    (1, "vocab 7 codes 6 tokenizer 0123abcd", "or set the head's codes to 6"),
    (1, "vocab 7 codes 5 tokenizer ffff", "made for the tokenizer ffff, not for 0123abcd"),
  ],
)
def test_a_wrong_file_is_refused_with_its_line_and_the_remedy(path, line, text, message):
  lines = path.read_text().splitlines()
  lines[line - 1 : line] = [] if text is None else [text]
  path.write_bytes("\n".join(lines).encode("latin-1"))
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    assign.load(path, 7, 5, fingerprint=FINGERPRINT)
  assert str(path) in str(error.value)


def test_an_empty_file_has_no_header(path):
  path.write_text("")
  with pytest.raises(ValueError, match="line 1: '' is no header"):
    assign.load(path, 7, 5)


def test_a_table_that_is_none_is_not_saved(tmp_path):
  path = tmp_path / "table.txt"
  for table, fingerprint, message in (
    (TABLE, "x", "token 5 is assigned to code 3"),
    (TABLE / 2, "x", "an assignment of float64"),
    (TABLE % 3, "two words", "fingerprint 'two words' is no word"),
    (TABLE % 3, "", "fingerprint '' is no word"),
  ):
    with pytest.raises(ValueError, match=message):
      assign.save(table, path, codes=3, fingerprint=fingerprint)
  assert not path.exists()
