"""Rows of DPQ's tables: the compared embeddings and their initial variables."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.dpq.settings import REBUILT, REBUILT_DIM, CodeSize, DPQSetting
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
  convert,
)
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
class DPQRow:
  """An embedding of a setting.

  Attributes:
    name: name of its run.
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


def rows(s: DPQSetting) -> list[DPQRow]:
  """The rows of a setting: those that `s.rows` names, then those of its grid."""
  k, m, _ = s.kd
  free = FreeQuantizer(k, m, additive=True, normalize=False, table_init=s.begin)
  kd = ComposedEmbedding(V, s.dim, DPQEmbedding(V, s.dim, free, query_init=s.begin), hidden=s.dim)
  # Shu and Nakayama (2018): a network learns codes that rebuild the trained table. They stay fixed.
  learner = EncoderQuantizer(
    k, m, s.dim, additive=True, normalize=False, gumbel=1.0, forward_temperature=1.0
  )
  rebuilt = {
    f"reconstruction-{k}x{m}": CodeSize(k, max(1, m * s.dim // REBUILT_DIM)) for k, m in REBUILT
  }
  codes = {
    **{"sx": s.sx, "vq": s.vq, "sx-tied": s.sx},
    **dict.fromkeys(("kd", "kd-distilled", "pretrained-codes"), s.kd),
    **{f"clusters-{size}": CodeSize(size, s.parts) for size in (64, 128, 256)},
    **rebuilt,
  }
  embeddings = {
    "full": full(s),
    "sx": softmax(s, s.sx),
    "vq": centroids(s, s.vq),
    "sx-tied": softmax(s, s.sx, tied=True),
    **{
      f"low-rank-{times}": LowRankEmbedding(V, s.dim, max(1, s.dim // times), weight_init=s.begin)
      for times in (5, 10, 20)
    },
    "kd": kd,
    "kd-distilled": GuidedEmbedding(V, s.dim, kd),
    "pretrained-codes": ProductEmbedding(V, s.dim, k, m, additive=True),
    **{f"scalar-{bits}": ScalarEmbedding(V, s.dim, bits) for bits in (8, 6, 4)},
    **{f"clusters-{size}": ProductEmbedding(V, s.dim, size, s.parts) for size in (64, 128, 256)},
    **{
      name: DPQEmbedding(V, s.dim, CentroidQuantizer(k, m, normalize=False))
      for name, (k, m, _) in rebuilt.items()
    },
  }
  start = {
    "kd-distilled": convert.Guide(),
    "pretrained-codes": convert.LearnedCodes(learner, s.rebuild_steps),
  }
  derive = {
    "scalar": convert.to_levels,
    "clusters": lambda embedding, table: convert.to_clusters(
      embedding, table, key=jax.random.key(0)
    ),
    "reconstruction": functools.partial(_rebuild, steps=s.rebuild_steps),
  }
  named = [
    DPQRow(
      name,
      f"{LABELS[name]} ({codes[name]})" if name in codes else LABELS[name],
      embedding,
      start=start.get(name),
      derive=derive.get(name.split("-")[0]),
    )
    for name, embedding in embeddings.items()
    if name in s.rows
  ]
  grid = [
    DPQRow(f"{kind}-{codes}", f"{LABELS[kind]} ({codes})", make(s, codes))
    for shared in (False, True)
    for kind, make in (("sx", softmax), ("vq", centroids))
    for codes in (CodeSize(k, m, shared) for k in s.grid[0] for m in s.grid[1])
  ]
  return named + grid


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


def _rebuild(embedding: DPQEmbedding, table: np.ndarray, steps: int) -> Mapping[str, Any]:
  """Variables of a DPQ-VQ that learns to rebuild the trained table.

  The paper does not say how its own was trained; of the ways that were tried, this one comes
  nearest to its numbers.
  """
  start, cluster, key = jax.random.split(jax.random.key(0), 3)
  variables = embedding.init(start, jnp.zeros((1,), jnp.int32))
  variables["params"]["query"] = jnp.asarray(table)
  fresh = {"params": variables["params"]["quantizer"]}
  clustered = convert.clustered(embedding.quantizer, fresh, table, key=cluster)
  variables["params"]["quantizer"] = clustered["params"]
  return convert.reconstruct(embedding, variables, table, key=key, steps=steps)
