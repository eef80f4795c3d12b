"""Settings of DPQ's tables at three scales.

The scale "smoke" runs in seconds on text that every machine has, "cpu" runs on two cores, and
"paper" has the paper's medium language models, for a GPU or TPU. The rows of a setting differ only
in the embedding.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from configs.dpq import bert, multi30k
from configs.dpq import translation as translated
from configs.dpq.lstm import MEDIUM, SMALL, LSTMSize, language_model
from configs.dpq.lstm import WORDS as LSTM_WORDS
from configs.dpq.text import ADAM, BEGIN, DIM, classifier
from experiments.studies.dpq.data.labelled import AGNews, DBpedia, LabelledSource
from experiments.studies.lstm import SymmetricUniform
from vqjax import Embedding
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import PennTreebank, Source, Text, WikiText, WordTokenizer

HEADLINE = "full", "sx", "vq"
"""The main rows, which are trained with all seeds of a setting."""

COMPRESSED = "scalar-8", "scalar-6", "scalar-4", "clusters-64", "clusters-128", "clusters-256"
"""Rows made of the trained full embedding, without training."""
CLASSIFIED = (*HEADLINE, "low-rank-10", "low-rank-20", "kd")


class CodeSize(NamedTuple):
  """Size of a product code.

  Attributes:
    codes: K, codewords of a subspace.
    subspaces: M (the paper's D).
    shared: whether all subspaces share one codebook.
  """

  codes: int
  subspaces: int
  shared: bool = False

  def __str__(self) -> str:
    return f"{self.codes}x{self.subspaces}" + ("s" if self.shared else "")


DEFAULT = CodeSize(32, 32)


@dataclasses.dataclass(frozen=True)
class DPQSetting:
  """A task with everything but its embedding.

  Attributes:
    make: (name, embedding, seed=seed) -> the experiment.
    dim: width of the embedding, d.
    begin: initialiser of its tables.
    rows: names of the rows that are trained or derived in this setting.
    sx: codes of the row "sx".
    vq: codes of the row "vq".
    weight: of DPQ-VQ's regulariser.
    before: the setting whose run of the same row gives the pre-trained encoder.
    grid: K and M of the heat maps, all pairs, for SX and VQ, with and without shared codebooks.
    seeds: number of seeds of the headline rows.
    words: whether neighbours of words and the use of each code are kept with the results.
    name: name of the setting, in run folders and results; `SCALES` fills it in.
    folder: folder of the scale's runs; `SCALES` fills it in.
  """

  make: Callable[..., Experiment]
  dim: int
  begin: SymmetricUniform
  rows: tuple[str, ...] = HEADLINE
  sx: CodeSize = DEFAULT
  vq: CodeSize = DEFAULT
  weight: float = 1.0
  before: str | None = None
  grid: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
  seeds: int = 1
  words: bool = False
  name: str = ""
  folder: str = ""

  def path(self, row: str, seed: int = 0) -> str:
    """The run folder of a row."""
    return f"{self.folder}/{self.name}/{row}-{seed}"


def lstm(
  text: tuple[Source, int],
  body: LSTMSize,
  sx: CodeSize,
  vq: CodeSize,
  tokenizer: WordTokenizer = LSTM_WORDS,
  **fields,
) -> DPQSetting:
  """Language modelling with an LSTM.

  Args:
    text: a source and its number of training tokens.
    body: size of the model.
    sx: codes of the row "sx".
    vq: codes of the row "vq".
    tokenizer: tokenizer of the text.
    **fields: of the setting.
  """

  def make(row: str, embedding: Embedding, seed: int) -> Experiment:
    return language_model(row, embedding, body, *text, seed, tokenizer)

  return DPQSetting(make, body.dim, body.begin, sx=sx, vq=vq, weight=body.weight, **fields)


def classified(
  data: LabelledSource, classes: int, options: dict[str, Any], dim: int = DIM, **fields
) -> DPQSetting:
  """Text classification with mean pooling; `options` are the classifier's."""
  make = functools.partial(classifier, data=data, classes=classes, **options)
  return DPQSetting(make, dim, BEGIN, **fields)


def pretrained(
  body: bert.EncoderSize, text: bert.Corpus, train: Train, tune: Train, codes: CodeSize
) -> dict[str, DPQSetting]:
  """BERT's pre-training and a fine-tuning task."""
  setting = functools.partial(
    DPQSetting, dim=body.dim, begin=bert.BEGIN, rows=("full", "sx"), sx=codes
  )
  return {
    "bert": setting(bert.pretraining(body, text, train)),
    "bert-pairs": setting(bert.pairs(body, text, tune), before="bert"),
  }


PTB, WIKITEXT = (PennTreebank(), 929_589), (WikiText(), 2_088_628)
PTB_SMALL = CodeSize(8, 25, shared=True), CodeSize(32, 25, shared=True)
FEW_HELD_OUT = Text(valid_fraction=0.005, test_fraction=0.005)
"""Text that every machine has, of which little is evaluated."""

SMOKE = {
  "ptb-small": lstm(
    (FEW_HELD_OUT, 8 * 20 * 6),
    LSTMSize(16, 8, 0.0, 0.1, 0.5, 1, 1, 3.0),
    sx=CodeSize(4, 4, shared=True),
    vq=CodeSize(4, 4),
    tokenizer=WordTokenizer(vocab=200),
    rows=(*HEADLINE, "sx-tied", "low-rank-5", *COMPRESSED),
    words=True,
  ),
  **pretrained(
    bert.EncoderSize(16, 1, 2, 32, 12),
    bert.Corpus(FEW_HELD_OUT, WordTokenizer(vocab=200)),
    train=Train(steps=3, batch=8, warmup=1, eval_every=3, save_every=3),
    tune=Train(steps=2, batch=8, warmup=1, eval_every=2, save_every=2),
    codes=CodeSize(4, 4),
  ),
}

# A sixth of the training texts is at hand; the paper's 5,000 steps would read them 30 times.
SHORTER = {"context": 64, "train": dataclasses.replace(ADAM, steps=2_000)}
FEW_WORDS = {
  "context": 64,
  "tokenizer": WordTokenizer(vocab=8_000, lowercase=True),
  "train": dataclasses.replace(ADAM, steps=400),
}

# The paper does not print the codes of text classification. These are the ones whose ratio, times
# (d + 1) / d, is the printed one at the paper's vocabulary, to the second decimal.
CPU = {
  "ptb-small": lstm(PTB, SMALL, *PTB_SMALL, rows=(*HEADLINE, *COMPRESSED), seeds=3, words=True),
  "ptb-short": lstm(
    PTB,
    SMALL._replace(hold=1, epochs=3),
    *PTB_SMALL,
    rows=(*HEADLINE, "sx-tied", "low-rank-5", "low-rank-10", "kd"),
  ),
  "ag-news": classified(
    AGNews(),
    4,
    SHORTER,
    rows=CLASSIFIED,
    sx=CodeSize(32, 100, shared=True),
    vq=CodeSize(16, 100),
    seeds=3,
  ),
  "dbpedia": classified(
    DBpedia(),
    14,
    SHORTER,
    rows=CLASSIFIED,
    sx=CodeSize(16, 100, shared=True),
    vq=CodeSize(32, 50),
  ),
  "multi30k": DPQSetting(
    multi30k.with_embedding,
    dim=multi30k.SMALL.dim,
    begin=translated.BEGIN,
  ),
  **pretrained(bert.SMALL, bert.PARAGRAPHS, bert.PRETRAIN, bert.FINE_TUNE, DEFAULT),
  "ag-news-grid": classified(
    AGNews(), 4, FEW_WORDS, dim=128, rows=("full",), grid=((2, 8, 32, 128), (8, 16, 32))
  ),
}

LARGER = CodeSize(128, 50, shared=True)
PAPER = {
  "ptb-medium": lstm(
    PTB,
    MEDIUM,
    sx=CodeSize(32, 50, shared=True),
    vq=LARGER,
    rows=(*HEADLINE, "low-rank-5", "low-rank-10", "kd", *COMPRESSED),
    seeds=3,
  ),
  # Table 3 has smaller codes than Table 4, and Table 12 larger ones.
  "ptb-medium-smaller": lstm(PTB, MEDIUM, CodeSize(32, 25, shared=True), LARGER),
  "ptb-medium-tied": lstm(PTB, MEDIUM, LARGER, LARGER, rows=("sx", "sx-tied", "vq")),
  "wikitext-medium": lstm(WIKITEXT, MEDIUM, LARGER, LARGER, rows=(*HEADLINE, "sx-tied")),
}

SCALES = {
  scale: {
    name: dataclasses.replace(setting, name=name, folder=f"runs/dpq/{scale}")
    for name, setting in settings.items()
  }
  for scale, settings in (("smoke", SMOKE), ("cpu", CPU), ("paper", PAPER))
}
"""Scale -> name -> setting."""

STAND_INS = {
  ("Table 3", "ptb-medium-smaller"): "ptb-small",
  ("Table 9", "ptb-medium"): "ptb-small",
  ("Table 12", "ptb-medium-tied"): "ptb-short",
  ("Table 3", "wmt"): "multi30k",
  ("Table 13", "mnli"): "bert-pairs",
}
"""(table, the paper's setting) -> the setting that stands in for it where a scale lacks it."""
