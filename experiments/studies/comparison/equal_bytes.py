"""One trained table on manual pages, made small by this library and by what others do.

cd experiments/studies/comparison; vqjax study equal_bytes.py --out equal_bytes
"""

import dataclasses

from experiments.studies.comparison import manuals
from experiments.studies.comparison.ptb import SIZES
from experiments.studies.comparison.rivals import Additive, Feedback, LowRankInt8, UniformBlocks
from experiments.studies.comparison.rows import rows
from vqjax import Product
from vqjax.lab.study import Compressed, Study

TABLE = "tied-contexts"


def study() -> Study:
  """The study, of the trained table of manual pages."""
  given = manuals.study()
  made = rows(SIZES, (TABLE, f"{TABLE}-file", f"{TABLE}-memory"), (TABLE,))
  made |= {
    "gptq": Feedback(TABLE, label="GPTQ, steps by counts, an ideal coder"),
    "additive": Additive(TABLE, 64, 9, label="two additive codes for 9 numbers, as AQLM"),
    "product": Compressed(TABLE, 1 / 16, Product(), label="product codes"),
    "low-rank": LowRankInt8(TABLE, label="low rank, factors in int8"),
    "int2": UniformBlocks(TABLE, 2, label="int2, a scale a row"),
    "int2-blocks": UniformBlocks(TABLE, 2, 40, label="int2, a scale for 40 numbers"),
    "int3": UniformBlocks(TABLE, 3, label="int3, a scale a row"),
    "int4": UniformBlocks(TABLE, 4, label="int4, a scale a row"),
  }
  return dataclasses.replace(given, rows=made)
