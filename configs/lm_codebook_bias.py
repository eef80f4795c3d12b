"""How much of a codebook's loss does one bias for each token win back?"""

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
