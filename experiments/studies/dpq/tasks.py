"""The studies of DPQ's tables. The rows of one differ only in the embedding.

vqjax study experiments/studies/dpq/tasks.py:ptb_small --out experiments/studies/dpq/ptb_small

The medium language models are the paper's, for a GPU or TPU; the others run on two cores.
"""

import dataclasses
import functools
from typing import Any

from configs.dpq import bert, translation
from configs.dpq.lstm import MEDIUM, SMALL, LSTMSize, language_model
from configs.dpq.lstm import WORDS as LSTM_WORDS
from configs.dpq.multi30k import SMALL as CAPTIONS
from configs.dpq.multi30k import with_embedding
from configs.dpq.text import ADAM, BEGIN, DIM, classifier
from experiments.studies.dpq.data.labelled import AGNews, DBpedia, LabelledSource
from experiments.studies.dpq.rows import (
  DEFAULT,
  HEADLINE,
  CodeSize,
  FromPart,
  Task,
  compressed,
  full,
  grid,
  softmax,
  study,
  trained,
)
from vqjax import Embedding
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import PennTreebank, Source, WikiText, WordTokenizer
from vqjax.lab.study import Row, Study

CLASSIFIED = (*HEADLINE, "low-rank-10", "low-rank-20", "kd")
PTB, WIKITEXT = (PennTreebank(), 929_589), (WikiText(), 2_088_628)
PTB_SMALL = CodeSize(8, 25, shared=True), CodeSize(32, 25, shared=True)
LARGER = CodeSize(128, 50, shared=True)

# A sixth of the training texts is at hand; the paper's 5,000 steps would read them 30 times.
SHORTER = {"context": 64, "train": dataclasses.replace(ADAM, steps=2_000)}
FEW_WORDS = {
  "context": 64,
  "tokenizer": WordTokenizer(vocab=8_000, lowercase=True),
  "train": dataclasses.replace(ADAM, steps=400),
}
GRID = (2, 8, 32, 128), (8, 16, 32)
"""K and M of the heat maps."""


def lstm(text: tuple[Source, int], body: LSTMSize, tokenizer: WordTokenizer = LSTM_WORDS) -> Task:
  """Language modelling with an LSTM, of a source and its number of training tokens."""

  def make(name: str, embedding: Embedding, seed: int) -> Experiment:
    return language_model(name, embedding, body, *text, seed, tokenizer)

  return Task(make, body.dim, body.begin, body.weight)


def classified(data: LabelledSource, classes: int, options: dict[str, Any], dim: int = DIM) -> Task:
  """Text classification with mean pooling; `options` are the classifier's."""
  make = functools.partial(classifier, data=data, classes=classes, **options)
  return Task(make, dim, BEGIN)


def ptb_small() -> Study:
  """The small LSTM on Penn Treebank."""
  task = lstm(PTB, SMALL)
  return study(task, *PTB_SMALL, further=compressed(task), seeds=3, words=True)


def ptb_short() -> Study:
  """Three epochs of the small LSTM."""
  names = *HEADLINE, "sx-tied", "low-rank-5", "low-rank-10", "kd"
  return study(lstm(PTB, SMALL._replace(hold=1, epochs=3)), *PTB_SMALL, names)


# The paper does not print the codes of text classification. These are the ones whose ratio, times
# (d + 1) / d, is the printed one at the paper's vocabulary, to the second decimal.
AG_NEWS = CodeSize(32, 100, shared=True), CodeSize(16, 100)
DBPEDIA = CodeSize(16, 100, shared=True), CodeSize(32, 50)


def ag_news() -> Study:
  """Topics of news."""
  return study(classified(AGNews(), 4, SHORTER), *AG_NEWS, CLASSIFIED, seeds=3)


def dbpedia() -> Study:
  """Kinds of entries of an encyclopedia."""
  return study(classified(DBpedia(), 14, SHORTER), *DBPEDIA, CLASSIFIED)


def ag_news_grid() -> Study:
  """The codes of the heat maps."""
  task = classified(AGNews(), 4, FEW_WORDS, dim=128)
  return study(task, names=("full",), further=grid(task, *GRID))


def multi30k() -> Study:
  """Translation of captions."""
  return study(Task(with_embedding, CAPTIONS.dim, translation.BEGIN))


def bert_pairs() -> Study:
  """BERT's pre-training, and a task for which it is fine-tuned."""
  return pretrained(bert.SMALL, bert.PARAGRAPHS, bert.PRETRAIN, bert.FINE_TUNE, DEFAULT)


def pretrained(
  body: bert.EncoderSize, text: bert.Corpus, train: Train, tune: Train, codes: CodeSize
) -> Study:
  """Rows "before-NAME", which are pre-trained, and NAME, which begins from its encoder."""
  before = Task(bert.pretraining(body, text, train), body.dim, bert.BEGIN)
  after = before._replace(make=bert.pairs(body, text, tune))
  rows: dict[str, Row] = {}
  for name, label, embedding in (
    ("full", "Full", full(before)),
    ("sx", f"DPQ-SX ({codes})", softmax(before, codes)),
  ):

    def tuned(base: Experiment, run: Any, name=name, embedding=embedding) -> Experiment:
      start = FromPart(run(f"before-{name}").folder, "encoder")
      made = after.make(name, embedding, seed=base.seed)
      return dataclasses.replace(made, init_from=start)

    rows[f"before-{name}"] = trained(before, f"{label}, pre-training", embedding)
    rows[name] = Row(tuned, label)
  return study(before, names=(), further=rows)


def ptb_medium() -> Study:
  """The paper's medium LSTM."""
  task = lstm(PTB, MEDIUM)
  names = *HEADLINE, "low-rank-5", "low-rank-10", "kd"
  sx = CodeSize(32, 50, shared=True)
  return study(task, sx, LARGER, names, compressed(task), seeds=3)


def ptb_medium_smaller() -> Study:
  """The codes of Table 3, which are smaller than those of Table 4."""
  return study(lstm(PTB, MEDIUM), CodeSize(32, 25, shared=True), LARGER)


def ptb_medium_tied() -> Study:
  """The codes of Table 12, which are larger."""
  return study(lstm(PTB, MEDIUM), LARGER, LARGER, ("sx", "sx-tied", "vq"))


def wikitext_medium() -> Study:
  """The paper's medium LSTM on WikiText-2."""
  return study(lstm(WIKITEXT, MEDIUM), LARGER, LARGER, (*HEADLINE, "sx-tied"))
