"""The vocabulary tables of a decoder at any step, and what a step costs.

The step is searched on calibration text; what is reported is measured on text that nothing was
fitted to.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from vqjax.convert.trained_variables import Variables
from vqjax.lm import checkpoints
from vqjax.lm.compression.exports import ROWS
from vqjax.lm.compression.judging import Reference, tables_of, with_tables
from vqjax.lm.models import Transformer
from vqjax.tables import CodedTable, Moments, PackedTable, container
from vqjax.tables.search import PackedTables, Point, Tables

__all__ = ["DecoderTables"]


class DecoderTables:
  """The tables of one model at any step.

  Attributes:
    made: the tables as integers, or as packed bits where that is their form in memory.
  """

  def __init__(
    self,
    model: Transformer,
    variables: Variables,
    moments: Moments,
    form: str = container.UNPACKED,
  ):
    """Check that the moments are those of the model.

    Args:
      form: name of the form of the tables in memory, one of `checkpoints.RUNTIMES`.

    Raises:
      ValueError: the moments have another width or vocabulary.
    """
    self.model, self.variables = model, variables
    self._runtime = checkpoints.RUNTIMES[form]
    tables = tables_of(model, variables)
    kind = PackedTables if form == container.PACKED else Tables
    self.made = kind(tables, moments.of_tables(list(tables)))

  def variables_of(self, tables: Mapping[str, CodedTable | PackedTable]) -> Variables:
    """The variables of the model with the rows that these tables have in memory."""
    made = {}
    for name, own in tables.items():
      rows_VD = own.table()
      for first in range(0, len(rows_VD), ROWS):
        rows_VD[first : first + ROWS] = self._runtime.rounded(rows_VD[first : first + ROWS])
      made[name] = jnp.asarray(rows_VD, self.model.dtype)
      del rows_VD
    return with_tables(self.variables, made)

  def point(self, step: float, reference: Reference | None) -> Point:
    """Size and divergence at a step."""
    size = self.made.size(step)
    if reference is None:
      return Point(step, size, None)
    # The integers are given back before the scores are made.
    student = self.variables_of(self.made.tables_at(step))
    (found,) = reference.compare([student])
    return Point(step, size, float(np.asarray(found["kl"]).mean(dtype=np.float64)))
