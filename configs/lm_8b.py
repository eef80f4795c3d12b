"""A decoder of eight billion parameters for a pod, with any head of `large.HEADS`."""

from configs.large import VOCAB, language_model
from vqjax.lab.config import Experiment


def experiment(head: str = "dense", vocab: int = VOCAB) -> Experiment:
  return language_model("lm-8b", head, vocab, dim=4096, layers=40, context=4096, batch=16)
