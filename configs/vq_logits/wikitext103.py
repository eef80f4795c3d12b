"""VQ-Logits on the 267,735 words of WikiText-103 (Tables 1, 2 and 4).

Put the three files of words into wikitext-103 under $VQJAX_DATA.
"""

from configs.vq_logits.base import language_model, training
from vqjax.lab.config import Experiment
from vqjax.lab.data import WikiText, WordTokenizer

VOCAB = 267_735


def experiment(head: str = "dense", vocab: int = VOCAB) -> Experiment:
  return language_model(
    "vq-wikitext103",
    head,
    vocab,
    dim=768,
    layers=12,
    context=512,
    data=WikiText("wikitext-103"),
    tokenizer=WordTokenizer(split=False),
    train=training(steps=250_000, batch=128, learning_rate=3e-4, warmup=10_000, eval_every=5000),
  )
