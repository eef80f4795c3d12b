"""The large language model of `lm_1b` and `lm_8b`, for a pod of accelerators."""

from collections.abc import Callable

import jax.numpy as jnp

from vqjax import CodebookHead, DenseEmbedding, DenseHead, GroupedHead, Head, assign
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import BPETokenizer, Text, Windows
from vqjax.lm.models import Transformer
from vqjax.sharding import MeshShape

VOCAB = 32_768

HEADS: dict[str, Callable[[int, int], Head]] = {
  "dense": lambda vocab, dim: DenseHead(vocab, dim, dtype=jnp.bfloat16),
  "codebook": lambda vocab, dim: CodebookHead(
    vocab,
    dim,
    codes=4096,
    assignment_init=assign.FrequentAlone(),
    token_bias=True,
    dtype=jnp.bfloat16,
  ),
  "grouped": lambda vocab, dim: GroupedHead(vocab, dim, dtype=jnp.bfloat16),
}


def language_model(
  name: str, head: str, vocab: int, dim: int, layers: int, context: int, batch: int
) -> Experiment:
  """Return a run of a decoder with attention heads of width 128.

  It computes in bfloat16 with float32 parameters, and rematerialises every block.
  """
  return Experiment(
    name=f"{name}-{head}",
    model=Transformer(
      embedding=DenseEmbedding(vocab, dim, dtype=jnp.bfloat16),
      head=HEADS[head](vocab, dim),
      dim=dim,
      layers=layers,
      heads=dim // 128,
      context=context,
      remat=True,
      dtype=jnp.bfloat16,
    ),
    data=Text(),
    tokenizer=BPETokenizer(vocab=vocab),
    loader=Windows(),
    train=Train(
      steps=100_000,
      batch=batch,
      learning_rate=3e-4,
      warmup=2000,
      mesh=MeshShape(fsdp=2, model=8),
    ),
  )
