"""Memories of n-grams on WikiText-2: a decoder of three blocks of width 160, BPE of 4,096 tokens.

vqjax study experiments/studies/ngrams/wikitext.py --out experiments/studies/ngrams/wikitext
"""

import dataclasses
from typing import Any

import jax
import optax
from flax import linen as nn

from experiments.studies.ngrams.forms import Coded, forms_of
from vqjax import (
  CentroidQuantizer,
  DenseEmbedding,
  DenseHead,
  DPQEmbedding,
  Embedding,
  Int8Embedding,
)
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import BPETokenizer, Source, WikiText, Windows
from vqjax.lab.study import Row, Study
from vqjax.lab.study.declaration import Runs
from vqjax.lab.training.optimizer import decayed, learning_rate
from vqjax.lm.models import Transformer
from vqjax.ngrams import NGramEmbedding, NGramMemory
from vqjax.ops.ngrams import XorHash
from vqjax.row_updates import rowwise

V, DIM, WIDTH = 4096, 160, 32


@dataclasses.dataclass(frozen=True)
class TableByRows:
  """AdamW, and Adagrad with one number a row for the table of n-grams.

  Attributes:
    factor: ratio of the table's learning rate to that of all else.
  """

  factor: float = 10.0

  def learning_rate(self, train: Train) -> optax.Schedule:
    """Return step -> learning rate, the schedule of AdamW."""
    return learning_rate(dataclasses.replace(train, optimizer=None))

  def rule(self, train: Train) -> optax.GradientTransformation:
    """Return the optimiser, without clipping."""
    schedule = self.learning_rate(train)
    rules = {
      "rows": rowwise(lambda step: self.factor * schedule(step)),
      "other": optax.adamw(
        schedule, b1=train.beta1, b2=train.beta2, weight_decay=train.weight_decay, mask=decayed
      ),
    }
    return optax.multi_transform(rules, _labels)


def _labels(params):
  names = lambda path: jax.tree_util.keystr(path, simple=True, separator=".").split(".")
  of = lambda path, _: "rows" if "lookup" in names(path) else "other"
  return jax.tree.map_with_path(of, params)


def decoder(dim: int) -> Transformer:
  """Three blocks whose embedding is the head, of a width that 5 divides."""
  embedding = DenseEmbedding(FROM_TOKENIZER, dim)
  head = DenseHead(FROM_TOKENIZER, dim, use_bias=True, embedding=embedding)
  return Transformer(embedding=embedding, head=head, dim=dim, layers=3, heads=5, context=128)


def base(source: Source, steps: int) -> Experiment:
  """The decoder without a memory, on batches of 2,048 tokens."""
  train = Train(
    steps=steps,
    batch=16,
    learning_rate=3e-3,
    final_fraction=1 / 30,
    warmup=100,
    beta2=0.98,
    eval_every=steps,
    save_every=500,
    keep=1,
    log_every=100,
  )
  return Experiment("base", decoder(DIM), source, BPETokenizer(V), Windows(), train)


def dense(rows: int) -> DenseEmbedding:
  """Rows of floats, which begin at zero."""
  return DenseEmbedding(rows, WIDTH, weight_init=nn.initializers.zeros)


def int8(rows: int) -> Int8Embedding:
  """Rows that are stored in 8 bits from the first step."""
  return Int8Embedding(rows, WIDTH, trained=True, levels_init=nn.initializers.zeros)


def product(rows: int) -> DPQEmbedding:
  """Rows of product codes from the first step, DPQ-VQ: 2 bits a number."""
  quantizer = CentroidQuantizer(codes=256, subspaces=8, table_init=nn.initializers.normal(0.02))
  return DPQEmbedding(rows, WIDTH, quantizer, query_init=nn.initializers.normal(0.02))


def memory(table: Embedding, ngrams: XorHash, label: str, **fields: Any) -> Row:
  """A row with a memory before the second block; `fields` are others of the row."""
  layer = NGramMemory(NGramEmbedding(ngrams, table), DIM)
  values = {
    "model.memories": (layer,),
    "model.memory_blocks": (1,),
    "train.optimizer": TableByRows(),
  }
  return Row(values, label, **fields)


BODY = (
  "embedding",
  "position",
  "blocks",
  "final_norm",
  "head",
  "memories_0.key",
  "memories_0.value",
  "memories_0.filters",
  "memories_0.key_scale",
  "memories_0.query_scale",
  "memories_0.convolved_scale",
)
"""All parameters but the table of n-grams."""


def around(source: str, bits: float | None, label: str, trainable: tuple[str, ...] = BODY) -> Row:
  """A row that trains all but the table of another row again, rounded to so many bits a weight."""

  def continued(_: Experiment, run: Runs) -> Experiment:
    start = run(source)
    train = dataclasses.replace(
      start.experiment.train,
      steps=150,
      warmup=15,
      eval_every=150,
      save_every=150,
      trainable=trainable,
    )
    begun = Coded(start.folder, bits)
    return dataclasses.replace(start.experiment, train=train, init_from=begun)

  return Row(continued, label, tune={"train.learning_rate": (1e-3,)}, seeds=1)


def study() -> Study:
  """The study; memories share the tuning of one of them, and most of them have one seed."""
  # Two heads of pairs and two of triples, or four of pairs.
  small, middle, large = (
    XorHash.qwen4(V, end=0, heads=2, least=size) for size in (8_192, 65_536, 262_144)
  )
  pairs = XorHash.qwen4(V, end=0, heads=4, order=2, least=65_536)
  dropout = {"model.dropout": (0.0, 0.1)}
  tune = {"train.learning_rate": (1.5e-3, 3e-3, 6e-3), **dropout}
  rates = {"train.learning_rate": (3e-3, 6e-3), "train.optimizer.factor": (5.0, 15.0), **dropout}
  name, more = "4 x 65,536 rows", {"tuned_as": "65536"}
  once = {**more, "seeds": 1}
  rows = {
    "none": Row({}, "no memory"),
    # As many bytes more, in float32, as 4 x 262,144 rows at 0.3 bits have.
    "wide": Row({"model": decoder(180)}, "no memory, 180 wide", tuned_as="none", seeds=1),
    "65536": memory(dense(middle.rows), middle, name, tune=rates),
    "262144": memory(dense(large.rows), large, "4 x 262,144 rows", **more),
    "8192": memory(dense(small.rows), small, "4 x 8,192 rows", **once),
    "pairs": memory(dense(pairs.rows), pairs, f"{name}, pairs only", **once),
    "random": memory(
      DenseEmbedding(middle.rows, WIDTH), middle, f"{name} that begin at random", **once
    ),
    "int8": memory(int8(middle.rows), middle, f"{name}, trained in int8", **once),
    "dpq": memory(product(middle.rows), middle, f"{name}, trained as DPQ", **once),
  }
  for source in ("65536", "262144"):
    for bits in (None, 0.8, 0.3):
      form = "as it is" if bits is None else f"at {bits} bits"
      label = f"{rows[source].label} {form}, all else trained for 150 steps more"
      rows[f"{source}-around-{bits or 'dense'}"] = around(source, bits, label)
  # What the text, read again, and its learning rate do without a table.
  rows["none-around-dense"] = around("none", None, "no memory, trained for 150 steps more", ())
  return Study(base(WikiText(), 1500), rows, tune=tune, extensions=1, measure=forms_of)
