"""The page of exports has the figures of the experiment."""

import json
import pathlib

from experiments.trimming import shown

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_page_has_the_table_of_the_result():
  result = json.loads((DOCS / "results" / "trimming.json").read_text("utf-8"))
  assert shown(result) in (DOCS / "exporting.md").read_text("utf-8")
