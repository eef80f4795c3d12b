"""A decoder of a billion parameters for a pod, with any head of `large.HEADS`."""

from configs.large import VOCAB, language_model
from vqjax.lab.config import Experiment


def experiment(head: str = "dense", vocab: int = VOCAB) -> Experiment:
  return language_model("lm-1b", head, vocab, dim=2048, layers=20, context=2048, batch=32)
