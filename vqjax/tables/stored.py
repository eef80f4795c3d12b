"""Rows that stay compressed: decoded by the host when they are looked up."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vqjax.embeddings import Embedding
from vqjax.embeddings.base import Arrays
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.tables import container
from vqjax.types import Dtype
from vqjax.variables import Declaration

__all__ = ["KeptRows", "StoredEmbedding"]

KEPT = 2**26
"""Bytes of decoded rows that are kept."""


class StoredEmbedding(Embedding):
  """Rows that are decoded from a file when they are looked up, by the host.

  It has no variables, is not trained and cannot be tied to a head.

  Attributes:
    decode: the rows of tokens in [0, V): int [n] -> float32 [n, D], such as `KeptRows`.
    dtype: dtype of the returned vectors; None: float32.
  """

  decode: Callable[[np.ndarray], np.ndarray]
  dtype: Dtype | None = None

  def declare(self) -> Declaration:
    """Nothing: the rows are in the file."""
    return {}

  def flops_per_token(self) -> int:
    """Zero: the host decodes."""
    return 0

  def rows_of(self, arrays: Arrays) -> RowFactory:
    """All rows, decoded."""
    return as_row_factory(self._vectors(arrays, jnp.arange(self.vocab)))

  def _vectors(self, arrays, token):
    del arrays
    shape = jax.ShapeDtypeStruct((*token.shape, self.dim), jnp.float32)
    vectors = jax.pure_callback(self._read, shape, token, vmap_method="expand_dims")
    return vectors.astype(self.dtype or jnp.float32)

  def _read(self, token):
    token = np.asarray(token)
    return self.decode(token.ravel()).reshape(*token.shape, self.dim).astype(np.float32)


class KeptRows:
  """Rows of an entropy-coded table, and the blocks of them that were decoded last."""

  def __init__(self, table: container.CompressedTable):
    self._table = table
    self._most = max(1, KEPT // (4 * table.restart * table.shape[1]))
    self._blocks: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()
    self._lock = threading.Lock()

  def __call__(self, ids: np.ndarray) -> np.ndarray:
    """The rows of tokens, float32 [n, D]."""
    block, row = np.divmod(ids, self._table.restart)
    found = np.empty((len(ids), self._table.shape[1]), np.float32)
    with self._lock:
      wanted, where = np.unique(block, return_inverse=True)
      for first in range(0, len(wanted), self._most):
        self._decode(wanted[first : first + self._most].tolist())
        for i in np.flatnonzero((where >= first) & (where < first + self._most)).tolist():
          found[i] = self._blocks[int(block[i])][row[i]]
    return found

  def _decode(self, wanted):
    missing = np.array([number for number in wanted if number not in self._blocks], np.int64)
    if len(missing):
      # By NumPy, since this is a callback.
      rows = self._table.blocks_of_rows(missing, compiled=False)
      self._blocks |= zip(missing.tolist(), rows)
    for number in wanted:
      self._blocks.move_to_end(number)
    while len(self._blocks) > self._most:
      self._blocks.popitem(last=False)
