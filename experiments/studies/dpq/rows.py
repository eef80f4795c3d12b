"""Rows of DPQ's tables: the embeddings that are compared, and how each gets its variables."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.dpq.settings import REBUILT, REBUILT_DIM, Codes, Setting
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

LABELS = {
  "full": "Full",
  "sx": "DPQ-SX",
  "vq": "DPQ-VQ",
  "sx-tied": "DPQ-SX, tied keys and values",
  "kd": "KD codes, end to end",
  "kd-distilled": "KD codes, distilled",
  "pretrained-codes": "Fixed codes of a trained table",
  **{f"low-rank-{times}": f"Low rank, {times}×" for times in (5, 10, 20)},
  **{f"scalar-{bits}": f"Scalar quantisation, {bits} bits" for bits in (8, 6, 4)},
  **{f"clusters-{codes}": f"Product quantisation, K = {codes}" for codes in (64, 128, 256)},
  **{f"reconstruction-{k}x{m}": f"Reconstruction, {k}x{m}" for k, m in REBUILT},
}
"""Name of a row -> its label in tables; those of a setting's grid are labelled by their codes."""

Derive = Callable[[Embedding, np.ndarray], Mapping[str, Any]]
"""(embedding, trained table [V, D]) -> the embedding's variables."""


@dataclasses.dataclass(frozen=True)
class Row:
  """An embedding of a setting.

  Attributes:
    name: of its run.
    label: in tables, with the size of its codes.
    embedding: the module.
    start: (embedding, fresh variables, trained full table) -> the variables that training starts
      from; None: the fresh ones.
    derive: makes the variables of the trained full table, without training; None: it is trained.
  """

  name: str
  label: str
  embedding: Embedding
  start: Callable | None = None
  derive: Derive | None = None


def rows(s: Setting) -> list[Row]:
  """The rows of a setting, those of `s.rows` first and those of its grid behind them."""
  k, m, _ = s.kd
  kd_codes = DPQEmbedding(
    V,
    s.dim,
    FreeQuantizer(k, m, additive=True, normalize=False, table_init=s.begin),
    query_init=s.begin,
  )
  kd = ComposedEmbedding(V, s.dim, kd_codes, hidden=s.dim)
  # Shu and Nakayama (2018): a network learns to rebuild the trained table from codes, which stay.
  learner = EncoderQuantizer(
    k, m, s.dim, additive=True, normalize=False, gumbel=1.0, forward_temperature=1.0
  )
  every = [
    _row("full", full(s)),
    _row("sx", softmax(s, s.sx), s.sx),
    _row("vq", centroids(s, s.vq), s.vq),
    _row("sx-tied", softmax(s, s.sx, tied=True), s.sx),
    *(
      _row(
        f"low-rank-{times}",
        LowRankEmbedding(V, s.dim, max(1, s.dim // times), weight_init=s.begin),
      )
      for times in (5, 10, 20)
    ),
    _row("kd", kd, s.kd),
    _row(
      "kd-distilled",
      GuidedEmbedding(V, s.dim, kd),
      s.kd,
      start=conversion.Guide(),
    ),
    _row(
      "pretrained-codes",
      ProductEmbedding(V, s.dim, k, m, additive=True),
      s.kd,
      start=conversion.Codes(learner, s.rebuild_steps),
    ),
    *(
      _row(f"scalar-{bits}", ScalarEmbedding(V, s.dim, bits), derive=reconstruct.to_levels)
      for bits in (8, 6, 4)
    ),
    *(
      _row(
        f"clusters-{codes}",
        ProductEmbedding(V, s.dim, codes, s.parts),
        Codes(codes, s.parts),
        derive=lambda embedding, table: reconstruct.to_clusters(
          embedding, table, key=jax.random.key(0)
        ),
      )
      for codes in (64, 128, 256)
    ),
    *(_rebuilt(s, codes, subspaces) for codes, subspaces in REBUILT),
  ]
  grid = [
    Row(f"{kind}-{codes}", f"{LABELS[kind]} ({codes})", make(s, codes))
    for shared in (False, True)
    for kind, make in (("sx", softmax), ("vq", centroids))
    for codes in (Codes(k, m, shared) for k in s.grid[0] for m in s.grid[1])
  ]
  return [row for row in every if row.name in s.rows] + grid


def _row(name: str, embedding: Embedding, codes: Codes | None = None, **how) -> Row:
  label = LABELS[name] if codes is None else f"{LABELS[name]} ({codes})"
  return Row(name, label, embedding, **how)


def full(s: Setting) -> Embedding:
  """A free vector for each token."""
  return DenseEmbedding(V, s.dim, weight_init=s.begin)


def softmax(s: Setting, codes: Codes, **fields) -> Embedding:
  """DPQ-SX; `fields` are further fields of its quantiser."""
  k, m, shared = codes
  quantizer = SoftmaxQuantizer(k, m, shared=shared, table_init=s.begin, **fields)
  return DPQEmbedding(V, s.dim, quantizer, query_init=s.begin)


def centroids(s: Setting, codes: Codes) -> Embedding:
  """DPQ-VQ."""
  k, m, shared = codes
  quantizer = CentroidQuantizer(k, m, shared=shared, table_init=s.begin, weight=s.weight)
  return DPQEmbedding(V, s.dim, quantizer, query_init=s.begin)


def _rebuilt(s: Setting, codes: int, subspaces: int) -> Row:
  """DPQ-VQ that learns to rebuild the trained table, starting from its clusters.

  A subspace is as wide as in the paper. The paper does not say how its own was trained; of the ways
  that were tried, this one comes nearest to its numbers.
  """
  own = Codes(codes, max(1, subspaces * s.dim // REBUILT_DIM))

  def derive(embedding: Embedding, table: np.ndarray) -> Mapping[str, Any]:
    start, cluster, key = jax.random.split(jax.random.key(0), 3)
    variables = embedding.init(start, jnp.zeros((1,), jnp.int32))
    variables["params"]["query"] = jnp.asarray(table)
    fresh = {"params": variables["params"]["quantizer"]}
    clustered = conversion.clustered(embedding.quantizer, fresh, table, key=cluster)
    variables["params"]["quantizer"] = clustered["params"]
    return reconstruct.reconstruct(embedding, variables, table, key=key, steps=s.rebuild_steps)

  quantizer = CentroidQuantizer(own.codes, own.subspaces, normalize=False)
  embedding = DPQEmbedding(V, s.dim, quantizer)
  return _row(f"reconstruction-{codes}x{subspaces}", embedding, own, derive=derive)
