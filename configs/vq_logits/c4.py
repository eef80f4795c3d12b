"""VQ-Logits on 10 billion tokens of C4 in 32,000 pieces (Tables 5 and 9).

Put the files c4-train.*.json.gz and c4-validation.*.json.gz, as AllenAI publishes them, into c4/en
under $VQJAX_DATA. The fraction is 10 billion of the whole corpus's 156 billion tokens; with some 70
of its 1,024 files for training, which are in random order, set data.fraction=1.
"""

from configs.vq_logits.base import language_model, training
from vqjax.lab.config import Experiment
from vqjax.lab.data import Filtered, JSONLines, SentencePieceTokenizer

VOCAB = 32_000


def experiment(head: str = "dense", vocab: int = VOCAB) -> Experiment:
  return language_model(
    "vq-c4",
    head,
    vocab,
    dim=768,
    layers=12,
    context=1024,
    data=Filtered(JSONLines("c4/en"), fraction=0.065),
    tokenizer=SentencePieceTokenizer(vocab),
    train=training(steps=500_000, batch=128, learning_rate=2e-4, warmup=10_000, eval_every=5000),
  )
