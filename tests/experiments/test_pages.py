"""Pages have the figures of the results that are kept."""

import importlib
import json
import pathlib
import shutil

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
