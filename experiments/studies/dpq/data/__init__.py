"""Data of the study: labelled texts, translations, and tasks made of plain text."""

from experiments.studies.dpq.data.documents import Continued, Documents, Intruded, Pairs
from experiments.studies.dpq.data.labelled import AGNews, DBpedia, LabelledSource, Zhang
from experiments.studies.dpq.data.masked import Masked
from experiments.studies.dpq.data.pairs import Mirrored, Multi30k, PairedSource, PairedText

__all__ = [
  "AGNews",
  "Continued",
  "DBpedia",
  "Documents",
  "Intruded",
  "LabelledSource",
  "Masked",
  "Mirrored",
  "Multi30k",
  "PairedSource",
  "PairedText",
  "Pairs",
  "Zhang",
]
