"""Tests of the page of the benchmark of drafters."""

import shutil

from experiments.bench import speculation, speculation_report
from experiments.studies import page


def test_the_page_has_what_the_results_say(tmp_path):
  figures = page.bench(page.DOCS, "speculation")
  copy = tmp_path / "page.md"
  shutil.copy(speculation_report.PAGE, copy)
  assert not speculation_report.update(copy, figures)


def test_the_figure_has_every_way_and_text():
  figures = page.bench(page.DOCS, "speculation")
  (axes,) = speculation_report.plot(figures).axes
  drawn = {line.get_label(): line.get_ydata() for line in axes.lines}
  assert drawn.keys() >= {speculation.ADAPTIVE, speculation.FREQUENT, "routed"}
  assert len(drawn[speculation.FREQUENT]) == sum(name in figures for name in speculation.DOMAINS)
