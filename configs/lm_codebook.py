"""The small decoder with a codebook of 1024 codes for the whole vocabulary."""

from configs.base import language_model
from vqjax import CodebookHead, assign
from vqjax.lab.config import Experiment


def experiment() -> Experiment:
  return language_model(
    "codebook",
    lambda vocab, dim, _: CodebookHead(
      vocab, dim, codes=1024, assignment_init=assign.FrequentAlone()
    ),
  )
