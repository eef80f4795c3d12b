"""A dataset of TensorFlow Datasets: the lines of a folder's files, in their order."""

from pathlib import Path

import tensorflow_datasets as tfds


class VqjaxLines(tfds.core.GeneratorBasedBuilder):
  """Lines of train.txt, validation.txt and test.txt."""

  VERSION = tfds.core.Version("1.0.0")
  MANUAL_DOWNLOAD_INSTRUCTIONS = "Give the folder of the files as --manual_dir."
  # To find checksums, the library would import a package that it does not declare.
  url_infos = {}  # noqa: RUF012

  def _info(self):
    features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
    return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

  def _split_generators(self, dl_manager):
    folder = Path(dl_manager.manual_dir)
    return {name: self._generate_examples(folder / f"{name}.txt") for name in SPLITS}

  def _generate_examples(self, path):
    for number, line in enumerate(path.read_text("utf-8").splitlines()):
      yield number, {"text": line}


SPLITS = ("train", "validation", "test")
