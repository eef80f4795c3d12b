"""Which models are there to put a vocabulary layer into?"""

from vqjax.models.base import LanguageModel
from vqjax.models.bert import Encoder, MaskedLanguageModel, PairClassifier, SpanFinder
from vqjax.models.classifier import TextClassifier
from vqjax.models.convnet import ConvNet
from vqjax.models.lstm import LSTM
from vqjax.models.recurrent_translator import RecurrentTranslator
from vqjax.models.seq2seq import EncoderDecoder, translate
from vqjax.models.transformer import Transformer
from vqjax.models.translator import Translator

__all__ = [
  "LSTM",
  "ConvNet",
  "Encoder",
  "EncoderDecoder",
  "LanguageModel",
  "MaskedLanguageModel",
  "PairClassifier",
  "RecurrentTranslator",
  "SpanFinder",
  "TextClassifier",
  "Transformer",
  "Translator",
  "translate",
]
