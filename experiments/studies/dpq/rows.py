"""Rows of DPQ's tables: the compared embeddings of a task."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from experiments.studies.dpq.measured import measure_trained
from experiments.studies.lstm import SymmetricUniform
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
from vqjax.convert import part_of, squared_error, with_part
from vqjax.convert.trained_variables import Variables
from vqjax.lab.config import FROM_TOKENIZER, Experiment, config_hash, with_fields
from vqjax.lab.study import Derived, Row, Study
from vqjax.lab.study.compressed import held_out_scores
from vqjax.lab.training import read_run_variables
from vqjax.lab.training.checkpoint import check_tokenizer
from vqjax.lab.training.run_folder import EncodedText, load_text

V = FROM_TOKENIZER

HEADLINE = "full", "sx", "vq"
"""The main rows, which are trained with all seeds of a study."""


class CodeSize(NamedTuple):
  """Size of a product code.

  Attributes:
    codes: K, codewords of a subspace.
    subspaces: M (the paper's D).
    shared: whether all subspaces share one codebook.
  """

  codes: int
  subspaces: int
  shared: bool = False

  def __str__(self) -> str:
    return f"{self.codes}x{self.subspaces}" + ("s" if self.shared else "")


DEFAULT = CodeSize(32, 32)


class Task(NamedTuple):
  """A task with everything but its embedding.

  Attributes:
    make: (name, embedding, seed=seed) -> the experiment.
    dim: width of the embedding, d.
    begin: initialiser of its tables.
    weight: of DPQ-VQ's regulariser.
  """

  make: Callable[..., Experiment]
  dim: int
  begin: SymmetricUniform
  weight: float = 1.0


def full(task: Task) -> Embedding:
  """A free vector for each token."""
  return DenseEmbedding(V, task.dim, weight_init=task.begin)


def softmax(task: Task, codes: CodeSize, **fields) -> Embedding:
  """DPQ-SX; `fields` are further fields of its quantiser."""
  k, m, shared = codes
  quantizer = SoftmaxQuantizer(k, m, shared=shared, table_init=task.begin, **fields)
  return DPQEmbedding(V, task.dim, quantizer, query_init=task.begin)


def centroids(task: Task, codes: CodeSize) -> Embedding:
  """DPQ-VQ."""
  k, m, shared = codes
  weight = task.weight
  quantizer = CentroidQuantizer(k, m, shared=shared, table_init=task.begin, weight=weight)
  return DPQEmbedding(V, task.dim, quantizer, query_init=task.begin)


def low_rank(task: Task, times: int) -> Embedding:
  """A product of two factors, `times` times smaller."""
  return LowRankEmbedding(V, task.dim, task.dim // times, weight_init=task.begin)


def composed(task: Task, codes: CodeSize) -> Embedding:
  """KD codes, whose queries are free."""
  free = FreeQuantizer(*codes[:2], additive=True, normalize=False, table_init=task.begin)
  own = DPQEmbedding(V, task.dim, free, query_init=task.begin)
  return ComposedEmbedding(V, task.dim, own, hidden=task.dim)


def trained(task: Task, label: str, embedding: Embedding, seeds: int | None = 1) -> Row:
  """A row with an embedding."""
  return Row(lambda base: task.make(base.name, embedding, seed=base.seed), label, seeds=seeds)


@dataclasses.dataclass(frozen=True)
class Replaced(Derived):
  """A row whose models are trained ones with another embedding, made of the full table.

  Attributes:
    embedding: the embedding.
    derive: (embedding, trained table [V, D]) -> its variables.
  """

  embedding: Embedding
  derive: Callable[[Embedding, np.ndarray], Mapping[str, Any]]

  def settings(self) -> dict[str, Any]:
    """A hash of the embedding."""
    return {"embedding": config_hash(self.embedding)}

  def measure(self, experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
    """Scores of the model, and the size and the error of its embedding."""
    text = load_text(with_fields(experiment, {"model.embedding": self.embedding}))
    model, (variables, _) = text.experiment.model, read_run_variables(folder)
    table_VD = np.asarray(variables["params"]["embedding"]["weight"])
    filled = self.derive(model.embedding, table_VD)
    result: dict[str, Any] = held_out_scores(model, with_part(variables, "embedding", filled), text)
    rebuilt_VD = model.embedding.apply(filled, method="table")
    result["embedding"] = {
      "class": type(self.embedding).__name__,
      "shipped_bytes": model.embedding.inference_size().state_bytes,
      "lost": squared_error(rebuilt_VD, table_VD) / squared_error(0 * table_VD, table_VD),
    }
    return {"result": result}


def compressed(task: Task) -> dict[str, Row | Derived]:
  """Rows made of the trained full embedding, without training."""
  to_clusters = functools.partial(convert.to_clusters, key=jax.random.key(0))
  rows: dict[str, Row | Derived] = {}
  for bits in (8, 6, 4):
    label = f"Scalar quantisation, {bits} bits"
    embedding = ScalarEmbedding(V, task.dim, bits)
    rows[f"scalar-{bits}"] = Replaced("full", embedding, convert.to_levels, label=label)
  for k in (64, 128, 256):
    label = f"Product quantisation, K = {k} ({CodeSize(k, task.dim // 2)})"
    embedding = ProductEmbedding(V, task.dim, k, task.dim // 2)
    rows[f"clusters-{k}"] = Replaced("full", embedding, to_clusters, label=label)
  return rows


def grid(
  task: Task, codes: Collection[int], subspaces: Collection[int]
) -> dict[str, Row | Derived]:
  """All pairs of K and M for SX and VQ, with and without shared codebooks."""
  return {
    f"{kind}-{size}": trained(task, f"{label} ({size})", make(task, size))
    for shared in (False, True)
    for kind, label, make in (("sx", "DPQ-SX", softmax), ("vq", "DPQ-VQ", centroids))
    for size in (CodeSize(k, m, shared) for k in codes for m in subspaces)
  }


def study(
  task: Task,
  sx: CodeSize = DEFAULT,
  vq: CodeSize = DEFAULT,
  names: Collection[str] = HEADLINE,
  further: Mapping[str, Row | Derived] | None = None,
  seeds: int = 1,
  words: bool = False,
) -> Study:
  """The study of a task.

  Args:
    task: the task.
    sx: codes of the row "sx".
    vq: codes of the row "vq".
    names: the rows of one embedding.
    further: further rows.
    seeds: number of seeds of the headline rows.
    words: whether neighbours of words and the use of each code are kept with the results.
  """
  every = {
    "full": ("Full", full(task)),
    "sx": (f"DPQ-SX ({sx})", softmax(task, sx)),
    "vq": (f"DPQ-VQ ({vq})", centroids(task, vq)),
    "sx-tied": (f"DPQ-SX, tied keys and values ({sx})", softmax(task, sx, tied=True)),
    "kd": (f"KD codes, end to end ({DEFAULT})", composed(task, DEFAULT)),
    **{f"low-rank-{n}": (f"Low rank, {n}×", low_rank(task, n)) for n in (5, 10, 20)},
  }
  rows = {
    name: trained(task, *every[name], None if name in HEADLINE else 1)
    for name in every
    if name in names
  }
  base = task.make("base", full(task), seed=0)
  measure = functools.partial(measure_trained, words=words)
  return Study(base, {**rows, **(further or {})}, seeds=seeds, measure=measure)


@dataclasses.dataclass(frozen=True)
class FromPart:
  """Initialises one part of a model, such as its encoder, from another run.

  Attributes:
    folder: the other run's folder.
    part: name of the part in both models.
  """

  folder: str
  part: str

  def __call__(self, text: EncodedText, model: nn.Module, variables: Variables) -> Variables:
    """The fresh variables with the other run's part; ValueError for another tokenizer."""
    check_tokenizer(self.folder, text)
    trained, _ = read_run_variables(self.folder)
    return with_part(variables, self.part, part_of(trained, self.part))
