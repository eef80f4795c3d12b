"""Runs are read as they were written, and tables show exactly their numbers."""

import io
import re

import pytest
from rich.console import Console

from vqjax.lab import report
from vqjax.lab.report import units
from vqjax.lab.report.run_tables import cells
from vqjax.lab.report.runs import Column, common_split, labels, read_run, read_runs


def test_runs_are_read_at_any_depth_in_the_order_of_their_paths(write_run, finished, tmp_path):
  folders = [write_run(folder, finished(folder)) for folder in ("b/second", "a/first", "z")]
  write_run("m", None, steps=0)
  first, second, unfinished, last = read_runs(tmp_path)
  assert [run.name for run in (first, second, last)] == ["a/first", "b/second", "z"]
  assert read_runs(folders[0]) == [second]
  assert (first.status, first.config_hash, len(first.metrics)) == ("finished", "0123456789ab", 41)
  assert first.get("head.params") == 1_570_000
  assert (unfinished.name, unfinished.status, unfinished.metrics) == ("m", "unfinished", ())
  assert unfinished.get("head.params") is None


def test_runs_of_one_name_are_labelled_by_their_folders(write_run, finished, tmp_path):
  write_run("seed0", finished("dense"))
  write_run("seed1", finished("dense"))
  write_run("other", finished("codebook"))
  expected = ["codebook", "dense (seed0)", "dense (seed1)"]
  assert labels(read_runs(tmp_path)) == expected


def test_damage_names_file_and_line_and_a_line_that_is_being_written_is_left_out(
  write_run, finished
):
  folder = write_run("one", finished())
  whole = (folder / "metrics.jsonl").read_text()
  lines = whole.splitlines(keepends=True)
  (folder / "metrics.jsonl").write_text(whole[:-9])
  assert len(read_run(folder).metrics) == len(lines) - 1
  for damage, problem in (
    (['{"step": \n'], "is not JSON"),
    (["7\n"], "must be a JSON object; got 7"),
    ([lines[1].replace('"step": 2', '"step": 3')], "its checksum must be"),
    ([], "its checksum must be"),  # a lost row shows in the next one
  ):
    (folder / "metrics.jsonl").write_text("".join(lines[:1] + damage + lines[2:]))
    with pytest.raises(ValueError, match=rf"metrics\.jsonl, line 2, is damaged: .*{problem}"):
      read_run(folder)
  (folder / "metrics.jsonl").write_text(whole)
  (folder / "result.json").write_text('{"name": "dense",\n "seed": }')
  with pytest.raises(ValueError, match=r"one.result\.json is damaged: line 2, column 10"):
    read_run(folder)


def column_texts(runs, title):
  columns = report.default_columns(runs)
  at = [column.title for column in columns].index(title)
  return [row[at].text for row in cells(columns, runs)]


def test_values_have_units_a_failed_run_says_so_and_a_missing_value_is_a_dash(demo, write_run):
  runs = report.read_runs(demo)
  assert column_texts(runs, "head params")[:2] == ["1.57 M", "98.3 k"]
  assert column_texts(runs, "head bytes")[:2] == ["6.10 MiB", "416 KiB"]
  assert column_texts(runs, "loss, ms")[:2] == ["10.0", "2.50"]
  assert column_texts(runs, "test perplexity")[:2] == ["120.00", "200.50"]
  for column in report.default_columns(runs):
    assert column_texts(runs, column.title)[2:] == ["failed", "–"]
  write_run("e_failed_late", {"status": "failed", "head": {"params": 7}})
  assert column_texts(report.read_runs(demo), "head params")[-1] == "7"


def test_quality_is_of_one_split_that_the_header_names(demo, write_run, finished):
  assert common_split(report.read_runs(demo)) == "test"
  untested = finished("untested")
  del untested["test"]
  write_run("e_untested", untested)
  runs = report.read_runs(demo)
  assert not any("test" in column.title for column in report.default_columns(runs))
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


def test_quality_has_a_best_among_runs_of_one_budget_only(demo, write_run, finished):
  write_run("e_longer", finished("longer", perplexity=90.0, train={"steps": 80}))
  runs = report.read_runs(demo)
  columns = report.default_columns(runs)
  best = {
    c.title: any(row[at].best for row in cells(columns, runs)) for at, c in enumerate(columns)
  }
  assert not any(found for title, found in best.items() if title.startswith("test "))
  assert best["loss, ms"]
  assert column_texts(runs, "steps")[0] == "40"


def test_tokens_are_those_of_the_windows(write_run, finished):
  settings = {"train": {"batch": 8}, "model": {"context": 64}}
  folder = write_run("one", finished(), config=settings)
  assert column_texts([read_run(folder)], "tokens") == ["20.5 k"]  # 40 steps of 8 x 64
  batches = [8, 16]
  runs = [
    read_run(write_run(f"of_{n}", finished(), config=settings | {"train": {"batch": n}}))
    for n in batches
  ]
  assert report.default_columns(runs)[0].smaller_is_better is None


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


def test_markdown_has_no_html_links_or_emphasis_of_names(write_run, finished):
  folder = write_run("one", finished("<img src=x onerror=y> [a](b) *c* `d` \x1b[31m \\"))
  runs = report.read_runs(folder)
  cell = report.markdown_table(report.default_columns(runs), runs).splitlines()[2].split(" | ")[0]
  assert cell == (r"| &lt;img src=x onerror=y&gt; \[a\](b) \*c\* \`d\` \\x1b\[31m \\")


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_a_console_table_breaks_no_number_at_any_width(demo, width):
  runs = report.read_runs(demo)
  console = Console(width=width, file=io.StringIO())
  console.print(report.console_table(report.default_columns(runs), runs, width))
  printed = console.file.getvalue()
  assert "…" not in printed
  for whole in ("120.00", "6.10 MiB", "416 KiB", "perplexity", "nats/token", "137 k", "failed"):
    assert whole in printed


def test_a_new_column_joins_a_table(demo):
  runs = report.read_runs(demo)
  paper = Column("paper", lambda run: {"dense": 110.0}.get(run.name), str, "Published.", True)
  assert [row[0].text for row in cells([paper], runs)] == ["110.0", "–", "failed", "–"]


def test_numbers_have_units_and_long_names_keep_both_ends():
  counts = {0: "0", 999: "999", 1000: "1.00 k", 1_570_000: "1.57 M", 98_304: "98.3 k"}
  # A value that would round up to the next prefix takes it.
  for value, text in {**counts, 999_999: "1.00 M", float("nan"): "nan"}.items():
    assert units.count(value) == text
  sizes = {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 6_400_000: "6.10 MiB", 2**40: "1.00 TiB"}
  for value, text in {**sizes, 2**20 - 1: "1.00 MiB"}.items():
    assert units.size(value) == text
  assert units.fixed(2)(float("inf")) == "inf"
  short = units.shorten("grouped_head_with_a_very_long_name_seed_3", 15)
  assert short == "grouped…_seed_3"
  assert units.shorten("dense") == "dense"
