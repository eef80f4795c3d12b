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
  """Rows of an entropy-coded table, of which those that were used last are kept decoded.

  Blocks of a table of tokens are kept whole, because neighbours are about as frequent. Rows of one
  in pages are kept alone: a hash has chosen their neighbours.
  """

  def __init__(self, table: container.CompressedTable):
    self._table, self._unit = table, 1 if table.is_paged else table.restart
    most = max(1, KEPT // (4 * self._unit * table.shape[1]))
    most = min(most, -(-table.shape[0] // self._unit))
    self._rows = np.empty((most, self._unit, table.shape[1]), np.float32)
    self._place: collections.OrderedDict[int, int] = collections.OrderedDict()
    self._lock = threading.Lock()

  def __call__(self, ids: np.ndarray) -> np.ndarray:
    """The rows of tokens, float32 [n, D]."""
    unit, row = np.divmod(ids, self._unit)
    wanted, where = np.unique(unit, return_inverse=True)
    found, most = np.empty((len(ids), self._table.shape[1]), np.float32), len(self._rows)
    with self._lock:
      for first in range(0, len(wanted), most):
        place = self._places(wanted[first : first + most].tolist())
        own = (where >= first) & (where < first + most)
        found[own] = self._rows[place[where[own] - first], row[own]]
    return found

  def _places(self, wanted):
    """Where the units are kept, after those that were not are decoded."""
    missing = [number for number in wanted if number not in self._place]
    if missing:
      ids = np.array(missing)[:, None] * self._unit + np.arange(self._unit)
      # By NumPy, since this is a callback.
      rows = self._table.take(ids.clip(max=self._table.shape[0] - 1), compiled=False)
    for number in wanted:
      if number in self._place:
        self._place.move_to_end(number)
    for number in missing:
      is_full = len(self._place) == len(self._rows)
      place = self._place.popitem(last=False)[1] if is_full else len(self._place)
      self._place[number] = place
    if missing:
      self._rows[[self._place[number] for number in missing]] = rows
    return np.array([self._place[number] for number in wanted])
