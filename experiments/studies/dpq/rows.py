"""Which embeddings do the DPQ tables compare, and how does each come to be?"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.dpq.setting import Codes, Setting
from vqjax import (
  CentroidQuantizer,
  ComposedEmbedding,
  DenseEmbedding,
  DPQEmbedding,
  Embedding,
  EncoderQuantizer,
  FreeQuantizer,
  GuidedEmbedding,
  LowRankEmbedding,
  ProductEmbedding,
  ScalarEmbedding,
  SoftmaxQuantizer,
)
from vqjax.convert import reconstruct
from vqjax.lab import conversion
from vqjax.lab.config import FROM_TOKENIZER

V = FROM_TOKENIZER


@dataclasses.dataclass(frozen=True)
class Row:
  """An embedding that is trained.

  Attributes:
    name: of its run.
    label: what tables call it.
    embedding: of a setting.
    fill: of a setting: how it begins with the table of the row "full"; None: with its own.
  """

  name: str
  label: str
  embedding: Callable[[Setting], Embedding]
  fill: Callable[[Setting], Callable] | None = None


REBUILT = (128, 64), (32, 128), (128, 128), (32, 256), (128, 256)
"""K x M of Table 11, whose model is `PAPER_DIM` wide."""

PAPER_DIM = 512

Fill = Callable[[Embedding, np.ndarray], Mapping[str, Any]]
"""(embedding, trained table [V, D]) -> its variables."""


@dataclasses.dataclass(frozen=True)
class Afterwards:
  """An embedding made of the trained full one.

  Attributes:
    name: of its result.
    label: what tables call it.
    embedding: of a setting.
    fill: makes its variables of the table.
  """

  name: str
  label: str
  embedding: Callable[[Setting], Embedding]
  fill: Fill


def full(s: Setting) -> Embedding:
  """A free vector for each token."""
  return DenseEmbedding(V, s.dim, weight_init=s.begin)


def softmax(codes: Codes, **fields) -> Callable[[Setting], Embedding]:
  """DPQ-SX."""

  def make(s: Setting) -> Embedding:
    quantizer = SoftmaxQuantizer(
      codes.codes, codes.subspaces, shared=codes.shared, table_init=s.begin, **fields
    )
    return DPQEmbedding(V, s.dim, quantizer, query_init=s.begin)

  return make


def centroids(codes: Codes) -> Callable[[Setting], Embedding]:
  """DPQ-VQ."""

  def make(s: Setting) -> Embedding:
    quantizer = CentroidQuantizer(
      codes.codes,
      codes.subspaces,
      shared=codes.shared,
      table_init=s.begin,
      weight=s.weight,
    )
    return DPQEmbedding(V, s.dim, quantizer, query_init=s.begin)

  return make


def low_rank(times: int) -> Callable[[Setting], Embedding]:
  """About a `times`-th of the full table's numbers."""
  return lambda s: LowRankEmbedding(V, s.dim, max(1, s.dim // times), weight_init=s.begin)


def guided(s: Setting) -> Embedding:
  """KD codes, drawn to the trained full table."""
  return GuidedEmbedding(V, s.dim, kd(s), weight=s.guide)


def fixed_codes(s: Setting) -> Embedding:
  """Codes that a network learned to rebuild the trained full table with; values are trained."""
  return ProductEmbedding(V, s.dim, s.kd.codes, s.kd.subspaces, additive=True)


def shu_nakayama(s: Setting) -> conversion.Codes:
  """How those codes are learned."""
  k, m, _ = s.kd
  network = EncoderQuantizer(
    k, m, s.dim, additive=True, normalize=False, gumbel=1.0, forward_temperature=1.0
  )
  return conversion.Codes(network, s.rebuild_steps)


def kd(s: Setting) -> Embedding:
  """Codes that are parameters, composed by a network: KD codes end to end."""
  k, m, _ = s.kd
  free = FreeQuantizer(k, m, additive=True, normalize=False, table_init=s.begin)
  inner = DPQEmbedding(V, s.dim, free, query_init=s.begin)
  return ComposedEmbedding(V, s.dim, inner, hidden=s.dim)


def label(s: Setting | None, name: str) -> str:
  """What tables call a row; without a setting, of no particular size."""
  own = [row for row in (*trained_rows(s), *afterwards(s)) if row.name == name] if s else []
  return own[0].label if own else _LABELS[name]


_LABELS = {
  "full": "Full",
  "sx": "DPQ-SX",
  "vq": "DPQ-VQ",
  "sx-tied": "DPQ-SX, tied",
  "kd": "KD codes, end to end",
  "kd-distilled": "KD codes, distilled",
  "pretrained-codes": "codes of a trained table, fixed",
} | {
  f"{kind}-{number}": f"{said} ({number}{unit})"
  for kind, said, numbers, unit in (
    ("low-rank", "Low rank", (5, 10, 20), "×"),
    ("scalar", "Scalar quantisation", (8, 6, 4), " bits"),
    ("clusters", "Product quantisation, K =", (64, 128, 256), ""),
    ("reconstruction", "Reconstruction", [f"{k}x{m}" for k, m in REBUILT], ""),
  )
  for number in numbers
}


def trained_rows(s: Setting) -> list[Row]:
  """The rows of a setting that are trained."""
  every = [
    Row("full", "Full", full),
    Row("sx", f"DPQ-SX ({s.sx})", softmax(s.sx)),
    Row("vq", f"DPQ-VQ ({s.vq})", centroids(s.vq)),
    Row("sx-tied", f"DPQ-SX, tied keys and values ({s.sx})", softmax(s.sx, tied=True)),
    *(Row(f"low-rank-{times}", f"Low rank ({times}×)", low_rank(times)) for times in (5, 10, 20)),
    Row("kd", f"KD codes, end to end ({s.kd})", kd),
    Row("kd-distilled", f"KD codes, distilled ({s.kd})", guided, lambda s: conversion.Guide()),
    Row("pretrained-codes", f"codes of a trained table, fixed ({s.kd})", fixed_codes, shu_nakayama),
  ]
  return [*(row for row in every if row.name in s.rows), *_grid(s)]


def _grid(s: Setting) -> list[Row]:
  """Figures 3, 7 and 8: K x M, both quantisers, shared and not."""
  kinds = {"sx": ("DPQ-SX", softmax), "vq": ("DPQ-VQ", centroids)}
  found = []
  for shared in (False, True):
    for kind, (label, make) in kinds.items():
      for k in s.grid[0]:
        for m in s.grid[1]:
          codes = Codes(k, m, shared)
          found.append(Row(f"{kind}-{codes}", f"{label} ({codes})", make(codes)))
  return found


def afterwards(s: Setting) -> list[Afterwards]:
  """The rows of a setting that are made of the trained full embedding."""
  every = [
    *(_levels(bits) for bits in (8, 6, 4)),
    *(_clusters(s, codes) for codes in (64, 128, 256)),
    *(_rebuilt(s, codes, subspaces) for codes, subspaces in REBUILT),
  ]
  return [row for row in every if row.name in s.rows]


def _rebuilt(s: Setting, codes: int, subspaces: int) -> Afterwards:
  """DPQ-VQ that learned to rebuild the table, from its clusters; as many numbers in a part as in
  the paper, which does not say how its own learned: of what was tried, this comes nearest.
  """
  own = Codes(codes, max(1, subspaces * s.dim // PAPER_DIM))

  def fill(embedding: Embedding, table: np.ndarray) -> Mapping[str, Any]:
    start, cluster, key = jax.random.split(jax.random.key(0), 3)
    variables = embedding.init(start, jnp.zeros((1,), jnp.int32))
    variables["params"]["query"] = jnp.asarray(table)
    quantizer = embedding.quantizer
    inner = {"params": variables["params"]["quantizer"]}
    begun = conversion.clustered(quantizer, inner, table, key=cluster)
    variables["params"]["quantizer"] = begun["params"]
    return reconstruct.reconstruct(embedding, variables, table, key=key, steps=s.rebuild_steps)

  name, said = f"reconstruction-{codes}x{subspaces}", f"Reconstruction ({own})"
  make = lambda s: DPQEmbedding(V, s.dim, CentroidQuantizer(*own[:2], normalize=False))
  return Afterwards(name, said, make, fill)


def _levels(bits: int) -> Afterwards:
  make = lambda s: ScalarEmbedding(V, s.dim, bits)
  label = f"Scalar quantisation ({bits} bits)"
  return Afterwards(f"scalar-{bits}", label, make, reconstruct.to_levels)


def _clusters(s: Setting, codes: int) -> Afterwards:
  make = lambda s: ProductEmbedding(V, s.dim, codes, s.parts)
  fill = lambda embedding, table: reconstruct.to_clusters(embedding, table, key=jax.random.key(0))
  label = f"Product quantisation ({codes}x{s.parts})"
  return Afterwards(f"clusters-{codes}", label, make, fill)
