"""VQ-Logits on the 10,000 words of Penn Treebank (Tables 5 and 10).

The schedule is 1,762 epochs of the training text. What Table 5 leaves out is as in Table 4.
"""

from configs.vq_logits.base import language_model, training
from vqjax.lab.config import Experiment
from vqjax.lab.data import PennTreebank, WordTokenizer

VOCAB = 10_000


def experiment(head: str = "dense", vocab: int = VOCAB) -> Experiment:
  return language_model(
    "vq-ptb",
    head,
    vocab,
    dim=512,
    layers=6,
    context=256,
    data=PennTreebank(),
    tokenizer=WordTokenizer(split=False),
    train=training(steps=100_000, batch=64, learning_rate=5e-4, warmup=2000, eval_every=1000),
  )
