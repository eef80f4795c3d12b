"""On which text, at which widths and for how long are the grouped head and its controls trained?

`paper` is what the paper says, for a GPU or TPU: TinyStories whole, an epoch. At `cpu` scale a
model is as deep and as wide, reads the slices of TinyStories that are at hand for some minutes, and
sees 128 tokens, of which GPT-Neo's local attention half, as in the paper. `smoke` takes seconds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

from configs.grouped_lm import EPOCH, GPT2, WINDOW, HeadOf, language_model
from configs.grouped_shapes import CPU as CPU_PICTURES
from configs.grouped_shapes import REDUCED, shapes_run
from experiments.studies.grouped.paper import ABLATED, FACTORED
from experiments.studies.grouped.spread import SpreadTokenizer
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import BPETokenizer, Grid, Stories, Text

RUNS = "runs/grouped"
"""Folder of all runs, a folder a scale."""

Make = Callable[..., Experiment]
"""(name, head, dim, window=, train=) -> a language model on the setting's text."""


@dataclasses.dataclass(frozen=True)
class Setting:
  """Language models that differ in their head, or in their window.

  Attributes:
    make: the model of a head.
    dim: width, D.
    rows: names of what is trained or made here.
    tune: schedule of the fine-tuning of what is converted, and of the control beside it.
    window: of GPT-Neo.
    sizes: numbers of groups of which each has a row.
    name: of the setting, as run folders and results have it: `at_scale` gives it.
    folder: where its runs are, likewise.
  """

  make: Make
  dim: int
  rows: tuple[str, ...] = ()
  tune: Train = dataclasses.field(default_factory=Train)
  window: int = WINDOW
  sizes: tuple[int, ...] = ()
  name: str = ""
  folder: str = ""

  def path(self, row: str) -> str:
    """The run folder of a row."""
    return f"{self.folder}/{self.name}/{row}"

  def experiment(self, row: str, head: HeadOf, **fields) -> Experiment:
    """The run of a row."""
    return self.make(f"{self.name}-{row}", head, self.dim, **fields)


def at_scale(scale: str, settings: Mapping[str, Setting]) -> dict[str, Setting]:
  """The settings with their names and the folder of their runs."""
  folder = f"{RUNS}/{scale}"
  return {
    name: dataclasses.replace(setting, name=name, folder=folder)
    for name, setting in settings.items()
  }


TABLE = "gpt-2", "gpt-neo", "grouped"
"""What Table 1 has."""

ORDERS = "shuffled", "frequency", "clusters"
"""Other orders than the tokenizer's."""

CONVERTED = (
  *("gpt-2-more", "converted", "converted-frequency"),
  *("tuned", "tuned-frequency", "tuned-distilled"),
)
"""What begins with the trained GPT-2, and the control that trains as much longer."""

EVERY = (*TABLE, *ORDERS, "unshared", "distilled", *CONVERTED)


def nearest(wanted: float) -> int:
  """The one of the paper's sizes that is nearest by ratio, here as a number of groups."""
  return min(ABLATED, key=lambda n: abs(math.log(n / wanted)))


FEW_SIZES = tuple(sorted({nearest(6 * (FACTORED / 36) ** (i / 11)) for i in range(12)}))
"""A dozen of them, evenly by ratio."""

WIDE = 262_144
"""Tokens of the vocabulary over which exact decoding was asked for."""

_SMOKE = functools.partial(
  language_model,
  layers=2,
  heads=2,
  context=16,
  data=Text(valid_fraction=0.005, test_fraction=0.005),
  tokenizer=BPETokenizer(vocab=300),
  train=Train(steps=4, batch=8, warmup=2, log_every=2, eval_every=4, save_every=4),
)

SMOKE = {
  "tiny-16": Setting(
    _SMOKE,
    16,
    EVERY,
    tune=Train(steps=2, batch=8, warmup=1, log_every=1, eval_every=2, save_every=2),
    window=8,
    sizes=(5, 60),
  ),
  "wide": Setting(
    functools.partial(_SMOKE, tokenizer=SpreadTokenizer(BPETokenizer(vocab=300), 1000)),
    16,
    ("grouped",),
  ),
}

_CPU = functools.partial(language_model, context=128, data=Stories(most=100))

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
"""327,680 tokens: what two cores read in some minutes with a dense head."""

TUNE = dataclasses.replace(SHORT, steps=80, learning_rate=1.3e-3, warmup=8, eval_every=80)

SHORTER = dataclasses.replace(SHORT, steps=150, batch=16, warmup=15, eval_every=150)

CPU = {
  "lm-128": Setting(functools.partial(_CPU, train=SHORT), 128, EVERY, TUNE, window=64),
  "lm-64": Setting(functools.partial(_CPU, train=SHORT), 64, (*TABLE, "shuffled"), window=64),
  "sizes": Setting(functools.partial(_CPU, train=SHORTER, layers=4, heads=2), 64, sizes=FEW_SIZES),
  "wide": Setting(
    functools.partial(_CPU, train=SHORT, tokenizer=SpreadTokenizer(GPT2, WIDE)), 128, ("grouped",)
  ),
}

_HALF = dataclasses.replace(EPOCH, steps=EPOCH.steps // 2)
_FIFTH = dataclasses.replace(EPOCH, steps=EPOCH.steps // 5, learning_rate=EPOCH.learning_rate / 3)

PAPER = {
  "lm-128": Setting(language_model, 128, EVERY, _FIFTH),
  "lm-256": Setting(language_model, 256, TABLE),
  "lm-512": Setting(language_model, 512, TABLE),
  "sizes": Setting(
    functools.partial(language_model, train=_HALF, layers=4, heads=2), 64, sizes=ABLATED
  ),
  "wide": Setting(
    functools.partial(language_model, tokenizer=SpreadTokenizer(GPT2, WIDE)), 128, ("grouped",)
  ),
}

SCALES = {
  scale: at_scale(scale, settings)
  for scale, settings in (("smoke", SMOKE), ("cpu", CPU), ("paper", PAPER))
}
"""Scale -> name -> setting."""

TOP = {"smoke": ("tiny-16", "wide"), "cpu": ("lm-128", "wide"), "paper": ("lm-128", "wide")}
"""Scale -> settings whose grouped row is asked for its best tokens."""

TINY_GRID = Grid(pattern=(0,), rotation=(0,), size=(2,), texture=(0,), opacity=(3,), border=(0,))

PICTURES: dict[str, Make] = {
  "smoke": functools.partial(
    shapes_run,
    grid=TINY_GRID,
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
