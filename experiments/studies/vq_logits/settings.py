"""Which text, which body and how much training do the VQ-Logits tables have, at which scale?

`smoke` runs in seconds on text that every machine has; `cpu` on two cores within hours; `paper` is
what VQ-Logits says (Tables 4 and 5), for a GPU or TPU. All heads of a setting share everything but
the head.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from configs import vq_c4, vq_ptb, vq_wikitext103
from vqjax import DenseEmbedding, DenseHead, Head
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import (
  Filtered,
  PennTreebank,
  SentencePieceTokenizer,
  Source,
  Text,
  Tokenizer,
  WikiText,
  Windows,
  WordTokenizer,
)
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
    product: (K, M) of the product head, at most 1/16 of the dense head's bytes with a token bias.
    other_products: (K, M) of further ones.
    residual: (K, R) of the codebook head with a low-rank part, likewise.
    small_codes: K of a codebook with a token bias, likewise.
    classes: of the class-based head.
    recluster_tokens: of the text that a re-clustering reads.
    ablations: whether it has the rows of Tables 2, 6 and 7.
    beyond: whether it has what the paper does not have, and a full softmax from scratch beside it.
    seeds: of the headline rows.
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
  product: tuple[int, int]
  other_products: tuple[tuple[int, int], ...]
  residual: tuple[int, int]
  small_codes: int
  classes: int
  recluster_tokens: int = 2**18
  ablations: bool = False
  beyond: bool = False
  seeds: int = 1

  @property
  def ablation_codes(self) -> int:
    """The codebook size of Tables 2, 6 and 7: the smallest of Table 1, as in the paper."""
    return self.codes[0]

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


def _cpu(
  name: str, data: Source, tokenizer: Tokenizer, steps: int, fine_tune: int, **fields
) -> Setting:
  """A decoder of width 128 with two layers, on batches of 1,024 tokens."""
  train = {"batch": 16, "warmup": 100, "weight_decay": 0.1}
  return Setting(
    name=name,
    folder=f"{RUNS}/cpu",
    data=data,
    tokenizer=tokenizer,
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
    product=(16, 4),
    other_products=((16, 2), (16, 8)),
    residual=(16, 2),
    small_codes=24,
    classes=20,
    recluster_tokens=512,
    ablations=name == "wikitext",
    beyond=name == "ptb",
  )


SMOKE = {name: _smoke(name) for name in ("ptb", "wikitext", "web")}

CPU = {
  "ptb": _cpu(
    "ptb",
    PennTreebank(),
    WordTokenizer(split=False),
    1800,
    900,
    codes=(256, 512, 1024),
    cutoffs=(750, 3000),
    rank=7,
    product=(224, 16),
    other_products=(),
    residual=(200, 4),
    small_codes=460,
    classes=100,
    beyond=True,
    seeds=3,
  ),
  "wikitext": _cpu(
    "wikitext",
    WikiText(),
    WordTokenizer(split=False),
    900,
    300,
    codes=(1024, 2048, 4096),
    cutoffs=(2500, 10_000),
    rank=64,
    product=(256, 16),
    other_products=(),
    residual=(512, 4),
    small_codes=1560,
    classes=180,
    ablations=True,
  ),
  "web": _cpu(
    "web",
    Filtered(WikiText(), min_chars=512),
    SentencePieceTokenizer(vocab=8000),
    600,
    200,
    codes=(512, 1024, 2048),
    cutoffs=(500, 2000),
    rank=16,
    product=(224, 16),
    other_products=(),
    residual=(200, 4),
    small_codes=375,
    classes=90,
  ),
}
"""WikiText-2 stands in for WikiText-103, and its long lines, by the same filters, for C4."""


def _paper(name: str, config: Experiment, **fields) -> Setting:
  """The paper's own: from scratch by its tables, fine-tuned by Table 4's second column."""
  model, train = config.model, config.train
  fine_tune = {"learning_rate": 5e-5, "warmup": 1000, "steps": min(50_000, train.steps // 5)}
  return Setting(
    name=name,
    folder=f"{RUNS}/paper",
    data=config.data,
    tokenizer=config.tokenizer,
    dim=model.dim,
    layers=model.layers,
    heads=model.heads,
    context=model.context,
    dropout=model.dropout,
    dtype=model.dtype,
    train=train,
    fine_tune=dataclasses.replace(train, **fine_tune),
    residual=(1024, 16),
    **fields,
  )


PAPER = {
  "ptb": _paper(
    "ptb",
    vq_ptb.experiment(),
    codes=(256, 512, 1024),
    cutoffs=(750, 3000),
    rank=27,
    product=(256, 64),
    other_products=((256, 32), (256, 128)),
    small_codes=585,
    classes=100,
    beyond=True,
    seeds=3,
  ),
  "wikitext": _paper(
    "wikitext",
    vq_wikitext103.experiment(),
    codes=(1024, 2048, 4096),
    cutoffs=(20_000, 80_000),
    rank=512,
    product=(256, 96),
    other_products=((256, 48), (256, 192)),
    small_codes=16_000,
    classes=517,
    ablations=True,
  ),
  "web": _paper(
    "web",
    vq_c4.experiment(),
    codes=(512, 1024, 2048),
    cutoffs=(2400, 9600),
    rank=48,
    product=(256, 96),
    other_products=((256, 48), (256, 192)),
    small_codes=1900,
    classes=179,
  ),
}

SCALES = {"smoke": SMOKE, "cpu": CPU, "paper": PAPER}
"""Scale -> text -> setting."""
