"""The text classifier of DPQ: mean embedding and a hidden layer (Appendix C)."""

import dataclasses

from experiments.studies.dpq.data.documents import Documents
from experiments.studies.dpq.data.labelled import LabelledSource
from experiments.studies.dpq.models.classifier import TextClassifier
from experiments.studies.lstm import SymmetricUniform
from vqjax import Embedding
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import TokenizerRecipe, WordTokenizer

V = FROM_TOKENIZER
DIM = 300
BEGIN = SymmetricUniform(0.1)

WORDS = WordTokenizer(vocab=30_000, lowercase=True)

ADAM = Train(
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
)
"""Adam at a constant rate for 5,000 batches of 64 texts, as in the reference implementation."""


def classifier(
  name: str,
  embedding: Embedding,
  data: LabelledSource,
  classes: int,
  *,
  tokenizer: TokenizerRecipe = WORDS,
  context: int = 128,
  train: Train = ADAM,
  seed: int = 0,
) -> Experiment:
  """Return a run on texts of `classes` classes, with any embedding."""
  return Experiment(
    name=name,
    model=TextClassifier(embedding=embedding, classes=classes, dim=embedding.dim, context=context),
    data=data,
    tokenizer=tokenizer,
    loader=Documents(),
    train=dataclasses.replace(train, eval_every=min(train.eval_every, train.steps)),
    seed=seed,
  )
