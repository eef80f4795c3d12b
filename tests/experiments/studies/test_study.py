"""Tests of a study's resumption, of its file of results, and of the blocks of its page."""

import importlib
import json

import pytest

from experiments.studies import study_page
from experiments.studies.comparison import page as comparison
from experiments.studies.grouped import page as grouped
from experiments.studies.study import PaperStudy
from experiments.studies.vq_logits import page as vq_logits
from experiments.studies.words import single_tokens
from tests.fakes import FewWords
from vqjax.lab.study.jobs import StudyJob


@pytest.fixture
def made():
  """The names of the jobs that were made, in their order."""
  return []


@pytest.fixture
def study(tmp_path, monkeypatch, made):
  """A study of five jobs at the scale "smoke"; the first fails, and two need others."""
  monkeypatch.chdir(tmp_path)

  def job(name, status, *needs):
    def make():
      made.append(name)
      return {"result": {"status": status, "config_hash": f"hash of {name}"}}

    return StudyJob(name, f"label of {name}", lambda: f"hash of {name}", make, needs)

  jobs = [
    job("a/dense", "failed"),
    job("a/tuned", "finished", "a/dense"),
    job("grades/tuned", "finished", "a/tuned"),
    job("a/grouped", "finished"),
    job("top/grouped", "finished", "a/grouped"),
  ]
  tables = lambda results, scale: print("rendered", *results) or {}
  return PaperStudy("x", "", ("smoke",), lambda scale: jobs, tables, lambda results: [])


def test_jobs_that_start_from_a_failed_run_are_skipped_and_the_others_run(study, made, capsys):
  assert study.main(["--scale", "smoke"]) == 0
  assert made == ["a/dense", "a/grouped", "top/grouped"]
  printed = capsys.readouterr()
  assert printed.out.split() == ["rendered", *made]
  assert "a/tuned is skipped: it starts from a/dense" in printed.err
  assert "grades/tuned is skipped: it starts from a/tuned" in printed.err


def test_a_second_call_makes_only_what_is_missing(study, made, capsys):
  assert study.main(["--scale", "smoke", "--only", "a/grouped"]) == 0
  assert study.main(["--scale", "smoke", "--only", "top/grouped"]) == 0
  assert made == ["a/grouped", "top/grouped"]
  capsys.readouterr()
  assert study.main(["--scale", "smoke", "--list", "--only", "top/grouped,a/dense"]) == 0
  listed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
  assert listed == [["done", "a/grouped"], ["done", "top/grouped"], ["a/dense", "label"]]


def test_rendering_makes_nothing_and_leaves_out_results_of_another_configuration(
  study, made, capsys
):
  study.results("smoke").keep(
    {"name": "a/grouped", "result": {"status": "finished", "config_hash": "old"}}
  )
  assert study.main(["--scale", "smoke", "--render"]) == 0
  printed = capsys.readouterr()
  assert made == []
  assert printed.out.split() == ["rendered"]
  assert "a/grouped is left out" in printed.err


def test_an_unknown_job_is_a_wrong_call_with_a_near_match(study, capsys):
  assert study.main(["--scale", "smoke", "--only", "a/grouped,b/none"]) == 2
  assert "`--only` must name jobs of the scale smoke; got b/none." in capsys.readouterr().err
  assert study.main(["--scale", "smoke", "--only", "a/grouqed"]) == 2
  assert "Did you mean a/grouped" in capsys.readouterr().err


def test_a_result_replaces_the_earlier_one_of_its_name(study):
  for value in (1, 2):
    result = {"status": "finished", "config_hash": str(value)}
    study.results("smoke").keep({"name": "a/grouped", "result": result})
    study.results("smoke").keep({"name": "a/dense", "result": result})
  rows = [json.loads(line) for line in study.results("smoke").path.read_text().splitlines()]
  assert [row["name"] for row in rows] == ["a/dense", "a/grouped"]
  assert {row["result"]["config_hash"] for row in rows} == {"2"}


@pytest.mark.parametrize("line", ["{", '{"name": "a/dense", "scale": "smoke"}', "[1]"])
def test_a_line_that_is_not_a_result_is_named(study, line):
  result = {"status": "finished", "config_hash": "1"}
  study.results("smoke").keep({"name": "a/dense", "result": result})
  with study.results("smoke").path.open("a") as file:
    file.write(line)
  with pytest.raises(ValueError, match=r"results\.jsonl, line 2, is damaged"):
    study.read("smoke")


def study_of(name):
  return importlib.import_module(f"experiments.studies.{name}.run").STUDY


STUDIES = ["dpq"]


@pytest.mark.parametrize("name", STUDIES)
def test_jobs_have_distinct_names_and_follow_those_that_they_need(name):
  for scale in study_of(name).scales:
    seen = set()
    for job in study_of(name).jobs(scale):
      assert job.name not in seen
      assert seen.issuperset(job.needs)
      seen.add(job.name)


@pytest.mark.parametrize("name", STUDIES)
def test_every_kept_result_is_of_the_configuration_that_the_code_has(name):
  """A code move must not change the identity of a result."""
  study = study_of(name)
  identities = {job.name: job.identity() for job in study.jobs("cpu")}
  kept = {name: row["result"]["config_hash"] for name, row in study.read("cpu").items()}
  assert {name: identities.get(name) for name in kept} == kept


DECLARED = [f"comparison/{name}" for name in comparison.NAMES]
DECLARED += [f"grouped/{name}" for name in grouped.NAMES]
DECLARED += [f"vq_logits/{name}" for name in vq_logits.MAIN]


@pytest.mark.parametrize("name", DECLARED)
def test_every_kept_result_is_of_the_configuration_that_its_study_has(name):
  jobs = study_page.work_of(name).job_list()
  assert jobs.current() == jobs.results.read() != {}


PAGE = """# Title

Prose.

<!-- generated: one -->
stale
<!-- end: one -->

More prose.

<!-- generated: two -->
<!-- end: two -->
"""


def test_only_the_generated_blocks_of_a_page_are_rewritten(tmp_path):
  path = tmp_path / "page.md"
  path.write_text(PAGE)
  blocks = {"one": "first \\1", "two": "second\n"}
  assert study_page.update_page(path, blocks)
  rewritten = path.read_text()
  assert not study_page.update_page(path, blocks)
  assert path.read_text() == rewritten
  outside = lambda text: [part.split("-->\n")[-1] for part in text.split("<!-- generated")]
  assert outside(rewritten) == outside(PAGE)
  assert "\nfirst \\1\n" in rewritten
  assert "stale" not in rewritten


@pytest.mark.parametrize("names", [("one",), ("one", "two", "three")])
def test_markers_and_blocks_must_match(tmp_path, names):
  path = tmp_path / "page.md"
  path.write_text(PAGE)
  with pytest.raises(ValueError, match="`page`"):
    study_page.update_page(path, dict.fromkeys(names, ""))
  assert path.read_text() == PAGE


def test_words_that_are_not_one_token_are_left_out():
  tokens = single_tokens(FewWords("monday", "toronto", "bush"), ("monday", "friday", "toronto"))
  assert tokens == {"monday": 2, "toronto": 3}


def test_no_point_of_the_frontier_is_beaten_at_a_smaller_x():
  points = [(8.0, 2.0), (1.0, 5.0), (2.0, 6.0), (4.0, 3.0), (4.0, 4.0)]
  assert study_page.frontier(points) == [(1.0, 5.0), (4.0, 3.0), (8.0, 2.0)]
