"""The language models on TinyStories of the grouped head's paper.

The vocabulary is GPT-2's 50,257 tokens. With the dense head tied and d = 128, 256, 1024, 2048 the
models have the 8.1, 19.3 and 152 million parameters of the paper's tables, and 506.8 million where
it prints 659. The paper does not give the learning rate; 1e-3 at this batch is ours.
"""

from collections.abc import Callable

from flax import linen as nn

from vqjax import DenseEmbedding, DenseHead, Embedding, GroupedHead, Head
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import BPETokenizer, Source, Stories, TokenizerRecipe, Windows
from vqjax.lm.models import Transformer

HeadOf = Callable[[int, int, Embedding], Head]
"""(vocab, dim, embedding) -> a head; a tied one shares the embedding."""

GPT2 = BPETokenizer(folder="tokenizers/gpt2")

FULL = Stories(("tinystories/TinyStories-train.txt",), "tinystories/TinyStories-valid.txt")

WINDOW = 256
"""Tokens that GPT-Neo's local attention covers."""

TOKENS = 472_000_000
"""Tokens of the training text by GPT-2's tokenizer, about."""

BATCH, CONTEXT = 32, 512

EPOCH = Train(
  steps=TOKENS // (BATCH * CONTEXT),
  batch=BATCH,
  learning_rate=1e-3,
  warmup=1000,
  weight_decay=0.1,
  log_every=100,
  eval_every=5000,
  save_every=1000,
)


def dense(vocab: int, dim: int, embedding: Embedding) -> Head:
  """Return the softmax over all tokens, tied to the embedding."""
  return DenseHead(vocab, dim, embedding=embedding)


def grouped(vocab: int, dim: int, embedding: Embedding) -> Head:
  """Return the paper's head: floor(sqrt V) groups in the order of the tokenizer."""
  del embedding
  return GroupedHead(vocab, dim)


def language_model(
  name: str,
  head: HeadOf,
  dim: int,
  *,
  window: int | None = None,
  layers: int = 8,
  heads: int = 8,
  context: int = CONTEXT,
  data: Source = FULL,
  tokenizer: TokenizerRecipe = GPT2,
  train: Train = EPOCH,
  seed: int = 0,
) -> Experiment:
  """Return a run of a decoder; with `window`, every second block is local."""
  # As GPT-2 begins, whatever its width: the dense rows of the paper are tied.
  embedding = DenseEmbedding(FROM_TOKENIZER, dim, weight_init=nn.initializers.normal(0.02))
  model = Transformer(
    embedding=embedding,
    head=head(FROM_TOKENIZER, dim, embedding),
    dim=dim,
    layers=layers,
    heads=heads,
    context=context,
    window=window,
  )
  return Experiment(name, model, data, tokenizer, Windows(), train, seed)


def experiment(
  name: str = "grouped", head: HeadOf = grouped, dim: int = 128, window: int | None = None
) -> Experiment:
  return language_model(f"{name}-{dim}", head, dim, window=window)
