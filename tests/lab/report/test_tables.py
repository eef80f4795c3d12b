"""Do console, Markdown and HTML tables say what the runs wrote, and nothing that they did not?"""

import io
import re

import pytest
from rich.console import Console

from vqjax.lab import report
from vqjax.lab.report.columns import Column, common_split
from vqjax.lab.report.tables import cells


def column_texts(runs, title):
  columns = report.default_columns(runs)
  at = [column.title for column in columns].index(title)
  return [row[at].text for row in cells(columns, runs)]


def test_values_read_as_numbers_with_units(demo):
  runs = report.read_runs(demo)
  assert column_texts(runs, "head params")[:2] == ["1.57 M", "98.3 k"]
  assert column_texts(runs, "head bytes")[:2] == ["6.10 MiB", "416 KiB"]
  assert column_texts(runs, "loss, ms")[:2] == ["10.0", "2.50"]
  assert column_texts(runs, "test perplexity")[:2] == ["120.00", "200.50"]


def test_a_failed_run_prints_failed_and_a_missing_value_a_dash(demo):
  runs = report.read_runs(demo)
  for column in report.default_columns(runs):
    assert column_texts(runs, column.title)[2:] == ["failed", "–"]


def test_a_failed_run_keeps_the_values_it_wrote(write_run):
  write_run("one", {"status": "failed", "head": {"params": 7}})
  runs = report.read_runs(write_run("two", None).parent)
  assert column_texts(runs, "head params") == ["7", "–"]


def test_quality_is_of_one_split_that_the_header_names(demo, write_run, finished):
  assert common_split(report.read_runs(demo)) == "test"
  untested = finished("untested")
  del untested["test"]
  write_run("e_untested", untested)
  runs = report.read_runs(demo)
  titles = [column.title for column in report.default_columns(runs)]
  assert titles[:3] == ["valid perplexity", "valid nats/token", "valid bits/byte"]
  assert not any("test" in title for title in titles)
  assert column_texts(runs, "valid perplexity")[0] == "132.00"


def test_loss_time_is_relative_to_the_first_dense_run(demo):
  runs = report.read_runs(demo)
  assert column_texts(runs, "loss / dense")[:2] == ["1.00×", "0.25×"]
  titles = [column.title for column in report.default_columns(runs[1:])]
  assert "loss / dense" not in titles


@pytest.mark.parametrize("other", [{"device": "gpu"}, {"loss": {"seconds": 1.0, "tokens": 17}}])
def test_loss_times_of_other_devices_or_batches_are_not_compared(demo, write_run, finished, other):
  write_run("e_other", finished("other", head={"class": "Other"}, **other))
  runs = report.read_runs(demo)
  assert column_texts(runs, "loss / dense")[-1] == "–"
  flags = {column.title: column.smaller_is_better for column in report.default_columns(runs)}
  assert flags["loss, ms"] is flags["tokens/s"] is None


def test_the_best_value_is_marked_where_values_differ(demo):
  runs = report.read_runs(demo)
  columns = report.default_columns(runs)
  best = {c.title: [row[at].best for row in cells(columns, runs)] for at, c in enumerate(columns)}
  assert best["test perplexity"] == [True, False, False, False]
  assert best["loss, ms"] == [False, True, False, False]
  assert not any(best["tokens/s"])
  assert not any(best["head params"])


def test_markdown_has_one_cell_for_each_column_in_each_row(demo, write_run, finished):
  write_run("e_odd", finished("a|b\nc"))
  runs = report.read_runs(demo)
  columns = report.default_columns(runs)
  lines = report.markdown_table(columns, runs).splitlines()
  assert len(lines) == 2 + len(runs)
  for line in lines:
    assert len(re.findall(r"(?<!\\)\|", line)) == len(columns) + 2
  assert lines[1] == "| --- |" + " ---: |" * len(columns)
  assert lines[-1].startswith("| a\\|b c |")
  assert "**120.00**" in lines[2]


def test_html_escapes_names_and_holds_exact_values(write_run, finished):
  folder = write_run("one", finished("<i>&", perplexity=123.456789))
  runs = report.read_runs(folder)
  table = report.html_table(report.default_columns(runs), runs)
  assert "&lt;i&gt;&amp;" in table
  assert "<i>" not in table
  assert 'title="123.456789">123.46</td>' in table


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_a_console_table_breaks_no_number_at_any_width(demo, width):
  runs = report.read_runs(demo)
  console = Console(width=width, file=io.StringIO())
  console.print(report.console_table(report.default_columns(runs), runs, width))
  printed = console.file.getvalue()
  assert "…" not in printed
  for whole in ("120.00", "6.10 MiB", "416 KiB", "perplexity", "nats/token", "137 k", "failed"):
    assert whole in printed


def test_columns_are_open_to_a_papers_own(demo):
  runs = report.read_runs(demo)
  paper = Column("paper", lambda run: {"dense": 110.0}.get(run.name), str, "Published.", True)
  assert [row[0].text for row in cells([paper], runs)] == ["110.0", "–", "failed", "–"]
