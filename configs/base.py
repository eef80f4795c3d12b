"""The small language model of the `lm_*` configs, which differ in their heads."""

from collections.abc import Callable

from vqjax import DenseEmbedding, Embedding, Head
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Text, Windows, WordTokenizer
from vqjax.lm.models import Transformer

DIM = 128


def language_model(name: str, head: Callable[[int, int, Embedding], Head]) -> Experiment:
  """Return a run of a two-layer decoder on the standard library's docstrings.

  Args:
    name: name of the run.
    head: (vocab, dim, embedding) -> the head; a tied head shares the embedding.
  """
  embedding = DenseEmbedding(FROM_TOKENIZER, DIM)
  return Experiment(
    name=name,
    model=Transformer(
      embedding=embedding,
      head=head(FROM_TOKENIZER, DIM, embedding),
      dim=DIM,
      layers=2,
      heads=4,
      context=64,
      dropout=0.1,
    ),
    data=Text(),
    tokenizer=WordTokenizer(min_count=2),
    loader=Windows(),
    train=Train(
      steps=800,
      batch=8,
      learning_rate=3e-3,
      warmup=80,
      weight_decay=0.1,
      log_every=10,
      eval_every=200,
      save_every=200,
    ),
  )
