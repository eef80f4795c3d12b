"""Models of the studies: language models, classifiers, translators and BERT."""

from vqjax.lab.models.bert import Encoder, MaskedLanguageModel, PairClassifier, SpanFinder
from vqjax.lab.models.classifier import TextClassifier
from vqjax.lab.models.convnet import ConvNet
from vqjax.lab.models.lstm import LSTM
from vqjax.lab.models.recurrent_translator import RecurrentTranslator
from vqjax.lab.models.seq2seq import EncoderDecoder, translate
from vqjax.lab.models.translator import Translator

__all__ = [
  "LSTM",
  "ConvNet",
  "Encoder",
  "EncoderDecoder",
  "MaskedLanguageModel",
  "PairClassifier",
  "RecurrentTranslator",
  "SpanFinder",
  "TextClassifier",
  "Translator",
  "translate",
]
