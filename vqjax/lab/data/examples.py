"""In which batches does a model see whole documents with a class each?"""

import dataclasses

import jax
import numpy as np

from vqjax.lab.data.cache import TokenSplit
from vqjax.lab.data.documents import DocumentRows, Examples
from vqjax.lab.data.pipeline import NONE, Batch


@dataclasses.dataclass(frozen=True)
class Documents(Examples):
  """Documents and their classes, shuffled anew each epoch: {"inputs": [B, T], "targets": [B]}.

  A document has its first T tokens, without the one that ends it, and `NONE` behind them.
  """

  def shapes(self, batch, context):
    row = jax.ShapeDtypeStruct((batch, context), np.int32)
    return {"inputs": row, "targets": jax.ShapeDtypeStruct((batch,), np.int32)}

  def _reader(self, split, context):
    return _Reader(split, context)


class _Reader:
  def __init__(self, split: TokenSplit, context: int):
    if split.labels is None:
      raise ValueError("the documents have no classes; choose labelled data, such as AGNews()")
    if len(split.labels) != split.documents:
      raise ValueError(f"{split.documents} documents have {len(split.labels)} classes")
    self.rows, self.labels = DocumentRows(split, context), split.labels

  def __len__(self) -> int:
    return len(self.labels)

  def __call__(self, number: np.ndarray) -> Batch:
    classes = np.where(number == NONE, NONE, self.labels[number])
    return {"inputs": self.rows(number), "targets": classes.astype(np.int32)}
