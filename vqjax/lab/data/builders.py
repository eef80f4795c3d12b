"""Builders of TensorFlow Datasets for corpora.

`python -m vqjax.lab.data.build NAME` runs them without TensorFlow.
"""

import abc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from vqjax.lab.data.corpora import PennTreebank, WikiText, stories_of
from vqjax.lab.data.source import Source

MANUAL = """\
Put the three files of words, whose names say train, valid and test, into the folder given as
--manual_dir, or into {folder} under $VQJAX_DATA.
"""


class _Texts(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """A dataset with the feature "text", in the order of its files."""

  VERSION = tfds.core.Version("1.0.0")
  # Nothing is downloaded, so there are no checksums. To find that out, the library would import a
  # package that it does not declare.
  url_infos: ClassVar[dict] = {}

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description=self.__doc__,
      features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
      disable_shuffling=True,
    )


class _Lines(_Texts, skip_registration=True):
  """A dataset of the lines of three files, empty ones included."""

  def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
    source = self._source(dl_manager)
    names = {"train": "train", "validation": "valid", "test": "test"}
    return {name: self._generate_examples(source, split) for name, split in names.items()}

  def _generate_examples(self, source: Source, split: str) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(source.documents(split)):
      yield number, {"text": line}

  def _source(self, dl_manager: Any) -> Source:
    """The corpus in the manual folder if it has files, otherwise under `$VQJAX_DATA`."""
    source = self._corpus()
    try:
      manual = Path(dl_manager.manual_dir)
    except AssertionError:  # the library asserts that the folder exists
      return source
    return type(source)(path=str(manual)) if any(manual.iterdir()) else source

  @abc.abstractmethod
  def _corpus(self) -> Source:
    """Return the source that is built, at its default path."""


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


class VqjaxTinyStories(_Texts):
  """TinyStories of Eldan and Li, 2023: one story an example, in order."""

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
