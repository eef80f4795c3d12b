"""How do Penn Treebank and WikiText become datasets of TensorFlow Datasets?"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from vqjax.data.corpora import PennTreebank, WikiText
from vqjax.data.source import Source

MANUAL = """\
Put the three files of words, whose names say train, valid and test, into the folder given as
--manual_dir, or into {folder} under $VQJAX_DATA.
"""


class _Lines(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Lines of three files, in their order, empty ones included."""

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
