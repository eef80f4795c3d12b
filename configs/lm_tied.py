"""The small decoder whose head shares the embedding's table."""

from configs.base import language_model
from vqjax import DenseHead
from vqjax.lab.config import Experiment


def experiment() -> Experiment:
  return language_model(
    "tied", lambda vocab, dim, embedding: DenseHead(vocab, dim, embedding=embedding)
  )
