"""What is kept beside the results of DPQ's runs: use of codes, neighbours of words, and BLEU."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.dpq.models.translator import Translator
from experiments.studies.dpq.translation import bleu
from experiments.studies.words import single_tokens
from vqjax import DPQEmbedding, Embedding
from vqjax.convert import part_of
from vqjax.lab.config import Experiment
from vqjax.lab.trained import load_run
from vqjax.lm.tokenizers import Tokenizer
from vqjax.ops import quantize

PROBES, NEIGHBOURS = ("monopoly", "toronto", "quickly"), 9
"""Words whose nearest neighbours are kept, and their number: Tables 5 to 7."""


def measure_trained(
  experiment: Experiment, folder: pathlib.Path, words: bool = False
) -> dict[str, Any]:
  """Measurements of a run's embedding, and BLEU if it translates.

  Args:
    experiment: experiment of the run.
    folder: folder of the run.
    words: whether neighbours of words, and the number of tokens on each code, are among them.
  """
  model, variables, tokenizer = load_run(folder, experiment)
  embedding = model.embedding
  # BERT's tasks hold the embedding in their encoder.
  in_encoder = "embedding" not in variables["params"]
  own = part_of(part_of(variables, "encoder") if in_encoder else variables, "embedding")
  measured = {"neighbours": nearest_words(embedding, own, tokenizer)} if words else {}
  if isinstance(embedding, DPQEmbedding):
    encode = jax.jit(lambda own, tokens: embedding.apply(own, tokens, method="codes_of"))
    codes_VM = encode(own, jnp.arange(embedding.vocab))
    counts_MK = quantize.code_counts(codes_VM, embedding.quantizer.codes)
    perplexity_M = np.asarray(quantize.code_perplexity(counts_MK), np.float64)
    measured["codes"] = {
      "perplexity": {"mean": float(perplexity_M.mean()), "least": float(perplexity_M.min())}
    }
    if words:
      measured["codes"]["counts"] = np.asarray(counts_MK, int).tolist()
  if isinstance(model, Translator):
    measured["bleu"] = bleu(experiment, model, variables)
  return measured


def nearest_words(
  embedding: Embedding, variables: dict[str, Any], tokenizer: Tokenizer
) -> dict[str, list[tuple[str, float]]]:
  """The nearest other words of each word of `PROBES`, with their cosines."""
  table_VD = np.asarray(embedding.apply(variables, method="table"), np.float64)
  unit_VD = table_VD / np.maximum(np.linalg.norm(table_VD, axis=1, keepdims=True), 1e-12)
  nearest = {}
  for word, token in single_tokens(tokenizer, PROBES).items():
    cosine_V = unit_VD @ unit_VD[token]
    cosine_V[token] = -np.inf
    best = np.argsort(-cosine_V, kind="stable")[:NEIGHBOURS]
    nearest[word] = [(tokenizer.decode([t]), float(min(cosine_V[t], 1.0))) for t in best]
  return nearest
