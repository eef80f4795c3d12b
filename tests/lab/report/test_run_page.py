"""The page is whole HTML, loads nothing, is escaped, and has the origin of its numbers."""

import html.parser

from vqjax.lab import report


class Reader(html.parser.HTMLParser):
  """Collects attributes, and checks that every element is closed in order."""

  def __init__(self, text: str):
    super().__init__()
    self.open, self.attributes = [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.attributes += attrs
    if tag not in ("meta", "path", "use"):
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.attributes += attrs

  def handle_endtag(self, tag):
    if tag not in ("path", "use"):
      assert self.open.pop() == tag


def test_a_page_is_whole_replaces_an_older_one_and_loads_nothing(
  demo, write_run, finished, tmp_path
):
  out = tmp_path / "out"
  write_run("e_odd", finished("<i>&", perplexity=123.456789))
  for title in ("old", "A <b> & c"):
    report.write_run_page(report.read_runs(demo), out / "page.html", title=title)
  assert [file.name for file in out.iterdir()] == ["page.html"]
  page = (out / "page.html").read_text()
  # Elements are closed, and ids are unique.
  reader = Reader(page)
  assert reader.open == []
  ids = [value for name, value in reader.attributes if name == "id"]
  assert len(ids) == len(set(ids)) > 2
  for name, value in reader.attributes:
    if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
      assert value.startswith("#")
  for request in ("<script", "<link", "<a ", "@import", "url(http"):
    assert request not in page
  # Names and errors are escaped; every run has its origin, and numbers are plotted.
  assert "<title>A &lt;b&gt; &amp; c</title>" in page
  assert "loss is nan &lt;b&gt;" in page
  assert "&lt;i&gt;&amp;" in page
  assert "<i>" not in page
  assert 'title="123.456789">123.46</td>' in page
  for origin in ("0123456789ab", "c0ffee", ">17<", "0.10.0", "2026-01-02", ">cpu<"):
    assert origin in page
  assert page.count("<svg") == 2
