"""Data: sources of documents, tokenizers, the token cache, and loaders of batches."""

from vqjax.lab.data.cache import TokenSplit, encode_split, fit_encoder
from vqjax.lab.data.corpora import JSONLines, PennTreebank, Stories, WikiText
from vqjax.lab.data.filters import Filtered
from vqjax.lab.data.pipeline import (
  EvaluationBatches,
  EvaluationStreams,
  Loader,
  Streams,
  Windows,
)
from vqjax.lab.data.source import Prepared, Source
from vqjax.lab.data.text import Text
from vqjax.lab.data.tfds import TFDS
from vqjax.lab.data.tokenizers import (
  BPETokenizer,
  CheckpointTokenizer,
  Encoder,
  SentencePieceTokenizer,
  Tokenizer,
  WordTokenizer,
)

__all__ = [
  "TFDS",
  "BPETokenizer",
  "CheckpointTokenizer",
  "Encoder",
  "EvaluationBatches",
  "EvaluationStreams",
  "Filtered",
  "JSONLines",
  "Loader",
  "PennTreebank",
  "Prepared",
  "SentencePieceTokenizer",
  "Source",
  "Stories",
  "Streams",
  "Text",
  "TokenSplit",
  "Tokenizer",
  "WikiText",
  "Windows",
  "WordTokenizer",
  "encode_split",
  "fit_encoder",
]
