"""BERT with any embedding: pre-training and a task (DPQ, Table 13).

The task is made of the same text: whether the second half of a paragraph belongs to it.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from experiments.studies.dpq.data.documents import Continued
from experiments.studies.dpq.data.masked import Masked
from experiments.studies.dpq.models.bert import BertEncoder, MaskedLanguageModel, PairClassifier
from experiments.studies.lstm import SymmetricUniform
from vqjax import DenseHead, DPQEmbedding, Embedding, SoftmaxQuantizer
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Filtered, SentencePieceTokenizer, Source, TokenizerRecipe, WikiText

V = FROM_TOKENIZER
BEGIN = SymmetricUniform(0.05)


class EncoderSize(NamedTuple):
  """A size of the encoder.

  Attributes:
    dim: width, D.
    layers: number of blocks.
    heads: attention heads.
    hidden: width of the feed-forward layers.
    context: most tokens of a segment.
    dropout: dropout of every branch.
  """

  dim: int
  layers: int
  heads: int
  hidden: int
  context: int
  dropout: float = 0.1

  def encoder(self, embedding: Embedding) -> BertEncoder:
    """Return the encoder of this size with an embedding."""
    return BertEncoder(
      embedding=embedding,
      dim=self.dim,
      layers=self.layers,
      heads=self.heads,
      context=self.context,
      hidden=self.hidden,
      dropout=self.dropout,
    )


SMALL = EncoderSize(128, 2, 4, 512, 64)


class Corpus(NamedTuple):
  """A source of text and its tokenizer."""

  data: Source
  tokenizer: TokenizerRecipe


PARAGRAPHS = Corpus(Filtered(WikiText(), min_chars=512), SentencePieceTokenizer(vocab=8000))

Make = Callable[[str, Embedding, int], Experiment]


def pretraining(size: EncoderSize, corpus: Corpus, train: Train) -> Make:
  """Return (name, embedding, seed) -> a run of pre-training."""

  def make(name: str, embedding: Embedding, seed: int) -> Experiment:
    head = DenseHead(V, size.dim, use_bias=True)
    model = MaskedLanguageModel(size.encoder(embedding), head)
    return Experiment(name, model, *corpus, loader=Masked(), train=train, seed=seed)

  return make


def pairs(size: EncoderSize, corpus: Corpus, train: Train) -> Make:
  """Return (name, embedding, seed) -> a run of the pair task, from fresh parameters."""

  def make(name: str, embedding: Embedding, seed: int) -> Experiment:
    model = PairClassifier(size.encoder(embedding), 2)
    return Experiment(name, model, *corpus, loader=Continued(), train=train, seed=seed)

  return make


PRETRAIN = Train(
  steps=4_000,
  batch=64,
  learning_rate=2e-3,
  warmup=400,
  weight_decay=0.01,
  beta2=0.999,
  final_fraction=0.0,
  eval_every=1_000,
  save_every=500,
)
FINE_TUNE = dataclasses.replace(
  PRETRAIN, steps=1_000, batch=32, learning_rate=5e-4, warmup=100, eval_every=250
)


def experiment() -> Experiment:
  quantizer = SoftmaxQuantizer(32, 32, table_init=BEGIN)
  embedding = DPQEmbedding(V, SMALL.dim, quantizer, query_init=BEGIN)
  return pretraining(SMALL, PARAGRAPHS, PRETRAIN)("dpq-sx", embedding, 0)
