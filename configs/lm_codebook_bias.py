"""The small decoder with a codebook of 1024 codes and a bias for each token."""

from configs.base import language_model
from vqjax import CodebookHead, assign
from vqjax.lab.config import Experiment


def experiment() -> Experiment:
  return language_model(
    "codebook+bias",
    lambda vocab, dim, _: CodebookHead(
      vocab, dim, codes=1024, assignment_init=assign.FrequentAlone(), token_bias=True
    ),
  )
