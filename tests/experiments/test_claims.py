"""Numbers in the words of pages are those of the tables of results beside them."""

import csv
import pathlib
import re
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[2]


class Claim(NamedTuple):
  """A number of a page, and the cell that it is.

  Attributes:
    page: the page.
    text: an expression for the words around the number, which is its group.
    table: the table in docs/results.
    row: what the row begins with, or what follows its number.
    column: the column of the cell.
  """

  page: str
  text: str
  table: str
  row: str
  column: str


MORE, STEP, DRAW = "% from the reference", "training", "sample"
README, CHOOSING, INDEX = "README.md", "docs/choosing.md", "docs/index.md"
PTB, STORIES, CONVERSIONS = "comparison-ptb", "comparison-stories", "vq_logits-conversions"

CLAIMS = [
  *(
    Claim(page, text, PTB, row, column)
    for page, text, row, column in (
      (README, r"trained table, in a file .* \+(\S+) %", "tied-contexts-file", MORE),
      (README, r"same table in memory .* \+(\S+) %", "tied-contexts-memory", MORE),
      (README, r"same table in memory .* (\d)× a draw", "tied-contexts-memory", DRAW),
      (README, r"small head that trains fast .* \+(\d+) %", "codebook-exchange", MORE),
      (README, r"small head that trains fast .* (\S+)× a step", "codebook-exchange", STEP),
      (INDEX, r"\[(\d\S*) MiB become", "tied-contexts", "MiB with the inputs"),
      (INDEX, r"MiB become (\S+) at", "tied-contexts-file", "MiB with the inputs"),
      (INDEX, r"MiB become .* at (\S+) % of perplexity", "tied-contexts-file", MORE),
      (CHOOSING, r"trained table, in a file .* \+(\S+) % perplexity", "tied-contexts-file", MORE),
      (CHOOSING, r"the same in memory .* \+(\S+) %;", "tied-contexts-memory", MORE),
      (CHOOSING, r"a draw takes (\d) times as long", "tied-contexts-memory", DRAW),
      (CHOOSING, r"trains in (\S+) of a dense step", "codebook-exchange", STEP),
      (CHOOSING, r"trains in .* \+(\d+) % at 1/16", "codebook-exchange", MORE),
      (CHOOSING, r"quality first .* \+(\d+) and", "product-learned", MORE),
      (CHOOSING, r"quality first .* and \+(\d+) % at 1/16", "product", MORE),
      (CHOOSING, r"faster training step, (\S+) and", "sampled", STEP),
      (CHOOSING, r"faster training step, .* and (\S+) of the time", "adaptive", STEP),
      (CHOOSING, r"faster training step.* \+(\d+) and", "sampled", MORE),
      (CHOOSING, r"faster training step.* and \+(\d+) %", "adaptive", MORE),
      (CHOOSING, r"\| untied full softmax \| (\d+) \|", "dense-contexts", MORE),
      (CHOOSING, r"\| learned product codes \| (\d+) \|", "product-learned", MORE),
      (CHOOSING, r"\| product codes \| (\d+) \|", "product", MORE),
      (CHOOSING, r"\| codebooks \| (\d+) to", "codebook-exchange", MORE),
      (CHOOSING, r"\| codebooks \| .* to (\d+) \|", "residual", MORE),
      (CHOOSING, r"\| tree softmax \| (\d+) \|", "hierarchical", MORE),
      (CHOOSING, r"\| low rank \| (\d+) \|", "low-rank", MORE),
      (CHOOSING, r"\| grouped \| (\d+) \|", "grouped", MORE),
    )
  ),
  Claim(CHOOSING, r"\[(\d+) %\]\S* above a dense head on TinyStories", STORIES, "grouped", MORE),
  Claim(CHOOSING, r"by frequency (\d+) %", STORIES, "grouped-frequency", MORE),
  Claim(CHOOSING, r"clusters of contexts (\d+) %", STORIES, "grouped-clusters", MORE),
  *(
    Claim(CHOOSING, text, CONVERSIONS, row, "% over full")
    for text, row in (
      (r"to (\d+) %\]\S* above the full softmax", "VQ-Logits (K=256)"),
      (r"\[(\d+) %\]\S* above the fine-tuned", "low rank, converted"),
      (r"1,024, exchange on bigrams \| \S+ \| (\S+) \|", "K=1024, exchange on bigrams"),
      (r"1,024, k-means \| \S+ \| (\S+) \|", "K=1024, k-means"),
      (r"460, exchange on bigrams \| \S+ \| (\S+) \|", "K=460, exchange"),
      (r"product codes, learned \| \S+ \| (\S+) \|", "product codes, learned"),
      (r"codebook and a low-rank part \| \S+ \| (\S+) \|", "codebook and a low-rank part"),
    )
  ),
]


def cell(claim):
  """The number in the cell of a claim."""
  with open(ROOT / "docs" / "results" / f"{claim.table}.csv", newline="") as file:
    rows = list(csv.DictReader(file))
  key = next(iter(rows[0]))
  bare = [re.sub(r"^\d+\. ", "", row[key]) for row in rows]
  exact = [row for row, name in zip(rows, bare) if name == claim.row]
  (found,) = exact or [row for row, name in zip(rows, bare) if name.startswith(claim.row)]
  return float(re.match(r"[+-]?[\d.]+", found[claim.column])[0])


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.page}: {claim.row}")
def test_a_number_is_that_of_its_table(claim):
  # Over the ends of lines.
  text = (ROOT / claim.page).read_text("utf-8")
  found = re.findall(claim.text, text) or re.findall(claim.text, text.replace("\n", " "))
  assert len(found) == 1, found
  decimals = len(found[0].partition(".")[2])
  assert abs(cell(claim) - float(found[0])) <= 0.5 * 10**-decimals + 1e-9


OTHERS = {
  (README, "-7 %"): "104.8 over 112.4, of docs/results/dpq.md",
  (CHOOSING, "2.7 %"): "the full softmax with as many steps over the converted one",
}
"""Percentages that are quotients of two cells."""


@pytest.mark.parametrize("page", [README, CHOOSING, INDEX])
def test_every_percentage_has_a_claim(page):
  text = (ROOT / page).read_text("utf-8").replace("\n", " ")
  claimed = {
    match.start(1)
    for claim in CLAIMS
    if claim.page == page
    for match in re.finditer(claim.text.replace(".*", "[^|]*.*?"), text)
  }
  percentages = re.finditer(r"[+-]?(\d[\d.]*) %", text)
  missing = [m[0] for m in percentages if {m.start(), m.start(1)}.isdisjoint(claimed)]
  assert [name for name in missing if (page, name) not in OTHERS] == []
