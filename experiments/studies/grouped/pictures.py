"""Classifiers of pictures, dense and grouped: the paper's Section 3.2.

vqjax study experiments/studies/grouped/pictures.py --out experiments/studies/grouped/pictures
"""

from typing import Any

from configs.grouped.shapes import CPU, REDUCED, dense, grouped, shapes_run
from experiments.studies.grouped.measured import curves
from vqjax.lab.study import Row, Study


def study() -> Study:
  """The study of 480 classes."""
  return _study(grid=REDUCED, train=CPU)


def paper() -> Study:
  """The study of all classes."""
  return _study()


def _study(**fields: Any) -> Study:
  base = shapes_run("base", dense, **fields)
  head = grouped(base.data.vocab, base.model.dim)
  rows = {"dense": Row(label="CNN, dense"), "grouped": Row({"model.head": head}, "CNN, grouped")}
  return Study(base, rows, seeds=1, measure=curves)
