"""Rows of DPQ's tables: the compared embeddings."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from experiments.studies.dpq.settings import CodeSize, DPQSetting
from vqjax import (
  CentroidQuantizer,
  ComposedEmbedding,
  DenseEmbedding,
  DPQEmbedding,
  Embedding,
  FreeQuantizer,
  LowRankEmbedding,
  ProductEmbedding,
  ScalarEmbedding,
  SoftmaxQuantizer,
  convert,
)
from vqjax.lab.config import FROM_TOKENIZER

V = FROM_TOKENIZER

Derive = Callable[[Embedding, np.ndarray], Mapping[str, Any]]
"""(embedding, trained table [V, D]) -> the embedding's variables."""


@dataclasses.dataclass(frozen=True)
class DPQRow:
  """An embedding of a setting.

  Attributes:
    name: name of its run.
    label: in tables, with the size of its codes.
    embedding: the module.
    derive: makes the variables of the trained full table, without training; None: it is trained.
  """

  name: str
  label: str
  embedding: Embedding
  derive: Derive | None = None


def rows(s: DPQSetting) -> list[DPQRow]:
  """The rows of a setting: those that `s.rows` names, then those of its grid."""
  k, m, _ = kd = CodeSize(32, 32)
  free = FreeQuantizer(k, m, additive=True, normalize=False, table_init=s.begin)
  free = DPQEmbedding(V, s.dim, free, query_init=s.begin)
  every = [
    DPQRow("full", "Full", full(s)),
    DPQRow("sx", f"DPQ-SX ({s.sx})", softmax(s, s.sx)),
    DPQRow("vq", f"DPQ-VQ ({s.vq})", centroids(s, s.vq)),
    DPQRow("sx-tied", f"DPQ-SX, tied keys and values ({s.sx})", softmax(s, s.sx, tied=True)),
    DPQRow("kd", f"KD codes, end to end ({kd})", ComposedEmbedding(V, s.dim, free, hidden=s.dim)),
    *(DPQRow(f"low-rank-{n}", f"Low rank, {n}×", low_rank(s, n)) for n in (5, 10, 20)),
    *(
      DPQRow(
        f"scalar-{bits}",
        f"Scalar quantisation, {bits} bits",
        ScalarEmbedding(V, s.dim, bits),
        convert.to_levels,
      )
      for bits in (8, 6, 4)
    ),
    *(
      DPQRow(
        f"clusters-{k}",
        f"Product quantisation, K = {k} ({CodeSize(k, s.dim // 2)})",
        ProductEmbedding(V, s.dim, k, s.dim // 2),
        lambda embedding, table: convert.to_clusters(embedding, table, key=jax.random.key(0)),
      )
      for k in (64, 128, 256)
    ),
  ]
  grid = [
    DPQRow(f"{kind}-{codes}", f"{label} ({codes})", make(s, codes))
    for shared in (False, True)
    for kind, label, make in (("sx", "DPQ-SX", softmax), ("vq", "DPQ-VQ", centroids))
    for codes in (CodeSize(k, m, shared) for k in s.grid[0] for m in s.grid[1])
  ]
  return [row for row in every if row.name in s.rows] + grid


def full(s: DPQSetting) -> Embedding:
  """A free vector for each token."""
  return DenseEmbedding(V, s.dim, weight_init=s.begin)


def softmax(s: DPQSetting, codes: CodeSize, **fields) -> Embedding:
  """DPQ-SX; `fields` are further fields of its quantiser."""
  k, m, shared = codes
  quantizer = SoftmaxQuantizer(k, m, shared=shared, table_init=s.begin, **fields)
  return DPQEmbedding(V, s.dim, quantizer, query_init=s.begin)


def centroids(s: DPQSetting, codes: CodeSize) -> Embedding:
  """DPQ-VQ."""
  k, m, shared = codes
  quantizer = CentroidQuantizer(k, m, shared=shared, table_init=s.begin, weight=s.weight)
  return DPQEmbedding(V, s.dim, quantizer, query_init=s.begin)


def low_rank(s: DPQSetting, times: int) -> Embedding:
  """A product of two factors, `times` times smaller."""
  return LowRankEmbedding(V, s.dim, s.dim // times, weight_init=s.begin)
