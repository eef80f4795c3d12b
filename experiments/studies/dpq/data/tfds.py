"""Labelled texts and translations of TensorFlow Datasets."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from experiments.studies.dpq.data.labelled import Labelled, LabelledSource
from experiments.studies.dpq.data.pairs import PairedSource
from vqjax.lab.data.tfds import Prebuilt

BUILDERS = "experiments.studies.dpq.data.builders"


@dataclasses.dataclass(frozen=True)
class LabelledTFDS(Prebuilt, LabelledSource):
  """A prepared dataset of texts with a class each, such as `vqjax_zhang/ag_news`.

  Attributes:
    name: name of the dataset.
    text: the feature that holds a text.
    label: the feature that holds its class, a number from 0.
    train: name of the training split, or a slice such as `train[:90%]`.
    valid: name or slice of the validation split.
    test: name or slice of the test split.
    data_dir: folder of the prepared datasets; None: the default of `tensorflow_datasets`.
  """

  name: str = "vqjax_zhang/ag_news"
  text: str = "text"
  label: str = "label"
  train: str = "train[:95%]"
  valid: str = "train[95%:]"
  test: str = "test"
  data_dir: str | None = None
  builders: ClassVar[str] = BUILDERS

  def examples(self, split: str) -> Iterator[Labelled]:
    """Yield the texts of a split with their classes."""
    for text, label in self._rows(split, "text", "label"):
      yield Labelled(text.decode("utf-8"), int(label))

  @property
  def classes(self) -> tuple[str, ...]:
    """The names of the classes."""
    return tuple(self._builder().info.features[self.label].names)

  def fingerprint(self) -> str:
    """Return a hash of the prepared files, the features and the splits."""
    return self._identity(self.text, self.label)


@dataclasses.dataclass(frozen=True)
class PairedTFDS(Prebuilt, PairedSource):
  """A prepared dataset of translations, such as `wmt19_translate/de-en`.

  Attributes:
    name: name of the dataset.
    source: the feature to translate from.
    target: the feature to translate to.
    train: name of the training split, or a slice such as `train[:90%]`.
    valid: name or slice of the validation split.
    test: name or slice of the test split.
    data_dir: folder of the prepared datasets; None: the default of `tensorflow_datasets`.
  """

  name: str = "wmt19_translate/de-en"
  source: str = "en"
  target: str = "de"
  train: str = "train"
  valid: str = "validation[:50%]"
  test: str = "validation[50%:]"
  data_dir: str | None = None
  builders: ClassVar[str] = BUILDERS

  def pairs(self, split: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a split."""
    for source, target in self._rows(split, "source", "target"):
      yield " ".join(source.decode("utf-8").split()), " ".join(target.decode("utf-8").split())

  def fingerprint(self) -> str:
    """Return a hash of the prepared files, the features and the splits."""
    return self._identity(self.source, self.target)
