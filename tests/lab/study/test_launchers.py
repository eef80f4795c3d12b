"""Jobs that other processes run end with the results of one process."""

import importlib.util
import json
import pathlib
import sys

import pytest

from tests import tiny
from vqjax.commands.study import main
from vqjax.lab.study import launchers
from vqjax.lab.study.tuning import ROUNDS

FOLDER = pathlib.Path("runs/study")


def needs(name):
  missing = importlib.util.find_spec(name) is None
  return pytest.mark.skipif(missing, reason=f"{name} is an extra")


def kept() -> dict[str, dict]:
  rows = map(json.loads, (FOLDER / "results.jsonl").read_text().splitlines())
  return {row["name"]: row for row in rows}


def losses() -> dict[str, float]:
  rows = ((name, row["result"].get("test")) for name, row in kept().items())
  return {name: test["nats_per_token"] for name, test in rows if test}


def test_what_other_processes_make_is_on_the_page_and_each_trial_is_one(fitted, monkeypatch):
  calls, first = [], [f"dense/tuning-8-{place}" for place in range(3)]
  second = ["dense/tuning-4-0", "dense/tuning-4-1"]

  def one_by_one(work, jobs, timeout_min):
    calls.append([job.name for job in jobs])
    assert timeout_min == "3"
    assert [job.needs for job in jobs if job.name == "dense/tuning"] in ([], [(*first, *second)])
    for job in jobs:
      launchers.RemoteJob.of(work, job)()

  monkeypatch.setitem(launchers.LAUNCHERS, "slurm", one_by_one)
  asked = ["study.py", "--only", "dense", "--launcher", "slurm", "--submit", "timeout_min=3"]
  assert main(asked) == 0
  runs = ["dense/run", "dense/run-s1", "dense/run-s2"]
  assert calls == [["dense/costs"], [*first, *second, "dense/tuning", *runs]]
  # The tuning found the runs of its trials.
  assert sum(not test for *_, test in fitted.runs) == len(first + second)
  assert [*losses()] == runs
  assert "dense" in (FOLDER / "study.md").read_text()


def test_trials_wait_for_the_run_that_their_row_begins_from_and_none_is_repeated(
  fitted, monkeypatch
):
  file, end, calls = pathlib.Path("study.py"), "    },\n    tune", []
  taught = '"taught": {"init_from": lambda base, run: FromRun(run("dense").folder)},'
  text = file.read_text().replace(end, f"      {taught}\n{end}")
  text = text.replace(
    "import Row, Study", "import Row, Study\nfrom vqjax.lab.training import FromRun"
  )
  file.write_text(text.replace("(1e-3, 2e-3, 4e-3)", "(1e-3, 2e-3, 4.0)"))
  # One rate diverges.
  fitted.nats = lambda run: None if run.train.learning_rate > 1 else 3.0
  assert main(["study.py", "--only", "dense/tuning"]) == 0

  def trials_first(work, jobs):
    calls.append(jobs)
    for job in sorted(jobs, key=lambda job: "tuning" not in job.name):
      launchers.RemoteJob.of(work, job)()

  monkeypatch.setitem(launchers.LAUNCHERS, "ray", trials_first)
  ran = len(fitted.runs)
  asked = ["study.py", "--only", "taught/tuning", "--launcher", "ray"]
  assert main(asked) == 0
  trials = [job for job in calls[-1] if "taught/tuning-" in job.name]
  assert len(trials) == 5
  assert all("dense/run" in job.needs for job in trials)
  # The run that they begin from came after them, so that they did nothing.
  assert [name for name, *_ in fitted.runs[ran:]] == ["dense"]
  assert main(asked) == 0
  # Two rounds, and one value beyond the edge: a candidate that diverged is not tried again.
  steps = [steps for _, _, steps, _ in fitted.runs[ran + 1 :]]
  assert steps == [40 // ROUNDS[0]] * 3 + [40 // ROUNDS[1]] * 3


@pytest.mark.parametrize(("name", "module"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_engine_names_its_extra(name, module, fitted, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, module, None)
  assert main(["study.py", "--launcher", name]) != 0
  assert f"pip install 'vqjax[{name}]'" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--submit", "a=1"], ["--launcher", "slurm", "--submit", "a"]])
def test_parameters_are_those_of_slurm(wrong, fitted, capsys):
  with pytest.raises(SystemExit):
    main(["study.py", *wrong])
  assert "`--submit`" in capsys.readouterr().err


@needs("submitit")
def test_submitit_runs_every_job_after_those_that_it_needs(fitted):
  call = ["study.py", "--only", "dense,codebook", "--launcher", "slurm"]
  assert main([*call, "--submit", "cluster=debug"]) == 0
  assert len(losses()) == 6


STUDY = """\
import pathlib

from tests import tiny
from vqjax import CodebookHead, DenseHead
from vqjax.lab.study import Study


def study():
  return Study(
    base=tiny.experiment(pathlib.Path("text"), DenseHead(0, 16)),
    rows={"dense": {}, "codebook": {"model.head": CodebookHead(0, 16, 8)}},
    tune={"train.learning_rate": (1e-3, 1e-2, 3e-2)},
    seeds=2,
  )
"""


@pytest.fixture
def tiny_study(tmp_path, monkeypatch):
  """The file of a study in the current folder, and the losses that one process gets."""
  monkeypatch.setenv("VQJAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[3]))
  monkeypatch.chdir(tmp_path)
  tiny.write_text(tmp_path / "text")
  pathlib.Path("study.py").write_text(STUDY)
  assert main(["study.py"]) == 0
  expected = losses()
  FOLDER.rename("alone")
  return expected


@needs("ray")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_nodes_of_ray_get_the_results_of_one_process(tiny_study, monkeypatch):
  import ray
  from ray.cluster_utils import Cluster

  cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
  cluster.add_node(num_cpus=1)
  monkeypatch.setenv("RAY_ADDRESS", cluster.address)
  try:
    assert main(["study.py", "--launcher", "ray"]) == 0
  finally:
    ray.shutdown()
    cluster.shutdown()
  assert losses() == tiny_study


@needs("submitit")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_of_submitit_get_the_results_of_one_process(tiny_study):
  assert main(["study.py", "--launcher", "slurm", "--submit", "cluster=local"]) == 0
  assert losses() == tiny_study
