"""Translation with any embedding (DPQ, Tables 3 and 11)."""

from typing import NamedTuple

from experiments.studies.dpq.data.documents import Pairs
from experiments.studies.dpq.models.translator import Translator
from experiments.studies.lstm import SymmetricUniform
from vqjax import DenseHead, Embedding
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Source, TokenizerRecipe

V = FROM_TOKENIZER
BEGIN = SymmetricUniform(0.1)
"""Initialiser of embeddings, as in the reference implementation."""


class TransformerSize(NamedTuple):
  """A size of the encoder and the decoder.

  Attributes:
    dim: width, D.
    layers: layers of the encoder, and of the decoder.
    heads: attention heads.
    hidden: width of the feed-forward layers.
    context: most tokens of a sentence.
    dropout: dropout of every branch.
  """

  dim: int
  layers: int
  heads: int
  hidden: int
  context: int
  dropout: float = 0.1


def translation(
  name: str,
  embedding: Embedding,
  size: TransformerSize,
  data: Source,
  tokenizer: TokenizerRecipe,
  train: Train,
  seed: int = 0,
) -> Experiment:
  """Return a run in which source and target share vocabulary and embedding."""
  return Experiment(
    name=name,
    model=Translator(
      embedding=embedding,
      head=DenseHead(V, size.dim, label_smoothing=0.1),
      dim=size.dim,
      layers=size.layers,
      heads=size.heads,
      context=size.context,
      hidden=size.hidden,
      dropout=size.dropout,
    ),
    data=data,
    tokenizer=tokenizer,
    loader=Pairs(),
    train=train,
    seed=seed,
  )
