"""Which pictures does a model see, if a picture is two integers until the model draws it?"""

import dataclasses

import jax
import numpy as np

from vqjax.lab.data.attributes import EVERY_CLASS, NUM_CLASSES, Grid
from vqjax.lab.data.documents import Examples
from vqjax.lab.data.files import content_hash
from vqjax.lab.data.pipeline import NONE, Batch
from vqjax.lab.data.source import SPLITS, Prepared

MOST = 2**30
"""Pictures of a data set: so many numbers of drawings are left to each seed."""


@dataclasses.dataclass(frozen=True)
class Shapes(Prepared):
  """Pictures of the classes of a grid; no picture is in two splits, or twice in one.

  Source: LLM Vocabulary Compression for Low-Compute Environments, Appendix C.1: "one attribute from
  each class was randomly chosen" for each of about 2 M pictures. We read it as: of each kind of
  attribute a value was drawn, so that any of the 184,320 classes is as likely and has about ten
  pictures, by chance. Here they are dealt out: in a split of n pictures each of C classes has
  floor(n / C) of them or one more, and which have one more is drawn.

  Attributes:
    grid: the classes.
    train_images: pictures of the training split.
    valid_images: of the validation split.
    test_images: of the test split.
    seed: which pictures, and which classes have one more.

  Raises:
    ValueError: a split without pictures, more than 2^30 in all, or a seed outside [0, 2^32).
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
        raise ValueError(f"data.{name}_images {count} is below 1; every split needs some")
    if sum(counts.values()) > MOST:
      raise ValueError(f"{sum(counts.values())} pictures are more than {MOST}; draw fewer")
    if not 0 <= self.seed < 2**32:
      raise ValueError(f"data.seed {self.seed} is outside [0, 2^32); give a number in it")

  def _counts(self) -> dict[str, int]:
    return {name: getattr(self, f"{name}_images") for name in SPLITS}

  @property
  def vocab(self) -> int:
    """The classes of the grid."""
    return self.grid.num_classes

  def split(self, name: str) -> "Drawings":
    """The pictures of "train", "valid" or "test"."""
    if name not in SPLITS:
      raise ValueError(f"there is no split {name!r}; the splits are {', '.join(SPLITS)}")
    place, counts = SPLITS.index(name), self._counts()
    first = int(np.random.default_rng(self.seed).integers(MOST))
    first += sum(counts[before] for before in SPLITS[:place])
    order = np.random.default_rng([self.seed, place]).permutation(self.vocab)
    return Drawings(self.grid, np.resize(order, counts[name]).astype(np.int32), first)

  def fingerprint(self) -> str:
    """Of the fields: they say which pictures."""
    return content_hash([repr(self)])


@dataclasses.dataclass(frozen=True, eq=False)
class Drawings:
  """The pictures of a split.

  Attributes:
    grid: what the classes are numbers in.
    classes: of each picture, int32.
    first: number of the first picture's drawing; the others follow.
  """

  grid: Grid
  classes: np.ndarray
  first: int

  def __len__(self) -> int:
    return len(self.classes)

  def __call__(self, number: np.ndarray) -> Batch:
    """A batch of these pictures; the picture `NONE` is the last one, without a target."""
    place = np.where(number == NONE, len(self) - 1, number)
    own = self.classes[place]
    inputs = np.stack([self.grid.classes[own], self.first + place], axis=-1)
    targets = np.where(number == NONE, NONE, own)
    return {"inputs": inputs.astype(np.int32), "targets": targets.astype(np.int32)}


@dataclasses.dataclass(frozen=True)
class Drawn(Examples):
  """Pictures, shuffled anew each epoch: {"inputs": [B, 2], "targets": [B]}, int32.

  The inputs are the class among all 184,320 and the number of the drawing, of which `shapes.draw`
  makes the picture; the targets are classes of the grid.
  """

  def shapes(self, batch, context):
    del context
    pairs = jax.ShapeDtypeStruct((batch, 2), np.int32)
    return {"inputs": pairs, "targets": jax.ShapeDtypeStruct((batch,), np.int32)}

  def _reader(self, split, context):
    del context
    if not isinstance(split, Drawings):
      raise ValueError("these data are no drawings; choose Shapes(), or another loader")
    return split
