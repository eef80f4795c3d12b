"""Studies: rows that are compared with one budget, tuned alike and paired by seed."""

from vqjax.lab.study.compressed import Compressed, Derived, FromCompressed
from vqjax.lab.study.declaration import Row, Study, load_study

__all__ = ["Compressed", "Derived", "FromCompressed", "Row", "Study", "load_study"]
