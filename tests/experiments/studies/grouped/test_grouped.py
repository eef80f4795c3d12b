"""The study of the grouped head: rows, tables, the page and the command."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from configs.grouped.lm import dense, language_model
from experiments.studies.grouped import report, rows, run, stories
from tests import tiny
from vqjax.lab.config import Train, with_vocab
from vqjax.lab.data import Text, WordTokenizer
from vqjax.sharding import MeshShape


def cells(frame, label):
  """The cells of the row of a table that begins with `label`; None for a missing one."""
  frame = frame.astype(object).where(frame.notna(), None)
  return next(row for row in frame.to_dict("records") if next(iter(row.values())) == label)


def kept(nats, **beside):
  result = {"status": "finished", "test": {"nats_per_token": nats}}
  return {"result": result, **beside}


def test_a_language_model_has_its_loss_and_differences_and_grades_stand_above_the_papers():
  results = {
    "lm-128/gpt-2": kept(4.0),
    "lm-128/grouped": kept(4.125),
    "lm-128/gpt-neo": {"result": {"status": "failed", "error": "the loss is nan"}},
    "lm-128/frequency": kept(4.0625),
    "grades/lm-128-grouped": kept(1.0, grades={"grammar": 3.5, "age": 5.0}, graded=28),
  }
  tables = report.tables(results, "cpu")
  row = cells(tables["language"], "lm-128: grouped, by frequency")
  assert list(row.values())[1:] == ["4.062", "+0.062", "-0.062"]
  assert cells(tables["language"], "lm-128: GPT-Neo")["nats"] == "failed"
  assert len(tables["language"]) == 4
  missing = report._not_run(results)
  assert "lm-128: grouped, by clusters (`lm-128/clusters`); " in missing
  assert "`lm-128/gpt-neo`" not in missing
  assert cells(tables["grades"], "grades/lm-128-grouped")["age"] == 5
  assert cells(tables["grades"], "lm-512/grouped")["plot"] == "5.475"  # the paper's


def test_a_step_that_the_compiler_refused_has_failed_and_another_is_missing():
  steps = {"128": {"grouped": {"peak_bytes": 1e9, "error": "x"}, "gpt-neo": {"error": "x"}}}
  frame = report._by_width(steps, report.QUANTITIES["memory"]).set_index("width")
  lines = frame.loc[["128 (8.1 M): GB, as compiled", "128 (8.1 M): GB, recomputing"]]
  assert list(lines["grouped"]) == ["failed", "1.00"]
  assert list(lines["GPT-Neo"]) == ["failed", "failed"]
  assert not any(lines["codebook"])


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
  assert curves["accuracy"] == [[120, 0.25]]


def test_spread_tokens_are_the_same_text():
  inner = WordTokenizer(split=False)
  fit = lambda tokenizer: tokenizer.fit(lambda: ["a b c d", "b a"])
  small, large = fit(inner), fit(rows.SpreadTokenizer(inner, 50))
  assert (large.vocab, large.stride) == (50, 50 // small.vocab)
  tokens = large.encode("d c a")
  assert tokens == [token * large.stride for token in small.encode("d c a")]
  assert large.decode(tokens) == small.decode(small.encode("d c a"))
  loaded = rows.SpreadTokenizer(inner, 50).load(large.state())
  assert loaded.encode("d c a") == tokens


def test_the_options_of_the_judge_need_each_other(capsys):
  for arguments in (["--judge-url", "http://127.0.0.1:1/v1"], ["--judge-model", "m"]):
    with pytest.raises(SystemExit, match="2"):
      run.main([*arguments, "--list"])
    assert "--judge-model" in capsys.readouterr().err


@pytest.fixture
def smoke(tmp_path, monkeypatch):
  """A scale that takes seconds, in an empty folder."""
  steps = {"steps": 4, "warmup": 2, "log_every": 2, "eval_every": 4, "save_every": 4}
  train = Train(batch=8, mesh=MeshShape(data=1), **steps)
  data = Text(str(tiny.write_text(tmp_path / "text")), valid_fraction=0.2, test_fraction=0.2)
  shape = {"layers": 2, "heads": 2, "context": 16}
  make = functools.partial(language_model, data=data, train=train, **shape)
  small = functools.partial(make, tokenizer=WordTokenizer())
  wide = functools.partial(make, tokenizer=rows.SpreadTokenizer(WordTokenizer(), 1000))
  found = [
    *rows.language_models("runs/grouped/smoke/lm-16", small, 16, train, window=8),
    *rows.some(("grouped",), "runs/grouped/smoke/wide", wide, 16),
  ]
  monkeypatch.setitem(rows.ROWS, "smoke", {row.job: row for row in found})
  monkeypatch.setattr(run, "STUDY", dataclasses.replace(run.STUDY, scales=("smoke",)))
  monkeypatch.setattr(run, "STORIES", {"stories": 2, "tokens": 4})
  monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_the_command_runs_resumes_grades_and_renders(smoke, monkeypatch, capsys):
  jobs = "lm-16/gpt-2,lm-16/converted-frequency,top/wide"
  assert run.main(["--scale", "smoke", "--only", jobs]) == 0
  before = run.STUDY.read("smoke")
  assert before.keys() == {*jobs.split(","), "wide/grouped"}
  grade = {"grammar": 4.0, "age": 6.5}
  monkeypatch.setattr(stories, "assessed", lambda url, model, pairs: [grade for _ in pairs])
  judge = ["--judge-url", "http://127.0.0.1:1/v1", "--judge-model", "m"]
  assert run.main(["--scale", "smoke", *judge, "--only", "grades/lm-16-gpt-2"]) == 0
  after = run.STUDY.read("smoke")
  assert {name: after[name] for name in before} == before  # nothing ran again
  assert after["grades/lm-16-gpt-2"]["grades"] == grade
  capsys.readouterr()
  assert run.main(["--scale", "smoke", "--render", *judge]) == 0
  shown = capsys.readouterr().out
  assert all(title in shown for title in ("language", "top", "grades"))
  tests = [after[f"lm-16/{name}"]["result"]["test"] for name in ("gpt-2", "converted-frequency")]
  assert tests[0]["tokens"] == tests[1]["tokens"] > 0
