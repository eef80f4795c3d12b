"""Data: sources of documents, tokenizers, the token cache, and loaders of batches."""

from vqjax.lab.data.cache import TokenSplit, encode_split, fit_encoder
from vqjax.lab.data.corpora import JSONLines, PennTreebank, Stories, WikiText
from vqjax.lab.data.documents import Continued, Documents, Intruded, Pairs
from vqjax.lab.data.filters import Filtered
from vqjax.lab.data.labelled import AGNews, DBpedia, LabelledSource
from vqjax.lab.data.pairs import Mirrored, Multi30k, PairedSource, PairedText
from vqjax.lab.data.pictures import Drawn, Shapes
from vqjax.lab.data.pipeline import (
  EvaluationBatches,
  EvaluationStreams,
  Loader,
  Masked,
  Streams,
  Windows,
)
from vqjax.lab.data.shapes import Grid
from vqjax.lab.data.source import Prepared, Source
from vqjax.lab.data.text import Text
from vqjax.lab.data.tfds import TFDS, LabelledTFDS, PairedTFDS
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
  "AGNews",
  "BPETokenizer",
  "CheckpointTokenizer",
  "Continued",
  "DBpedia",
  "Documents",
  "Drawn",
  "Encoder",
  "EvaluationBatches",
  "EvaluationStreams",
  "Filtered",
  "Grid",
  "Intruded",
  "JSONLines",
  "LabelledSource",
  "LabelledTFDS",
  "Loader",
  "Masked",
  "Mirrored",
  "Multi30k",
  "PairedSource",
  "PairedTFDS",
  "PairedText",
  "Pairs",
  "PennTreebank",
  "Prepared",
  "SentencePieceTokenizer",
  "Shapes",
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
