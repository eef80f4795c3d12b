"""Numbers in the words of pages are those of the tables of results.

A number has a mark behind it, <!-- TABLE / ROW --> or <!-- TABLE / ROW / COLUMN -->: a CSV file of
docs/results, or PAGE.md BLOCK, a generated table of a page there. Without a column the number is
the row's first percentage that is not a paper's.
"""

import io
import re

import pandas as pd
import pytest

from experiments.studies.study_page import DOCS

NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?"
CLAIM = re.compile(
  rf"({NUMBER})(?: %|×)?(?:\s\(({NUMBER}) to\s+({NUMBER})\))?"
  r"<!-- ([^>/]+?) / ([^>/]+?)(?: / ([^>]+))? -->"
)

MARKED = {
  "../README.md": {"-7 %"},  # 104.8 over 112.4, of results/dpq.md
  "choosing.md": {"2.7 %"},  # the full softmax of as many steps over the converted one
  # A margin, an interval's level, an audit, validation, and quotients of two rows.
  "results/comparison.md": {"1 %", "95 %", "0.7 %", "0.4 %", "10.3 %", "12 %"},
}
"""Pages whose percentages all have marks -> the others that they have."""

OTHERS = [f"results/{name}.md" for name in ("bottleneck", "grouped", "ngrams", "vq_logits")]


def table_of(name):
  page, _, block = name.partition(" ")
  text = (DOCS / "results" / page).read_text("utf-8")
  if not block:
    return pd.read_csv(io.StringIO(text), dtype=str, index_col=0)
  lines = re.search(rf"<!-- generated: {block} -->\n\n(.+?)\n\n", text, re.DOTALL)[1].split("\n")
  rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
  return pd.DataFrame(rows[2:], columns=rows[0]).set_index(rows[0][0])


def assert_is(said, cell):
  """Numbers of the prose are those of a cell, in the digits that they have."""
  for words, exact in zip(filter(None, said), re.findall(NUMBER, cell.replace("± ", ""))):
    words, exact = words.replace(",", ""), exact.replace(",", "")
    units = [10.0 ** -len(number.partition(".")[2]) for number in (words, exact)]
    value = float(exact) if words[0] in "+-" else abs(float(exact))
    assert abs(float(words) - value) <= sum(units) / 2 + 1e-9, (words, cell)


@pytest.mark.parametrize("page", [*MARKED, *OTHERS])
def test_a_number_is_that_of_the_row_that_its_mark_names(page):
  claims = CLAIM.findall((DOCS / page).read_text("utf-8"))
  assert claims
  for *said, name, row, column in claims:
    table = table_of(name)
    cell = table.loc[row, column or next(x for x in table if "%" in x and "paper" not in x)]
    assert_is(said, cell)


def test_the_numbers_of_the_first_page_are_those_of_the_tied_table():
  # In the text of an image, which has no place for marks.
  said = re.search(r"\[(\d\S*) MiB become (\S+) at (\S+) % of", (DOCS / "index.md").read_text())
  rows = table_of("comparison-ptb.csv").loc[["tied-contexts", "tied-contexts-file"]]
  sizes = rows["MiB with the inputs"]
  for words, cell in zip(said.groups(), [*sizes, rows["% from the reference"].iloc[1]]):
    assert_is([words], cell)


@pytest.mark.parametrize("page", MARKED)
def test_every_percentage_has_a_mark(page):
  text = (DOCS / page).read_text("utf-8")
  prose = re.sub(r"<!-- generated: ([\w-]+) -->.*?<!-- end: \1 -->", "", text, flags=re.DOTALL)
  assert set(re.findall(rf"{NUMBER} %", CLAIM.sub("", prose))) == MARKED[page]
