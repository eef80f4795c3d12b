"""Which words share a code, beside those of the paper's Table 8?"""

import collections
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.studies.vq_logits.paper import WORDS
from vqjax.lab.config import Experiment
from vqjax.lab.data import Encoder, encode_split, fit_encoder
from vqjax.lab.training import read_variables

SHOWN = 10
"""How many further words of a code are shown."""


def clusters(experiment: Experiment, folder: pathlib.Path) -> list[dict[str, Any]]:
  """For each row of Table 8 the code of a finished codebook run that most of its words are on.

  Raises:
    FileNotFoundError: the folder has no checkpoint.
  """
  variables, _ = read_variables(folder)
  table = variables["codes"]["head"]["assignment"]
  encoder = fit_encoder(experiment.data, experiment.tokenizer)
  train = encode_split(experiment.data, encoder, "train")
  counts = np.bincount(np.asarray(train.tokens), minlength=len(table))
  return [shared(encoder, table, counts, words) for words in WORDS]


def shared(
  encoder: Encoder, table: np.ndarray, counts: np.ndarray, words: Sequence[str]
) -> dict[str, Any]:
  """The code that most of some words are on.

  `known` are the words that the tokenizer has as one token, `code` the code, `held` those of them
  on it, `others` the most frequent other words on it, and `size` how many tokens it has. Where no
  word is known there is no code.
  """
  token = {word: found for word in words if (found := _token(encoder, word)) is not None}
  if not token:
    return {"words": list(words), "known": []}
  code, _ = collections.Counter(int(table[v]) for v in token.values()).most_common(1)[0]
  on_it = np.flatnonzero(table == code)
  others = [v for v in on_it[np.argsort(-counts[on_it], kind="stable")] if v not in token.values()]
  return {
    "words": list(words),
    "known": list(token),
    "code": code,
    "held": [word for word, v in token.items() if table[v] == code],
    "others": [encoder.decode([v]).strip() for v in others[:SHOWN]],
    "size": len(on_it),
  }


def _token(encoder: Encoder, word: str) -> int | None:
  """The number of a word that is one token."""
  tokens = encoder.encode(word)[:-1]
  whole = len(tokens) == 1 and encoder.decode(tokens).strip() == word
  return int(tokens[0]) if whole else None
