"""BERT with any embedding: pre-training on hidden words, then a pair and a span task (Table 13).

The tasks are made of the same text: whether the second half of a paragraph is its own, and which
stretch of a paragraph is another's.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from vqjax import DenseHead, DPQEmbedding, Embedding, SoftmaxQuantizer
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import (
  Continued,
  Filtered,
  Intruded,
  Masked,
  SentencePieceTokenizer,
  Source,
  Tokenizer,
  WikiText,
)
from vqjax.lab.models import (
  Encoder,
  MaskedLanguageModel,
  PairClassifier,
  SpanFinder,
  SymmetricUniform,
)

V = FROM_TOKENIZER
BEGIN = SymmetricUniform(0.05)


class Body(NamedTuple):
  """A size of the encoder.

  Attributes:
    dim: width, D.
    layers: number of blocks.
    heads: of an attention.
    hidden: width of the feed-forward layers.
    context: most tokens of a segment.
    dropout: of every branch.
  """

  dim: int
  layers: int
  heads: int
  hidden: int
  context: int
  dropout: float = 0.1

  def encoder(self, embedding: Embedding) -> Encoder:
    """The encoder with this embedding."""
    return Encoder(
      embedding=embedding,
      dim=self.dim,
      layers=self.layers,
      heads=self.heads,
      context=self.context,
      hidden=self.hidden,
      dropout=self.dropout,
    )


BASE = Body(768, 12, 12, 3072, 512)
SMALL = Body(128, 2, 4, 512, 64)


class Text(NamedTuple):
  """What is read, and how."""

  data: Source
  tokenizer: Tokenizer


PARAGRAPHS = Text(Filtered(WikiText(), min_chars=512), SentencePieceTokenizer(vocab=8000))

Make = Callable[[str, Embedding, int], Experiment]


def pretraining(body: Body, text: Text, train: Train) -> Make:
  """(name, embedding, seed) -> pre-training."""

  def make(name: str, embedding: Embedding, seed: int) -> Experiment:
    head = DenseHead(V, body.dim, use_bias=True)
    model = MaskedLanguageModel(body.encoder(embedding), head)
    return Experiment(name, model, *text, loader=Masked(), train=train, seed=seed)

  return make


def pairs(body: Body, text: Text, train: Train) -> Make:
  """(name, embedding, seed) -> the pair task, without a beginning."""

  def make(name: str, embedding: Embedding, seed: int) -> Experiment:
    model = PairClassifier(body.encoder(embedding), 2)
    return Experiment(name, model, *text, loader=Continued(), train=train, seed=seed)

  return make


def spans(body: Body, text: Text, train: Train) -> Make:
  """(name, embedding, seed) -> the span task, without a beginning."""

  def make(name: str, embedding: Embedding, seed: int) -> Experiment:
    model = SpanFinder(body.encoder(embedding))
    return Experiment(name, model, *text, loader=Intruded(), train=train, seed=seed)

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
