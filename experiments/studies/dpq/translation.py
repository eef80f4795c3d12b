"""Translations of test sentences by beam search, and their BLEU."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import sacrebleu

from experiments.studies.dpq.models import EncoderDecoder, translate
from vqjax.lab.config import Experiment
from vqjax.lab.data import encode_document, fit_tokenizer
from vqjax.lab.data.pipeline import NONE
from vqjax.lm.tokenizers import Tokenizer

BEAMS, PENALTY, SENTENCES = 4, 0.6, 50
"""Beams of the search, its length penalty, and sentences of a batch."""


def bleu(
  experiment: Experiment, model: EncoderDecoder, variables: Mapping[str, Any]
) -> dict[str, Any]:
  """BLEU of a model's test translations, cased and detokenised, by sacrebleu."""
  tokenizer = fit_tokenizer(experiment.data, experiment.tokenizer)
  sources, references = zip(*experiment.data.pairs("test"), strict=True)
  metric = sacrebleu.BLEU()
  score = metric.corpus_score(translations(model, variables, tokenizer, sources), [references])
  return {"score": score.score, "signature": str(metric.get_signature())}


def translations(
  model: EncoderDecoder, variables: Mapping[str, Any], tokenizer: Tokenizer, sources: Sequence[str]
) -> list[str]:
  """The translation of each source by beam search, in the order of the sources."""
  encoded = [encode_document(tokenizer, source)[: model.context] for source in sources]
  search = jax.jit(
    functools.partial(translate, model, eos=tokenizer.eos[0], beams=BEAMS, penalty=PENALTY)
  )
  texts = [""] * len(sources)
  # Sources of similar length share a batch, so that few steps of the search are wasted.
  order = sorted(range(len(sources)), key=lambda at: len(encoded[at]))
  for first in range(0, len(order), SENTENCES):
    chosen = order[first : first + SENTENCES]
    # All batches have one shape, so that the program is compiled once.
    batch = np.full((SENTENCES, model.context), NONE, np.int32)
    batch[:, 0] = tokenizer.eos[0]
    for row, at in enumerate(chosen):
      batch[row, : len(encoded[at])] = encoded[at]
    tokens = np.asarray(search(variables, batch).tokens)
    for row, at in enumerate(chosen):
      texts[at] = tokenizer.decode(tokens[row][tokens[row] >= 0].tolist()).strip()
  return texts
