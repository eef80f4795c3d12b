"""The studies of the grouped head: rows, tables and what is measured."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from configs.grouped.lm import dense, language_model
from experiments.studies.grouped import language, measured, page, pictures, sizes
from experiments.studies.grouped.spread import SpreadTokenizer
from tests import tiny
from vqjax.commands.study import main
from vqjax.lab.config import with_vocab
from vqjax.lab.data import WordTokenizer


def cells(frame, label):
  """The cells of the row of a table that begins with `label`; None for a missing one."""
  frame = frame.astype(object).where(frame.notna(), None)
  return next(row for row in frame.to_dict("records") if next(iter(row.values())) == label)


def kept(nats):
  return {"result": {"status": "finished", "test": {"nats_per_token": nats}}}


def test_a_language_model_has_its_loss_and_differences():
  results = {
    "lm-128-gpt-2/run": kept(4.0),
    "lm-128-grouped/run": kept(4.125),
    "lm-128-gpt-neo/run": {"result": {"status": "failed", "error": "the loss is nan"}},
    "lm-128-frequency/run": kept(4.0625),
  }
  studies = {"language": language.study(), "sizes": sizes.study(), "pictures": pictures.study()}
  both = {name: (study, results) for name, study in studies.items()}
  table = page.tables(both)["language"]
  row = cells(table, "lm-128: grouped, by frequency")
  assert list(row.values())[1:] == ["4.062", "+0.062", "-0.062"]
  assert cells(table, "lm-128: GPT-Neo")["nats"] == "failed"
  assert len(table) == 4
  missing = page.not_run(*both["language"])
  assert "lm-128: grouped, by clusters (`lm-128-clusters`); " in missing
  assert "`lm-128-gpt-neo`" not in missing


def test_a_step_that_the_compiler_refused_has_failed_and_another_is_missing():
  steps = {"128": {"grouped": {"peak_bytes": 1e9, "error": "x"}, "gpt-neo": {"error": "x"}}}
  frame = page._by_width(steps, page.QUANTITIES["memory"]).set_index("width")
  lines = frame.loc[["128 (8.1 M): GB, as compiled", "128 (8.1 M): GB, recomputing"]]
  assert list(lines["grouped"]) == ["failed", "1.00"]
  assert list(lines["GPT-Neo"]) == ["failed", "failed"]
  assert not any(lines["codebook"])


def test_every_row_of_the_paper_is_a_row_of_the_study():
  steps = {f"{dim}/{model}": None for dim in page.WIDTHS for model in page.MODELS}
  rows = {"1": language.paper().rows, "pictures": pictures.paper().rows}
  for table, printed in page.PAPER.items():
    assert printed.keys() <= rows.get(table, steps).keys()


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
  curves = measured.curves(None, tmp_path)["curves"]
  assert len(curves["train"]) == 60
  assert {loss for _, loss in curves["train"]} == {0.5}
  assert curves["accuracy"] == [[120, 0.25]]


def test_spread_tokens_are_the_same_text():
  inner = WordTokenizer(split=False)
  fit = lambda tokenizer: tokenizer.fit(lambda: ["a b c d", "b a"])
  small, large = fit(inner), fit(SpreadTokenizer(inner, 50))
  assert (large.vocab, large.stride) == (50, 50 // small.vocab)
  tokens = large.encode("d c a")
  assert tokens == [token * large.stride for token in small.encode("d c a")]
  assert large.decode(tokens) == small.decode(small.encode("d c a"))
  loaded = SpreadTokenizer(inner, 50).load(large.state())
  assert loaded.encode("d c a") == tokens


SMOKE = """\
import functools

from configs.grouped.lm import dense, language_model
from experiments.studies.grouped.language import language_models, measurements, some
from experiments.studies.grouped.spread import SpreadTokenizer
from vqjax.lab.config import Train
from vqjax.lab.data import Text, WordTokenizer
from vqjax.lab.study import Study
from vqjax.sharding import MeshShape


def study():
  steps = {"steps": 4, "warmup": 2, "log_every": 2, "eval_every": 4, "save_every": 4}
  train = Train(batch=8, mesh=MeshShape(data=1), **steps)
  data = Text("text", valid_fraction=0.2, test_fraction=0.2)
  shape = {"layers": 2, "heads": 2, "context": 16}
  make = functools.partial(language_model, data=data, train=train, **shape)
  small = functools.partial(make, tokenizer=WordTokenizer())
  wide = functools.partial(make, tokenizer=SpreadTokenizer(WordTokenizer(), 1000))
  rows = language_models("lm-16", small, 16, train, window=8)
  rows |= some(("grouped",), "wide", wide, 16)
  return Study(small("base", dense, 16), rows, seeds=1, measure=measurements)
"""


@pytest.mark.slow
def test_a_study_trains_converts_and_times(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  tiny.write_text(tmp_path / "text")
  pathlib.Path("smoke.py").write_text(SMOKE)
  names = "lm-16-gpt-2", "lm-16-converted-frequency", "wide-grouped"
  assert main(["smoke.py", "--out", ".", "--only", ",".join(f"{name}/run" for name in names)]) == 0
  lines = map(json.loads, pathlib.Path("results.jsonl").read_text().splitlines())
  found = {line["name"]: line for line in lines}
  assert found["wide-grouped/run"]["top"]["vocab"] == 1000
  tests = [found[f"{name}/run"]["result"]["test"] for name in names[:2]]
  assert tests[0]["tokens"] == tests[1]["tokens"] > 0
