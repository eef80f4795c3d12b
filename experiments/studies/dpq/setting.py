"""What is a setting of the DPQ tables: a task with everything but its embedding?"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

from configs import dpq_bert as bert
from configs import dpq_translation as translated
from configs.dpq_lstm import WORDS as LSTM_WORDS
from configs.dpq_lstm import Body, language_model
from configs.dpq_text import ADAM, BEGIN, DIM, WORDS, classifier
from vqjax import Embedding
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import (
  LabelledSource,
  Mirrored,
  Source,
  Text,
  WordTokenizer,
)
from vqjax.lab.models.initializers import SymmetricUniform

FEW_HELD_OUT = Text(valid_fraction=0.005, test_fraction=0.005)
"""Text that every machine has, of which little is evaluated."""

RUNS = "runs/dpq"
"""Folder of all runs of these tables, a folder a scale."""


class Codes(NamedTuple):
  """How an embedding is quantised.

  Attributes:
    codes: K.
    subspaces: M, the paper's D.
    shared: whether all subspaces have one table.
  """

  codes: int
  subspaces: int
  shared: bool = False

  def __str__(self) -> str:
    return f"{self.codes}x{self.subspaces}" + ("s" if self.shared else "")


KD = Codes(32, 32)


@dataclasses.dataclass(frozen=True)
class Setting:
  """A task with everything but its embedding.

  Attributes:
    make: (name, embedding, seed) -> the run.
    dim: width of the embedding, d.
    begin: initialiser of its tables.
    weight: of DPQ-VQ's regulariser.
    rows: names of what is trained or made here.
    sx: how the row "sx" is quantised.
    vq: how the row "vq" is.
    kd: codes of the rows after Chen et al. (2018b) and Shu and Nakayama.
    guide: weight of the distance to the full table, of the row "kd-distilled".
    rebuild_steps: of the network that finds the codes of "pretrained-codes".
    parts: subspaces of product quantisation after training.
    before: the setting whose run of the same row gives the encoder that this one begins with.
    grid: K x M of the heat maps; each as SX and VQ, shared and not.
    seeds: of the headline rows.
    name: of the setting, as run folders and results have it: `at_scale` gives it.
    folder: where its runs are, likewise.
  """

  make: Callable[[str, Embedding, int], Experiment]
  dim: int
  begin: SymmetricUniform
  rows: tuple[str, ...]
  sx: Codes
  vq: Codes
  kd: Codes = KD
  guide: float = 1.0
  rebuild_steps: int = 20_000
  parts: int = 1
  weight: float = 1.0
  before: str | None = None
  grid: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
  seeds: int = 1
  name: str = ""
  folder: str = ""

  def path(self, row: str, seed: int = 0) -> str:
    """The run folder of a row."""
    return f"{self.folder}/{self.name}/{row}-{seed}"


def at_scale(scale: str, settings: Mapping[str, Setting]) -> dict[str, Setting]:
  """The settings with their names and the folder of their runs."""
  folder = f"{RUNS}/{scale}"
  return {
    name: dataclasses.replace(setting, name=name, folder=folder)
    for name, setting in settings.items()
  }


def lstm(
  data: Source,
  tokens: int,
  body: Body,
  rows: tuple[str, ...],
  sx: Codes,
  vq: Codes,
  quantized: Body | None = None,
  words: WordTokenizer = LSTM_WORDS,
  **fields,
) -> Setting:
  """`quantized` is the body where the embedding is not the full one; None: the same."""

  def make(row: str, embedding: Embedding, seed: int) -> Experiment:
    own = body if row == "full" or quantized is None else quantized
    return language_model(row, embedding, own, data, tokens, seed, words)

  more = {"weight": body.weight, "parts": body.dim // 2, **fields}
  return Setting(make, body.dim, body.begin, rows, sx, vq, **more)


def classified(
  data: LabelledSource,
  classes: int,
  rows: tuple[str, ...],
  sx: Codes,
  vq: Codes,
  *,
  dim: int = DIM,
  train=ADAM,
  tokenizer: WordTokenizer = WORDS,
  context: int = 128,
  **fields,
) -> Setting:
  """Text classification: `configs.dpq_text`."""

  def make(row: str, embedding: Embedding, seed: int) -> Experiment:
    options = {"tokenizer": tokenizer, "context": context, "train": train, "seed": seed}
    return classifier(row, embedding, data, classes, **options)

  return Setting(make, dim, BEGIN, rows, sx, vq, **fields)


def mirrored(row: str, embedding: Embedding, seed: int) -> Experiment:
  """A translation of seconds: `data.Mirrored`."""
  body = translated.Body(16, 1, 2, 32, 12)
  data, words = Mirrored(FEW_HELD_OUT), WordTokenizer(vocab=200)
  train = Train(steps=4, batch=8, warmup=2, eval_every=4, save_every=4)
  return translated.translation(row, embedding, body, data, words, train, seed)


def pretrained(
  body: bert.Body, text: bert.Text, train: Train, tune: Train, codes: Codes
) -> dict[str, Setting]:
  """Pre-training and its two tasks."""
  shared = body.dim, bert.BEGIN, ("full", "sx"), codes, codes
  return {
    "bert": Setting(bert.pretraining(body, text, train), *shared),
    "bert-pairs": Setting(bert.pairs(body, text, tune), *shared, before="bert"),
    "bert-spans": Setting(bert.spans(body, text, tune), *shared, before="bert"),
  }
