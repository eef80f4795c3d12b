"""The pictures of 184,320 classes of the grouped head's paper (Section 3.2)."""

import dataclasses
from collections.abc import Callable

from experiments.studies.grouped import shapes
from experiments.studies.grouped.convnet import ConvNet
from experiments.studies.grouped.drawings import Drawn, Shapes
from experiments.studies.grouped.shapes import Grid
from vqjax import DenseHead, GroupedHead, Head
from vqjax.lab.config import Experiment, Train

EVERY = Grid()

REDUCED = Grid(pattern=(0,), rotation=(0,), texture=(0,), opacity=(3,), border=(0,))
"""480 classes: shapes, colours and sizes, all solid, upright and opaque."""

PAPER = Train(
  steps=72_000,
  batch=256,
  accumulate=4,
  learning_rate=1e-3,
  final_fraction=1.0,
  warmup=0,
  weight_decay=0.0,
  clip=1e6,
  beta2=0.999,
  log_every=100,
  eval_every=7_200,
  save_every=7_200,
)
"""Adam, four batches of 64 in a step, 10 epochs of 1,843,200 pictures (Appendix C.3)."""

CPU = dataclasses.replace(
  PAPER,
  steps=400,
  batch=64,
  accumulate=1,  # XLA's convolutions in a loop are 45 times as slow on a CPU
  learning_rate=1e-4,  # at 1e-3, from the first step, most units of the dense layer die
  warmup=40,
  log_every=10,
  eval_every=50,
  save_every=200,
)
"""A few minutes on two cores, with `REDUCED`."""


def dense(vocab: int, dim: int) -> Head:
  """Return the paper's baseline: 104,087,552 parameters with the convolutions."""
  return DenseHead(vocab, dim, use_bias=True)


def grouped(vocab: int, dim: int) -> Head:
  """Return the paper's head: 10,340,999 parameters with the convolutions."""
  return GroupedHead(vocab, dim, use_bias=True)


def shapes_run(
  name: str,
  head_of: Callable[[int, int], Head],
  grid: Grid = EVERY,
  *,
  train: Train = PAPER,
  dim: int = 512,
  channels: tuple[int, ...] = (32, 64, 128),
) -> Experiment:
  """Return a run on the classes of a grid, with ten pictures of each to train on.

  A held-out split has a picture for ten classes, or for each where there are fewer than 10,000.

  Args:
    name: name of the run.
    head_of: (number of classes, dim) -> the head.
    grid: the classes.
    train: optimisation.
    dim: width of the dense layer.
    channels: channels of the convolutions.
  """
  classes = grid.num_classes
  held_out = classes if classes < 10_000 else classes // 10
  return Experiment(
    name=name,
    model=ConvNet(head_of(classes, dim), dim, channels, images=shapes.draw),
    data=Shapes(grid, 10 * classes, held_out, held_out),
    tokenizer=None,
    loader=Drawn(),
    train=train,
    seed=0,
  )


def experiment() -> Experiment:
  """Return the paper's model on all classes, for an accelerator."""
  return shapes_run("grouped-shapes", grouped)
