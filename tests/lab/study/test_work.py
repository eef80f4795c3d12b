"""A study as the command runs it: tuned, trained, resumed, and said on its page."""

import csv
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import tiny
from vqjax import DenseHead
from vqjax.commands.study import main
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.study import Compressed, Row, Study, load_study, tuning, work
from vqjax.lab.study.tuning import ROUNDS
from vqjax.lab.training import FromRun, Interrupted, loop

FOLDER = pathlib.Path("runs/study")


def page() -> str:
  return (FOLDER / "study.md").read_text()


def lines() -> dict[str, dict[str, str]]:
  with (FOLDER / "study.csv").open() as file:
    return {line["row"]: line for line in csv.DictReader(file)}


def test_every_row_is_tuned_and_the_test_text_is_read_once_by_each_seed(fitted):
  assert main(["study.py"]) == 0
  scored = [(name, seed) for name, seed, _, test in fitted.runs if test]
  assert sorted(scored) == [(row, seed) for row in ("codebook", "dense") for seed in range(3)]
  trials = [steps for name, seed, steps, test in fitted.runs if name == "dense" and not test]
  assert trials == [40 // ROUNDS[0]] * 3 + [40 // ROUNDS[1]] * 2
  kept = [json.loads(line) for line in (FOLDER / "results.jsonl").read_text().splitlines()]
  tunings = {row["name"]: row["chosen"] for row in kept if row["name"].endswith("/tuning")}
  assert tunings["dense/tuning"] == {"train.learning_rate": 2e-3}


def test_the_table_has_paired_differences_and_verdicts(fitted):
  bounds = {0: 0.0, 1: 0.3, 2: 0.1}
  plain = fitted.nats
  fitted.nats = lambda run: plain(run) and plain(run) + bounds.get(run.seed, 0.0)
  assert main(["study.py"]) == 0
  line = lines()["codebook"]
  # The seeds differ by more than the rows, but both rows of a seed alike.
  found = [float(line[f"percent_{name}"]) for name in ("from_reference", "low", "high")]
  np.testing.assert_allclose(found, 100 * np.expm1(0.1))
  assert line["verdict"] == "worse"
  assert (line["layer_bytes"], line["layer_bytes_with_inputs"]) == ("10", "1010")
  assert "| codebook |" in page()


def test_a_row_that_diverged_and_its_missing_seeds_are_on_the_page(fitted):
  assert main(["study.py"]) == 0
  assert "- wild/tuning failed: every candidate diverged" in page()
  assert "`wild` has 0 of 3 runs: seeds 0, 1, 2 are missing" in page()
  fitted.runs.clear()
  assert main(["study.py"]) == 0
  assert fitted.runs == []


def test_rows_with_grids_of_their_own_are_named_and_a_failed_tuning_chose_nothing(fitted):
  file = pathlib.Path("study.py")
  text = file.read_text().replace('"wild":', '"fixed": Row(tune={}), "wild":')
  file.write_text(text)
  assert main(["study.py", "--only", "wild"]) == 0
  assert "- `dense`, `codebook`: train.learning_rate [0.001, 0.002, 0.004]." in page()
  assert "- `fixed`: not tuned." in page()
  assert "- `wild`: train.learning_rate [1000, 10000]." in page()
  assert "1000 |" not in page()


def test_a_seed_that_diverged_is_on_the_page_and_the_others_are_compared(fitted):
  plain = fitted.nats
  fitted.nats = lambda run: None if (run.name, run.seed) == ("codebook", 1) else plain(run)
  assert main(["study.py"]) == 0
  assert "- codebook/run-s1 failed: the loss is nan" in page()
  assert lines()["codebook"]["seeds"] == "2"


def test_a_grid_is_extended_where_its_winner_lies_at_an_edge(fitted):
  file = pathlib.Path("study.py")
  file.write_text(file.read_text().replace("(1e-3, 2e-3, 4e-3)", "(5e-4, 1e-3)"))
  assert main(["study.py", "--only", "dense"]) == 0
  assert "`dense` tried train.learning_rate = 0.002 and 0.004 too" in page()
  trials = [steps for _, _, steps, test in fitted.runs if not test]
  assert trials[-2:] == [40 // ROUNDS[-1]] * 2
  assert "and chose 0.002" in page()


def test_a_winner_that_is_still_at_an_edge_is_named(fitted):
  file = pathlib.Path("study.py")
  file.write_text(file.read_text().replace("(1e-3, 2e-3, 4e-3)", "(1e-4, 2e-4)"))
  assert main(["study.py", "--only", "dense"]) == 0
  chose = "`dense` chose train.learning_rate = 0.0008, the largest value tried"
  assert f"{chose}, also after 0.0004 and 0.0008: one beyond it may be better" in page()


@pytest.mark.parametrize(
  ("field", "values", "edge", "expected"),
  [
    ("train.learning_rate", (1e-3, 3e-3, 9e-3), "largest", 2.7e-2),
    ("train.learning_rate", (1e-3, 2e-3), "smallest", 5e-4),
    ("model.dropout", (0.0, 0.1, 0.3), "largest", 0.5),
    ("model.dropout", (0.1, 0.3), "smallest", 0.0),
    ("model.dropout", (0.5, 0.8), "largest", None),
    ("train.warmup", (0, 10), "largest", 20),
    ("train.batch", (8, 16), "largest", 32),
    ("train.batch", (1, 2), "smallest", None),
  ],
)
def test_the_value_beyond_an_edge_is_one_step_on(field, values, edge, expected):
  assert tuning.SearchSpace({field: values}).beyond(field, edge) == expected


def test_no_dropout_is_no_edge():
  space = tuning.SearchSpace({"model.dropout": (0.0, 0.1)})
  assert [space.edge("model.dropout", value) for value in (0.0, 0.1)] == [None, "largest"]


def test_one_candidate_is_chosen_without_a_tuning(fitted, capsys):
  file = pathlib.Path("study.py")
  file.write_text(file.read_text().replace("(1e-3, 2e-3, 4e-3)", "(8e-3,)"))
  assert main(["study.py", "--only", "dense"]) == 0
  assert {steps for _, _, steps, _ in fitted.runs} == {40}
  np.testing.assert_allclose(float(lines()["dense"]["test_nats_per_token"]), 3 + np.log(4))
  capsys.readouterr()
  assert main(["study.py", "--list"]) == 0
  listed = capsys.readouterr().out
  assert "wild/tuning" in listed
  assert "dense/tuning" not in listed


def test_a_file_may_have_several_studies(fitted):
  file = pathlib.Path("study.py")
  more = "\n\ndef short():\n  made = study()\n  return Study(made.base, {'dense': {}}, seeds=1)\n"
  file.write_text(file.read_text() + more)
  assert main(["study.py:short"]) == 0
  assert [name for name, *_ in fitted.runs] == ["dense"]
  assert "# Study study.py:short" in pathlib.Path("runs/study-short/study.md").read_text()
  assert main(["study.py:long"]) == 2


def test_an_edited_study_trains_what_has_changed(fitted):
  assert main(["study.py", "--only", "dense,codebook"]) == 0
  fitted.runs.clear()
  file = pathlib.Path("study.py")
  file.write_text(file.read_text().replace("base.model.dim, 8)", "base.model.dim, 4)"))
  assert main(["study.py", "--only", "dense,codebook"]) == 0
  assert {name for name, *_ in fitted.runs} == {"codebook"}
  assert lines()["codebook"]["seeds"] == "3"


def test_a_compressed_row_follows_its_source_and_is_not_tuned(fitted, monkeypatch):
  file = pathlib.Path("study.py")
  text = file.read_text().replace("import Row,", "import Compressed, Row,")
  file.write_text(text.replace('"dense": {},', '"dense": {}, "small": Compressed("dense"),'))
  sources = []

  def measure(row, run, folder):
    sources.append((folder.name, run.train.learning_rate, row.of))
    score = {"nats_per_token": 3.0, "perplexity": math.exp(3.0)}
    parts = {"head": {"state_bytes": 7, "tied": True}, "embedding": {"shipped_bytes": 0}}
    return {"result": {"valid": score, "test": score, **parts}}

  monkeypatch.setattr(Compressed, "measure", measure)
  assert main(["study.py", "--only", "small"]) == 0
  assert [source[1:] for source in sources] == [(2e-3, "dense")] * 3
  assert sources[2][0].startswith("dense-s2-")
  assert (lines()["small"]["layer_bytes_with_inputs"], lines()["small"]["verdict"]) == (
    "7",
    "equal",
  )
  # A further seed would take as long as these did on average.
  made = work.Work(load_study(file), FOLDER, file)
  took = [made.results.read()[f"small/run{seed}"]["seconds"] for seed in ("", "-s1", "-s2")]
  job = next(job for job in made.job_list().jobs if job.name == "small/run")
  assert made.seconds(job) == pytest.approx(sum(took) / 3)


def test_a_compressed_row_without_a_loss_has_failed(fitted, monkeypatch):
  file = pathlib.Path("study.py")
  text = file.read_text().replace("import Row,", "import Compressed, Row,")
  file.write_text(text.replace('"dense": {},', '"dense": {}, "small": Compressed("dense"),'))
  measured = {"result": {"test": {"nats_per_token": math.nan}}}
  monkeypatch.setattr(Compressed, "measure", lambda *_: measured)
  assert main(["study.py", "--only", "small/run"]) == 0
  assert "- small/run failed: the test loss is nan" in page()


TAUGHT = """\
      "taught": Row(
        {
          "init_from": lambda base, run: FromRun(run("dense").folder),
          "train.weight_decay": lambda base, run: run("dense").experiment.train.learning_rate,
        },
        tuned_as="TUNED_AS",
        seeds=2,
      ),
    },
    tune"""


@pytest.mark.parametrize("tuned_as", ["", "dense"])
def test_a_row_begins_from_the_tuned_run_of_another_of_its_seed(fitted, tuned_as):
  file = pathlib.Path("study.py")
  text = file.read_text().replace("    },\n    tune", TAUGHT.replace("TUNED_AS", tuned_as))
  file.write_text(
    text.replace(
      "import Row",
      "import Row\nfrom vqjax.lab.training import FromRun\nfrom vqjax.lab.study import Row",
    )
  )
  begun = {}
  plain = fitted.nats

  def nats(run):
    if run.name == "taught":
      begun.setdefault(run.init_from.folder, []).append(run.train.weight_decay)
      return 2.5
    return plain(run)

  fitted.nats = nats
  assert main(["study.py", "--only", "taught"]) == 0
  folders = sorted(map(str, FOLDER.glob("runs/dense-*")), key=lambda path: "-s1-" in path)
  assert sorted(begun) == sorted(folders)
  assert {rate for rates in begun.values() for rate in rates} == {2e-3}
  # Its trials begin from the first seed.
  assert [len(begun[folder]) for folder in folders] == [1 if tuned_as else 7, 1]
  assert ("`taught` has the tuning of `dense`" in page()) == bool(tuned_as)
  assert "`taught` has" not in page().partition("## Tuning")[0]
  fitted.runs.clear()
  FOLDER.rename("moved")
  assert main(["study.py", "--only", "taught", "--out", "moved"]) == 0
  assert fitted.runs == []


def test_a_row_that_begins_from_another_row_goes_on_where_the_folder_was_moved(
  tmp_path, monkeypatch
):
  tiny.write_text(tmp_path / "text")
  base = tiny.experiment(tmp_path / "text", DenseHead(FROM_TOKENIZER, 16))
  taught = {"init_from": lambda base, run: FromRun(run("dense").folder)}
  tune = {"train.learning_rate": (1e-3, 1e-2)}
  study = Study(base, {"dense": Row(tune={}), "taught": taught}, tune, seeds=1, extensions=0)
  ended = []

  class Training:
    def __init__(self, text, run, program):
      self.run = text.experiment

    def run_to_end(self, test):
      name, steps = self.run.name, self.run.train.steps
      if (name, steps) == ("taught", 40) and "two" not in self.run.init_from.folder:
        raise Interrupted(signal.SIGINT, 15)
      ended.append((name, steps))
      return {"valid": {"nats_per_token": 3.0, "perplexity": math.exp(3.0)}}

  def go_on(folder):
    jobs = work.Work(study, tmp_path / folder, tmp_path / "study.py").job_list()
    for job in jobs.jobs:
      if not job.name.endswith("/costs"):
        jobs.do(job)
    return jobs.current()

  monkeypatch.setattr(loop, "_Training", Training)
  with pytest.raises(Interrupted):
    go_on("one")
  trials = [("taught", 40 // part) for part in ROUNDS[1:] for _ in range(2)]
  assert ended == [("dense", 40), *trials]
  (tmp_path / "one").rename(tmp_path / "two")
  results = tmp_path / "two" / "results.jsonl"
  lines = results.read_text().splitlines(keepends=True)
  # Neither what is kept nor the trials of a tuning that is not.
  results.write_text("".join(line for line in lines if '"taught/tuning"' not in line))
  assert go_on("two")["taught/run"]["result"]["status"] == "finished"
  assert ended == [("dense", 40), *trials, ("taught", 40)]


def test_a_row_that_begins_from_another_row_with_another_seed_says_so(tmp_path):
  source = lambda base, run: FromRun(run("dense" if base.seed == 0 else "other").folder)
  base = tiny.experiment(tmp_path, DenseHead(FROM_TOKENIZER, 16))
  rows = {"dense": {}, "other": {}, "taught": {"init_from": lambda base, run: source(base, run)}}
  made = work.Work(Study(base, rows, seeds=2), tmp_path / "out", tmp_path / "study.py")
  identity = {job.name: job.identity for job in made.job_list().jobs}
  assert identity["taught/run"]()
  with pytest.raises(ValueError, match="begins from 'other' with seed 1, and from dense"):
    identity["taught/run-s1"]()


def test_a_row_of_one_seed_is_compared_with_the_mean_of_the_reference(fitted):
  file = pathlib.Path("study.py")
  file.write_text(file.read_text().replace('"wild": Row(', '"one": Row(seeds=1), "wild": Row('))
  fitted.nats = lambda run: 4.0 if run.name == "one" else 3.0 + run.seed
  assert main(["study.py", "--only", "dense,one"]) == 0
  np.testing.assert_allclose(float(lines()["one"]["percent_from_reference"]), 0, atol=1e-9)
  assert lines()["one"]["percent_low"] == ""


def test_rows_with_another_budget_or_that_begin_from_others_are_named(fitted):
  file = pathlib.Path("study.py")
  rows = """"long": {"train.steps": 80},
      "next": {"init_from": lambda base, run: FromRun(run("dense").folder)},
      "wild":"""
  text = file.read_text().replace('"wild":', rows)
  file.write_text(f"from vqjax.lab.training import FromRun\n{text}")
  assert main(["study.py", "--render"]) == 0
  assert "- `long`: 80 steps of" in page()
  assert "- `next` begins from the runs of `dense`." in page()


def test_further_measurements_are_kept_with_each_finished_run(fitted):
  file = pathlib.Path("study.py")
  measure = "seeds=3,\n    measure=lambda run, folder: {'steps of': run.name},"
  file.write_text(file.read_text().replace("seeds=3,", measure))
  assert main(["study.py", "--only", "dense"]) == 0
  kept = [json.loads(line) for line in (FOLDER / "results.jsonl").read_text().splitlines()]
  assert [row.get("steps of") for row in kept if "/run" in row["name"]] == ["dense"] * 3


def test_a_measurement_with_the_name_of_a_part_of_results_is_refused(fitted, capsys):
  file = pathlib.Path("study.py")
  measure = "seeds=3,\n    measure=lambda run, folder: {'result': run.name},"
  file.write_text(file.read_text().replace("seeds=3,", measure))
  assert main(["study.py", "--only", "dense"]) == 2
  assert "`measure` must return names of its own; got result" in capsys.readouterr().err


def test_one_seed_has_no_verdict(fitted):
  assert main(["study.py", "--only", "dense/run,codebook/run"]) == 0
  assert lines()["codebook"]["verdict"] == "undecided"
  assert "`dense` has 1 of 3 runs: seeds 1, 2 are missing" in page()


def test_a_scale_has_a_folder_of_its_own_and_a_row_is_chosen_by_name(fitted):
  assert main(["study.py", "--scale", "0.5", "--only", "dense"]) == 0
  assert {name for name, *_ in fitted.runs} == {"dense"}
  assert max(steps for _, _, steps, _ in fitted.runs) == 20
  assert pathlib.Path("runs/study-x0.5/study.html").exists()


def test_the_plan_adds_the_measured_seconds_of_what_is_left(fitted, capsys):
  assert main(["study.py", "--only", "dense/run"]) == 0
  # A trial starts in 4 s, has 5 or 10 steps and two evaluations; the run has 40 steps and three.
  seconds = 3 * (4 + 5 * 0.5 + 2 * 2) + 2 * (4 + 10 * 0.5 + 2 * 2) + 4 + 40 * 0.5 + 3 * 2 + 1
  further = 2 * (4 + 10 * 0.5 + 2 * 2)
  printed = f"together about {seconds / 60:.1f} min, and up to {further:.0f} s for values beyond"
  assert printed in capsys.readouterr().out


def test_names_of_rows_with_a_space_between_say_that_commas_belong_there(fitted, capsys):
  with pytest.raises(SystemExit):
    main(["study.py", "--only", "dense", "codebook"])
  assert "unrecognized arguments: codebook; `--only` takes names with commas" in (
    capsys.readouterr().err
  )


def test_pages_are_rendered_without_a_run_and_alike_again(fitted):
  assert main(["study.py", "--render"]) == 0
  assert "`dense` has 0 of 3 runs" in page()
  assert main(["study.py"]) == 0
  files = lambda: {path.name: path.read_bytes() for path in FOLDER.glob("study.*")}
  first = files()
  fitted.runs.clear()
  assert main(["study.py", "--render"]) == 0
  assert files() == first
  assert first.keys() == {f"study.{suffix}" for suffix in ("md", "html", "csv", "tex", "png")}
  assert fitted.runs == []


def test_code_that_is_not_committed_is_known(tmp_path):
  file, git = tmp_path / "study.py", ["git", "-C", str(tmp_path)]
  file.write_text("1")
  assert work.code_of(file) is None
  subprocess.run([*git, "init", "-q"], check=True)
  subprocess.run([*git, "add", "."], check=True)
  author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
  subprocess.run([*git, *author, "commit", "-qm", "one"], check=True)
  commit = work.code_of(file)
  assert not commit.endswith("+")
  module = tmp_path / "head.py"
  module.write_text("3")  # which the file may import
  assert work.code_of(file) == f"{commit}+"
  module.unlink()
  file.write_text("2")
  assert work.code_of(file) == f"{commit}+"


def test_results_that_are_committed_are_no_code(tmp_path):
  results, git = tmp_path / "runs" / "results.jsonl", ["git", "-C", str(tmp_path)]
  results.parent.mkdir()
  results.write_text("1")
  (tmp_path / "study.py").write_text("1")
  author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
  for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "one"]):
    subprocess.run([*git, *command], check=True)
  results.write_text("2")
  assert not work.code_of(tmp_path / "study.py").endswith("+")


def timeless(path: pathlib.Path) -> list:
  """The kept results without times."""

  def without(value):
    if isinstance(value, dict):
      times = ("seconds", "date", "costs", "loss_cost", "last_row", "checksum", "versions")
      skipped = lambda key: key in times or key.endswith("_seconds") or key.endswith("_per_second")
      return {key: without(item) for key, item in value.items() if not skipped(key)}
    return [without(item) for item in value] if isinstance(value, list) else value

  rows = [without(json.loads(line)) for line in path.read_text().splitlines()]
  for row in rows:
    row["result"].pop("loss", None)
    row["result"].get("train", {}).pop("peak_memory_bytes", None)
  return rows


KILLED = """\
import pathlib

from tests import tiny
from vqjax import CodebookHead, DenseHead, Int8
from vqjax.lab.study import Compressed, Row, Study


def study():
  return Study(
    base=tiny.experiment(pathlib.Path("text"), DenseHead(0, 16)),
    rows={
      "dense": {},
      "codebook": Row({"model.head": CodebookHead(0, 16, 8)}, tune={}),
      "small": Compressed("dense", bytes=None, method=Int8(16)),
    },
    tune={"train.learning_rate": (1e-3, 1e-2, 3e-2)},
    seeds=2,
  )
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_that_is_killed_in_each_phase_ends_with_the_same_results(tmp_path):
  root = pathlib.Path(__file__).parents[3]
  tiny.write_text(tmp_path / "text")
  (tmp_path / "study.py").write_text(KILLED)
  call = [sys.executable, "-m", "vqjax.cli", "study", "study.py", "--out"]
  own = {"PYTHONPATH": str(root), "VQJAX_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
  start = lambda out: subprocess.Popen([*call, out], cwd=tmp_path, env=os.environ | own)
  assert start("whole").wait() == 0
  killed = tmp_path / "killed"
  results = killed / "results.jsonl"
  count = lambda pattern: len([*killed.glob(pattern)])
  # Costs, trials of both rounds, checkpoints and results of runs, compressed rows, and pages.
  phases = (
    results.exists,
    lambda: "codebook/costs" in results.read_text(),
    lambda: count("tuning/dense/*/result.json"),
    lambda: count("tuning/dense/*/result.json") > 3,
    lambda: "dense/tuning" in results.read_text(),
    lambda: count("runs/dense-*/checkpoints/*"),
    lambda: count("study.md"),
    lambda: count("runs/codebook-*/checkpoints/*"),
    lambda: count("runs/codebook-*/result.json"),
    lambda: "small/run" in results.read_text(),
  )
  for is_reached in phases if os.environ.get("VQJAX_EXHAUSTIVE") else phases[::3]:
    process = start("killed")
    while not is_reached():
      assert process.poll() is None
      time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
  assert start("killed").wait() == 0
  assert timeless(killed / "results.jsonl") == timeless(tmp_path / "whole" / "results.jsonl")
