"""Settings and rows of the grouped head's study.

The scale `paper` has the paper's sizes, for a GPU or TPU: an epoch of the whole of TinyStories.
At the scale `cpu` a model is as deep and as wide, but reads slices of TinyStories for some minutes,
128 tokens at a time; GPT-Neo's local attention sees half of them, as in the paper. The scale
`smoke` takes seconds.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from configs.grouped.lm import EPOCH, GPT2, WINDOW, dense, grouped, language_model
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
class GroupedSetting:
  """Language models on one text with different heads or attention windows.

  Attributes:
    name: name of the setting in run folders and results.
    make: (name, head, dim, window=, train=) -> a language model on the setting's text.
    dim: width, D.
    rows: names of the rows of this setting; None: all.
    tune: schedule of the fine-tuning of converted models, and of the control beside them.
    window: attention window of GPT-Neo.
    groups: numbers of groups, each of which has a row.
  """

  name: str
  make: Callable[..., Experiment]
  dim: int
  rows: tuple[str, ...] | None = None
  tune: Train = SHORT
  window: int = WINDOW
  groups: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class GroupedRow:
  """A language model.

  Attributes:
    job: setting and name.
    label: its label in tables.
    folder: its run folder.
    experiment: its experiment.
    needs: the job that it starts from, if any.
    trained: False if it is evaluated as it starts, without training.
    control: another job that has read as many tokens, with which its loss is compared.
  """

  job: str
  label: str
  folder: str
  experiment: Experiment
  needs: tuple[str, ...] = ()
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


def rows(scale: str, s: GroupedSetting) -> list[GroupedRow]:
  """The rows of a setting, each after the row that it starts from."""
  folder = lambda name: f"{RUNS}/{scale}/{s.name}/{name}"
  make = lambda name, head=grouped, **more: s.make(f"{s.name}-{name}", head, s.dim, **more)
  dense_run, of_dense = make("gpt-2", dense), folder("gpt-2")

  def row(name: str, label: str, experiment: Experiment, control: str | None = None, **more: Any):
    control = control and f"{s.name}/{control}"
    return GroupedRow(f"{s.name}/{name}", label, folder(name), experiment, control=control, **more)

  def regrouped(name: str, label: str, order: convert.Ordering) -> GroupedRow:
    init_from = starting_points.Regrouped(order)
    return row(name, label, replace(make(name, ordered), init_from=init_from), "grouped")

  def converted(name: str, label: str, order=None, distillation: float = 0.0, **more: Any):
    head = (grouped if order is None else ordered)(FROM_TOKENIZER, s.dim, None)
    experiment = starting_points.converted(
      dense_run,
      of_dense,
      head,
      convert.ToGrouped(by=order),
      name=f"{s.name}-{name}",
      train=s.tune,
      distillation=distillation,
    )
    return row(name, label, experiment, needs=after_dense, **more)

  after_dense = (f"{s.name}/gpt-2",)
  student, by_frequency = make("distilled"), convert.ByFrequency()
  distilled = replace(
    student,
    model=starting_points.Distilled(student.model, dense_run.model),
    train=replace(student.train, trainable=("student",)),
    init_from=starting_points.FromTeacher(of_dense),
  )
  longer = replace(make("gpt-2-more", dense, train=s.tune), init_from=FromRun(of_dense))
  tuned = functools.partial(converted, control="gpt-2-more")
  every = [
    row("gpt-2", "GPT-2", dense_run),
    row("gpt-neo", "GPT-Neo", make("gpt-neo", dense, window=s.window)),
    row("grouped", "grouped", make("grouped")),
    regrouped("shuffled", "grouped, tokens shuffled", convert.Shuffled()),
    regrouped("frequency", "grouped, by frequency", by_frequency),
    regrouped("clusters", "grouped, by clusters", convert.ByClusters(convert.ContextKMeans())),
    row("unshared", "one linear a group", make("unshared", unshared), "grouped"),
    row("distilled", "grouped, taught by GPT-2", distilled, "grouped", needs=after_dense),
    row("gpt-2-more", "GPT-2, trained on", longer, needs=after_dense),
    converted("converted", "GPT-2, converted", trained=False),
    converted("converted-frequency", "GPT-2, converted by frequency", by_frequency, trained=False),
    tuned("tuned", "GPT-2, converted, trained on"),
    tuned("tuned-frequency", "GPT-2, by frequency, trained on", by_frequency),
    tuned("tuned-distilled", "GPT-2, by frequency, trained on and taught", by_frequency, 1.0),
  ]
  chosen = [one for one in every if s.rows is None or one.job.split("/")[1] in s.rows]
  of_groups = lambda n: make(f"groups-{n}", lambda vocab, dim, _: GroupedHead(vocab, dim, n))
  return chosen + [row(f"groups-{n}", f"{n:,} groups", of_groups(n)) for n in s.groups]


TABLE = ("gpt-2", "gpt-neo", "grouped")
"""Rows of the paper's Table 1."""


def _smoke() -> tuple[GroupedSetting, ...]:
  data = Text(valid_fraction=0.005, test_fraction=0.005)
  train = Train(steps=4, batch=8, warmup=2, log_every=2, eval_every=4, save_every=4)
  shape = {"layers": 2, "heads": 2, "context": 16}
  make = functools.partial(language_model, data=data, train=train, **shape)
  small = functools.partial(make, tokenizer=BPETokenizer(vocab=300))
  wide = functools.partial(make, tokenizer=SpreadTokenizer(BPETokenizer(vocab=300), 1000))
  tune = replace(train, steps=2, warmup=1, log_every=1, eval_every=2, save_every=2)
  return (
    GroupedSetting("lm-16", small, 16, None, tune, window=8),
    GroupedSetting("sizes", small, 16, (), groups=(5, 60)),
    GroupedSetting("wide", wide, 16, ("grouped",)),
  )


def _cpu() -> tuple[GroupedSetting, ...]:
  make = functools.partial(language_model, context=128, data=Stories(most=100), train=SHORT)
  wide = functools.partial(make, tokenizer=SpreadTokenizer(GPT2, WIDE))
  train = replace(SHORT, steps=150, batch=16, warmup=15, eval_every=150)
  shallow = functools.partial(make, train=train, layers=4, heads=2)
  tune = replace(SHORT, steps=80, learning_rate=1.3e-3, warmup=8, eval_every=80)
  return (
    GroupedSetting("lm-128", make, 128, None, tune, window=64),
    GroupedSetting("lm-64", make, 64, (*TABLE, "shuffled"), window=64),
    GroupedSetting("sizes", shallow, 64, (), groups=FEW_GROUPS),
    GroupedSetting("wide", wide, 128, ("grouped",)),
  )


def _paper() -> tuple[GroupedSetting, ...]:
  fifth = replace(EPOCH, steps=EPOCH.steps // 5, learning_rate=EPOCH.learning_rate / 3)
  half = replace(EPOCH, steps=EPOCH.steps // 2)
  shallow = functools.partial(language_model, train=half, layers=4, heads=2)
  wide = functools.partial(language_model, tokenizer=SpreadTokenizer(GPT2, WIDE))
  return (
    GroupedSetting("lm-128", language_model, 128, None, fifth),
    GroupedSetting("lm-256", language_model, 256, TABLE),
    GroupedSetting("lm-512", language_model, 512, TABLE),
    GroupedSetting("sizes", shallow, 64, (), groups=ABLATED),
    GroupedSetting("wide", wide, 128, ("grouped",)),
  )


ROWS = {
  scale: {row.job: row for s in settings() for row in rows(scale, s)}
  for scale, settings in {"smoke": _smoke, "cpu": _cpu, "paper": _paper}.items()
}
"""Scale -> job -> row."""

TINY = Grid(pattern=(0,), rotation=(0,), size=(2,), texture=(0,), opacity=(3,), border=(0,))

PICTURES: dict[str, Callable[..., Experiment]] = {
  "smoke": functools.partial(
    shapes_run, grid=TINY, steps=2, train=CPU_PICTURES, dim=8, channels=(2, 2, 2)
  ),
  "cpu": functools.partial(shapes_run, grid=REDUCED, train=CPU_PICTURES),
  "paper": shapes_run,
}
"""Scale -> (name, head of (vocab, dim)) -> a run on pictures."""
