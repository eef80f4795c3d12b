"""Texts, decoders and budgets of the VQ-Logits study at three scales.

`smoke` runs in seconds on text that every machine has, `cpu` within hours on two cores, and `paper`
has the sizes and schedules of the paper (Tables 4 and 5), for a GPU or TPU. The rows of a setting
differ only in the head.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from configs.vq_logits import c4, ptb, wikitext103
from vqjax import DenseEmbedding, DenseHead, Head
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import (
  Filtered,
  PennTreebank,
  SentencePieceTokenizer,
  Source,
  Text,
  TokenizerRecipe,
  WikiText,
  Windows,
  WordTokenizer,
)
from vqjax.lm.models import Transformer

INPUTS = nn.initializers.normal(0.02)
"""Initialiser of the input embeddings of untied rows."""

RUNS = "runs/vq"
"""Folder of the training runs; each scale has a folder in it."""


@dataclasses.dataclass(frozen=True)
class Further:
  """Sizes of the heads that the paper does not have.

  With a token bias, the first three have at most 1/16 of the dense head's bytes.

  Attributes:
    product: (K, M) of the product head.
    residual: (K, R) of the codebook head with a low-rank part.
    small_codes: K of a small codebook.
    recluster_tokens: length of the text that one re-clustering reads.
  """

  product: tuple[int, int]
  residual: tuple[int, int]
  small_codes: int
  recluster_tokens: int = 2**18


@dataclasses.dataclass(frozen=True)
class VQLogitsSetting:
  """A text, a decoder, a training budget, and the sizes of the compared heads.

  Attributes:
    name: name of the text; the rows of the study are called "NAME/ROW".
    scale: scale of the run folders.
    dense: the experiment of the full softmax, from which converted rows start.
    fine_tune: training after a conversion, and of the fine-tuned full softmax.
    codes: codebook sizes K of the main table; the first is that of Tables 2, 6 and 7.
    cutoffs: cutoffs of the adaptive softmax.
    rank: rank of the low-rank head.
    ablations: whether the setting has the rows of Tables 2, 6 and 7 and of Section 6.
    further: sizes of the heads that the paper does not have; None: the setting has none of them.
    seeds: number of seeds of the headline rows.
  """

  name: str
  scale: str
  dense: Experiment
  fine_tune: Train
  codes: tuple[int, ...]
  cutoffs: tuple[int, ...]
  rank: int
  ablations: bool = False
  further: Further | None = None
  seeds: int = 1

  @property
  def dim(self) -> int:
    """Model width, D."""
    return self.dense.model.dim

  @property
  def dtype(self) -> Any:
    """Data type of the computation."""
    return self.dense.model.dtype

  @property
  def whole(self) -> Train:
    """Training from scratch for the steps of the dense run and its fine-tuning."""
    train = self.dense.train
    steps = train.steps + self.fine_tune.steps
    return dataclasses.replace(train, steps=steps, eval_every=steps, save_every=steps)

  def path(self, row: str, seed: int) -> str:
    """The run folder of a row."""
    return f"{RUNS}/{self.scale}/{self.name}/{row}-{seed}"

  def run(self, row: str, head: Head, train: Train, seed: int, **changes: Any) -> Experiment:
    """The dense experiment with another head, embedding and training."""
    own = getattr(head, "embedding", None)
    embedding = own or _inputs(self.dim, self.dtype)
    model = self.dense.model.clone(head=head, embedding=embedding)
    return dataclasses.replace(self.dense, name=row, model=model, train=train, seed=seed, **changes)


def _inputs(dim: int, dtype: Any) -> DenseEmbedding:
  return DenseEmbedding(FROM_TOKENIZER, dim, weight_init=INPUTS, dtype=dtype)


def _train(steps: int, **fields: Any) -> Train:
  return Train(
    steps=steps, eval_every=steps, save_every=max(1, steps // 4), keep=1, log_every=10, **fields
  )


def _dense(data: Source, tokenizer: TokenizerRecipe, train: Train, **fields: Any) -> Experiment:
  """A full softmax on a decoder with the given fields, computed in float32."""
  dim, dtype = fields["dim"], jnp.float32
  model = Transformer(
    embedding=_inputs(dim, dtype),
    head=DenseHead(FROM_TOKENIZER, dim, dtype=dtype),
    dtype=dtype,
    **fields,
  )
  return Experiment("dense", model, data, tokenizer, Windows(), train)


def _smoke(name: str, **fields: Any) -> VQLogitsSetting:
  train = {"batch": 4, "warmup": 2, "learning_rate": 3e-3}
  decoder = {"dim": 16, "layers": 1, "heads": 2, "context": 16, "dropout": 0.0}
  # Little of the text that every machine has is evaluated.
  text = Text(valid_fraction=0.005, test_fraction=0.005)
  return VQLogitsSetting(
    name,
    "smoke",
    _dense(text, WordTokenizer(vocab=400), _train(4, **train), **decoder),
    _train(2, **train),
    codes=(16, 32, 64),
    cutoffs=(40, 120),
    rank=8,
    **fields,
  )


def _cpu(
  name: str, data: Source, tokenizer: TokenizerRecipe, steps: int, fine_tune: int, **fields: Any
) -> VQLogitsSetting:
  """A decoder of width 128 with two layers, on batches of 1,024 tokens."""
  train = {"batch": 16, "warmup": 100, "weight_decay": 0.1}
  decoder = {"dim": 128, "layers": 2, "heads": 4, "context": 64, "dropout": 0.1}
  return VQLogitsSetting(
    name,
    "cpu",
    _dense(data, tokenizer, _train(steps, learning_rate=3e-3, **train), **decoder),
    _train(fine_tune, learning_rate=1.5e-3, **train),
    **fields,
  )


def _paper(name: str, config: Experiment, **fields: Any) -> VQLogitsSetting:
  """The paper's decoder and schedule, with Table 4's second column's fine-tuning."""
  model, train = config.model, config.train
  fine_tune = dataclasses.replace(
    train, learning_rate=5e-5, warmup=1000, steps=min(50_000, train.steps // 5)
  )
  # The vocabulary is that of the fitted tokenizer, which a word list may leave below the paper's.
  free = model.clone(
    embedding=model.embedding.clone(vocab=FROM_TOKENIZER),
    head=model.head.clone(vocab=FROM_TOKENIZER),
  )
  dense = dataclasses.replace(config, name="dense", model=free)
  return VQLogitsSetting(name, "paper", dense, fine_tune, **fields)


SCALES = {
  "smoke": {
    "ptb": _smoke("ptb", further=Further((16, 4), (16, 2), 24, recluster_tokens=512)),
    "wikitext": _smoke("wikitext", ablations=True),
    "web": _smoke("web"),
  },
  "cpu": {
    "ptb": _cpu(
      "ptb",
      PennTreebank(),
      WordTokenizer(split=False),
      steps=1800,
      fine_tune=900,
      codes=(256, 512, 1024),
      cutoffs=(750, 3000),
      rank=7,
      further=Further(product=(224, 16), residual=(200, 4), small_codes=460),
      seeds=3,
    ),
    "wikitext": _cpu(
      "wikitext",
      WikiText(),
      WordTokenizer(split=False),
      steps=900,
      fine_tune=300,
      codes=(1024, 2048, 4096),
      cutoffs=(2500, 10_000),
      rank=64,
      ablations=True,
    ),
    "web": _cpu(
      "web",
      Filtered(WikiText(), min_chars=512),
      SentencePieceTokenizer(vocab=8000),
      steps=600,
      fine_tune=200,
      codes=(512, 1024, 2048),
      cutoffs=(500, 2000),
      rank=16,
    ),
  },
  "paper": {
    "ptb": _paper(
      "ptb",
      ptb.experiment(),
      codes=(256, 512, 1024),
      cutoffs=(750, 3000),
      rank=27,
      further=Further((256, 64), (1024, 16), 585),
      seeds=3,
    ),
    "wikitext": _paper(
      "wikitext",
      wikitext103.experiment(),
      codes=(1024, 2048, 4096),
      cutoffs=(20_000, 80_000),
      rank=512,
      ablations=True,
    ),
    "web": _paper(
      "web",
      c4.experiment(),
      codes=(512, 1024, 2048),
      cutoffs=(2400, 9600),
      rank=48,
    ),
  },
}
"""Scale -> text -> setting. At `cpu`, WikiText-2 stands in for WikiText-103 and C4."""
