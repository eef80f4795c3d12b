"""How do corpora, labelled texts and translations become datasets of TensorFlow Datasets?"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from vqjax.lab.data.corpora import PennTreebank, WikiText
from vqjax.lab.data.labelled import csv_example
from vqjax.lab.data.pairs import paired_lines
from vqjax.lab.data.source import Source
from vqjax.lab.data.stories import stories_of

MANUAL = """\
Put the three files of words, whose names say train, valid and test, into the folder given as
--manual_dir, or into {folder} under $VQJAX_DATA.
"""


class _Texts(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Texts of files, in their order."""

  VERSION = tfds.core.Version("1.0.0")
  # Nothing is downloaded, so there are no checksums. Finding that out by itself, the library
  # imports a package that it does not declare.
  url_infos: ClassVar[dict] = {}

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description=self.__doc__,
      features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
      disable_shuffling=True,
    )


class _Lines(_Texts, skip_registration=True):
  """Lines of three files, in their order, empty ones included."""

  def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
    source = self._source(dl_manager)
    names = {"train": "train", "validation": "valid", "test": "test"}
    return {theirs: self._generate_examples(source, ours) for theirs, ours in names.items()}

  def _generate_examples(self, source: Source, split: str) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(source.documents(split)):
      yield number, {"text": line}

  def _source(self, dl_manager: Any) -> Source:
    """The corpus in the manual folder if that has files, else the one under `$VQJAX_DATA`."""
    source = self._corpus()
    try:
      manual = Path(dl_manager.manual_dir)
    except AssertionError:  # how the library says that there is no such folder
      return source
    return type(source)(path=str(manual)) if any(manual.iterdir()) else source

  def _corpus(self) -> Source:
    raise TypeError(f"{type(self).__name__} does not say which corpus it builds: define _corpus")


class VqjaxPennTreebank(_Lines):
  """Penn Treebank in Mikolov's version, a line an example."""

  MANUAL_DOWNLOAD_INSTRUCTIONS = MANUAL.format(folder="ptb")

  def _corpus(self) -> Source:
    return PennTreebank()


class VqjaxWikiText(_Lines):
  """WikiText at the level of words, a line an example, with the empty lines."""

  BUILDER_CONFIGS: ClassVar[list] = [
    tfds.core.BuilderConfig(name="2", description="WikiText-2"),
    tfds.core.BuilderConfig(name="103", description="WikiText-103"),
  ]
  MANUAL_DOWNLOAD_INSTRUCTIONS = MANUAL.format(folder="wikitext-2 or wikitext-103")

  def _corpus(self) -> Source:
    return WikiText(path=f"wikitext-{self.builder_config.name}")


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
"""Data of Zhang et al., Character-level convolutional networks, 2015 -> names of its classes."""


class VqjaxZhang(tfds.core.GeneratorBasedBuilder):
  """Texts with a class each: train.csv and test.csv, whose first column counts classes from 1."""

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
    count = len(ZHANG[self.builder_config.name])
    with path.open(encoding="utf-8", newline="") as lines:
      for number, row in enumerate(csv.reader(lines)):
        texts = tuple(range(1, len(row)))
        found = csv_example(row, 0, 1, texts, count, f"{path}, row {number + 1}")
        yield number, {"text": found.text, "label": found.label}


class VqjaxTinyStories(_Texts):
  """TinyStories of Eldan and Li, 2023: a story an example, in the order of the files."""

  MANUAL_DOWNLOAD_INSTRUCTIONS = (
    "Give the folder of TinyStories-train.txt and TinyStories-valid.txt as --manual_dir.\n"
  )

  def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
    folder = Path(dl_manager.manual_dir)
    names = {"train": "train", "validation": "valid"}
    return {
      split: self._generate_examples(folder / f"TinyStories-{name}.txt")
      for split, name in names.items()
    }

  def _generate_examples(self, path: Path) -> Iterator[tuple[int, dict]]:
    for number, story in enumerate(stories_of(path)):
      yield number, {"text": story}


class VqjaxIwslt15(tfds.core.GeneratorBasedBuilder):
  """English and Vietnamese talks: lines of train, tst2012 (validation) and tst2013 (test)."""

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
    files = (folder / f"{name}.{language}" for language in ("en", "vi"))
    for number, (english, vietnamese) in enumerate(paired_lines(*files)):
      yield number, {"en": english, "vi": vietnamese}
