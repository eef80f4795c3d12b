"""The page of lenses has the figures of the experiment, which say what the page says of them."""

import json
import pathlib

from experiments.tuned_lens import shown

DOCS = pathlib.Path(__file__).parents[2] / "docs"
RESULTS = json.loads((DOCS / "results/lens.json").read_text("utf-8"))


def test_the_page_has_the_tables_of_the_results():
  page = (DOCS / "lenses.md").read_text("utf-8")
  for table in shown(RESULTS).split("\n\n"):
    assert table in page


def test_every_tuned_lens_is_below_the_logit_lens_at_every_block():
  for result in RESULTS.values():
    assert all(tuned < logit for tuned, logit in zip(result["tuned"], result["logit"]))
