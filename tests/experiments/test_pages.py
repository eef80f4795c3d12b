"""Pages have the figures of the results that are kept."""

import importlib
import io
import json
import pathlib
import re
import shutil

import pandas as pd
import pytest

from experiments import (
  article,
  bottleneck,
  gemma_compression,
  routed,
  small_models,
  trimming,
  tuned_lens,
)
from experiments.bench import speculation_report
from experiments.studies import study_page
from experiments.studies.study_page import DOCS


def kept(name):
  return json.loads((DOCS / "results" / name).read_text("utf-8"))


@pytest.mark.parametrize(
  ("shown", "name", "page"),
  [
    (gemma_compression.shown, "compression.json", "results/pretrained.md"),
    (gemma_compression.shown, "compression-packed.json", "results/pretrained.md"),
    (small_models.shown, "compression-small.json", "results/pretrained.md"),
    (routed.shown, "routed.json", "results/pretrained.md"),
    (trimming.shown, "trimming.json", "results/pretrained.md"),
    (tuned_lens.shown, "lens.json", "results/pretrained.md"),
  ],
)
def test_a_page_has_the_tables_of_its_results(shown, name, page):
  text = (DOCS / page).read_text("utf-8")
  for table in shown(kept(name)).split("\n\n"):
    assert table in text


def test_every_tuned_lens_is_below_the_logit_lens_at_every_block():
  for result in kept("lens.json").values():
    assert all(tuned < logit for tuned, logit in zip(result["tuned"], result["logit"]))


# A number of the prose may have a mark, <!-- TABLE / ROW -->: it is the row's percentage.
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?"
CLAIM = re.compile(
  rf"({NUMBER})(?: %)?(?:\s\(({NUMBER}) to\s+({NUMBER})\))?<!-- ([^>]+?) / ([^>]+) -->"
)


def table_of(name):
  """A CSV file of docs/results, or a generated table of a page there: PAGE.md BLOCK."""
  page, _, block = name.partition(" ")
  text = (DOCS / "results" / page).read_text("utf-8")
  if not block:
    return pd.read_csv(io.StringIO(text), dtype=str, index_col=0)
  lines = re.search(rf"<!-- generated: {block} -->\s(.+?)\s<!-- end", text, re.DOTALL)[1]
  rows = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in lines.split("\n") if line
  ]
  return pd.DataFrame(rows[2:], columns=rows[0]).set_index(rows[0][0])


CLAIMED = (
  "../README.md",
  "choosing.md",
  *(
    f"results/{name}.md" for name in ("bottleneck", "comparison", "grouped", "ngrams", "vq_logits")
  ),
)


@pytest.mark.parametrize("page", CLAIMED)
def test_numbers_of_the_prose_are_those_of_the_rows_that_their_marks_name(page):
  claims = CLAIM.findall((DOCS / page).read_text("utf-8"))
  assert claims
  for *said, name, row in claims:
    table = table_of(name)
    cell = table.loc[row, next(x for x in table if "%" in x and "paper" not in x)].replace("± ", "")
    for words, exact in zip(filter(None, said), re.findall(NUMBER, cell)):
      words, exact = words.replace(",", ""), exact.replace(",", "")
      units = [10.0 ** -len(number.partition(".")[2]) for number in (words, exact)]
      value = float(exact) if words[0] in "+-" else abs(float(exact))
      assert abs(float(words) - value) <= sum(units) / 2 + 1e-9, (words, cell, name, row)


@pytest.mark.parametrize(
  ("page", "others"),
  [
    # A margin, an interval's level, an audit, validation, and ratios of two rows.
    (
      "results/comparison.md",
      {
        "within 1 %",
        "about 1 %",
        "the 95 %",
        "was 0.7 %",
        "and 0.4 %",
        "lose 10.3 %",
        "and 8.3 %",
        "and 12 %",
      },
    ),
    ("choosing.md", {"is 2.7 %"}),
  ],
)
def test_every_percentage_of_the_prose_has_a_mark(page, others):
  text = (DOCS / page).read_text("utf-8")
  prose = re.sub(r"<!-- generated: ([\w-]+) -->.*?<!-- end: \1 -->", "", text, flags=re.DOTALL)
  unmarked = CLAIM.sub("", prose)
  found = {" ".join(match.split()) for match in re.findall(r"\S+\s\d[\d.]*\s%(?!\]\()", unmarked)}
  assert found == others


def assert_tables_are_those_of_the_docs(folder):
  for table in folder.glob("*.csv"):
    assert table.read_bytes() == (DOCS / "results" / table.name).read_bytes()


PAGES = {
  "article": (article, lambda: [json.loads(article.RESULTS.read_text("utf-8"))]),
  "bottleneck": (bottleneck, lambda: [json.loads(bottleneck.RESULTS.read_text("utf-8"))]),
  "drafters": (
    speculation_report,
    lambda: (
      [study_page.bench(DOCS, f"speculation{x}") for x in ("", "-run")]
      + [study_page.bench(DOCS, "medusa")]
    ),
  ),
}


@pytest.mark.parametrize("name", PAGES)
def test_rendering_a_page_again_changes_nothing(name, tmp_path):
  module, results = PAGES[name]
  copy = shutil.copy(module.PAGE, tmp_path / module.PAGE.name)
  assert not module.update(pathlib.Path(copy), *results())
  assert_tables_are_those_of_the_docs(tmp_path)


def test_the_figures_of_drafters_are_plotted():
  assert speculation_report.plot(study_page.bench(DOCS, "speculation")).axes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["comparison", "dpq", "grouped", "vq_logits"])
def test_rendering_reproduces_the_page_of_a_study_and_again_changes_nothing(name, tmp_path):
  page = importlib.import_module(f"experiments.studies.{name}.page")
  (tmp_path / "results").mkdir()
  for file in (f"{name}.md", "bench.json"):
    shutil.copy(DOCS / "results" / file, tmp_path / "results")

  def render():
    page.update(tmp_path)
    return {path.name: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}

  first = render()
  text = first[f"{name}.md"]
  assert text == (DOCS / "results" / f"{name}.md").read_bytes()
  assert_tables_are_those_of_the_docs(tmp_path / "results")
  figures = [file for file in first if file.endswith(".png")]
  assert figures
  assert all(f"(../images/{file})".encode() in text for file in figures)
  assert render() == first
