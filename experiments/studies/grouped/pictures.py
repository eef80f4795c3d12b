"""The data set of the pictures that `shapes` draws, and its loader."""

import dataclasses

import jax
import numpy as np

from experiments.studies.grouped.shapes import NUM_CLASSES, Grid
from vqjax.lab.data.corpus_files import content_hash
from vqjax.lab.data.pipeline import NONE, Batch, Examples
from vqjax.lab.data.source import SPLITS, Prepared

EVERY_CLASS = Grid()

MOST = 2**30
"""Largest number of pictures in a data set: each seed has this many numbers of drawings."""


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

  Raises:
    ValueError: a split has no pictures, there are more than 2^30, or `seed` is out of range.
  """

  grid: Grid = EVERY_CLASS
  train_images: int = 10 * NUM_CLASSES
  valid_images: int = NUM_CLASSES // 10
  test_images: int = NUM_CLASSES // 10
  seed: int = 0

  def __post_init__(self):
    counts = self._counts()
    for name, count in counts.items():
      if count < 1:
        raise ValueError(f"`data.{name}_images` must be at least 1; got {count}. Raise it.")
    if sum(counts.values()) > MOST:
      raise ValueError(f"the splits must have at most {MOST} pictures; got {counts}. Take fewer.")
    if not 0 <= self.seed < 2**32:
      raise ValueError(f"`data.seed` must be in [0, 2^32); got {self.seed}. 0 is usual.")

  def _counts(self) -> dict[str, int]:
    return {name: getattr(self, f"{name}_images") for name in SPLITS}

  @property
  def vocab(self) -> int:
    """The number of classes of the grid."""
    return self.grid.num_classes

  def split(self, name: str) -> "Drawings":
    """Return the pictures of "train", "valid" or "test"."""
    if name not in SPLITS:
      raise ValueError(f"`name` must be one of {', '.join(SPLITS)}; got {name!r}. Name one.")
    position, counts = SPLITS.index(name), self._counts()
    first = int(np.random.default_rng(self.seed).integers(MOST))
    first += sum(counts[before] for before in SPLITS[:position])
    order = np.random.default_rng([self.seed, position]).permutation(self.vocab)
    return Drawings(self.grid, np.resize(order, counts[name]).astype(np.int32), first)

  def fingerprint(self) -> str:
    """Return a hash of the fields, which determine the pictures."""
    return content_hash([repr(self)])


@dataclasses.dataclass(frozen=True, eq=False)
class Drawings:
  """The pictures of a split.

  Attributes:
    grid: the grid that numbers the classes.
    classes: int32, the class of each picture in the grid.
    first: number of the first picture's drawing; the others follow.
  """

  grid: Grid
  classes: np.ndarray
  first: int

  def __len__(self) -> int:
    return len(self.classes)

  def __call__(self, number: np.ndarray) -> Batch:
    """Return a batch of these pictures; the picture `NONE` is without a target."""
    position = np.where(number == NONE, len(self) - 1, number)
    own = self.classes[position]
    inputs = np.stack([self.grid.classes[own], self.first + position], axis=-1)
    targets = np.where(number == NONE, NONE, own)
    return {"inputs": inputs.astype(np.int32), "targets": targets.astype(np.int32)}


@dataclasses.dataclass(frozen=True)
class Drawn(Examples):
  """Pictures, shuffled anew each epoch: {"inputs": [B, 2], "targets": [B]}, int32.

  The inputs are the class among all 184,320 and the number of the drawing, from which
  `shapes.draw` makes the picture; the targets are classes of the grid.
  """

  def shapes(self, batch, context):
    del context
    inputs = jax.ShapeDtypeStruct((batch, 2), np.int32)
    return {"inputs": inputs, "targets": jax.ShapeDtypeStruct((batch,), np.int32)}

  def _reader(self, split, context):
    del context
    if not isinstance(split, Drawings):
      raise ValueError(f"`split` must be drawings; got {type(split).__name__}. Choose Shapes().")
    return split
