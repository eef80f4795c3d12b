"""Settings and rows of the grouped head's study.

The scale `paper` has the paper's sizes, for a GPU or TPU: an epoch of the whole of TinyStories.
At the scale `cpu` a model is as deep and as wide, but reads slices of TinyStories for some minutes,
128 tokens at a time; GPT-Neo's local attention sees half of them, as in the paper.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from configs.grouped import shapes as picture_shapes
from configs.grouped.lm import EPOCH, GPT2, WINDOW, dense, grouped, language_model
from vqjax import Embedding, GroupedHead, Head, UnsharedGroupedHead, convert
from vqjax.lab import starting_points
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Stories, TokenizerRecipe
from vqjax.lab.data.tokenizer_recipes import Documents
from vqjax.lab.training import FromRun
from vqjax.lm.tokenizers import Tokenizer

WIDE = 262_144
"""The larger vocabulary at which exact decoding is timed."""

FACTORED = 50_232
"""The number near the vocabulary whose 64 divisors the paper takes as numbers of groups."""

ABLATED = tuple(n for n in range(1, FACTORED + 1) if FACTORED % n == 0)[4:-4]
"""The paper's Figure 3: the divisors of `FACTORED` without the four smallest and four largest."""

FEW_GROUPS = (6, 12, 23, 42, 84, 161, 312, 598, 1196, 2184, 4186, 8372)
"""Twelve of `ABLATED`, about evenly spaced by ratio."""

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


@dataclasses.dataclass(frozen=True)
class SpreadTokenizer(TokenizerRecipe):
  """A tokenizer that spreads another tokenizer's tokens over a larger vocabulary.

  No text at hand has 262,144 different tokens. If the tokens of a smaller vocabulary are spread
  evenly over it, each group of a head has its share of tokens that occur and of tokens that do not.

  Attributes:
    inner: the other tokenizer.
    vocab: size of the larger vocabulary.
  """

  inner: TokenizerRecipe
  vocab: int

  def fit(self, documents: Documents) -> Tokenizer:
    """Fit the inner tokenizer."""
    return Spread(self.inner.fit(documents), self.vocab)

  def load(self, state: str) -> Tokenizer:
    """Load the state of a `Spread`."""
    return Spread(self.inner.load(json.loads(state)["inner"]), self.vocab)

  def files(self) -> tuple[pathlib.Path, ...]:
    """Files of the inner tokenizer."""
    return self.inner.files()


class Spread:
  """A tokenizer whose tokens are multiples of `stride`."""

  def __init__(self, inner: Tokenizer, vocab: int):
    """Spread the tokens of `inner` over a vocabulary of `vocab` tokens."""
    self._inner, self.vocab, self.pieces = inner, vocab, vocab
    self.stride = vocab // inner.vocab
    self.bos = None if inner.bos is None else inner.bos * self.stride
    self.eos = tuple(end * self.stride for end in inner.eos)

  def encode(self, text: str, *, special: bool = True) -> list[int]:
    """Spread tokens of a text."""
    return [token * self.stride for token in self._inner.encode(text, special=special)]

  def decode(self, tokens: Iterable[int]) -> str:
    """Text of the tokens, each as the nearest one below that occurs."""
    return self._inner.decode([self._below(token) for token in tokens])

  def piece(self, token: int) -> str:
    """Entry of the nearest token below that occurs."""
    return self._inner.piece(self._below(token))

  def _below(self, token: int) -> int:
    return min(int(token) // self.stride, self._inner.vocab - 1)

  def state(self) -> str:
    """State of the inner tokenizer, and the vocabulary."""
    return json.dumps({"inner": self._inner.state(), "vocab": self.vocab})


@dataclasses.dataclass(frozen=True)
class GroupedRow:
  """A model of the study.

  Attributes:
    folder: its run folder, which ends with its setting and its name.
    label: its label in tables.
    experiment: its experiment.
    needs: the row of its setting that it starts from, if any.
    trained: False if it is evaluated as it starts, without training.
    control: another row of its setting that has read as many tokens, to compare the loss with.
  """

  folder: str
  label: str
  experiment: Experiment
  needs: str | None = None
  trained: bool = True
  control: str | None = None

  @property
  def job(self) -> str:
    """Setting and name."""
    return "/".join(self.folder.split("/")[-2:])


def ordered(vocab: int, dim: int, embedding: Embedding) -> Head:
  """A grouped head that keeps an order of its tokens as a variable."""
  del embedding
  return GroupedHead(vocab, dim, order_init=convert.in_order)


def unshared(vocab: int, dim: int, embedding: Embedding) -> Head:
  """A grouped head with a linear layer for each group."""
  del embedding
  return UnsharedGroupedHead(vocab, dim)


Make = Callable[..., Experiment]
"""(name, head, dim, window=, train=) -> a language model on the text of a setting."""

TABLE = ("gpt-2", "gpt-neo", "grouped")
"""Rows of the paper's Table 1."""


def language_models(
  folder: str, make_of: Make, dim: int, tune: Train = SHORT, window: int = WINDOW
) -> list[GroupedRow]:
  """All rows of a setting, each after the row that it starts from.

  Args:
    folder: folder of the setting's runs.
    make_of: makes the models.
    dim: width, D.
    tune: schedule of the fine-tuning of converted models, and of the control beside them.
    window: attention window of GPT-Neo.
  """
  title = lambda name: f"{pathlib.Path(folder).name}-{name}"
  make = lambda name, head=grouped, **more: make_of(title(name), head, dim, **more)
  row = lambda name, *rest, **more: GroupedRow(f"{folder}/{name}", *rest, **more)
  dense_run, of_dense = make("gpt-2", dense), f"{folder}/gpt-2"

  def regrouped(name: str, label: str, order: convert.Ordering) -> GroupedRow:
    init_from = starting_points.Regrouped(order)
    return row(name, label, replace(make(name, ordered), init_from=init_from), control="grouped")

  def converted(name: str, label: str, order=None, distillation: float = 0.0, **more):
    head = (grouped if order is None else ordered)(FROM_TOKENIZER, dim, None)
    to = convert.ToGrouped(by=order)
    options = {"name": title(name), "train": tune, "distillation": distillation}
    experiment = starting_points.converted(dense_run, of_dense, head, to, **options)
    return row(name, label, experiment, "gpt-2", **more)

  student, by_frequency = make("distilled"), convert.ByFrequency()
  distilled = replace(
    student,
    model=starting_points.Distilled(student.model, dense_run.model),
    train=replace(student.train, trainable=("student",)),
    init_from=starting_points.FromTeacher(of_dense),
  )
  longer = replace(make("gpt-2-more", dense, train=tune), init_from=FromRun(of_dense))
  tuned = functools.partial(converted, control="gpt-2-more")
  return [
    row("gpt-2", "GPT-2", dense_run),
    row("gpt-neo", "GPT-Neo", make("gpt-neo", dense, window=window)),
    row("grouped", "grouped", make("grouped")),
    regrouped("shuffled", "grouped, tokens shuffled", convert.Shuffled()),
    regrouped("frequency", "grouped, by frequency", by_frequency),
    regrouped("clusters", "grouped, by clusters", convert.ByClusters(convert.ContextKMeans())),
    row("unshared", "one linear a group", make("unshared", unshared), control="grouped"),
    row("distilled", "grouped, taught by GPT-2", distilled, "gpt-2", control="grouped"),
    row("gpt-2-more", "GPT-2, trained on", longer, "gpt-2"),
    converted("converted", "GPT-2, converted", trained=False),
    converted("converted-frequency", "GPT-2, converted by frequency", by_frequency, trained=False),
    tuned("tuned", "GPT-2, converted, trained on"),
    tuned("tuned-frequency", "GPT-2, by frequency, trained on", by_frequency),
    tuned("tuned-distilled", "GPT-2, by frequency, trained on and taught", by_frequency, 1.0),
  ]


def some(names: tuple[str, ...], *setting: Any, **more: Any) -> list[GroupedRow]:
  """The named rows of `language_models`."""
  return [row for row in language_models(*setting, **more) if row.job.split("/")[1] in names]


def by_groups(folder: str, make: Make, groups: Iterable[int]) -> list[GroupedRow]:
  """A row for each number of groups, at width 64."""
  head_of = lambda n: lambda vocab, dim, embedding: GroupedHead(vocab, dim, n)
  run = lambda n: make(f"sizes-groups-{n}", head_of(n), 64)
  return [GroupedRow(f"{folder}/groups-{n}", f"{n:,} groups", run(n)) for n in groups]


def of_pictures(folder: str, **fields: Any) -> list[GroupedRow]:
  """Classifiers of pictures with the fields of `shapes_run`."""
  heads = {"dense": picture_shapes.dense, "grouped": picture_shapes.grouped}
  run = lambda name: picture_shapes.shapes_run(f"pictures-{name}", heads[name], **fields)
  return [GroupedRow(f"{folder}/{name}", f"CNN, {name}", run(name)) for name in heads]


def _cpu(at: str) -> list[GroupedRow]:
  make = functools.partial(language_model, context=128, data=Stories(most=100), train=SHORT)
  wide = functools.partial(make, tokenizer=SpreadTokenizer(GPT2, WIDE))
  train = replace(SHORT, steps=150, batch=16, warmup=15, eval_every=150)
  shallow = functools.partial(make, train=train, layers=4, heads=2)
  tune = replace(SHORT, steps=80, learning_rate=1.3e-3, warmup=8, eval_every=80)
  reduced = {"grid": picture_shapes.REDUCED, "train": picture_shapes.CPU}
  return [
    *language_models(f"{at}/lm-128", make, 128, tune, window=64),
    *some((*TABLE, "shuffled"), f"{at}/lm-64", make, 64, window=64),
    *by_groups(f"{at}/sizes", shallow, FEW_GROUPS),
    *some(("grouped",), f"{at}/wide", wide, 128),
    *of_pictures(f"{at}/pictures", **reduced),
  ]


def _paper(at: str) -> list[GroupedRow]:
  fifth = replace(EPOCH, steps=EPOCH.steps // 5, learning_rate=EPOCH.learning_rate / 3)
  half = replace(EPOCH, steps=EPOCH.steps // 2)
  shallow = functools.partial(language_model, train=half, layers=4, heads=2)
  wide = functools.partial(language_model, tokenizer=SpreadTokenizer(GPT2, WIDE))
  return [
    *language_models(f"{at}/lm-128", language_model, 128, fifth),
    *some(TABLE, f"{at}/lm-256", language_model, 256),
    *some(TABLE, f"{at}/lm-512", language_model, 512),
    *by_groups(f"{at}/sizes", shallow, ABLATED),
    *some(("grouped",), f"{at}/wide", wide, 128),
    *of_pictures(f"{at}/pictures"),
  ]


ROWS = {
  scale: {row.job: row for row in rows(f"runs/grouped/{scale}")}
  for scale, rows in {"cpu": _cpu, "paper": _paper}.items()
}
"""Scale -> job -> row."""
