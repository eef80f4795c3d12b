"""What does a decoder of a billion parameters look like, with a head of choice?"""

from configs.large import VOCAB, language_model
from vqjax.lab.config import Experiment


def experiment(head: str = "dense", vocab: int = VOCAB) -> Experiment:
  return language_model("lm-1b", head, vocab, dim=2048, layers=20, context=2048, batch=32)
