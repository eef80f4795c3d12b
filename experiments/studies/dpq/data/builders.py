"""Builders of TensorFlow Datasets for labelled texts and translations.

`python -m vqjax.lab.data.build NAME --imports experiments.studies.dpq.data.builders` runs them
without TensorFlow.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from experiments.studies.dpq.data.labelled import Columns
from experiments.studies.dpq.data.pairs import paired_lines

ZHANG = {
  "ag_news": ("World", "Sports", "Business", "Sci/Tech"),
  "yahoo_answers": (
    "Society & Culture",
    "Science & Mathematics",
    "Health",
    "Education & Reference",
    "Computers & Internet",
    "Sports",
    "Business & Finance",
    "Entertainment & Music",
    "Family & Relationships",
    "Politics & Government",
  ),
  "dbpedia": (
    *("Company", "EducationalInstitution", "Artist", "Athlete", "OfficeHolder"),
    *("MeanOfTransportation", "Building", "NaturalPlace", "Village", "Animal", "Plant", "Album"),
    *("Film", "WrittenWork"),
  ),
  "yelp_review_polarity": ("1", "2"),
  "yelp_review_full": ("1", "2", "3", "4", "5"),
}
"""Dataset of Zhang et al., Character-level convolutional networks, 2015 -> names of its classes."""


class VqjaxZhang(tfds.core.GeneratorBasedBuilder):
  """Texts with a class each, from train.csv and test.csv; classes count from 1."""

  VERSION = tfds.core.Version("1.0.0")
  BUILDER_CONFIGS: ClassVar[list] = [
    tfds.core.BuilderConfig(name=name, description=f"{len(classes)} classes")
    for name, classes in ZHANG.items()
  ]
  MANUAL_DOWNLOAD_INSTRUCTIONS = "Give the folder of train.csv and test.csv as --manual_dir.\n"
  url_infos: ClassVar[dict] = {}

  def _info(self) -> tfds.core.DatasetInfo:
    label = tfds.features.ClassLabel(names=ZHANG[self.builder_config.name])
    return tfds.core.DatasetInfo(
      builder=self,
      description=self.__doc__,
      features=tfds.features.FeaturesDict({"text": tfds.features.Text(), "label": label}),
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
    folder = Path(dl_manager.manual_dir)
    return {name: self._generate_examples(folder / f"{name}.csv") for name in ("train", "test")}

  def _generate_examples(self, path: Path) -> Iterator[tuple[int, dict]]:
    with path.open(encoding="utf-8", newline="") as lines:
      width = len(next(csv.reader(lines)))
    columns = Columns(path.name, label=0, texts=range(1, width), first=1)
    examples = columns.read(path, len(ZHANG[self.builder_config.name]))
    for number, example in enumerate(examples):
      yield number, example._asdict()


class VqjaxIwslt15(tfds.core.GeneratorBasedBuilder):
  """English and Vietnamese talks: train, tst2012 (validation), tst2013 (test)."""

  VERSION = tfds.core.Version("1.0.0")
  MANUAL_DOWNLOAD_INSTRUCTIONS = (
    "Give the folder of train.en, train.vi, tst2012.en, tst2012.vi, tst2013.en and tst2013.vi, as"
    " the Stanford NLP group prepared them, as --manual_dir.\n"
  )
  url_infos: ClassVar[dict] = {}

  def _info(self) -> tfds.core.DatasetInfo:
    sides = {"en": tfds.features.Text(), "vi": tfds.features.Text()}
    return tfds.core.DatasetInfo(
      builder=self, description=self.__doc__, features=tfds.features.FeaturesDict(sides)
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
    folder = Path(dl_manager.manual_dir)
    names = {"train": "train", "validation": "tst2012", "test": "tst2013"}
    return {split: self._generate_examples(folder, name) for split, name in names.items()}

  def _generate_examples(self, folder: Path, name: str) -> Iterator[tuple[int, dict]]:
    pairs = paired_lines(folder / f"{name}.en", folder / f"{name}.vi")
    for number, (english, vietnamese) in enumerate(pairs):
      yield number, {"en": english, "vi": vietnamese}
