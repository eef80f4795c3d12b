"""Which text, which body and how much training do the VQ-Logits tables have, at which scale?

`smoke` runs in seconds on text that every machine has; `cpu` on two cores within hours; `paper` is
what VQ-Logits says (Tables 4 and 5), for a GPU or TPU. All heads of a setting share everything but
the head.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from vqjax import DenseEmbedding, DenseHead, Head
from vqjax.config import FROM_TOKENIZER, Experiment, Train
from vqjax.data import PennTreebank, Source, Text, Tokenizer, WikiText, Windows, WordTokenizer
from vqjax.models import Transformer
from vqjax.types import Dtype

RUNS = "runs/vq"
"""Folder of all runs of these tables, a folder a scale."""


@dataclasses.dataclass(frozen=True)
class Setting:
  """A text with a body and a budget.

  Attributes:
    name: of the text and the scale, as run folders have it.
    folder: where its runs are.
    data: the text.
    tokenizer: its tokens.
    dim: model width, D.
    layers: blocks of the decoder.
    heads: attention heads.
    context: tokens of a sequence.
    dropout: of the decoder.
    dtype: of the computation.
    train: of a dense model to be converted; the other two have its remaining fields.
    fine_tune: steps and learning rate after a conversion, or of the dense control.
    codes: codebook sizes of the main table.
    cutoffs: of the adaptive softmax.
    rank: of the low-rank head.
  """

  name: str
  folder: str
  data: Source
  tokenizer: Tokenizer
  dim: int
  layers: int
  heads: int
  context: int
  dropout: float
  dtype: Dtype
  train: Train
  fine_tune: Train
  codes: tuple[int, ...]
  cutoffs: tuple[int, ...]
  rank: int

  def model(self, head: Head, embedding: Any = None) -> Transformer:
    """The decoder with this head."""
    return Transformer(
      embedding=embedding or DenseEmbedding(FROM_TOKENIZER, self.dim, dtype=self.dtype),
      head=head,
      dim=self.dim,
      layers=self.layers,
      heads=self.heads,
      context=self.context,
      dropout=self.dropout,
      dtype=self.dtype,
    )

  def dense_head(self) -> DenseHead:
    """The full softmax."""
    return DenseHead(FROM_TOKENIZER, self.dim, dtype=self.dtype)

  def path(self, name: str, seed: int = 0) -> str:
    """The run folder of a row."""
    return f"{self.folder}/{self.name}/{name}-{seed}"

  def run(self, name: str, model: Any, train: Train, seed: int = 0, **options) -> Experiment:
    """A run of this text."""
    return Experiment(
      name=name,
      model=model,
      data=self.data,
      tokenizer=self.tokenizer,
      loader=Windows(),
      train=train,
      seed=seed,
      **options,
    )

  @property
  def whole(self) -> Train:
    """As many steps from scratch as a dense model and its fine-tuning have together."""
    steps = self.train.steps + self.fine_tune.steps
    return dataclasses.replace(self.train, steps=steps, eval_every=steps, save_every=steps)


def _train(steps: int, **fields) -> Train:
  defaults = {"eval_every": steps, "save_every": max(1, steps // 4), "keep": 1, "log_every": 10}
  return Train(steps=steps, **(defaults | fields))


def _cpu(name: str, data: Source, steps: int, fine_tune: int, **fields) -> Setting:
  """A decoder of width 128 with two layers, on batches of 1,024 tokens."""
  train = {"batch": 16, "warmup": 100, "weight_decay": 0.1}
  return Setting(
    name=name,
    folder=f"{RUNS}/cpu",
    data=data,
    tokenizer=WordTokenizer(split=False),
    dim=128,
    layers=2,
    heads=4,
    context=64,
    dropout=0.1,
    dtype=jnp.float32,
    train=_train(steps, learning_rate=3e-3, **train),
    fine_tune=_train(fine_tune, learning_rate=1.5e-3, **train),
    **fields,
  )


def _smoke(name: str) -> Setting:
  train = {"batch": 4, "warmup": 2, "learning_rate": 3e-3}
  return Setting(
    name=name,
    folder=f"{RUNS}/smoke",
    data=Text(),
    tokenizer=WordTokenizer(vocab=400),
    dim=16,
    layers=1,
    heads=2,
    context=16,
    dropout=0.0,
    dtype=jnp.float32,
    train=_train(4, **train),
    fine_tune=_train(2, **train),
    codes=(16, 32, 64),
    cutoffs=(40, 120),
    rank=8,
  )


SMOKE = {name: _smoke(name) for name in ("ptb", "wikitext", "web")}

CPU = {
  "ptb": _cpu(
    "ptb", PennTreebank(), 1800, 900, codes=(256, 512, 1024), cutoffs=(750, 3000), rank=8
  ),
  "wikitext": _cpu(
    "wikitext",
    WikiText(),
    1200,
    400,
    codes=(1024, 2048, 4096),
    cutoffs=(2500, 10_000),
    rank=64,
  ),
}
