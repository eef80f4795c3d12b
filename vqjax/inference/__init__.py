"""Generation and scoring of text with the general decoder and any head."""

from vqjax.inference.cache import unstacked
from vqjax.inference.generation import Generated, generate, stream
from vqjax.inference.sampling import GREEDY, UNFILTERED, Sampling
from vqjax.inference.scoring import score
from vqjax.inference.speculation import Draft, Drafter, EarlyExit
from vqjax.inference.text import TextStream, Tokenizer

__all__ = [
  "GREEDY",
  "UNFILTERED",
  "Draft",
  "Drafter",
  "EarlyExit",
  "Generated",
  "Sampling",
  "TextStream",
  "Tokenizer",
  "generate",
  "score",
  "stream",
  "unstacked",
]
