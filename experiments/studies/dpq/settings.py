"""Which task, which body and how much training do the DPQ tables have, at which scale?

`smoke` runs in seconds on text that every machine has; `cpu` on two cores; `paper` is what the
paper and its reference implementation say, for a GPU or TPU. All rows of a setting share everything
but the embedding.
"""

import dataclasses
from typing import NamedTuple

from configs import dpq_bert as bert
from configs import dpq_multi30k as multi30k
from configs import dpq_translation as translated
from configs.dpq_lstm import LARGE, LARGE_DPQ, MEDIUM, SMALL, Body
from configs.dpq_text import ADAM
from experiments.studies.dpq.setting import (
  FEW_HELD_OUT,
  Codes,
  Setting,
  at_scale,
  classified,
  lstm,
  mirrored,
  pretrained,
)
from vqjax.lab.config import Train
from vqjax.lab.data import (
  TFDS,
  AGNews,
  DBpedia,
  LabelledTFDS,
  PennTreebank,
  SentencePieceTokenizer,
  WordTokenizer,
)
from vqjax.lab.data import WikiText as Wiki

COLUMN = "full", "sx", "vq"
"""What every table has."""

TRADITIONAL = "low-rank-5", "low-rank-10"
RECONSTRUCTED = tuple(
  f"reconstruction-{codes}" for codes in ("128x64", "32x128", "128x128", "32x256", "128x256")
)
AFTERWARDS = "scalar-8", "scalar-6", "scalar-4", "clusters-64", "clusters-128", "clusters-256"
"""Made of the trained full embedding, without training."""

CHEN = "kd", "kd-distilled", "pretrained-codes"
"""The baselines of Table 4."""

CLASSIFIED = (*COLUMN, "low-rank-10", "low-rank-20", "kd")


class Quantized(NamedTuple):
  """How the two rows of a data set are quantised."""

  sx: Codes
  vq: Codes


# The paper does not print them. They are those whose ratio, times (d + 1) / d, is the one it prints
# at its vocabulary, to the second decimal.
AG_NEWS = Quantized(Codes(32, 100, True), Codes(16, 100))
DBPEDIA = Quantized(Codes(16, 100, True), Codes(32, 50))
YAHOO = Quantized(Codes(16, 50, True), Codes(32, 100))
YELP_POLARITY = Quantized(Codes(32, 50, True), Codes(16, 100))
YELP_FULL = Quantized(Codes(16, 50, True), Codes(16, 100))


PTB = PennTreebank(), 929_589
WIKITEXT = Wiki(), 2_088_628
WIKIPEDIA = TFDS(
  "wikipedia/20230601.en", train="train[:98%]", valid="train[98%:99%]", test="train[99%:]"
)

_TINY = Body(16, 8, 0.0, 0.1, 0.5, 1, 1, 3.0)

SMOKE = {
  "ptb-small": lstm(
    FEW_HELD_OUT,
    8 * 20 * 6,
    _TINY,
    (*COLUMN, "sx-tied", "low-rank-5", *CHEN, *AFTERWARDS),
    Codes(4, 4, True),
    Codes(4, 4),
    kd=Codes(4, 4),
    rebuild_steps=20,
    words=WordTokenizer(vocab=200),
  ),
  "multi30k": Setting(
    mirrored,
    16,
    translated.BEGIN,
    (*COLUMN, "reconstruction-32x256"),
    Codes(4, 4),
    Codes(4, 4),
    rebuild_steps=20,
  ),
  **pretrained(
    bert.Body(16, 1, 2, 32, 12),
    bert.Text(FEW_HELD_OUT, WordTokenizer(vocab=200)),
    Train(steps=3, batch=8, warmup=1, eval_every=3, save_every=3),
    Train(steps=2, batch=8, warmup=1, eval_every=2, save_every=2),
    Codes(4, 4),
  ),
}

SHORTER = {"context": 64, "train": dataclasses.replace(ADAM, steps=2_000)}
"""A sixth of the training texts is here: as many steps would read them thirty times."""

CPU = {
  "ptb-small": lstm(
    *PTB,
    SMALL,
    (*COLUMN, *AFTERWARDS),
    Codes(8, 25, True),
    Codes(32, 25, True),
    seeds=3,
  ),
  "ptb-short": lstm(
    *PTB,
    SMALL._replace(hold=1, epochs=3),
    (*COLUMN, "sx-tied", *TRADITIONAL, *CHEN),
    Codes(8, 25, True),
    Codes(32, 25, True),
  ),
  "ag-news": classified(AGNews(), 4, CLASSIFIED, AG_NEWS.sx, AG_NEWS.vq, seeds=3, **SHORTER),
  "dbpedia": classified(DBpedia(), 14, CLASSIFIED, DBPEDIA.sx, DBPEDIA.vq, **SHORTER),
  "multi30k": Setting(
    multi30k.with_embedding,
    multi30k.SMALL.dim,
    translated.BEGIN,
    (*COLUMN, *RECONSTRUCTED),
    Codes(32, 32),
    Codes(32, 32),
  ),
  **pretrained(bert.SMALL, bert.PARAGRAPHS, bert.PRETRAIN, bert.FINE_TUNE, Codes(32, 32)),
  "ag-news-grid": classified(
    AGNews(),
    4,
    ("full",),
    Codes(32, 50),
    Codes(32, 50),
    dim=128,
    train=dataclasses.replace(ADAM, steps=400),
    tokenizer=WordTokenizer(vocab=8_000, lowercase=True),
    context=64,
    grid=((2, 8, 32, 128), (8, 16, 32)),
  ),
  "ag-news-changes": classified(
    AGNews(),
    4,
    (),
    Codes(32, 32),
    Codes(32, 32),
    dim=128,
    train=dataclasses.replace(ADAM, steps=1_000, save_every=50, keep=20),
    tokenizer=WordTokenizer(vocab=8_000, lowercase=True),
    context=64,
    grid=((8, 32, 128), (32,)),
  ),
}

PAPER = {
  "ptb-small": lstm(
    *PTB,
    SMALL,
    (*COLUMN, *CHEN),
    Codes(8, 25, True),
    Codes(32, 25, True),
    seeds=3,
  ),
  "ptb-medium": lstm(
    *PTB,
    MEDIUM,
    (*COLUMN, *TRADITIONAL, *CHEN, *AFTERWARDS),
    Codes(32, 50, True),
    Codes(128, 50, True),
    grid=((2, 8, 32, 128), (10, 25, 50, 130)),
    seeds=3,
  ),
  # Table 3 has smaller codes than Table 4, and Table 12 larger ones.
  "ptb-medium-smaller": lstm(*PTB, MEDIUM, COLUMN, Codes(32, 25, True), Codes(128, 50, True)),
  "ptb-medium-tied": lstm(
    *PTB, MEDIUM, ("sx", "sx-tied", "vq"), Codes(128, 50, True), Codes(128, 50, True)
  ),
  "ptb-large": lstm(
    *PTB,
    LARGE,
    (*COLUMN, *CHEN),
    Codes(16, 50, True),
    Codes(16, 50, True),
    quantized=LARGE_DPQ,
  ),
  "wikitext-medium": lstm(
    *WIKITEXT,
    MEDIUM,
    (*COLUMN, "sx-tied"),
    Codes(128, 50, True),
    Codes(128, 50, True),
  ),
  **{
    name: classified(
      LabelledTFDS(f"vqjax_zhang/{data}"),
      classes,
      CLASSIFIED,
      codes.sx,
      codes.vq,
      tokenizer=WordTokenizer(lowercase=True),
      context=512,
    )
    for name, data, classes, codes in (
      ("ag-news", "ag_news", 4, AG_NEWS),
      ("yahoo", "yahoo_answers", 10, YAHOO),
      ("dbpedia", "dbpedia", 14, DBPEDIA),
      ("yelp-polarity", "yelp_review_polarity", 2, YELP_POLARITY),
      ("yelp-full", "yelp_review_full", 5, YELP_FULL),
    )
  },
  **{
    name: Setting(
      *(make, 512, translated.BEGIN, COLUMN, Codes(32, 32), Codes(128, 128)),
      weight=1 / translated.WORDS,
    )
    for name, make in (
      ("iwslt-en-vi", translated.iwslt15("en", "vi")),
      ("iwslt-vi-en", translated.iwslt15("vi", "en")),
    )
  },
  "wmt": Setting(
    translated.wmt19,
    translated.BASE.dim,
    translated.BEGIN,
    (*COLUMN, *RECONSTRUCTED),
    Codes(128, 128),
    Codes(128, 128),
  ),
  **pretrained(
    bert.BASE,
    bert.Text(WIKIPEDIA, SentencePieceTokenizer(vocab=30_522)),
    Train(
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
    dataclasses.replace(bert.FINE_TUNE, steps=30_000, learning_rate=3e-5),
    Codes(32, 128),
  ),
}

SCALES = {
  scale: at_scale(scale, settings)
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
"""Scale -> (table, the paper's setting) -> the setting that is run in its place."""
