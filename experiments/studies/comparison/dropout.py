"""Heads on Penn Treebank with the dropout of each tuned, in one budget of steps and in two.

vqjax study experiments/studies/comparison/dropout.py --out experiments/studies/comparison/dropout
"""

import dataclasses

from experiments.studies.comparison import ptb
from experiments.studies.comparison.rows import rows
from vqjax.lab.study import Study

DROPOUTS = 0.0, 0.15, 0.3
"""What every row tries, for all of its steps; and higher ones where the highest is the best."""

HEADLINE = "tied-contexts", "tied-contexts-file", "tied-contexts-memory", "product-learned"


def study() -> Study:
  """The study: learning rates are those that the study without dropout chose."""
  rate = "train.learning_rate"
  further = (
    *("tied-longer", "tied-distilled", "codebook-exchange", "dense-contexts", "dense", "tied"),
    *("adaptive", "low-rank", "codebook", "residual", "product"),
  )
  made = rows(ptb.SIZES, (*HEADLINE, *further), HEADLINE)
  own = {
    "tied-distilled": {rate: (40.0,), "model.student.dropout": DROPOUTS},
    "low-rank": {rate: (25.0,), "model.dropout": DROPOUTS},
  }
  made |= {name: dataclasses.replace(made[name], tune=tune) for name, tune in own.items()}
  tune = {rate: (40.0,), "model.dropout": DROPOUTS}
  return Study(ptb.base(), made, tune, seeds=5, rounds=(1,))
