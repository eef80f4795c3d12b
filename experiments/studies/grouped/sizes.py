"""Language models of width 64 with other numbers of groups: the paper's Figure 3.

vqjax study experiments/studies/grouped/sizes.py --out experiments/studies/grouped/sizes
"""

from collections.abc import Iterable
from dataclasses import replace

from configs.grouped.lm import EPOCH, grouped, language_model
from experiments.studies.grouped.language import SHORT
from experiments.studies.grouped.measured import curves
from vqjax import GroupedHead
from vqjax.lab.config import FROM_TOKENIZER, Experiment
from vqjax.lab.data import Stories
from vqjax.lab.study import Row, Study

FACTORED = 50_232
"""The number near the vocabulary whose 64 divisors the paper takes as numbers of groups."""

ABLATED = tuple(n for n in range(1, FACTORED + 1) if FACTORED % n == 0)[4:-4]
"""The paper's Figure 3: the divisors of `FACTORED` without the four smallest and four largest."""

FEW_GROUPS = 6, 12, 23, 42, 84, 161, 312, 598, 1196, 2184, 4186, 8372
"""Twelve of `ABLATED`, about evenly spaced by ratio."""

SHALLOW = {"layers": 4, "heads": 2}


def study() -> Study:
  """The study of short trainings."""
  train = replace(SHORT, steps=150, batch=16, warmup=15, eval_every=150)
  text = {"context": 128, "data": Stories(most=100), "train": train}
  return _study(language_model("base", grouped, 64, **SHALLOW, **text), FEW_GROUPS)


def paper() -> Study:
  """The study of the paper's trainings, half an epoch each."""
  half = replace(EPOCH, steps=EPOCH.steps // 2)
  return _study(language_model("base", grouped, 64, **SHALLOW, train=half), ABLATED)


def _study(base: Experiment, groups: Iterable[int]) -> Study:
  head = lambda n: GroupedHead(FROM_TOKENIZER, base.model.dim, n)
  rows = {f"groups-{n}": Row({"model.head": head(n)}, f"{n:,} groups") for n in groups}
  return Study(base, rows, seeds=1, measure=curves)
