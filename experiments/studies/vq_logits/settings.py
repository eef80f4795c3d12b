"""Texts, decoders and budgets of the VQ-Logits study at three scales.

`cpu` runs within hours on two cores, `smoke` has its sizes and a few steps on text that every
machine has, and `paper` has the decoders and schedules of the paper (Tables 4 and 5), for a GPU or
TPU. The rows of a setting differ only in the head.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from configs.vq_logits import c4, ptb, wikitext103
from vqjax import DenseEmbedding, DenseHead
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

SEEDS = 3
"""Number of seeds of a setting's repeated rows."""


@dataclasses.dataclass(frozen=True)
class VQLogitsSetting:
  """A text, a decoder, a training budget, and the sizes of the compared heads.

  Attributes:
    name: name of the text; the rows of the study are called "NAME/ROW".
    dense: the experiment of the full softmax, from which converted rows start.
    fine_tune: training after a conversion, and of the fine-tuned full softmax.
    codes: the paper's codebook sizes K; the first is that of Tables 2, 6 and 7.
    cutoffs: cutoffs of the adaptive softmax.
    rank: rank of the low-rank head.
    ablations: whether the setting has the rows of Tables 2, 6 and 7.
    further: whether the setting has the heads that the paper does not have.
    repeated: names of the rows that are run with every seed.
    scale: scale of the run folders.
  """

  name: str
  dense: Experiment
  fine_tune: Train
  codes: tuple[int, ...]
  cutoffs: tuple[int, ...]
  rank: int
  ablations: bool = False
  further: bool = False
  repeated: tuple[str, ...] = ()
  scale: str = "cpu"

  @property
  def dim(self) -> int:
    """Model width, D."""
    return self.dense.model.dim

  @property
  def dtype(self) -> Any:
    """Data type of the computation."""
    return self.dense.model.dtype

  def path(self, row: str) -> str:
    """The run folder of a row."""
    return f"runs/vq/{self.scale}/{self.name}/{row}-{self.dense.seed}"


def _lasting(train: Train, steps: int) -> Train:
  """The training with so many steps, evaluated at its end."""
  return dataclasses.replace(train, steps=steps, eval_every=steps, save_every=max(1, steps // 4))


def _cpu(
  name: str, data: Source, tokenizer: TokenizerRecipe, steps: int, fine_tune: int, **fields: Any
) -> VQLogitsSetting:
  """A decoder of width 128 with two layers, on batches of 1,024 tokens, in float32."""
  train = Train(batch=16, learning_rate=3e-3, warmup=100, weight_decay=0.1, keep=1, log_every=10)
  shape, dtype, initial = (FROM_TOKENIZER, 128), jnp.float32, nn.initializers.normal(0.02)
  embedding = DenseEmbedding(*shape, weight_init=initial, dtype=dtype)
  decoder = {"dim": 128, "layers": 2, "heads": 4, "context": 64, "dropout": 0.1, "dtype": dtype}
  model = Transformer(embedding=embedding, head=DenseHead(*shape, dtype=dtype), **decoder)
  dense = Experiment("dense", model, data, tokenizer, Windows(), _lasting(train, steps))
  tuning = dataclasses.replace(train, learning_rate=1.5e-3)
  return VQLogitsSetting(name, dense, _lasting(tuning, fine_tune), **fields)


def _smoke(s: VQLogitsSetting) -> VQLogitsSetting:
  """A setting on other text, of which little is evaluated, for a few steps."""
  dense = dataclasses.replace(
    s.dense,
    data=Text(valid_fraction=0.005, test_fraction=0.005),
    tokenizer=WordTokenizer(vocab=12_000),
    train=_lasting(s.dense.train, 4),
  )
  return dataclasses.replace(s, dense=dense, fine_tune=_lasting(s.fine_tune, 2), scale="smoke")


def _paper(s: VQLogitsSetting, config: Experiment, **fields: Any) -> VQLogitsSetting:
  """The paper's decoder, schedule and heads, with Table 4's second column's fine-tuning."""
  steps = min(50_000, config.train.steps // 5)
  return dataclasses.replace(
    s,
    dense=dataclasses.replace(config, name="dense"),
    fine_tune=dataclasses.replace(config.train, learning_rate=5e-5, warmup=1000, steps=steps),
    scale="paper",
    further=False,
    **fields,
  )


PTB = _cpu(
  "ptb",
  PennTreebank(),
  WordTokenizer(split=False),
  steps=1800,
  fine_tune=900,
  codes=(256, 512, 1024),
  cutoffs=(750, 3000),
  rank=7,
  further=True,
  repeated=("dense", "full", "full-scratch", "vq-1024"),
)
WIKITEXT = _cpu(
  "wikitext",
  WikiText(),
  WordTokenizer(split=False),
  steps=900,
  fine_tune=300,
  codes=(1024, 2048, 4096),
  cutoffs=(2500, 10_000),
  rank=64,
  ablations=True,
)
WEB = _cpu(
  "web",
  Filtered(WikiText(), min_chars=512),
  SentencePieceTokenizer(vocab=8000),
  steps=600,
  fine_tune=200,
  codes=(512, 1024, 2048),
  cutoffs=(500, 2000),
  rank=16,
)
CPU = {s.name: s for s in (PTB, WIKITEXT, WEB)}
SCALES = {
  "smoke": {name: _smoke(s) for name, s in CPU.items()},
  "cpu": CPU,
  "paper": {
    "ptb": _paper(PTB, ptb.experiment(), rank=27),
    "wikitext": _paper(
      # A word list may have fewer words than the paper's.
      WIKITEXT,
      wikitext103.experiment("dense", FROM_TOKENIZER),
      cutoffs=(20_000, 80_000),
      rank=512,
    ),
    "web": _paper(WEB, c4.experiment(), cutoffs=(2400, 9600), rank=48),
  },
}
"""Scale -> text -> setting. At `cpu`, WikiText-2 stands in for WikiText-103 and C4."""
