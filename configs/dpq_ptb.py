"""The small LSTM of Zaremba et al. on Penn Treebank, its embedding quantised by DPQ-SX.

The paper's 105.8 (Table 4): K = 8, 25 shared subspaces. Its loss is the sum over the 20 tokens of a
row, ours the mean: so the rate of 1 is 20 here, and the clipping of 3 is 3/20.
"""

from vqjax import (
  CentroidQuantizer,
  DenseEmbedding,
  DenseHead,
  DPQEmbedding,
  Embedding,
  SoftmaxQuantizer,
)
from vqjax.config import FROM_TOKENIZER, Experiment, Train
from vqjax.data import PennTreebank, Streams, WordTokenizer
from vqjax.initializers import SymmetricUniform
from vqjax.models import LSTM
from vqjax.training import SGD

V = FROM_TOKENIZER
DIM, UNROLL, ROWS = 200, 20, 20
BEGIN = SymmetricUniform(0.1)

EPOCH = 929_589 // ROWS // UNROLL
"""Steps of an epoch: tokens of the training text, in as many streams as rows."""


def with_embedding(name: str, embedding: Embedding) -> Experiment:
  """The same model and training with another embedding."""
  return Experiment(
    name=name,
    model=LSTM(
      embedding=embedding,
      head=DenseHead(V, DIM, use_bias=True, weight_init=BEGIN, bias_init=BEGIN),
      dim=DIM,
      context=UNROLL,
      weight_init=BEGIN,
    ),
    data=PennTreebank(),
    tokenizer=WordTokenizer(split=False),
    loader=Streams(),
    train=Train(
      steps=15 * EPOCH,
      batch=ROWS,
      learning_rate=1.0 * UNROLL,
      clip=3.0 / UNROLL,
      optimizer=SGD(hold=4 * EPOCH, every=EPOCH, factor=0.5),
      log_every=50,
      eval_every=EPOCH,
      save_every=EPOCH,
    ),
  )


def full() -> Experiment:
  """The paper's 114.5: a free vector for each word."""
  return with_embedding("full", DenseEmbedding(V, DIM, weight_init=BEGIN))


def centroids() -> Experiment:
  """The paper's 106.5, DPQ-VQ: K = 32, 25 shared subspaces; 1/20 for a mean loss, as the rate."""
  quantizer = CentroidQuantizer(DIM, 32, 25, shared=True, weight=1.0 / UNROLL, table_init=BEGIN)
  return with_embedding("dpq-vq", DPQEmbedding(V, DIM, quantizer, query_init=BEGIN))


def experiment() -> Experiment:
  quantizer = SoftmaxQuantizer(DIM, 8, 25, shared=True, table_init=BEGIN)
  return with_embedding("dpq-sx", DPQEmbedding(V, DIM, quantizer, query_init=BEGIN))
