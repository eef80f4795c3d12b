"""DPQ-SX on captions of Multi30k, English to German: an hour on a CPU core."""

from configs.dpq.translation import BEGIN, TransformerSize, V, translation
from experiments.studies.dpq.data.pairs import Multi30k
from vqjax import DPQEmbedding, Embedding, SoftmaxQuantizer
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import SentencePieceTokenizer

SMALL = TransformerSize(dim=128, layers=3, heads=4, hidden=512, context=32)

TRAIN = Train(
  steps=2_000,
  batch=64,
  learning_rate=2e-3,
  warmup=400,
  weight_decay=0.0,
  beta2=0.98,
  final_fraction=0.02,
  eval_every=1_000,
  save_every=500,
)


def with_embedding(name: str, embedding: Embedding, seed: int = 0) -> Experiment:
  """Return a run of this model and training with any embedding."""
  pieces = SentencePieceTokenizer(vocab=6_000)
  return translation(name, embedding, SMALL, Multi30k(), pieces, TRAIN, seed)


def experiment() -> Experiment:
  quantizer = SoftmaxQuantizer(32, 32, table_init=BEGIN)
  return with_embedding("dpq-sx", DPQEmbedding(V, SMALL.dim, quantizer, query_init=BEGIN))
