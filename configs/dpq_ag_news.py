"""Topics of AG News by the mean of a text's vectors, the embedding quantised by DPQ-SX.

The settings of the reference implementation: width 300, Adam at 1e-3, 5,000 batches of 64 texts.
"""

from vqjax import DPQEmbedding, Embedding, SoftmaxQuantizer
from vqjax.config import FROM_TOKENIZER, Experiment, Train
from vqjax.data import AGNews, Documents, WordTokenizer
from vqjax.initializers import SymmetricUniform
from vqjax.models import TextClassifier

V = FROM_TOKENIZER
DIM = 300
BEGIN = SymmetricUniform(0.1)


def with_embedding(name: str, embedding: Embedding) -> Experiment:
  """The same model and training with another embedding."""
  return Experiment(
    name=name,
    model=TextClassifier(embedding=embedding, classes=4, dim=DIM, context=128),
    data=AGNews(),
    tokenizer=WordTokenizer(vocab=30_000, lowercase=True),
    loader=Documents(),
    train=Train(
      steps=5_000,
      batch=64,
      learning_rate=1e-3,
      final_fraction=1.0,
      warmup=0,
      weight_decay=0.0,
      clip=1e6,
      beta2=0.999,
      eval_every=250,
      save_every=1_000,
    ),
  )


def experiment() -> Experiment:
  quantizer = SoftmaxQuantizer(DIM, 32, 50, table_init=BEGIN)
  return with_embedding("dpq-sx", DPQEmbedding(V, DIM, quantizer, query_init=BEGIN))
