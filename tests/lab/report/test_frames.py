"""Tables of any columns, in Markdown and in a terminal."""

import io

import pandas as pd
from rich.console import Console

from vqjax.lab.report.frames import markdown, show_frame


def test_tables_show_missing_cells_and_leave_out_empty_columns():
  frame = pd.DataFrame({"head": ["a|b", "c"], "number": ["1.0", None], "empty": [None, None]})
  header, align, *body = markdown(frame).splitlines()
  cells = lambda line: [cell.strip() for cell in line.strip("|").split(" | ")]
  assert cells(header) == ["head", "number"]
  assert align.endswith("-:|")
  assert [cells(line) for line in body] == [["a\\|b", "1.0"], ["c", "–"]]


def test_a_wide_table_is_shown_in_parts_with_whole_numbers():
  frame = pd.DataFrame(
    {"run": ["a label of several words"]}
    | {f"{n} per cent": [f"{n}.25 ± {n}.75"] for n in range(9)}
  )
  stream = io.StringIO()
  show_frame(Console(file=stream, width=60), "Title", frame)
  lines = stream.getvalue().splitlines()
  assert max(map(len, lines)) <= 60
  assert all(f"{n}.25 ± {n}.75" in stream.getvalue() for n in range(9))
