"""Is a run folder read as it was written, and is damage reported with its place?"""

import pytest

from vqjax.lab.report.rows import labels, read_run, read_runs


def test_a_finished_run_is_read(write_run, finished):
  run = read_run(write_run("one", finished("dense")))
  assert (run.name, run.status, run.config_hash) == ("dense", "finished", "0123456789ab")
  assert run.get("head.params") == 1_570_000
  assert len(run.metrics) == 41


def test_what_a_run_lacks_is_none(write_run):
  run = read_run(write_run("started", None, steps=0))
  assert (run.name, run.status, run.metrics) == ("started", "unfinished", ())
  assert run.get("head.params") is None


def test_runs_are_found_at_any_depth_in_the_order_of_their_paths(write_run, finished, tmp_path):
  for folder in ("b/second", "a/first", "z"):
    write_run(folder, finished(folder))
  assert [run.name for run in read_runs(tmp_path)] == ["a/first", "b/second", "z"]


def test_a_run_folder_is_its_own_only_run(write_run, finished):
  assert [run.name for run in read_runs(write_run("one", finished("dense")))] == ["dense"]


def test_a_shared_name_is_told_apart_by_the_folder(write_run, finished, tmp_path):
  write_run("seed0", finished("dense"))
  write_run("seed1", finished("dense"))
  write_run("other", finished("codebook"))
  expected = ["codebook", "dense (seed0)", "dense (seed1)"]
  assert labels(read_runs(tmp_path)) == expected


def test_damage_in_a_result_names_file_and_line(write_run, finished):
  folder = write_run("one", finished())
  (folder / "result.json").write_text('{"name": "dense",\n "seed": }')
  with pytest.raises(ValueError, match=r"one.result\.json, line 2: damaged JSON"):
    read_run(folder)


def test_damage_in_the_metrics_names_file_and_line(write_run, finished):
  folder = write_run("one", finished())
  (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: damaged JSON"):
    read_run(folder)
  (folder / "metrics.jsonl").write_text("{}\n\n7\n")
  with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3: 7 is no JSON object"):
    read_run(folder)


def test_a_line_that_is_still_being_written_is_left_out(write_run, finished):
  folder = write_run("one", finished())
  (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2')
  assert read_run(folder).metrics == ({"step": 1},)
  (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
  assert len(read_run(folder).metrics) == 2
