"""Which numbers does the VQ-Logits paper print, and for which of our rows?"""

from typing import NamedTuple


class Published(NamedTuple):
  """A row of Tables 1, 2, 6, 7, 9 or 10, or of Section 6.

  Attributes:
    perplexity: on the test text.
    params: of the output layer, in millions; None where the table has none.
    logits: speed of the logits relative to the full softmax, likewise.
  """

  perplexity: float
  params: float | None = None
  logits: float | None = None


class Body(NamedTuple):
  """What the paper's heads stand on.

  Attributes:
    text: its name.
    vocab: number of tokens, V.
    dim: width, D.
    layers: of the decoder.
    codes: codebook sizes of the main table, as many as a `Setting` has.
  """

  text: str
  vocab: int
  dim: int
  layers: int
  codes: tuple[int, ...]


BODIES = {
  "wikitext": Body("WikiText-103", 267_735, 768, 12, (1024, 2048, 4096)),
  "web": Body("C4", 32_000, 768, 12, (512, 1024, 2048)),
  "ptb": Body("Penn Treebank", 10_000, 512, 6, (256, 512, 1024)),
}
"""Name of our setting -> the paper's."""

PAPER = {
  "Table 1": {
    "full": Published(18.0, 205.2, 1.0),
    "adaptive": Published(18.9, 52.1, 1.7),
    "low-rank": Published(19.5, 137.1, 1.4),
    "vq-1024": Published(19.2, 0.78, 6.5),
    "vq-2048": Published(18.7, 1.57, 5.0),
    "vq-4096": Published(18.3, 3.15, 3.2),
  },
  "Table 2": {
    "full": Published(18.0),
    "vq-1024-fixed": Published(20.1),
    "vq-1024": Published(19.2),
    "vq-1024-scratch": Published(19.8),
  },
  "Table 6": {
    "vq-1024": Published(19.2),
    "vq-1024-inputs": Published(19.4),
    "vq-1024-bins": Published(19.7),
    "vq-1024-random": Published(21.5),
  },
  "Table 7": {
    "vq-1024": Published(19.2),
    "vq-1024-head": Published(19.5),
    "vq-1024-codebook": Published(19.9),
  },
  "Section 6": {
    "vq-1024": Published(19.2),
    "vq-1024-tied": Published(20.4),
  },
  "Table 9": {
    "full": Published(12.1, 24.6, 1.0),
    "adaptive": Published(12.8, 8.2, 1.9),
    "vq-512": Published(12.9, 0.39, 7.5),
    "vq-1024": Published(12.5, 0.78, 5.2),
    "vq-2048": Published(12.3, 1.57, 3.5),
  },
  "Table 10": {
    "full": Published(55.2, 5.1, 1.0),
    "adaptive": Published(56.5, 2.1, 1.5),
    "vq-256": Published(58.1, 0.13, 8.0),
    "vq-512": Published(56.9, 0.26, 5.0),
    "vq-1024": Published(56.0, 0.52, 3.0),
  },
}
"""Table -> row of ours -> the paper's numbers."""

TITLES = {
  "Table 1": ("wikitext", "main results, WikiText"),
  "Table 2": ("wikitext", "initialisation and learning of the codebook"),
  "Table 6": ("wikitext", "how tokens get their codes"),
  "Table 7": ("wikitext", "what is fine-tuned"),
  "Section 6": ("wikitext", "input embeddings that are the codes"),
  "Table 9": ("web", "main results, text of the web"),
  "Table 10": ("ptb", "main results, Penn Treebank"),
}
"""Table -> our setting, and what the table is about."""

LOGITS_MS = {"full": (410.4, 100.0), "vq-1024": (1.56, 15.4), "vq-2048": (3.14, 20.0)}
"""Table 3: MB of the weights in 16 bits, and ms for the logits of 32 x 512 tokens on an A100."""

WORDS = (
  ("Monday", "Tuesday", "Wednesday", "Sunday"),
  ("January", "February", "June", "October", "December"),
  ("km", "kg", "cm", "mph", "ft"),
  ("previously", "formerly", "subsequently", "recently"),
  ("he", "she", "it"),
  ("Australia", "Canada", "Germany", "France"),
  ("=", "==", "==="),
)
"""Table 8: words that the paper's codes share at K = 1,024."""
