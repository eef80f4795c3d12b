"""The declaration of a study: rows from dotted paths, and errors with file, line and field."""

import dataclasses
from fractions import Fraction

import pytest

from vqjax import CodebookHead, DenseEmbedding, DenseHead
from vqjax.lab.config import config_hash
from vqjax.lab.study import Compressed, Row, Study, load_study
from vqjax.lab.training import FromRun


def test_a_row_differs_from_the_base_in_its_fields_and_its_seed(base):
  study = Study(base, {"dense": {}, "small": {"model.dropout": 0.0, "train.learning_rate": 1}})
  made = study.experiment("small", seed=2)
  own = dataclasses.replace(base.train, learning_rate=1.0)
  model = base.model.clone(dropout=0.0)
  expected = dataclasses.replace(base, name="small", seed=2, train=own, model=model)
  assert config_hash(made) == config_hash(expected)


def test_a_lambda_makes_a_value_of_the_base_with_its_seed(base):
  code = lambda base: CodebookHead(0, base.model.dim, 5 + base.seed)
  study = Study(base, {"codebook": {"model.head": code}})
  assert study.experiment("codebook", seed=3).model.head == CodebookHead(0, 16, 8)


def test_a_lambda_may_have_defaults_and_the_runs_of_other_rows(base):
  heads = {f"k{k}": {"model.head": lambda base, k=k: CodebookHead(0, 16, k)} for k in (4, 8)}
  begun = {"train.steps": lambda base, run: 2 * run("k4").experiment.train.steps}
  study = Study(base, {**heads, "longer": begun})
  assert study.experiment("k4").model.head.codes == 4
  assert study.experiment("longer", scale=Fraction(1, 2)).train.steps == base.train.steps
  assert study.begins_from("longer") == ("k4",)


def test_a_function_makes_the_whole_experiment_of_the_runs_of_other_rows(base):
  def longer(base, run):
    made, folder = run("dense")
    return dataclasses.replace(made, init_from=FromRun(folder), train=base.train)

  study = Study(base, {"dense": {"model.dropout": 0.2}, "longer": Row(longer), "same": longer})
  made = study.experiment("longer", seed=2, scale=Fraction(1, 2))
  assert (made.name, made.seed, made.model.dropout) == ("longer", 2, 0.2)
  assert (made.init_from.folder, made.train.steps) == ("runs/dense", base.train.steps // 2)
  assert study.begins_from("same") == ("dense",)


def test_an_object_that_two_fields_share_stays_one(base):
  table = DenseEmbedding(0, 16)
  tied = {"model.embedding": table, "model.head": DenseHead(0, 16, embedding=table)}
  model = Study(base, {"tied": tied}).experiment("tied").model
  assert model.head.embedding is model.embedding


def test_a_scale_is_that_of_the_steps_and_their_schedule(base):
  train = Study(base, {"dense": {}}).experiment("dense", scale=Fraction("0.5")).train
  assert (train.steps, train.warmup, train.eval_every, train.save_every) == (20, 2, 10, 5)


BEGUN = {"init_from": lambda base, run: FromRun(run("a").folder)}


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"rows": {}}, r"`rows` must name the rows"),
    ({"seeds": 0}, r"`seeds` must be in \[1, 100\]; got 0"),
    ({"margin": 1}, r"`margin` must be in \[0, 1\); got 1"),
    ({"rounds": ()}, r"`rounds` must be integers of at least 1; got \(\)"),
    ({"reference": "b"}, r"`reference` must be a row; got 'b'. The rows are a"),
    ({"rows": {"..": {}}}, r"row ..: `name` must be a name for a folder"),
    ({"rows": {"a": {}, "b/c": Compressed("a")}}, r"`rows` must have no slash .*; got 'b/c'"),
    ({"rows": {"a": {"model.haed": 1}}}, r"row a: `model.haed` .* Did you mean model.head\?"),
    ({"rows": {"a": {"train.steps": 1.5}}}, r"row a: `train.steps` must be an integer; got 1.5"),
    ({"rows": {"a": {"train.batch": 0}}}, r"row a: `train.batch` must be in"),
    ({"tune": {"learning_rate": (1.0,)}}, r"Did you mean train.learning_rate\?"),
    ({"tune": {"train.learning_rate": (0.1, -1.0)}}, r"row a: `train.learning_rate` must be above"),
    ({"tune": {"train.learning_rate": 0.1}}, r"`tune` must name values"),
    ({"rows": {"a": lambda base: base.model}}, "row a: a function in `rows` must return an"),
    ({"rows": {"a": {}, "b": Compressed("c")}}, r"`of` must be a row .*; got 'c' in row b"),
    ({"rows": {"b": BEGUN, "a": {}}}, r"row b: `run` must name a trained row before b; got 'a'"),
    ({"rows": {"a": Row(seeds=1), "b": BEGUN}}, "row b: `seeds` must be at most those of a"),
    ({"rows": {"a": Row(seeds=4)}}, r"`seeds` must be in \[1, 3\], the study's; got 4 in row a"),
    ({"rows": {"a": Row(tuned_as="b"), "b": {}}}, "`tuned_as` must be a row before it.*got 'b'"),
    ({"rows": {"a": {}, "b": Compressed("a", method=lambda table: table)}}, "row b: .*lambda"),
    ({"rows": {"a": Row(tune={"model.head": (object(),)})}}, r"`tune` must name values"),
  ],
)
def test_what_a_study_cannot_be_is_refused_with_the_remedy(base, settings, message):
  with pytest.raises(ValueError, match=message):
    Study(base, **{"rows": {"a": {}}, **settings})


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    ('"model.head"', '"model.haed"', "Did you mean model.head?"),
    ('"train.learning_rate": (1e-3', '"train.rate": (1e-3', "`train.rate` must name a field"),
    ('"train.learning_rate": (1e-3', '"train.optimizer.rate": (1e-3', "`train.optimizer` must be"),
    ("seeds=3", "seeds=-3", "`seeds` must be in [1, 100]; got -3"),
    ("base.model.dim", "base.modle.dim", "has no attribute 'modle'"),
    ("import pathlib", "import pathlibs", "No module named 'pathlibs'"),
    ("def study():", "def study()", "SyntaxError: expected ':'"),
  ],
)
def test_an_error_of_a_file_names_the_line(fitted, tmp_path, old, new, message):
  file = tmp_path / "study.py"
  text = file.read_text().replace(old, new, 1)
  file.write_text(text)
  line = 1 + text[: text.index(new)].count("\n")
  with pytest.raises(ValueError, match=rf"study\.py, line {line}: ") as error:
    load_study(file)
  assert message in str(error.value)
