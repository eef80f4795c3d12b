"""The page of compressed tables has the figures of the experiments."""

import json
import pathlib

import pytest

from experiments import gemma, small_models

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
  ("shown", "name"),
  [(gemma.shown, "compression.json"), (small_models.shown, "compression-small.json")],
)
def test_the_page_has_the_tables_of_the_results(shown, name):
  result = json.loads((DOCS / "results" / name).read_text("utf-8"))
  page = (DOCS / "compression.md").read_text("utf-8")
  for table in shown(result).split("\n\n"):
    assert table in page
