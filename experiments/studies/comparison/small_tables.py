"""A small table that is worth training: tied, in bytes from the first step, and its rivals.

vqjax study experiments/studies/comparison/small_tables.py \\
    --out experiments/studies/comparison/small_tables

A decoder of two blocks of width 128 with BPE of 4,096 tokens learns WikiText-2 in 1,500 steps of
1,024 tokens. The dense table is trained by AdamW, or by one second moment a row; the table in bytes
by the latter, rounded stochastically. The last two are then compressed to 1/16 and 1/32 of their
float32, and all else trained for 300 steps around the compressed table, which stays.
"""

import dataclasses

from vqjax import DenseEmbedding, DenseHead, Int8Embedding
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import BPETokenizer, WikiText, Windows
from vqjax.lab.study import Compressed, FromCompressed, Row, Study
from vqjax.lab.study.declaration import Runs
from vqjax.lab.training import FromRun, RowwiseTables
from vqjax.lm.models import Transformer

V, DIM = FROM_TOKENIZER, 128


def tied(embedding):
  """The fields of a model whose head is tied to an embedding."""
  head = DenseHead(V, DIM, use_bias=True, embedding=embedding)
  return {"model.embedding": embedding, "model.head": head}


def further(source: str, part: int | None, label: str) -> Row:
  """A row that trains on where another ended: all, or all but its table at 1/PART of its bytes."""

  def continued(base: Experiment, run: Runs) -> Experiment:
    start = run(source)
    model = base.model if part else start.experiment.model
    size = {"steps": 300, "warmup": 30, "eval_every": 300, "save_every": 300}
    fixed = {"trainable": WITHOUT_TABLE, "optimizer": None} if part else {}
    train = dataclasses.replace(start.experiment.train, **size, **fixed)
    begun = FromRun(start.folder)
    if part:
      begun = FromCompressed(start.folder, 1 / part, start.experiment.model.embedding)
    return dataclasses.replace(start.experiment, model=model, train=train, init_from=begun)

  return Row(continued, label, tune={"train.learning_rate": (5e-4, 1.5e-3, 4.5e-3)})


WITHOUT_TABLE = "position", "blocks", "final_norm", "head"
"""All parameters but the tied table."""


def study() -> Study:
  """The study."""
  dense = tied(DenseEmbedding(V, DIM))
  rowwise = {"train.optimizer": RowwiseTables()}
  base = Experiment(
    name="base",
    model=Transformer(
      embedding=dense["model.embedding"],
      head=dense["model.head"],
      dim=DIM,
      layers=2,
      heads=4,
      context=128,
      dropout=0.1,
    ),
    data=WikiText(),
    tokenizer=BPETokenizer(4096),
    loader=Windows(),
    train=Train(
      steps=1500, batch=8, final_fraction=1 / 30, warmup=100, beta2=0.98, log_every=100, keep=1
    ),
  )
  rows = {
    "adamw": Row(dense, label="dense, AdamW"),
    "rowwise": Row(dense | rowwise, label="dense, a moment a row"),
    "int8": Row(
      tied(Int8Embedding(V, DIM, DIM, trained=True)) | rowwise, label="bytes, a moment a row"
    ),
  }
  rows["rowwise-on"] = further("rowwise", None, f"{rows['rowwise'].label}, trained on")
  for name in ("rowwise", "int8"):
    for part in (16, 32):
      label = f"{rows[name].label}, then 1/{part}"
      rows[f"{name}-{part}"] = Compressed(name, 1 / part, label=label)
      rows[f"{name}-{part}-on"] = further(name, part, f"{label}, all else trained on")
  return Study(
    base=base,
    rows=rows,
    tune={"train.learning_rate": (1.5e-3, 3e-3, 6e-3)},
    seeds=3,
    reference="rowwise",
    margin=0.005,
  )
