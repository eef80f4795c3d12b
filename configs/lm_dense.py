"""The small decoder with an ordinary softmax head: the baseline."""

from configs.base import language_model
from vqjax import DenseHead
from vqjax.lab.config import Experiment


def experiment() -> Experiment:
  return language_model("dense", lambda vocab, dim, _: DenseHead(vocab, dim))
