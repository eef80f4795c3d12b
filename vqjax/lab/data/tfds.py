"""A source that reads prepared datasets of TensorFlow Datasets, without TensorFlow."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vqjax.lab.data.corpus_files import content_hash, import_extra, outline
from vqjax.lab.data.source import SPLITS, Source

__all__ = ["TFDS"]

CHUNK = 1024
"""Number of examples read at once; one by one takes ten times as long."""


@dataclasses.dataclass(frozen=True)
class TFDS(Source):
  """A prepared dataset of `tensorflow_datasets`, in its own order, never downloaded.

  Its format must have random access, like array_record, which needs no TensorFlow.

  Attributes:
    name: name of the dataset, with its config and version where it has several.
    text: the feature that holds a document.
    train: name of the training split, or a slice such as `train[:90%]`.
    valid: name or slice of the validation split.
    test: name or slice of the test split.
    data_dir: folder of the prepared datasets; None: the default of `tensorflow_datasets`.
  """

  name: str
  text: str = "text"
  train: str = "train"
  valid: str = "validation"
  test: str = "test"
  data_dir: str | None = None

  def _documents(self, split: str) -> Iterator[str]:
    builder = self._builder()
    if self.text not in builder.info.features:
      raise ValueError(
        f"`TFDS.text` must be one of {', '.join(builder.info.features)}; got {self.text!r}. Name"
        " one of them."
      )
    examples = builder.as_data_source(self._split(builder, split))
    for first in range(0, len(examples), CHUNK):
      chunk = range(first, min(first + CHUNK, len(examples)))
      for example in examples.__getitems__(list(chunk)):
        yield example[self.text].decode("utf-8")

  def fingerprint(self) -> str:
    """Return a hash of the prepared files (outlines of large ones), feature and splits."""
    builder = self._builder()
    files = sorted({Path(f) for info in builder.info.splits.values() for f in info.filepaths})
    splits = [self._split(builder, name) for name in SPLITS]
    return content_hash([builder.info.full_name, self.text, *splits, *map(outline, files)])

  def _split(self, builder: Any, split: str) -> str:
    """The dataset's own name of a split."""
    name = getattr(self, split)
    if name.split("[")[0] not in builder.info.splits:
      raise ValueError(
        f"`TFDS.{split}` must be one of {', '.join(builder.info.splits)}, or a"
        f" slice of one; got {name!r}. Name one of them."
      )
    return name

  def _builder(self) -> Any:
    # Imported here, since it takes half a second that a run on other text does not need.
    tensorflow_datasets = import_extra("tensorflow_datasets")
    try:
      builder = tensorflow_datasets.builder(self.name, data_dir=self.data_dir)
    except tensorflow_datasets.core.DatasetNotFoundError:
      raise ValueError(
        f"`TFDS.name` must be a dataset in {self.data_dir or 'the default folder'}"
        f" or one of tensorflow_datasets.list_builders(); got {self.name!r}. Correct the"
        " name, or set data_dir."
      ) from None
    if not builder.is_prepared():
      raise FileNotFoundError(
        f"`TFDS.data_dir` must hold {self.name}; got none in {builder.data_path}. Prepare it with"
        f" `python -m vqjax.lab.data.build {self.name} --data_dir ...`."
      )
    return builder
