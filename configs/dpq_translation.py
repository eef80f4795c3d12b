"""Translation with a Transformer of any size and any embedding (DPQ, Tables 3 and 11)."""

from typing import NamedTuple

from vqjax import DenseHead, Embedding
from vqjax.config import FROM_TOKENIZER, Experiment, Train
from vqjax.data import PairedSource, Pairs, Tokenizer
from vqjax.initializers import SymmetricUniform
from vqjax.models import Translator

V = FROM_TOKENIZER
BEGIN = SymmetricUniform(0.1)
"""Of embeddings, as in the reference implementation."""


class Body(NamedTuple):
  """A size of the model.

  Attributes:
    dim: width, D.
    layers: of the encoder, and of the decoder.
    heads: of an attention.
    hidden: width of the feed-forward layers.
    context: most tokens of a sentence.
    dropout: of every branch.
  """

  dim: int
  layers: int
  heads: int
  hidden: int
  context: int
  dropout: float = 0.1


BASE = Body(512, 6, 8, 2048, 256)
"""Transformer base of Vaswani et al., with the context of the DPQ paper's Appendix C."""


def translation(
  name: str,
  embedding: Embedding,
  body: Body,
  data: PairedSource,
  tokenizer: Tokenizer,
  train: Train,
  seed: int = 0,
) -> Experiment:
  """A run; source and target have one vocabulary and one embedding, the softmax its own rows."""
  return Experiment(
    name=name,
    model=Translator(
      embedding=embedding,
      head=DenseHead(V, body.dim, label_smoothing=0.1),
      dim=body.dim,
      layers=body.layers,
      heads=body.heads,
      context=body.context,
      hidden=body.hidden,
      dropout=body.dropout,
    ),
    data=data,
    tokenizer=tokenizer,
    loader=Pairs(),
    train=train,
    seed=seed,
  )
