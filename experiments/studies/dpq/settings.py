"""Settings of DPQ's tables at three scales.

The scale "smoke" runs in seconds on text that every machine has, "cpu" runs on two cores, and
"paper" has the values of the paper and its reference implementation, for a GPU or TPU. The rows of
a setting differ only in the embedding.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from configs.dpq import bert, multi30k
from configs.dpq import translation as translated
from configs.dpq.lstm import LARGE, LARGE_DPQ, MEDIUM, SMALL, LSTMSize, language_model
from configs.dpq.lstm import WORDS as LSTM_WORDS
from configs.dpq.text import ADAM, BEGIN, DIM, classifier
from experiments.studies.dpq.data import AGNews, DBpedia, LabelledSource, Mirrored, Zhang
from experiments.studies.lstm import SymmetricUniform
from vqjax import Embedding
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import (
  TFDS,
  PennTreebank,
  SentencePieceTokenizer,
  Source,
  Text,
  WikiText,
  WordTokenizer,
)

HEADLINE = "full", "sx", "vq"
"""The main rows, which are trained with all seeds of a setting."""

TRADITIONAL = "low-rank-5", "low-rank-10"
REBUILT = (128, 64), (32, 128), (128, 128), (32, 256), (128, 256)
"""K x M of the paper's Table 11, whose model is `REBUILT_DIM` wide."""
REBUILT_DIM = 512
RECONSTRUCTED = tuple(f"reconstruction-{k}x{m}" for k, m in REBUILT)
COMPRESSED = "scalar-8", "scalar-6", "scalar-4", "clusters-64", "clusters-128", "clusters-256"
"""Rows made of the trained full embedding, without training."""

CHEN = "kd", "kd-distilled", "pretrained-codes"
"""The baselines of Table 4: Chen et al. (2018b), and Shu and Nakayama (2018)."""

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
    kd: codes of the rows of `CHEN`.
    rebuild_steps: training steps of the network that learns the codes of "pretrained-codes".
    parts: subspaces of product quantisation after training.
    weight: of DPQ-VQ's regulariser.
    before: the setting whose run of the same row gives the pre-trained encoder.
    grid: K and M of the heat maps, all pairs, for SX and VQ, with and without shared codebooks.
    seeds: number of seeds of the headline rows.
    words: whether neighbours and codes of words are kept with the results.
    name: name of the setting, in run folders and results; `SCALES` fills it in.
    folder: folder of the scale's runs; `SCALES` fills it in.
  """

  make: Callable[..., Experiment]
  dim: int
  begin: SymmetricUniform
  rows: tuple[str, ...] = HEADLINE
  sx: CodeSize = DEFAULT
  vq: CodeSize = DEFAULT
  kd: CodeSize = DEFAULT
  rebuild_steps: int = 20_000
  parts: int = 1
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
  *,
  quantized: LSTMSize | None = None,
  tokenizer: WordTokenizer = LSTM_WORDS,
  **fields,
) -> DPQSetting:
  """Language modelling with an LSTM.

  Args:
    text: a source and its number of training tokens.
    body: size of the model.
    quantized: size of the model with any other embedding than the full one; None: `body`.
    tokenizer: tokenizer of the text.
    **fields: of the setting.
  """

  def make(row: str, embedding: Embedding, seed: int) -> Experiment:
    own = body if row == "full" or quantized is None else quantized
    return language_model(row, embedding, own, *text, seed, tokenizer)

  fields = {"weight": body.weight, "parts": body.dim // 2} | fields
  return DPQSetting(make, body.dim, body.begin, **fields)


def classified(data: LabelledSource, classes: int, options: dict[str, Any], **fields) -> DPQSetting:
  """Text classification with mean pooling; `options` are the classifier's."""
  make = functools.partial(classifier, data=data, classes=classes, **options)
  return DPQSetting(make, begin=BEGIN, **{"dim": DIM} | fields)


def mirrored(row: str, embedding: Embedding, seed: int) -> Experiment:
  """A translation of a text into its mirror image, which trains in seconds."""
  body = translated.TransformerSize(16, 1, 2, 32, 12)
  data, tokenizer = Mirrored(FEW_HELD_OUT), WordTokenizer(vocab=200)
  train = Train(steps=4, batch=8, warmup=2, eval_every=4, save_every=4)
  return translated.translation(row, embedding, body, data, tokenizer, train, seed)


def pretrained(
  body: bert.EncoderSize, text: bert.Corpus, train: Train, tune: Train, codes: CodeSize
) -> dict[str, DPQSetting]:
  """BERT's pre-training and its two fine-tuning tasks."""
  fields = {"dim": body.dim, "begin": bert.BEGIN, "rows": ("full", "sx"), **both(codes)}
  return {
    "bert": DPQSetting(bert.pretraining(body, text, train), **fields),
    "bert-pairs": DPQSetting(bert.pairs(body, text, tune), **fields, before="bert"),
    "bert-spans": DPQSetting(bert.spans(body, text, tune), **fields, before="bert"),
  }


def both(codes: CodeSize) -> dict[str, CodeSize]:
  """The same codes for DPQ-SX and DPQ-VQ, as fields of a setting."""
  return {"sx": codes, "vq": codes}


PTB = PennTreebank(), 929_589
PTB_SMALL = {"sx": CodeSize(8, 25, shared=True), "vq": CodeSize(32, 25, shared=True)}
WIKITEXT = WikiText(), 2_088_628
WIKIPEDIA = TFDS(
  "wikipedia/20230601.en", train="train[:98%]", valid="train[98%:99%]", test="train[99%:]"
)
FEW_HELD_OUT = Text(valid_fraction=0.005, test_fraction=0.005)
"""Text that every machine has, of which little is evaluated."""

# The paper does not print these codes. They are the ones whose ratio, times (d + 1) / d, is the
# printed one at the paper's vocabulary, to the second decimal.
ZHANG = {
  "ag-news": {"sx": CodeSize(32, 100, shared=True), "vq": CodeSize(16, 100)},
  "yahoo": {"sx": CodeSize(16, 50, shared=True), "vq": CodeSize(32, 100)},
  "dbpedia": {"sx": CodeSize(16, 100, shared=True), "vq": CodeSize(32, 50)},
  "yelp-polarity": {"sx": CodeSize(32, 50, shared=True), "vq": CodeSize(16, 100)},
  "yelp-full": {"sx": CodeSize(16, 50, shared=True), "vq": CodeSize(16, 100)},
}
"""Setting -> row -> codes, for the text classification data of Zhang et al. (2015)."""

SMOKE = {
  "ptb-small": lstm(
    (FEW_HELD_OUT, 8 * 20 * 6),
    LSTMSize(16, 8, 0.0, 0.1, 0.5, 1, 1, 3.0),
    tokenizer=WordTokenizer(vocab=200),
    rows=(*HEADLINE, "sx-tied", "low-rank-5", *CHEN, *COMPRESSED),
    sx=CodeSize(4, 4, shared=True),
    vq=CodeSize(4, 4),
    kd=CodeSize(4, 4),
    rebuild_steps=20,
    words=True,
  ),
  "multi30k": DPQSetting(
    mirrored,
    dim=16,
    begin=translated.BEGIN,
    rows=(*HEADLINE, "reconstruction-32x256"),
    **both(CodeSize(4, 4)),
    rebuild_steps=20,
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
FEW_WORDS = {"context": 64, "tokenizer": WordTokenizer(vocab=8_000, lowercase=True)}

CPU = {
  "ptb-small": lstm(PTB, SMALL, rows=(*HEADLINE, *COMPRESSED), **PTB_SMALL, seeds=3, words=True),
  "ptb-short": lstm(
    PTB,
    SMALL._replace(hold=1, epochs=3),
    rows=(*HEADLINE, "sx-tied", *TRADITIONAL, *CHEN),
    **PTB_SMALL,
  ),
  "ag-news": classified(AGNews(), 4, SHORTER, rows=CLASSIFIED, **ZHANG["ag-news"], seeds=3),
  "dbpedia": classified(DBpedia(), 14, SHORTER, rows=CLASSIFIED, **ZHANG["dbpedia"]),
  "multi30k": DPQSetting(
    multi30k.with_embedding,
    dim=multi30k.SMALL.dim,
    begin=translated.BEGIN,
    rows=(*HEADLINE, *RECONSTRUCTED),
    **both(CodeSize(32, 32)),
  ),
  **pretrained(bert.SMALL, bert.PARAGRAPHS, bert.PRETRAIN, bert.FINE_TUNE, CodeSize(32, 32)),
  "ag-news-grid": classified(
    AGNews(),
    4,
    FEW_WORDS | {"train": dataclasses.replace(ADAM, steps=400)},
    dim=128,
    rows=("full",),
    grid=((2, 8, 32, 128), (8, 16, 32)),
  ),
  "ag-news-changes": classified(
    AGNews(),
    4,
    FEW_WORDS | {"train": dataclasses.replace(ADAM, steps=1_000, save_every=50, keep=20)},
    dim=128,
    rows=(),
    grid=((8, 32, 128), (32,)),
  ),
}

PAPER = {
  "ptb-small": lstm(PTB, SMALL, rows=(*HEADLINE, *CHEN), **PTB_SMALL, seeds=3, words=True),
  "ptb-medium": lstm(
    PTB,
    MEDIUM,
    rows=(*HEADLINE, *TRADITIONAL, *CHEN, *COMPRESSED),
    sx=CodeSize(32, 50, shared=True),
    vq=CodeSize(128, 50, shared=True),
    grid=((2, 8, 32, 128), (10, 25, 50, 130)),
    seeds=3,
  ),
  # Table 3 has smaller codes than Table 4, and Table 12 larger ones.
  "ptb-medium-smaller": lstm(
    PTB, MEDIUM, sx=CodeSize(32, 25, shared=True), vq=CodeSize(128, 50, shared=True)
  ),
  "ptb-medium-tied": lstm(
    PTB, MEDIUM, rows=("sx", "sx-tied", "vq"), **both(CodeSize(128, 50, shared=True))
  ),
  "ptb-large": lstm(
    PTB,
    LARGE,
    quantized=LARGE_DPQ,
    rows=(*HEADLINE, *CHEN),
    **both(CodeSize(16, 50, shared=True)),
  ),
  "wikitext-medium": lstm(
    WIKITEXT, MEDIUM, rows=(*HEADLINE, "sx-tied"), **both(CodeSize(128, 50, shared=True))
  ),
  **{
    name: classified(
      Zhang(f"zhang/{data}"),
      classes,
      {"tokenizer": WordTokenizer(lowercase=True), "context": 512},
      rows=CLASSIFIED,
      **ZHANG[name],
    )
    for name, data, classes in (
      ("ag-news", "ag_news", 4),
      ("yahoo", "yahoo_answers", 10),
      ("dbpedia", "dbpedia", 14),
      ("yelp-polarity", "yelp_review_polarity", 2),
      ("yelp-full", "yelp_review_full", 5),
    )
  },
  **{
    f"iwslt-{source}-{target}": DPQSetting(
      translated.iwslt15(source, target),
      dim=512,
      begin=translated.BEGIN,
      sx=CodeSize(32, 32),
      vq=CodeSize(128, 128),
      weight=1 / translated.WORDS,
    )
    for source, target in (("en", "vi"), ("vi", "en"))
  },
  "wmt": DPQSetting(
    translated.wmt19,
    dim=translated.BASE.dim,
    begin=translated.BEGIN,
    rows=(*HEADLINE, *RECONSTRUCTED),
    **both(CodeSize(128, 128)),
  ),
  **pretrained(
    bert.BASE,
    bert.Corpus(WIKIPEDIA, SentencePieceTokenizer(vocab=30_522)),
    train=Train(
      steps=1_000_000,
      batch=1024,
      accumulate=8,
      learning_rate=1e-4,
      warmup=10_000,
      weight_decay=0.01,
      beta2=0.999,
      final_fraction=0.0,
      eval_every=10_000,
      save_every=10_000,
    ),
    tune=dataclasses.replace(bert.FINE_TUNE, steps=30_000, learning_rate=3e-5),
    codes=CodeSize(32, 128),
  ),
}

SCALES = {
  scale: {
    name: dataclasses.replace(setting, name=name, folder=f"runs/dpq/{scale}")
    for name, setting in settings.items()
  }
  for scale, settings in (("smoke", SMOKE), ("cpu", CPU), ("paper", PAPER))
}
"""Scale -> name -> setting."""

BERT_TASKS = {("Table 13", "mnli"): "bert-pairs", ("Table 13", "squad"): "bert-spans"}

STAND_INS = {
  "smoke": {("Table 3", "wmt"): "multi30k", ("Table 11", "wmt"): "multi30k", **BERT_TASKS},
  "cpu": {
    ("Table 3", "ptb-medium-smaller"): "ptb-small",
    ("Table 9", "ptb-medium"): "ptb-small",
    ("Table 12", "ptb-medium-tied"): "ptb-short",
    ("Table 3", "wmt"): "multi30k",
    ("Table 11", "wmt"): "multi30k",
    **BERT_TASKS,
  },
  "paper": BERT_TASKS,
}
"""Scale -> (table, the paper's setting) -> the setting that stands in for it."""
