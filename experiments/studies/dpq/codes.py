"""Which codes has a trained embedding: how often each is used, how small, near which others?"""

import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.dpq.bleu import bleu
from vqjax import DPQEmbedding, Embedding
from vqjax.lab.config import Experiment, with_vocab
from vqjax.lab.conversion.tables import embedding_of
from vqjax.lab.data import Encoder, fit_encoder
from vqjax.lab.models import EncoderDecoder
from vqjax.lab.training import read_variables, saved_steps
from vqjax.ops import quantize

FAMILIES = (
  ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
  ("reagan", "bush", "obama", "clinton", "putin"),
  ("toronto", "london", "paris", "tokyo", "chicago", "boston", "berlin"),
)
"""Words of one kind each, as in the paper's Table 8; a text has some of them."""

NEIGHBOURS = "monopoly", "toronto", "quickly"
"""Words whose nearest others are listed: Tables 5 to 7."""

NEAREST = 10


def beside(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """What is kept of a run's embedding: neighbours of words, and of codes how they are used."""
  encoder = fit_encoder(experiment.data, experiment.tokenizer)
  embedding = with_vocab(experiment, encoder.vocab).model.embedding
  variables = embedding_of(_whole(read_variables(folder)[0]))
  found = {"neighbours": neighbours(embedding, variables, encoder)}
  if isinstance(embedding, DPQEmbedding):
    found["codes"] = codes(embedding, variables, encoder)
    found["compact"] = compact(embedding, variables)
    found["changes"] = changes(embedding, folder)
  if isinstance(experiment.model, EncoderDecoder):
    found |= bleu(experiment, folder)
  return found


def _whole(variables: dict[str, Any]) -> dict[str, Any]:
  """The variables of the encoder, where a model has its embedding in one."""
  if "encoder" not in variables["params"] or "embedding" in variables["params"]:
    return variables
  return {name: tree["encoder"] for name, tree in variables.items() if "encoder" in tree}


def compact(embedding: DPQEmbedding, variables: dict[str, Any]) -> dict[str, float]:
  """How small it is: the ratio of the paper's formula, and the bytes of the saved file."""
  small = embedding.compact(variables)
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "embedding.safetensors")
    small.save(path)
    size = path.stat().st_size
  return {"formula": small.compression_ratio(), "bytes": small.nbytes, "file_bytes": size}


def changes(embedding: DPQEmbedding, folder: pathlib.Path) -> list[tuple[int, float]]:
  """(step, per cent of all codes that differ from those of the checkpoint before), as kept."""
  found, before = [], None
  for step in saved_steps(folder):
    own = embedding_of(_whole(read_variables(folder, at=step)[0]))
    now = np.asarray(codes_of_all(embedding, own))
    if before is not None:
      found.append((step, 100 * float((now != before).mean())))
    before = now
  return found


def codes_of_all(embedding: DPQEmbedding, variables: dict[str, Any]) -> jax.Array:
  """int32 [V, M]."""
  encode = jax.jit(lambda own, tokens: embedding.apply(own, tokens, method="codes_of"))
  return encode(variables, jnp.arange(embedding.vocab))


def codes(embedding: DPQEmbedding, variables: dict[str, Any], encoder: Encoder) -> dict[str, Any]:
  """How many tokens of the vocabulary are on each code, and the codes of some words."""
  code = codes_of_all(embedding, variables)
  counts = quantize.code_counts(code, embedding.quantizer.codes)
  perplexity = np.asarray(quantize.code_perplexity(counts), np.float64)
  words = {word: token for family in FAMILIES for word, token in known(encoder, family).items()}
  return {
    "counts": np.asarray(counts, int).tolist(),
    "perplexity": {"mean": float(perplexity.mean()), "least": float(perplexity.min())},
    "distinct": len(np.unique(np.asarray(code), axis=0)),
    "words": {word: np.asarray(code[token]).tolist() for word, token in words.items()},
  }


def neighbours(
  embedding: Embedding, variables: dict[str, Any], encoder: Encoder
) -> dict[str, list[tuple[str, float]]]:
  """The words of the largest cosines with some words, and these, the word itself first."""
  table = np.asarray(embedding.apply(variables, method="table"), np.float64)
  unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
  found = {}
  for word, token in known(encoder, NEIGHBOURS).items():
    cosine = unit @ unit[token]
    cosine[token] = 2.0  # first, whatever shares its codes
    best = np.argsort(-cosine, kind="stable")[:NEAREST]
    found[word] = [(encoder.decode([t]), float(min(cosine[t], 1.0))) for t in best]
  return found


def known(encoder: Encoder, words: Sequence[str]) -> dict[str, int]:
  """Those of the words that are one token, which is not the one for unknown words."""
  found = {}
  for word in words:
    tokens = encoder.encode(word)[:-1]
    if len(tokens) == 1 and encoder.decode(tokens).strip() == word:
      found[word] = int(tokens[0])
  return found
