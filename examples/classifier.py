"""Embeddings of a classifier, compared: which package of Python's library is a docstring from?

vqjax study examples/classifier.py --scale 0.1   a tenth of the steps, to see that all runs
vqjax study examples/classifier.py

The text, the batches and the model are this file's own: a study needs no language model.
"""

import ast
import dataclasses
import functools
import hashlib
import pathlib
import sys
import sysconfig
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from vqjax import CentroidQuantizer, DenseEmbedding, DPQEmbedding, Embedding, Int8Embedding
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Source, WordTokenizer
from vqjax.lab.data.pipeline import NONE, Examples
from vqjax.lab.study import Row, Study

V, D = FROM_TOKENIZER, 64
PACKAGES = "asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml"


@functools.cache
def docstrings():
  """Split -> the docstrings of eight words or more, with the numbers of their packages."""
  library, found = pathlib.Path(sysconfig.get_paths()["stdlib"]), {}
  for label, package in enumerate(PACKAGES):
    for path in sorted((library / package).rglob("*.py")):
      for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        is_documented = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        text = is_documented and ast.get_docstring(node)
        if text and len(text.split()) >= 8:
          part = hashlib.md5(text.encode()).digest()[0] % 8  # equal texts are in one split
          found.setdefault({0: "test", 1: "valid"}.get(part, "train"), []).append((text, label))
  return found


@dataclasses.dataclass(frozen=True)
class Docstrings(Source):
  """Docstrings with a class each."""

  def _documents(self, split):
    return (text for text, _ in docstrings()[split])

  def labels(self, split):
    return np.array([label for _, label in docstrings()[split]], np.int32)

  def fingerprint(self):
    return hashlib.md5(repr(docstrings()).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Labelled(Examples):
  """Batches of whole texts, {"inputs": [B, T], "targets": [B]}, with `NONE` as padding."""

  def shapes(self, batch, context):
    shape = lambda *axes: jax.ShapeDtypeStruct(axes, np.int32)
    return {"inputs": shape(batch, context), "targets": shape(batch)}

  def _reader(self, split, context):
    ends = np.flatnonzero(split.tokens == split.eos)
    rows = np.full((len(ends), context), NONE, np.int32)
    for row, text in zip(rows, np.split(split.tokens, ends + 1)):
      row[: len(text[:-1])] = text[:-1][:context]
    return _Rows(rows, split.labels)


@dataclasses.dataclass
class _Rows:
  rows: np.ndarray
  labels: np.ndarray

  def __len__(self):
    return len(self.rows)

  def __call__(self, number):  # [B]; the last batch of an evaluation is filled with `NONE`
    none = number == NONE
    inputs = np.where(none[:, None], NONE, self.rows[number])
    return {"inputs": inputs, "targets": np.where(none, NONE, self.labels[number])}


class Classifier(nn.Module):
  """The mean of a text's vectors, a hidden layer, and a softmax over the packages."""

  embedding: Embedding
  dim: int
  context: int = 64

  def setup(self):
    self.hidden, self.output = nn.Dense(self.dim), nn.Dense(len(PACKAGES))

  def __call__(self, tokens, deterministic=True):
    return self._scores(tokens, deterministic)[0]

  def _scores(self, tokens, deterministic):
    vectors, terms = self.embedding.loss_terms(jnp.maximum(tokens, 0), deterministic)
    real = (tokens >= 0)[..., None]
    mean = (vectors * real).sum(axis=1) / jnp.maximum(real.sum(axis=1), 1)
    return self.output(nn.relu(self.hidden(mean))), terms

  def loss_terms(self, tokens, targets, deterministic=True):
    """Log-probabilities of the targets, and the embedding's own terms of the loss."""
    scores, terms = self._scores(tokens, deterministic)
    own = jnp.take_along_axis(nn.log_softmax(scores), jnp.maximum(targets, 0)[:, None], axis=1)
    return own[:, 0], {f"embedding/{name}": term for name, term in terms.items()}

  def log_prob(self, tokens, targets, deterministic=True):
    return self.loss_terms(tokens, targets, deterministic)[0]

  def hits(self, tokens, targets):
    """What is counted beside the loss."""
    return {"accuracy": self(tokens).argmax(axis=-1) == targets}


def study() -> Study:
  base = Experiment(
    name="base",
    model=Classifier(DenseEmbedding(V, D), D),
    data=Docstrings(),
    tokenizer=WordTokenizer(vocab=4000),
    loader=Labelled(),
    train=Train(steps=600, batch=64, warmup=30),
  )
  codes = CentroidQuantizer(codes=64, subspaces=16)
  return Study(
    base=base,
    rows={
      "dense": {},
      "int8": {"model.embedding": Int8Embedding(V, D, trained=True)},
      "codes": Row({"model.embedding": DPQEmbedding(V, D, codes)}, label="product codes"),
    },
    tune={"train.learning_rate": (1e-3, 3e-3, 1e-2)},
    seeds=3,
  )


if __name__ == "__main__":
  from vqjax.commands.study import main

  with tempfile.TemporaryDirectory() as folder:
    sys.exit(main([__file__, "--scale", "0.02", "--only", "dense/run", "--out", folder]))
