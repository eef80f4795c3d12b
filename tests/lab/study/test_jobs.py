"""Jobs of a study: what is run, what is left out, and the file of their results."""

import json

import pytest

from vqjax.lab.study.jobs import JobList, ResultsFile, StudyJob


@pytest.fixture
def made():
  """The names of the jobs that were made, in their order."""
  return []


@pytest.fixture
def jobs(tmp_path, made):
  """Five jobs; the first fails, and two need others."""

  def job(name, status, *needs):
    def make():
      made.append(name)
      return {"result": {"status": status, "config_hash": f"hash of {name}"}}

    return StudyJob(name, f"label of {name}", lambda: f"hash of {name}", make, needs)

  every = [
    job("dense/run", "failed"),
    job("tuned/run", "finished", "dense/run"),
    job("small/run", "finished", "tuned/run"),
    job("grouped/run", "finished"),
    job("top/run", "finished", "grouped/run"),
  ]
  return JobList(every, ResultsFile(tmp_path / "results.jsonl", "1.0", tmp_path / "lock"))


def run(jobs, only=None):
  for job in jobs.chosen(only):
    jobs.do(job)


def test_jobs_that_start_from_a_failed_run_are_skipped_and_the_others_run(jobs, made, capsys):
  run(jobs)
  assert made == ["dense/run", "grouped/run", "top/run"]
  printed = capsys.readouterr().err
  assert "tuned/run is skipped: it starts from dense/run" in printed
  assert "small/run is skipped: it starts from tuned/run" in printed


def test_a_second_call_makes_only_what_is_missing(jobs, made):
  run(jobs, "grouped")
  run(jobs, "top/run")
  assert made == ["grouped/run", "top/run"]
  listed = [line.split()[:2] for line in jobs.listing(jobs.chosen("top,dense"))]
  assert listed == [["done", "grouped/run"], ["done", "top/run"], ["dense/run", "label"]]


def test_results_of_another_configuration_are_left_out(jobs, capsys):
  jobs.results.keep({"name": "top/run", "result": {"status": "finished", "config_hash": "old"}})
  assert jobs.current() == {}
  assert "top/run is left out" in capsys.readouterr().err


def test_an_unknown_job_is_refused_with_a_near_match(jobs):
  with pytest.raises(ValueError, match=r"`--only` must name jobs of the scale 1.0; got none/run."):
    jobs.chosen("grouped,none/run")
  with pytest.raises(ValueError, match="Did you mean grouped"):
    jobs.chosen("grouqed")


def test_a_result_replaces_the_earlier_one_of_its_name(jobs):
  for value in (1, 2):
    result = {"status": "finished", "config_hash": str(value)}
    jobs.results.keep({"name": "grouped/run", "result": result})
    jobs.results.keep({"name": "dense/run", "result": result})
  rows = [json.loads(line) for line in jobs.results.path.read_text().splitlines()]
  assert [row["name"] for row in rows] == ["dense/run", "grouped/run"]
  assert {row["result"]["config_hash"] for row in rows} == {"2"}


@pytest.mark.parametrize("line", ["{", '{"name": "a/run", "scale": "1.0"}', "[1]"])
def test_a_line_that_is_not_a_result_is_named(jobs, line):
  jobs.results.keep({"name": "a/run", "result": {"status": "finished", "config_hash": "1"}})
  with jobs.results.path.open("a") as file:
    file.write(line)
  with pytest.raises(ValueError, match=r"results\.jsonl, line 2, is damaged"):
    jobs.results.read()
