"""Memories of n-grams on two smaller texts: one pass, with the rates that were tuned on WikiText-2.

vqjax study experiments/studies/ngrams/texts.py:ptb --out experiments/studies/ngrams/ptb
vqjax study experiments/studies/ngrams/texts.py:stories --out experiments/studies/ngrams/stories
"""

from experiments.studies.ngrams import wikitext
from experiments.studies.ngrams.forms import forms_of
from vqjax.lab.data import PennTreebank, Source, Stories
from vqjax.lab.study import Row, Study
from vqjax.ops.ngrams import XorHash

RATE, FACTOR = 6e-3, 45.0
"""Learning rate with and without a memory, and the ratio of the table's rate to it."""


def ptb() -> Study:
  """Penn Treebank: 620 batches are one pass."""
  return _study(PennTreebank(), 620)


def stories() -> Study:
  """Slices of TinyStories: 524 batches are one pass."""
  return _study(Stories(), 524)


def _study(source: Source, steps: int) -> Study:
  rows = {"none": Row({"train.learning_rate": RATE}, "no memory")}
  for size in (8_192, 65_536, 262_144):
    ngrams = XorHash.qwen4(wikitext.V, end=0, heads=2, least=size)
    row = wikitext.memory(wikitext.dense(ngrams.rows), ngrams, f"4 x {size:,} rows")
    fields = {"train.learning_rate": RATE, "train.optimizer": wikitext.TableByRows(FACTOR)}
    rows[str(size)] = Row({**row.fields, **fields}, row.label)
  return Study(wikitext.base(source, steps), rows, seeds=1, measure=forms_of)
