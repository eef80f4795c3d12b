"""The page of routed heads has the figures of the experiment."""

import json
import pathlib

from experiments.routed import shown

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_page_has_the_tables_of_the_results():
  result = json.loads((DOCS / "results/routed.json").read_text("utf-8"))
  page = (DOCS / "routed.md").read_text("utf-8")
  for table in shown(result).split("\n\n"):
    assert table in page
