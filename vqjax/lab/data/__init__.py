"""Where do documents, tokens and batches come from?"""

from vqjax.lab.data.attributes import Grid
from vqjax.lab.data.cache import TokenSplit, encode_split, fit_encoder
from vqjax.lab.data.corpora import PennTreebank, WikiText
from vqjax.lab.data.drawn import Drawn, Shapes
from vqjax.lab.data.examples import Documents
from vqjax.lab.data.filters import Filtered
from vqjax.lab.data.jsonl import JSONLines
from vqjax.lab.data.labelled import AGNews, DBpedia, LabelledSource
from vqjax.lab.data.pairs import Mirrored, Multi30k, PairedSource, Pairs
from vqjax.lab.data.pieces import SentencePieceTokenizer
from vqjax.lab.data.pipeline import EvaluationBatches, EvaluationStreams, Loader, Streams, Windows
from vqjax.lab.data.source import Prepared, Source
from vqjax.lab.data.stories import Stories
from vqjax.lab.data.tasks import Continued, Intruded, Masked
from vqjax.lab.data.text import Text
from vqjax.lab.data.tfds import TFDS, LabelledTFDS, PairedTFDS
from vqjax.lab.data.tokenizers import BPETokenizer, Encoder, Tokenizer, WordTokenizer

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
