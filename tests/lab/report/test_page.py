"""The page is whole HTML, loads nothing, and explains its numbers."""

import html.parser

import pytest

from vqjax.lab import report


class Reader(html.parser.HTMLParser):
  """Collects attributes and ids, and checks that every element is closed in order."""

  def __init__(self, text: str):
    super().__init__()
    self.open, self.attributes = [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.attributes += attrs
    if tag not in ("meta", "wbr", "path", "use"):
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.attributes += attrs

  def handle_endtag(self, tag):
    if tag not in ("path", "use"):
      assert self.open.pop() == tag


@pytest.fixture
def page(demo, tmp_path):
  path = tmp_path / "out" / "page.html"
  report.write_page(report.read_runs(demo), path, title="A <b> & c")
  return path.read_text()


def test_elements_are_closed_and_ids_are_unique(page):
  reader = Reader(page)
  assert reader.open == []
  ids = [value for name, value in reader.attributes if name == "id"]
  assert len(ids) == len(set(ids)) > 2


def test_the_page_loads_nothing_from_outside(page):
  for name, value in Reader(page).attributes:
    if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
      assert value.startswith("#")
  for request in ("<script", "<link", "<a ", "@import", "url(http"):
    assert request not in page


def test_the_page_is_escaped(page):
  assert "<title>A &lt;b&gt; &amp; c</title>" in page
  assert "loss is nan &lt;b&gt;" in page


def test_the_page_explains_each_column_and_each_runs_origin(page, demo):
  for column in report.default_columns(report.read_runs(demo)):
    assert f"<dt>{column.title}</dt>" in page
  for origin in (
    "0123456789ab",
    "c0ffee",
    "<dd>17</dd>",
    "jax 0.10.0",
    "2026-01-02",
    "<dd>cpu</dd>",
  ):
    assert origin in page
  assert "4 runs: 2 finished, 1 failed, 1 unfinished" in page
  assert page.count("<svg") == 2


def test_a_page_without_anything_to_plot_has_no_plot(write_run, tmp_path):
  runs = report.read_runs(write_run("started", None, steps=0))
  report.write_page(runs, tmp_path / "page.html")
  text = (tmp_path / "page.html").read_text()
  assert "<svg" not in text


def test_a_page_replaces_an_older_one_and_leaves_nothing_else(demo, tmp_path):
  out = tmp_path / "out"
  for title in ("old", "new"):
    report.write_page(report.read_runs(demo), out / "page.html", title=title)
  assert [file.name for file in out.iterdir()] == ["page.html"]
  assert "<title>new</title>" in (out / "page.html").read_text()
