"""Data: sources of documents, tokenizers, the token cache, and loaders of batches."""

from vqjax.lab.data.corpora import JSONLines, PennTreebank, Stories, WikiText
from vqjax.lab.data.filters import Filtered
from vqjax.lab.data.pipeline import (
  EvaluationBatches,
  EvaluationStreams,
  Loader,
  Streams,
  Windows,
)
from vqjax.lab.data.plain_text import Text
from vqjax.lab.data.source import Prepared, Source
from vqjax.lab.data.tfds import TFDS
from vqjax.lab.data.token_cache import (
  TokenSplit,
  encode_document,
  encode_split,
  fingerprint,
  fit_tokenizer,
)
from vqjax.lab.data.tokenizer_recipes import (
  BPETokenizer,
  CheckpointTokenizer,
  JSONTokenizer,
  SentencePieceTokenizer,
  TokenizerRecipe,
  WordTokenizer,
)

__all__ = [
  "TFDS",
  "BPETokenizer",
  "CheckpointTokenizer",
  "EvaluationBatches",
  "EvaluationStreams",
  "Filtered",
  "JSONLines",
  "JSONTokenizer",
  "Loader",
  "PennTreebank",
  "Prepared",
  "SentencePieceTokenizer",
  "Source",
  "Stories",
  "Streams",
  "Text",
  "TokenSplit",
  "TokenizerRecipe",
  "WikiText",
  "Windows",
  "WordTokenizer",
  "encode_document",
  "encode_split",
  "fingerprint",
  "fit_tokenizer",
]
