"""Language models on TinyStories, dense and grouped: the rows of the paper's Table 1, and others.

vqjax study experiments/studies/grouped/language.py --out experiments/studies/grouped/language

A model is as deep and as wide as the paper's, but reads slices of TinyStories for some minutes, 128
tokens at a time; GPT-Neo's local attention sees half of them, as in the paper. `paper()` has the
paper's sizes, for a GPU or TPU: an epoch of the whole of TinyStories.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from configs.grouped.lm import EPOCH, GPT2, WINDOW, dense, grouped, language_model
from experiments.studies.grouped.measured import curves, time_top_k
from experiments.studies.grouped.spread import SpreadTokenizer
from vqjax import Embedding, GroupedHead, Head, UnsharedGroupedHead, convert
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train, config_hash
from vqjax.lab.data import Stories
from vqjax.lab.starting_points import Distilled, FromTeacher, Regrouped, converted
from vqjax.lab.study import Derived, Row, Study
from vqjax.lab.study.compressed import held_out_scores
from vqjax.lab.training import FromRun
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.run_folder import load_text
from vqjax.sharding import make_mesh

WIDE = 262_144
"""The larger vocabulary at which exact decoding is timed."""

SHORT = Train(
  steps=320,
  batch=8,
  learning_rate=4e-3,
  warmup=32,
  log_every=5,
  eval_every=160,
  save_every=100,
  keep=1,
)
"""327,680 tokens, which two cores read in some minutes with a dense head."""

TABLE = "gpt-2", "gpt-neo", "grouped"
"""Rows of the paper's Table 1."""

Make = Callable[..., Experiment]
"""(name, head, dim, window=, train=) -> a language model on the text of a study."""


def study() -> Study:
  """The study of short trainings."""
  make = functools.partial(language_model, context=128, data=Stories(most=100), train=SHORT)
  tune = replace(SHORT, steps=80, learning_rate=1.3e-3, warmup=8, eval_every=80)
  rows = language_models("lm-128", make, 128, tune, window=64)
  rows |= some((*TABLE, "shuffled"), "lm-64", make, 64, window=64)
  return _study(make, rows)


def paper() -> Study:
  """The study of the paper's trainings."""
  fifth = replace(EPOCH, steps=EPOCH.steps // 5, learning_rate=EPOCH.learning_rate / 3)
  rows = language_models("lm-128", language_model, 128, fifth)
  for dim in (256, 512):
    rows |= some(TABLE, f"lm-{dim}", language_model, dim)
  return _study(language_model, rows)


def _study(make: Make, rows: dict[str, Row | Derived]) -> Study:
  """The rows, and one with many tokens."""
  wide = functools.partial(make, tokenizer=SpreadTokenizer(GPT2, WIDE))
  rows |= some(("grouped",), "wide", wide, 128)
  return Study(make("base", dense, 128), rows, seeds=1, measure=measurements)


def measurements(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """The curves of a run, and of two also the times of their exact best tokens."""
  is_timed = experiment.name in ("lm-128-grouped", "wide-grouped")
  return curves(experiment, folder) | (time_top_k(experiment, folder) if is_timed else {})


def ordered(vocab: int, dim: int, embedding: Embedding) -> Head:
  """A grouped head that keeps an order of its tokens as a variable."""
  del embedding
  return GroupedHead(vocab, dim, order_init=convert.in_order)


def unshared(vocab: int, dim: int, embedding: Embedding) -> Head:
  """A grouped head with a linear layer for each group."""
  del embedding
  return UnsharedGroupedHead(vocab, dim)


@dataclasses.dataclass(frozen=True)
class Converted(Derived):
  """A row whose models are trained dense ones with their heads converted.

  Attributes:
    head: the new head.
    target: makes its variables.
  """

  head: Head
  target: convert.ToGrouped

  def settings(self) -> dict[str, Any]:
    """Hashes of the head and the target."""
    return {"head": config_hash(self.head), "target": config_hash(self.target)}

  def measure(self, experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
    """Scores of the held-out splits, and the size of the head."""
    name = experiment.name
    text = load_text(converted(experiment, folder, self.head, self.target, name=name))
    run = text.experiment
    init_key, _ = keys(run.seed)
    variables = Program(run, make_mesh(run.train.mesh)).init(init_key).variables
    variables = run.init_from(text, run.model, variables)
    result: dict[str, Any] = held_out_scores(run.model, variables, text)
    head = run.model.head
    result["head"] = {"class": type(head).__name__, "state_bytes": head.size().state_bytes}
    return {"result": result}


def language_models(
  setting: str, make_of: Make, dim: int, tune: Train = SHORT, window: int = WINDOW
) -> dict[str, Row | Derived]:
  """All rows of a setting, "SETTING-ROW", each after the row that it starts from.

  Args:
    setting: what their names begin with.
    make_of: makes the models.
    dim: width, D.
    tune: schedule of the fine-tuning of converted models, and of the control beside them.
    window: attention window of GPT-Neo.
  """
  make = lambda head=grouped, **more: make_of("row", head, dim, **more)
  of_dense = f"{setting}-gpt-2"

  def trained(label: str, head=grouped, init_from=None, **more) -> Row:
    made = lambda base: replace(make(head, **more), init_from=init_from)
    return Row(made, f"{setting}: {label}")

  def regrouped(label: str, order: convert.Ordering) -> Row:
    return trained(f"grouped, {label}", ordered, Regrouped(order))

  def distilled(base: Experiment, run: Any) -> Experiment:
    student, (teacher, folder) = make(), run(of_dense)
    train = replace(student.train, trainable=("student",))
    model = Distilled(student.model, teacher.model)
    return replace(student, model=model, train=train, init_from=FromTeacher(folder))

  def longer(base: Experiment, run: Any) -> Experiment:
    experiment, folder = run(of_dense)
    return replace(experiment, train=tune, init_from=FromRun(folder))

  def target(order: convert.Ordering | None) -> dict[str, Any]:
    head = (grouped if order is None else ordered)(FROM_TOKENIZER, dim, None)
    return {"head": head, "target": convert.ToGrouped(by=order)}

  def tuned(label: str, order: convert.Ordering | None = None, distillation: float = 0.0) -> Row:
    options = {"train": tune, "distillation": distillation, **target(order)}
    made = lambda base, run: converted(*run(of_dense), name=base.name, **options)
    return Row(made, f"{setting}: GPT-2, {label}")

  def only_converted(label: str, order: convert.Ordering | None = None) -> Derived:
    return Converted(of_dense, label=f"{setting}: GPT-2, {label}", **target(order))

  by_frequency = convert.ByFrequency()
  rows = {
    "gpt-2": trained("GPT-2", dense),
    "gpt-neo": trained("GPT-Neo", dense, window=window),
    "grouped": trained("grouped"),
    "shuffled": regrouped("tokens shuffled", convert.Shuffled()),
    "frequency": regrouped("by frequency", by_frequency),
    "clusters": regrouped("by clusters", convert.ByClusters(convert.ContextKMeans())),
    "unshared": trained("one linear a group", unshared),
    "distilled": Row(distilled, f"{setting}: grouped, taught by GPT-2"),
    "gpt-2-more": Row(longer, f"{setting}: GPT-2, trained on"),
    "converted": only_converted("converted"),
    "converted-frequency": only_converted("converted by frequency", by_frequency),
    "tuned": tuned("converted, trained on"),
    "tuned-frequency": tuned("by frequency, trained on", by_frequency),
    "tuned-distilled": tuned("by frequency, trained on and taught", by_frequency, 1.0),
  }
  return {f"{setting}-{name}": row for name, row in rows.items()}


def some(names: tuple[str, ...], setting: str, *more: Any, **options: Any) -> dict[str, Any]:
  """The named rows of `language_models`."""
  rows = language_models(setting, *more, **options)
  return {f"{setting}-{name}": rows[f"{setting}-{name}"] for name in names}
