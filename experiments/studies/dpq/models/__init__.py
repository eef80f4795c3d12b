"""Models of the study: a text classifier, translators and BERT."""

from experiments.studies.dpq.models.bert import (
  BertEncoder,
  MaskedLanguageModel,
  PairClassifier,
  SpanFinder,
)
from experiments.studies.dpq.models.classifier import TextClassifier
from experiments.studies.dpq.models.recurrent import RecurrentTranslator
from experiments.studies.dpq.models.translator import EncoderDecoder, Translator, translate

__all__ = [
  "BertEncoder",
  "EncoderDecoder",
  "MaskedLanguageModel",
  "PairClassifier",
  "RecurrentTranslator",
  "SpanFinder",
  "TextClassifier",
  "Translator",
  "translate",
]
