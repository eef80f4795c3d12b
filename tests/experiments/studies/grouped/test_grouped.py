"""The study of the grouped head: rows, tables, the page and the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.grouped.lm import dense, language_model
from experiments.studies.grouped import report, rows, run
from experiments.studies.grouped.judge import Grades, Judge
from tests import tiny
from vqjax.lab.config import with_vocab
from vqjax.lab.data import WordTokenizer


def cells(frame, label):
  """The cells of the row of a table that begins with `label`; None for a missing one."""
  frame = frame.astype(object).where(frame.notna(), None)
  return next(row for row in frame.to_dict("records") if next(iter(row.values())) == label)


def kept(nats, **beside):
  scores = {"nats_per_token": nats, "perplexity": float(np.exp(nats))}
  result = {"status": "finished", "test": scores, "valid": scores}
  result |= {"head": {"params": 7}, "model": {"params": 8_085_000}}
  return {"result": result, **beside}


FAILED = {"result": {"status": "failed", "error": "the loss is nan"}}


@pytest.fixture
def results():
  grades = {"grammar": 3.5, "creativity": 3.0, "consistency": 4.0, "plot": 2.5, "age": 5.0}
  return {
    "lm-128/gpt-2": kept(4.0),
    "lm-128/grouped": kept(4.125),
    "lm-128/gpt-neo": FAILED,
    "grades/lm-128-grouped": kept(
      1.0, grades=grades, graded=28, failed=2, settings={"model": "teacher", "stories": 30}
    ),
  }


@pytest.fixture
def cost():
  row = lambda peak, plain: {
    "peak_bytes": peak,
    "without_remat": {"peak_bytes": plain},
    "tokens_per_s": 1e9 / peak,
    "macs": {"weights": 4_000_000_000, "attention": 500_000_000},
  }
  origin = {"commit": "beef", "device": "cpu", "date": "2026-01-02T03", "quick": False}
  return {
    "steps": {"128": {"gpt-2": row(6e9, 14e9), "grouped": row(1e9, 7e9)}},
    "provenance": {"steps": origin},
  }


def test_a_language_model_that_was_run_has_its_perplexity_and_difference_and_both_grades(results):
  frame = report.page_tables(results, "cpu", None)["language"]
  row = cells(frame, "lm-128: grouped")
  assert (row["perplexity"], row["nats"], row["- GPT-2"]) == ("61.87", "4.125", "+0.125")
  assert cells(frame, "lm-128: GPT-Neo")["perplexity"] == "failed"
  assert list(frame.model) == ["lm-128: GPT-2", "lm-128: GPT-Neo", "lm-128: grouped"]
  missing = report.not_run(results, "cpu")
  assert "lm-128: grouped, by clusters (`lm-128/clusters`); " in missing
  assert "`lm-128/gpt-neo`" not in missing
  grades = report.page_tables(results, "cpu", None)["grades"]
  row = cells(grades, "lm-128: grouped")
  assert (row["grammar"], row["age"]) == ("3.50 / 3.53", "5.00 / 4.55")
  assert row["graded"] == "28 of 30 by teacher"
  assert cells(grades, "paper, GPT-2, 128")["plot"] == "2.95"  # ours was not graded
  assert cells(grades, "paper, grouped, 512")["plot"] == "5.475"  # all digits that are printed
  assert not any(model.startswith("lm-128: GPT") for model in grades.model)


def test_a_step_that_the_compiler_refused_has_failed_and_another_is_missing(cost):
  models = cost["steps"]["128"]
  del models["grouped"]["without_remat"]
  models["grouped"]["error"] = "out of memory"
  models["gpt-neo"] = {"macs": models["grouped"]["macs"], "error": "out of memory"}
  frame = report.page_tables({}, "cpu", cost)["memory"].set_index("width")
  lines = frame.loc[["128 (8.1 M): GB, as compiled", "128 (8.1 M): GB, recomputing"]]
  memory = lambda label: [cell if isinstance(cell, str) else None for cell in lines[label]]
  assert memory("grouped") == ["failed", "1.00"]
  assert memory("GPT-Neo") == [None, "failed"]
  assert memory("codebook") == [None, None]


def test_quick_measurements_of_the_bench_are_left_out(cost, tmp_path):
  assert report.read_cost(tmp_path) is None
  provenance = cost["provenance"]["steps"]
  path = tmp_path / "results" / "bench.json"
  path.parent.mkdir(parents=True)
  figures = {
    "grouped-steps": cost["steps"] | {"provenance": provenance},
    "grouped-sizes": {"sizes": [], "least": {}, "provenance": provenance | {"quick": True}},
  }
  path.write_text(json.dumps(figures))
  read = report.read_cost(tmp_path)
  assert read.keys() == {"steps"}


def test_every_row_of_the_paper_is_a_row_of_the_study():
  jobs = {job.name for job in run.jobs("paper")}
  steps = {f"{dim}/{model}" for dim in report.WIDTHS for model in report.MODELS}
  for table, of_rows in report.PAPER.items():
    assert of_rows.keys() <= (steps if table in ("2", "3") else jobs)


@pytest.mark.parametrize(
  ("dim", "millions"), [(128, 8.1), (256, 19.3), (1024, 152.8), (2048, 506.8)]
)
def test_a_tied_gpt_2_has_the_parameters_that_the_page_states(dim, millions):
  model = with_vocab(language_model("x", dense, dim), 50_257).model
  tokens = jnp.zeros((1, 4), jnp.int32)
  shapes = jax.eval_shape(lambda key: model.init(key, tokens), jax.random.key(0))
  assert round(sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6, 1) == millions


def test_a_kept_curve_averages_the_losses_between_its_points(tmp_path):
  metrics = [{"step": step, "loss": float(step % 2)} for step in range(1, 121)]
  metrics.append({"step": 120, "valid": {"nats_per_token": 3.0, "accuracy": 0.25}})
  tiny.write_rows(tmp_path, metrics)
  curves = run.curves(None, tmp_path)["curves"]
  assert len(curves["train"]) == 60
  assert {loss for _, loss in curves["train"]} == {0.5}
  assert curves["valid"] == [[120, 3.0]]
  assert curves["accuracy"] == [[120, 0.25]]


def test_spread_tokens_are_the_same_text():
  inner = WordTokenizer(split=False)
  fit = lambda tokenizer: tokenizer.fit(lambda: ["a b c d", "b a"])
  small, large = fit(inner), fit(rows.SpreadTokenizer(inner, 50))
  assert large.vocab == 50
  assert large.stride == 50 // small.vocab
  tokens = large.encode("d c a")
  assert tokens == [token * large.stride for token in small.encode("d c a")]
  assert large.decode(tokens) == small.decode(small.encode("d c a"))
  loaded = rows.SpreadTokenizer(inner, 50).load(large.state())
  assert loaded.encode("d c a") == tokens
  with pytest.raises(ValueError, match=r"`vocab`.*6.*got 5"):
    fit(rows.SpreadTokenizer(inner, 5))


def test_the_options_of_the_judge_need_each_other(capsys):
  for arguments in (["--judge-url", "http://127.0.0.1:1/v1"], ["--judge-model", "m"]):
    with pytest.raises(SystemExit, match="2"):
      run.main([*arguments, "--list"])
    assert "--judge-model" in capsys.readouterr().err


@pytest.mark.slow
def test_the_sheet_of_classes_is_a_picture(tmp_path):
  assert run.main(["--sheet", str(tmp_path / "sheet.png")]) == 0
  assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_command_runs_resumes_grades_and_renders(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  jobs = "tiny-16/gpt-2,tiny-16/converted-frequency,top/tiny-16,pictures/grouped"
  assert run.main(["--scale", "smoke", "--only", jobs]) == 0
  before = run.STUDY.read("smoke")
  assert before.keys() == {*jobs.split(","), "tiny-16/grouped"}
  monkeypatch.setattr(Judge, "grades", lambda *story: Grades(4, 3, 2, 1, 6.5))
  judge = ["--judge-url", "http://127.0.0.1:1/v1", "--judge-model", "m"]
  assert run.main(["--scale", "smoke", *judge, "--only", "grades/tiny-16-gpt-2"]) == 0
  after = run.STUDY.read("smoke")
  assert {name: after[name] for name in before} == before  # nothing ran again
  capsys.readouterr()
  assert run.main(["--scale", "smoke", "--render"]) == 0  # keeps the grades without the judge
  assert report.TITLES["language"] in capsys.readouterr().out
  results = run.STUDY.job_list("smoke").current()
  assert results["grades/tiny-16-gpt-2"]["grades"]["age"] == 6.5
  row = cells(report.page_tables(results, "smoke", None)["grades"], "tiny-16: GPT-2")
  assert row["consistency"] == "2.00 / –"
  assert results["top/tiny-16"]["top"]["same"]
  # The converted model has the trained body: it is worse than its source, but far from chance.
  converted = results["tiny-16/converted-frequency"]["result"]["test"]["nats_per_token"]
  assert results["tiny-16/gpt-2"]["result"]["test"]["nats_per_token"] < converted < 7
