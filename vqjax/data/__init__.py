"""Where do documents, tokens and batches come from?"""

from vqjax.data.attributes import Grid
from vqjax.data.cache import TokenSplit, encode_split, fit_encoder
from vqjax.data.corpora import PennTreebank, WikiText
from vqjax.data.drawn import Drawn, Shapes
from vqjax.data.examples import Documents
from vqjax.data.filters import Filtered
from vqjax.data.jsonl import JSONLines
from vqjax.data.labelled import AGNews, DBpedia, LabelledSource
from vqjax.data.pairs import Mirrored, Multi30k, PairedSource, Pairs
from vqjax.data.pieces import SentencePieceTokenizer
from vqjax.data.pipeline import EvaluationBatches, EvaluationStreams, Loader, Streams, Windows
from vqjax.data.source import Prepared, Source
from vqjax.data.stories import Stories
from vqjax.data.tasks import Continued, Intruded, Masked
from vqjax.data.text import Text
from vqjax.data.tfds import TFDS, LabelledTFDS, PairedTFDS
from vqjax.data.tokenizers import BPETokenizer, Encoder, Tokenizer, WordTokenizer

__all__ = [
  "TFDS",
  "AGNews",
  "BPETokenizer",
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
