"""The data set of the pictures that `shapes` draws, and its loader."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Int

from experiments.studies.grouped.shapes import NUM_CLASSES, Grid
from vqjax.lab.data.corpus_files import content_hash
from vqjax.lab.data.pipeline import NONE, Batch, Examples
from vqjax.lab.data.source import SPLITS, Prepared

EVERY_CLASS = Grid()

MOST = 2**30
"""Bound of the number of the first drawing of a seed; the others follow it."""


@dataclasses.dataclass(frozen=True)
class Shapes(Prepared):
  """Pictures of the classes of a grid; no picture is in two splits, or twice in one.

  Source: LLM Vocabulary Compression for Low-Compute Environments, Appendix C.1: "one attribute from
  each class was randomly chosen" for each of about 2 M pictures. We read it as a uniform draw of a
  value of each attribute, which gives each of the 184,320 classes about ten pictures. Here the
  classes are stratified: in a split of n pictures each of C classes has floor(n / C) of them or
  one more, and the seed chooses which have one more.

  Attributes:
    grid: the classes.
    train_images: pictures of the training split.
    valid_images: pictures of the validation split.
    test_images: pictures of the test split.
    seed: seed of the pictures, and of the classes that have one more.
  """

  grid: Grid = EVERY_CLASS
  train_images: int = 10 * NUM_CLASSES
  valid_images: int = NUM_CLASSES // 10
  test_images: int = NUM_CLASSES // 10
  seed: int = 0

  @property
  def vocab(self) -> int:
    """The number of classes of the grid."""
    return self.grid.num_classes

  def split(self, name: str) -> "Drawings":
    """Return the pictures of "train", "valid" or "test"."""
    position, counts = SPLITS.index(name), [getattr(self, f"{split}_images") for split in SPLITS]
    first = int(np.random.default_rng(self.seed).integers(MOST)) + sum(counts[:position])
    order = np.random.default_rng([self.seed, position]).permutation(self.vocab)
    classes = np.resize(order, counts[position]).astype(np.int32)
    numbers = first + np.arange(len(classes))
    inputs = np.stack([self.grid.classes[classes], numbers], axis=-1).astype(np.int32)
    return Drawings(inputs, classes)

  def fingerprint(self) -> str:
    """Return a hash of the fields, which determine the pictures."""
    return content_hash([repr(self)])


@dataclasses.dataclass(frozen=True, eq=False)
class Drawings:
  """The pictures of a split.

  Attributes:
    inputs: the class of each picture among all 184,320, and the number of its drawing.
    targets: the class of each picture in the grid.
  """

  inputs: Int[np.ndarray, "N 2"]
  targets: Int[np.ndarray, "N"]

  def __len__(self) -> int:
    return len(self.targets)

  def __call__(self, number: np.ndarray) -> Batch:
    """Return a batch of these pictures; the picture `NONE` is the last, without a target."""
    targets = np.where(number == NONE, NONE, self.targets[number])
    return {"inputs": self.inputs[number], "targets": targets.astype(np.int32)}


@dataclasses.dataclass(frozen=True)
class Drawn(Examples):
  """Pictures, shuffled anew each epoch: {"inputs": [B, 2], "targets": [B]}, int32.

  From the inputs `shapes.draw` makes the pictures.
  """

  def shapes(self, batch, context):
    del context
    inputs = jax.ShapeDtypeStruct((batch, 2), np.int32)
    return {"inputs": inputs, "targets": jax.ShapeDtypeStruct((batch,), np.int32)}

  def _reader(self, split, context):
    del context
    return split
