"""How good are a run's translations of its test split, by BLEU?"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import sacrebleu

from vqjax.lab.config import Experiment
from vqjax.lab.data import Encoder, fit_encoder
from vqjax.lab.data.pipeline import NONE
from vqjax.lab.models import EncoderDecoder, translate
from vqjax.lab.training import read_variables
from vqjax.lab.training.run import load_text

BEAMS, PENALTY, ROWS = 4, 0.6, 50
SHOWN = 5


def bleu(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """The BLEU of a run's newest checkpoint, and some of its translations."""
  text = load_text(experiment)
  return scored(experiment, text.experiment.model, read_variables(folder)[0])


def scored(
  experiment: Experiment, model: EncoderDecoder, variables: Mapping[str, Any]
) -> dict[str, Any]:
  """{"bleu": {"score", "signature", "examples": [source, reference, translation]}}.

  sacrebleu's own tokenisation of the detokenised text, cased.
  """
  encoder = fit_encoder(experiment.data, experiment.tokenizer)
  pairs = list(experiment.data.pairs("test"))
  sources, references = zip(*pairs, strict=True)
  found = translations(model, variables, encoder, sources)
  metric = sacrebleu.BLEU()
  score = metric.corpus_score(found, [references])
  shown = [list(row) for row in list(zip(sources, references, found, strict=True))[:SHOWN]]
  told = {"score": score.score, "signature": str(metric.get_signature()), "examples": shown}
  return {"bleu": told}


def translations(
  model: EncoderDecoder, variables: Mapping[str, Any], encoder: Encoder, sources: tuple[str, ...]
) -> list[str]:
  """What the beam search makes of each text, sources of like length at a time."""
  encoded = [encoder.encode(source)[: model.context] for source in sources]
  search = jax.jit(
    functools.partial(translate, model, eos=encoder.eos, beams=BEAMS, penalty=PENALTY)
  )
  found = [""] * len(sources)
  order = sorted(range(len(sources)), key=lambda at: len(encoded[at]))
  for first in range(0, len(order), ROWS):
    chosen = order[first : first + ROWS]
    # One shape for all: the program is compiled once.
    batch = np.full((ROWS, model.context), NONE, np.int32)
    batch[:, 0] = encoder.eos
    for row, at in enumerate(chosen):
      batch[row, : len(encoded[at])] = encoded[at]
    tokens = np.asarray(search(variables, batch).tokens)
    for row, at in enumerate(chosen):
      found[at] = encoder.decode(tokens[row][tokens[row] >= 0].tolist()).strip()
  return found
