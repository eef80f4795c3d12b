"""How is a dataset of TensorFlow Datasets read without TensorFlow?"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vqjax.data.files import content_hash, outline
from vqjax.data.source import SPLITS, Source

CHUNK = 1024
"""Examples read at once: one by one takes ten times as long."""


@dataclasses.dataclass(frozen=True)
class TFDS(Source):
  """A prepared dataset of `tensorflow_datasets`, in its own order; nothing is downloaded.

  It has to be in a format of random access, such as array_record, which needs no TensorFlow.

  Attributes:
    name: of the dataset, with its config and version if need be: `vqjax_wiki_text/2`.
    text: the feature that holds a document.
    train: what the dataset calls the training split; slices such as `train[:90%]` work.
    valid: the same for validation.
    test: the same for test.
    data_dir: folder of the prepared datasets; None: that of `tensorflow_datasets`.
  """

  name: str = "vqjax_penn_treebank"
  text: str = "text"
  train: str = "train"
  valid: str = "validation"
  test: str = "test"
  data_dir: str | None = None

  def _documents(self, split: str) -> Iterator[str]:
    builder = self._builder()
    features = builder.info.features
    if self.text not in features:
      raise ValueError(
        f"{self.name} has no feature {self.text!r}; set TFDS.text to one of {', '.join(features)}"
      )
    examples = builder.as_data_source(self._split(builder, split))
    for first in range(0, len(examples), CHUNK):
      chunk = range(first, min(first + CHUNK, len(examples)))
      for example in examples.__getitems__(list(chunk)):
        yield example[self.text].decode("utf-8")

  def fingerprint(self) -> str:
    """A hash of the prepared files (the outlines of large ones), the feature and the splits."""
    builder = self._builder()
    files = sorted({Path(f) for info in builder.info.splits.values() for f in info.filepaths})
    splits = [self._split(builder, name) for name in SPLITS]
    return content_hash([builder.info.full_name, self.text, *splits, *map(outline, files)])

  def _split(self, builder: Any, split: str) -> str:
    """The dataset's own name of a split, which it has."""
    name = getattr(self, split)
    if name.split("[")[0] not in builder.info.splits:
      raise ValueError(
        f"{self.name} has no split {name!r}; set TFDS.{split} to one of "
        f"{', '.join(builder.info.splits)}, or to a slice of one"
      )
    return name

  def _builder(self) -> Any:
    # Imported here: it takes half a second that a run on other text need not pay.
    import tensorflow_datasets

    import vqjax.data.builders  # noqa: F401  registers this package's own datasets

    try:
      builder = tensorflow_datasets.builder(self.name, data_dir=self.data_dir)
    except tensorflow_datasets.core.DatasetNotFoundError:
      raise ValueError(
        f"there is no dataset {self.name!r}: not in {self.data_dir or 'the default data_dir'}, "
        "nor known to tensorflow_datasets; see the names in tensorflow_datasets.list_builders()"
      ) from None
    if not builder.is_prepared():
      raise FileNotFoundError(
        f"{builder.data_path} does not hold {self.name}; prepare it with `python -m "
        f"vqjax.data.build {self.name} --data_dir ...`, or set TFDS.data_dir"
      )
    return builder
