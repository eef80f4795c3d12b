"""The small decoder that predicts a group first, then a token inside it."""

from configs.base import language_model
from vqjax import GroupedHead
from vqjax.lab.config import Experiment


def experiment() -> Experiment:
  return language_model("grouped", lambda vocab, dim, _: GroupedHead(vocab, dim))
