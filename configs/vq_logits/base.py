"""The decoder of VQ-Logits and its heads, for the configs of its three corpora.

Sizes and schedules are those of Tables 4 and 5 and Appendix B. Where the paper says nothing, the
betas are AdamW's defaults and the cosine ends at a tenth of the learning rate. The paper also
applies dropout to attention; here it is on the embedding and the output of every branch.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp

from vqjax import CodebookHead, DenseEmbedding, DenseHead, Head
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import Source, TokenizerRecipe, Windows
from vqjax.lm.models import Transformer

HEADS: dict[str, Callable[[int, int], Head]] = {
  "dense": functools.partial(DenseHead, dtype=jnp.bfloat16),
  **{
    f"codebook-{codes}": functools.partial(CodebookHead, codes=codes, dtype=jnp.bfloat16)
    for codes in (256, 512, 1024, 2048, 4096)
  },
}
"""Codes are blocks of consecutive tokens: the paper's Option B, for training from scratch."""


def language_model(
  name: str,
  head: str,
  vocab: int,
  dim: int,
  layers: int,
  context: int,
  data: Source,
  tokenizer: TokenizerRecipe,
  train: Train,
) -> Experiment:
  """Return a run of a decoder with attention heads of width 64 and dropout 0.1."""
  return Experiment(
    name=f"{name}-{head}",
    model=Transformer(
      embedding=DenseEmbedding(vocab, dim, dtype=jnp.bfloat16),
      head=HEADS[head](vocab, dim),
      dim=dim,
      layers=layers,
      heads=dim // 64,
      context=context,
      dropout=0.1,
      dtype=jnp.bfloat16,
    ),
    data=data,
    tokenizer=tokenizer,
    loader=Windows(),
    train=train,
  )


training = functools.partial(
  Train, weight_decay=0.01, clip=1.0, beta2=0.999, log_every=100, save_every=1000
)
"""Training from scratch. Fine-tuning on WikiText-103 has the overrides train.learning_rate=5e-5
train.warmup=1000 train.steps=50000."""
