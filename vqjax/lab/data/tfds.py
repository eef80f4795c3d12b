"""Sources that read prepared datasets of TensorFlow Datasets, without TensorFlow."""

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from vqjax.lab.data.files import content_hash, import_extra, outline
from vqjax.lab.data.source import SPLITS, Source

CHUNK = 1024
"""Number of examples read at once; one by one takes ten times as long."""


class Prebuilt(Source):
  """A prepared dataset of `tensorflow_datasets`, in its own order, never downloaded.

  Its format must have random access, like array_record, which needs no TensorFlow. A subclass has
  the fields `name`, `train`, `valid`, `test` and `data_dir`.
  """

  builders: ClassVar[str] = "vqjax.lab.data.builders"
  """Module of builders that are known beside those of the library."""

  def _rows(self, split: str, *fields: str) -> Iterator[tuple[Any, ...]]:
    """Yield the features that these fields name, of every example of a split.

    Raises:
      ValueError: the dataset has no such split or feature.
    """
    builder = self._builder()
    features = [getattr(self, field) for field in fields]
    for field, feature in zip(fields, features, strict=True):
      if feature not in builder.info.features:
        raise ValueError(
          f"`{type(self).__name__}.{field}` must be one of {', '.join(builder.info.features)};"
          f" got {feature!r}. Name one of them."
        )
    examples = builder.as_data_source(self._split(builder, split))
    for first in range(0, len(examples), CHUNK):
      chunk = range(first, min(first + CHUNK, len(examples)))
      for example in examples.__getitems__(list(chunk)):
        yield tuple(example[feature] for feature in features)

  def _identity(self, *fields: str) -> str:
    """A hash of the prepared files (outlines of large ones), splits and fields."""
    builder = self._builder()
    files = sorted({Path(f) for info in builder.info.splits.values() for f in info.filepaths})
    splits = [self._split(builder, name) for name in SPLITS]
    return content_hash([builder.info.full_name, *fields, *splits, *map(outline, files)])

  def _split(self, builder: Any, split: str) -> str:
    """The dataset's own name of a split."""
    name = getattr(self, split)
    if name.split("[")[0] not in builder.info.splits:
      raise ValueError(
        f"`{type(self).__name__}.{split}` must be one of {', '.join(builder.info.splits)}, or a"
        f" slice of one; got {name!r}. Name one of them."
      )
    return name

  def _builder(self) -> Any:
    # Imported here, since it takes half a second that a run on other text does not need.
    tensorflow_datasets = import_extra("tensorflow_datasets")
    importlib.import_module(self.builders)  # registers them

    try:
      builder = tensorflow_datasets.builder(self.name, data_dir=self.data_dir)
    except tensorflow_datasets.core.DatasetNotFoundError:
      raise ValueError(
        f"`{type(self).__name__}.name` must be a dataset in {self.data_dir or 'the default folder'}"
        f" or one of tensorflow_datasets.list_builders(); got {self.name!r}. Correct the"
        " name, or set data_dir."
      ) from None
    if not builder.is_prepared():
      raise FileNotFoundError(
        f"`{type(self).__name__}.data_dir` must hold {self.name}; got none in {builder.data_path}."
        f" Prepare it with `python -m vqjax.lab.data.build {self.name} --imports {self.builders}"
        " --data_dir ...`."
      )
    return builder


@dataclasses.dataclass(frozen=True)
class TFDS(Prebuilt):
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

  name: str = "vqjax_penn_treebank"
  text: str = "text"
  train: str = "train"
  valid: str = "validation"
  test: str = "test"
  data_dir: str | None = None

  def _documents(self, split: str) -> Iterator[str]:
    for (text,) in self._rows(split, "text"):
      yield text.decode("utf-8")

  def fingerprint(self) -> str:
    """Return a hash of the prepared files, the feature and the splits."""
    return self._identity(self.text)
