"""Which numbers does the DPQ paper print, and for which of our rows?"""

from typing import NamedTuple


class Published(NamedTuple):
  """A row of a table.

  Attributes:
    score: perplexity, accuracy in per cent, or BLEU.
    ratio: compression of the embedding; None where the table has none.
  """

  score: float
  ratio: float | None = None


def _column(full: float, sx: tuple[float, float], vq: tuple[float, float]) -> dict[str, Published]:
  return {"full": Published(full, 1.0), "sx": Published(*sx), "vq": Published(*vq)}


def _scores(**rows: float) -> dict[str, Published]:
  return {name.replace("_", "-"): Published(score) for name, score in rows.items()}


PAPER = {
  "Table 3": {
    "ptb-medium-smaller": _column(83.38, (83.17, 163.2), (83.27, 58.67)),
    "wikitext-medium": _column(95.61, (94.94, 59.25), (95.92, 95.25)),
    "iwslt-en-vi": _column(25.4, (25.3, 86.17), (25.3, 16.13)),
    "iwslt-vi-en": _column(23.0, (23.1, 72.0), (22.5, 14.05)),
    "wmt": _column(38.8, (38.8, 18.0), (38.7, 18.23)),
    "ag-news": _column(92.59, (92.49, 19.26), (92.55, 23.95)),
    "yahoo": _column(69.41, (69.62, 48.16), (69.15, 19.24)),
    "dbpedia": _column(98.12, (98.13, 24.08), (98.14, 38.45)),
    "yelp-polarity": _column(93.92, (94.17, 38.52), (93.91, 24.04)),
    "yelp-full": _column(60.33, (60.10, 48.16), (60.22, 24.05)),
  },
  "Table 4": {
    "ptb-small": _column(114.5, (105.8, 85.5), (106.5, 51.1))
    | {
      "pretrained-codes": Published(108.0, 4.8),
      "kd": Published(108.5, 4.8),
      "kd-distilled": Published(107.8, 4.8),
    },
    "ptb-medium": _column(83.4, (82.0, 82.9), (83.3, 58.7))
    | {
      "pretrained-codes": Published(84.9, 11.7),
      "kd": Published(89.0, 11.7),
      "kd-distilled": Published(83.1, 11.7),
    },
    "ptb-large": _column(78.7, (78.5, 238.3), (79.5, 238.3))
    | {
      "pretrained-codes": Published(80.7, 18.5),
      "kd": Published(86.4, 18.5),
      "kd-distilled": Published(77.7, 18.5),
    },
  },
  "Table 9": {
    "ptb-medium": {
      "full": Published(83.38, 1.0),
      "scalar-8": Published(84.06, 4.0),
      "scalar-6": Published(87.73, 5.3),
      "scalar-4": Published(92.86, 8.3),
      "clusters-64": Published(84.03, 8.3),
      "clusters-128": Published(83.71, 6.7),
      "clusters-256": Published(83.66, 5.3),
      "low-rank-5": Published(84.84, 5.0),
      "low-rank-10": Published(85.53, 10.2),
      "pretrained-codes": Published(84.92, 12.5),
      "kd-distilled": Published(83.11, 12.5),
      "vq": Published(83.3, 58.7),
      "sx": Published(82.0, 82.9),
    }
  },
  "Table 10": {
    name: {row: Published(*numbers) for row, numbers in rows.items()}
    for name, rows in {
      "ag-news": {
        "full": (92.6, 1.0),
        "low-rank-10": (91.4, 10.4),
        "low-rank-20": (91.5, 21.4),
        "kd": (91.6, 53.3),
        "vq": (92.6, 24.0),
        "sx": (92.5, 19.3),
      },
      "yahoo": {
        "full": (69.4, 1.0),
        "low-rank-10": (69.5, 10.2),
        "low-rank-20": (69.1, 21.5),
        "kd": (69.5, 31.7),
        "vq": (69.2, 19.2),
        "sx": (69.6, 48.2),
      },
      "dbpedia": {
        "full": (98.1, 1.0),
        "low-rank-10": (97.7, 10.3),
        "low-rank-20": (97.9, 21.3),
        "kd": (98.0, 48.4),
        "vq": (98.1, 38.5),
        "sx": (98.1, 24.1),
      },
      "yelp-polarity": {
        "full": (93.9, 1.0),
        "low-rank-10": (92.4, 10.4),
        "low-rank-20": (92.4, 21.5),
        "kd": (93.1, 48.6),
        "vq": (93.9, 24.0),
        "sx": (94.2, 38.5),
      },
      "yelp-full": {
        "full": (60.3, 1.0),
        "low-rank-10": (57.8, 10.3),
        "low-rank-20": (57.3, 21.4),
        "kd": (59.0, 54.4),
        "vq": (60.2, 24.1),
        "sx": (60.1, 48.2),
      },
    }.items()
  },
  "Table 11": {
    "wmt": {
      "full": Published(38.8, 1.0),
      "reconstruction-128x64": Published(28.9, 31.9),
      "reconstruction-32x128": Published(35.4, 25.0),
      "reconstruction-128x128": Published(35.7, 17.0),
      "reconstruction-32x256": Published(36.9, 12.6),
      "reconstruction-128x256": Published(37.8, 8.8),
      "vq": Published(38.7, 17.0),
      "sx": Published(38.8, 17.0),
    }
  },
  "Table 12": {
    "ptb-medium-tied": _scores(sx=82.4, sx_tied=83.5, vq=83.5),
    "wikitext-medium": _scores(sx=95.2, sx_tied=95.8, vq=97.0),
  },
  "Table 13": {
    "mnli": {"full": Published(84.2, 1.0), "sx": Published(83.9, 37.0)},
    "squad": {"full": Published(83.1, 1.0), "sx": Published(83.1, 37.0)},
  },
}
"""Table -> the paper's setting -> row."""

TITLES = {
  "Table 3": "DPQ against the full embedding",
  "Table 4": "Penn Treebank, language models of three sizes",
  "Table 9": "Penn Treebank, other ways to compress",
  "Table 10": "text classification, other ways to compress",
  "Table 11": "translation, tables reconstructed after training",
  "Table 12": "keys and values tied or not",
  "Table 13": "BERT, a pair and a span task",
}

TEXTS = {
  "ptb-small": "PTB, small",
  "ptb-short": "PTB, small, 3 epochs",
  "ptb-medium": "PTB, medium",
  "ptb-medium-smaller": "PTB, medium",
  "ptb-medium-tied": "PTB, medium",
  "ptb-large": "PTB, large",
  "wikitext-medium": "WikiText-2, medium",
  "iwslt-en-vi": "IWSLT15, En-Vi",
  "iwslt-vi-en": "IWSLT15, Vi-En",
  "wmt": "WMT19, En-De",
  "multi30k": "Multi30k, En-De",
  "mnli": "BERT, MNLI",
  "squad": "BERT, SQuAD 1.1, exact match",
  "bert-pairs": "BERT, continuations",
  "bert-spans": "BERT, stretches of another text",
  "ag-news": "AG News",
  "yahoo": "Yahoo! Answers",
  "dbpedia": "DBpedia",
  "yelp-polarity": "Yelp, polarity",
  "yelp-full": "Yelp, full",
}
"""Setting -> what tables call it."""
