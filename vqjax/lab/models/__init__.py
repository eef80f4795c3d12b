"""Models of the studies: language models, classifiers, translators and BERT."""

from vqjax.lab.models.bert import BertEncoder, MaskedLanguageModel, PairClassifier, SpanFinder
from vqjax.lab.models.classifiers import ConvNet, TextClassifier
from vqjax.lab.models.recurrent import LSTM, RecurrentTranslator, SymmetricUniform
from vqjax.lab.models.translator import EncoderDecoder, Translator, translate

__all__ = [
  "LSTM",
  "BertEncoder",
  "ConvNet",
  "EncoderDecoder",
  "MaskedLanguageModel",
  "PairClassifier",
  "RecurrentTranslator",
  "SpanFinder",
  "SymmetricUniform",
  "TextClassifier",
  "Translator",
  "translate",
]
