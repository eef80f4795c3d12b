"""The decoder of `lm_1b` with a memory of 300 million rows of n-grams, each of 32 numbers."""

import dataclasses

import jax.numpy as jnp
from flax import linen as nn

from configs.large import VOCAB, language_model
from vqjax import Int8Embedding
from vqjax.lab.config import Experiment
from vqjax.lab.training import RowwiseTables
from vqjax.ngrams import NGramEmbedding, NGramMemory
from vqjax.ops.ngrams import XorHash


def experiment(rows: int = 300_000_000) -> Experiment:
  """Return the run of a memory of about so many rows, by 16 heads of pairs and triples."""
  base = language_model("lm-1b", "dense", VOCAB, dim=2048, layers=20, context=2048, batch=32)
  ngrams = XorHash.qwen4(VOCAB, end=0, heads=8, least=rows // 16)
  # A whole number of rows for each of 64 devices.
  rows = -(-ngrams.rows // 64) * 64
  table = Int8Embedding(rows, 32, trained=True, levels_init=nn.initializers.zeros)
  memory = NGramMemory(NGramEmbedding(ngrams, table), 2048, param_dtype=jnp.float32)
  return dataclasses.replace(
    base,
    name="lm-1b-ngrams",
    model=base.model.clone(memories=(memory,), memory_blocks=(1,)),
    train=dataclasses.replace(base.train, optimizer=RowwiseTables()),
  )
