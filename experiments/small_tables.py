"""A small head that is worth training: a tied table in bytes from the first step, and its rivals.

vqjax study experiments/small_tables.py --out runs/small_tables

A decoder of two blocks of width 128 with BPE of 4,096 tokens learns WikiText-2 in 1,500 steps of
1,024 tokens. The dense table is trained by AdamW, or by one second moment a row; the table in bytes
by the latter, rounded stochastically. Each is then compressed to 1/16 and 1/32 of its float32.
"""

from vqjax import DenseEmbedding, DenseHead, Int8Embedding
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import BPETokenizer, WikiText, Windows
from vqjax.lab.study import Compressed, Row, Study
from vqjax.lab.training import RowwiseTables
from vqjax.lm.models import Transformer

V, DIM = FROM_TOKENIZER, 128


def tied(embedding):
  """The fields of a model whose head is tied to an embedding."""
  head = DenseHead(V, DIM, use_bias=True, embedding=embedding)
  return {"model.embedding": embedding, "model.head": head}


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
  for name in ("adamw", "rowwise", "int8"):
    for part in (16, 32):
      rows[f"{name}-{part}"] = Compressed(name, 1 / part)
  return Study(
    base=base,
    rows=rows,
    tune={"train.learning_rate": (1.5e-3, 3e-3, 6e-3)},
    seeds=3,
    reference="rowwise",
    margin=0.005,
  )
