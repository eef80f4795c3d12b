"""Settings and rows of the grouped head's study.

The scale `paper` has the paper's sizes, for a GPU or TPU: an epoch of the whole of TinyStories.
At the scale `cpu` a model is as deep and as wide, but reads slices of TinyStories for some minutes,
128 tokens at a time; GPT-Neo's local attention sees half of them, as in the paper. The scale
`smoke` takes seconds.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterable

from configs.grouped.lm import EPOCH, GPT2, WINDOW, HeadOf, dense, grouped, language_model
from configs.grouped.shapes import CPU as CPU_PICTURES
from configs.grouped.shapes import REDUCED, shapes_run
from experiments.studies.grouped.shapes import Grid
from vqjax import Embedding, GroupedHead, Head, UnsharedGroupedHead, convert
from vqjax.lab import starting_points
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import BPETokenizer, Stories, Text, TokenizerRecipe
from vqjax.lab.data.tokenizer_recipes import Documents
from vqjax.lab.training import FromRun
from vqjax.lm.tokenizers import Tokenizer

RUNS = "runs/grouped"
"""Folder of all runs, with a folder for each scale."""

TEACHER = "gpt-2"
"""The row whose trained model is converted, and is the teacher of distillation."""

WIDE = 262_144
"""The larger vocabulary at which exact decoding is timed."""

FACTORED = 50_232
"""The number near the vocabulary whose 64 divisors the paper takes as numbers of groups."""

ABLATED = tuple(n for n in range(1, FACTORED + 1) if FACTORED % n == 0)[4:-4]
"""The paper's Figure 3: the divisors of `FACTORED` without the four smallest and four largest."""


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
    if vocab < inner.vocab:
      raise ValueError(
        f"`vocab` must be at least the inner vocabulary {inner.vocab}; got {vocab}. Raise it."
      )
    self._inner, self.vocab, self.pieces = inner, vocab, vocab
    self.stride = vocab // inner.vocab
    self.bos = None if inner.bos is None else inner.bos * self.stride
    self.eos = tuple(end * self.stride for end in inner.eos)

  def encode(self, text: str, *, special: bool = True) -> list[int]:
    """Spread tokens of a text."""
    return [token * self.stride for token in self._inner.encode(text, special=special)]

  def decode(self, tokens: Iterable[int]) -> str:
    """Text of the tokens."""
    return self._inner.decode([self._below(token) for token in tokens])

  def piece(self, token: int) -> str:
    """Entry of the nearest token below that occurs."""
    return self._inner.piece(self._below(token))

  def _below(self, token: int) -> int:
    return min(int(token) // self.stride, self._inner.vocab - 1)

  def state(self) -> str:
    """State of the inner tokenizer, and the vocabulary."""
    return json.dumps({"inner": self._inner.state(), "vocab": self.vocab})


Make = Callable[..., Experiment]
"""(name, head, dim, window=, train=) -> a language model on a setting's text."""


@dataclasses.dataclass(frozen=True)
class GroupedSetting:
  """Language models on one text with different heads or attention windows.

  Attributes:
    name: name of the setting in run folders and results.
    folder: the folder of the scale's runs.
    make: makes the model of a head.
    dim: width, D.
    rows: names of the rows of this setting.
    tune: schedule of the fine-tuning of converted models, and of the control beside them.
    window: attention window of GPT-Neo.
    groups: numbers of groups, each of which has a row.
  """

  name: str
  folder: str
  make: Make
  dim: int
  rows: tuple[str, ...] = ()
  tune: Train = SHORT
  window: int = WINDOW
  groups: tuple[int, ...] = ()

  def path(self, row: str) -> str:
    """The run folder of a row."""
    return f"{self.folder}/{self.name}/{row}"

  def experiment(self, row: str, head: HeadOf, **fields) -> Experiment:
    """The run of a row."""
    return self.make(f"{self.name}-{row}", head, self.dim, **fields)


@dataclasses.dataclass(frozen=True)
class GroupedRow:
  """A language model of a setting.

  Attributes:
    name: name of its run.
    label: its label in tables.
    make: setting -> its experiment.
    needs: name of the row that it starts from.
    trained: False if it is evaluated as it starts, without training.
    control: name of the row that has read as many tokens, with which its loss is compared.
  """

  name: str
  label: str
  make: Callable[[GroupedSetting], Experiment]
  needs: str | None = None
  trained: bool = True
  control: str | None = None


def ordered(vocab: int, dim: int, embedding: Embedding) -> Head:
  """A grouped head that keeps an order of its tokens as a variable."""
  del embedding
  return GroupedHead(vocab, dim, order_init=convert.in_order)


def unshared(vocab: int, dim: int, embedding: Embedding) -> Head:
  """A grouped head with a linear layer for each group."""
  del embedding
  return UnsharedGroupedHead(vocab, dim)


def _scratch(
  name: str,
  label: str,
  head: HeadOf,
  control: str | None = None,
  order: convert.Ordering | None = None,
  local: bool = False,
) -> GroupedRow:
  """A row that trains from scratch.

  Args:
    name: name of the row.
    label: its label.
    head: its head.
    control: name of the row with which it is compared.
    order: the order of the tokens, if not the tokenizer's.
    local: whether every second block has local attention, as in GPT-Neo.
  """

  def make(s: GroupedSetting) -> Experiment:
    experiment = s.experiment(name, head, window=s.window if local else None)
    regrouped = None if order is None else starting_points.Regrouped(order)
    return dataclasses.replace(experiment, init_from=regrouped)

  return GroupedRow(name, label, make, control=control)


def _continued(s: GroupedSetting) -> Experiment:
  """The trained GPT-2, trained for as long again as the converted models."""
  experiment = s.experiment("gpt-2-more", dense, train=s.tune)
  return dataclasses.replace(experiment, init_from=FromRun(s.path(TEACHER)))


def _distilled(s: GroupedSetting) -> Experiment:
  """The paper's head from scratch, with the trained GPT-2 as its teacher."""
  student, teacher = s.experiment("distilled", grouped), s.experiment(TEACHER, dense)
  return dataclasses.replace(
    student,
    model=starting_points.Distilled(student.model, teacher.model),
    train=dataclasses.replace(student.train, trainable=("student",)),
    init_from=starting_points.FromTeacher(s.path(TEACHER)),
  )


def _converted(
  name: str,
  label: str,
  by_frequency: bool = False,
  tuned: bool = False,
  distillation: float = 0.0,
) -> GroupedRow:
  """The trained GPT-2 with a converted grouped head, fine-tuned if `tuned`."""

  def make(s: GroupedSetting) -> Experiment:
    return starting_points.converted(
      s.experiment(TEACHER, dense),
      s.path(TEACHER),
      (ordered if by_frequency else grouped)(FROM_TOKENIZER, s.dim, None),
      convert.ToGrouped(by=convert.ByFrequency() if by_frequency else None),
      name=f"{s.name}-{name}",
      train=s.tune,
      distillation=distillation,
    )

  return GroupedRow(name, label, make, TEACHER, tuned, control="gpt-2-more" if tuned else TEACHER)


BY_CLUSTERS = convert.ByClusters(convert.ContextKMeans())

_ROWS = (
  _scratch("gpt-2", "GPT-2", dense),
  _scratch("gpt-neo", "GPT-Neo", dense, TEACHER, local=True),
  _scratch("grouped", "grouped", grouped, TEACHER),
  _scratch("shuffled", "grouped, tokens shuffled", ordered, "grouped", convert.Shuffled()),
  _scratch("frequency", "grouped, by frequency", ordered, "grouped", convert.ByFrequency()),
  _scratch("clusters", "grouped, by clusters", ordered, "grouped", BY_CLUSTERS),
  _scratch("unshared", "one linear a group", unshared, "grouped"),
  GroupedRow("distilled", "grouped, taught by GPT-2", _distilled, TEACHER, control="grouped"),
  GroupedRow("gpt-2-more", "GPT-2, trained on", _continued, TEACHER),
  _converted("converted", "GPT-2, converted"),
  _converted("converted-frequency", "GPT-2, converted by frequency", by_frequency=True),
  _converted("tuned", "GPT-2, converted, trained on", tuned=True),
  _converted("tuned-frequency", "GPT-2, by frequency, trained on", by_frequency=True, tuned=True),
  _converted(
    "tuned-distilled",
    "GPT-2, by frequency, trained on and taught",
    by_frequency=True,
    tuned=True,
    distillation=1.0,
  ),
)


def rows(s: GroupedSetting) -> list[GroupedRow]:
  """The rows of a setting, each after the row that it starts from."""

  def of_groups(groups: int) -> GroupedRow:
    head = lambda vocab, dim, embedding: GroupedHead(vocab, dim, groups)
    return _scratch(f"groups-{groups}", f"{groups:,} groups", head)

  return [row for row in _ROWS if row.name in s.rows] + [of_groups(groups) for groups in s.groups]


EVERY = tuple(row.name for row in _ROWS)
TABLE = ("gpt-2", "gpt-neo", "grouped")
"""Rows of the paper's Table 1."""

FEW_GROUPS = tuple(
  sorted(
    min(ABLATED, key=lambda groups: abs(math.log(groups / wanted)))
    for wanted in (6 * (FACTORED / 36) ** (i / 11) for i in range(12))
  )
)
"""Twelve of `ABLATED` from 6 to FACTORED / 6, evenly spaced by ratio."""


def _smoke() -> tuple[GroupedSetting, ...]:
  folder, train = f"{RUNS}/smoke", Train(steps=4, batch=8, warmup=2, log_every=2, eval_every=4)
  make = functools.partial(
    language_model,
    layers=2,
    heads=2,
    context=16,
    data=Text(valid_fraction=0.005, test_fraction=0.005),
    train=dataclasses.replace(train, save_every=4),
  )
  small = functools.partial(make, tokenizer=BPETokenizer(vocab=300))
  wide = functools.partial(make, tokenizer=SpreadTokenizer(BPETokenizer(vocab=300), 1000))
  tune = Train(steps=2, batch=8, warmup=1, log_every=1, eval_every=2, save_every=2)
  return (
    GroupedSetting("tiny-16", folder, small, 16, EVERY, tune, window=8, groups=(5, 60)),
    GroupedSetting("wide", folder, wide, 16, ("grouped",)),
  )


def _cpu() -> tuple[GroupedSetting, ...]:
  folder = f"{RUNS}/cpu"
  make = functools.partial(language_model, context=128, data=Stories(most=100), train=SHORT)
  wide = functools.partial(make, tokenizer=SpreadTokenizer(GPT2, WIDE))
  train = dataclasses.replace(SHORT, steps=150, batch=16, warmup=15, eval_every=150)
  shallow = functools.partial(make, train=train, layers=4, heads=2)
  tune = dataclasses.replace(SHORT, steps=80, learning_rate=1.3e-3, warmup=8, eval_every=80)
  return (
    GroupedSetting("lm-128", folder, make, 128, EVERY, tune, window=64),
    GroupedSetting("lm-64", folder, make, 64, (*TABLE, "shuffled"), window=64),
    GroupedSetting("sizes", folder, shallow, 64, groups=FEW_GROUPS),
    GroupedSetting("wide", folder, wide, 128, ("grouped",)),
  )


def _paper() -> tuple[GroupedSetting, ...]:
  folder = f"{RUNS}/paper"
  fifth = dataclasses.replace(EPOCH, steps=EPOCH.steps // 5, learning_rate=EPOCH.learning_rate / 3)
  half = dataclasses.replace(EPOCH, steps=EPOCH.steps // 2)
  shallow = functools.partial(language_model, train=half, layers=4, heads=2)
  wide = functools.partial(language_model, tokenizer=SpreadTokenizer(GPT2, WIDE))
  return (
    GroupedSetting("lm-128", folder, language_model, 128, EVERY, fifth),
    GroupedSetting("lm-256", folder, language_model, 256, TABLE),
    GroupedSetting("lm-512", folder, language_model, 512, TABLE),
    GroupedSetting("sizes", folder, shallow, 64, groups=ABLATED),
    GroupedSetting("wide", folder, wide, 128, ("grouped",)),
  )


SCALES = {
  scale: {s.name: s for s in settings}
  for scale, settings in (("smoke", _smoke()), ("cpu", _cpu()), ("paper", _paper()))
}
"""Scale -> name -> setting."""

TOP = {"smoke": ("tiny-16", "wide"), "cpu": ("lm-128", "wide"), "paper": ("lm-128", "wide")}
"""Scale -> settings whose grouped head's top-k is timed."""

PICTURES: dict[str, Make] = {
  "smoke": functools.partial(
    shapes_run,
    grid=Grid(pattern=(0,), rotation=(0,), size=(2,), texture=(0,), opacity=(3,), border=(0,)),
    steps=2,
    train=dataclasses.replace(CPU_PICTURES, batch=8, log_every=1),
    train_images=96,
    held_out=8,
    dim=8,
    channels=(2, 2, 2),
  ),
  "cpu": functools.partial(shapes_run, grid=REDUCED, train=CPU_PICTURES),
  "paper": shapes_run,
}
"""Scale -> (name, head of (vocab, dim)) -> a run on pictures."""
