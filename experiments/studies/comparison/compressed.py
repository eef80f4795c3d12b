"""Trained dense heads, compressed after their training to a fraction of their bytes."""

import abc
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from vqjax import tables
from vqjax.convert import part_of, with_part
from vqjax.heads import PackedHead
from vqjax.lab.config import Experiment
from vqjax.lab.starting_points import Distilled, student_of
from vqjax.lab.study import Derived
from vqjax.lab.study.compressed import held_out_scores, moments_of
from vqjax.lab.training import read_run_variables
from vqjax.lab.training.run_folder import load_text
from vqjax.lm.models import LanguageModel
from vqjax.tables import entropy_coder


class TrainedTable(NamedTuple):
  """A trained table and what is to become of it.

  Attributes:
    model: the model; a tied table is its embedding's.
    variables: its variables.
    moments: what errors of the table cost.
    size: the bytes that the table and the biases may take.
  """

  model: LanguageModel
  variables: Mapping[str, Any]
  moments: tables.Moments
  size: int

  @property
  def is_tied(self) -> bool:
    """Whether the input vectors are the rows of the table."""
    return self.model.head.embedding is not None

  @property
  def weight(self) -> np.ndarray:
    """The rows [V, D]."""
    owner = "embedding" if self.is_tied else "head"
    return np.asarray(part_of(self.variables, owner)["params"]["weight"])

  @property
  def bias(self) -> np.ndarray:
    """The biases [V] as they are kept, in float16."""
    return half(part_of(self.variables, "head")["params"]["bias"])

  def replaced(
    self, rows: Mapping[str, Any], head: nn.Module, embedding: nn.Module | None = None
  ) -> tuple[nn.Module, dict]:
    """The model and its variables with compressed rows, of `head` or the tied `embedding`."""
    bias = {"bias": self.bias}
    if not self.is_tied:
      rows = {**rows, "params": rows["params"] | bias}
      return self.model.clone(head=head), with_part(self.variables, "head", rows)
    variables = with_part(self.variables, "head", {"params": bias})
    return self.model.clone(head=head, embedding=embedding), with_part(variables, "embedding", rows)


def half(values: np.ndarray) -> np.ndarray:
  """Values rounded to float16, in float32."""
  return np.asarray(values, np.float16).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class SixteenthOfBytes(Derived):
  """A row whose table and biases are compressed to 1/16 of their bytes.

  Attributes:
    method: the form of the table.
  """

  method: ClassVar[str]

  def settings(self) -> dict[str, Any]:
    """The method and the size."""
    return {"method": self.method, "divisor": DIVISOR}

  @abc.abstractmethod
  def compressed(self, table: TrainedTable) -> tuple[nn.Module, dict, int]:
    """Return the model of inference, its variables, and the bytes of the table and the biases."""

  def measure(self, experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
    """Scores of the model with a compressed table; of a distilled run the student's."""
    text = load_text(experiment)
    model = text.experiment.model
    variables, _ = read_run_variables(folder)
    if isinstance(model, Distilled):
      model, variables = model.student, student_of(variables)
    tied = model.head.embedding
    whole = model.head.size().state_bytes + (0 if tied is None else tied.size().state_bytes)
    moments = moments_of(model, variables, text)
    model, variables, used = self.compressed(
      TrainedTable(model, variables, moments, whole // DIVISOR)
    )
    result: dict[str, Any] = held_out_scores(model, variables, text)
    result["head"] = {"class": type(model.head).__name__, "state_bytes": used}
    result["seed"] = experiment.seed
    return {"result": result}


DIVISOR = 16
"""What the bytes of a table are divided by."""

WITHIN = 0.002
"""Part of the bytes that a file may leave."""

GROUPS = 16
"""Row groups of a packed head."""


@dataclasses.dataclass(frozen=True)
class InFile(SixteenthOfBytes):
  """A table in an entropy-coded file, and biases in float16, with the smallest step that fits."""

  # With the version of the quantiser, by which results of another one are known.
  method = f"InFile(within={WITHIN}, version=2)"

  def compressed(self, table: TrainedTable) -> tuple[nn.Module, dict, int]:
    """The model with the rows that the file has."""
    weight, size = table.weight, table.size
    vocab, dim = weight.shape
    step, best = 0.1, None
    for _ in range(12):
      quantized = tables.coded_table(weight, table.moments, step)
      used = sum(part.nbytes for part in entropy_coder.encode_table(quantized).values()) + 2 * vocab
      if used <= size and (best is None or used > best[1]):
        best = quantized, used
        if used >= (1 - WITHIN) * size:
          break
      # A bit less for each number where the step doubles; a little under the size.
      step *= 2 ** (8 * (used - (1 - WITHIN / 2) * size) / (vocab * dim))
    if best is None:
      raise ValueError(
        f"`size` must be above the bytes of the coarsest file; got {size}. Give more."
      )
    rows = {"params": {"weight": best[0].table()}}
    return *table.replaced(rows, table.model.head, table.model.embedding), best[1]


@dataclasses.dataclass(frozen=True)
class InMemory(SixteenthOfBytes):
  """A `PackedHead`, whose parameters are float16."""

  method = f"InMemory(classes={GROUPS})"

  def compressed(self, table: TrainedTable) -> tuple[nn.Module, dict, int]:
    """The model with the packed rows."""
    vocab, dim = table.weight.shape
    # Tokens that are not in the order of their counts have ranks of 2 bytes.
    ranks = 0 if (np.diff(table.moments.counts) <= 0).all() else 2 * vocab
    units = tables.units_of(table.size, vocab, dim, GROUPS, 2 * vocab + ranks)
    packed = tables.pack(table.weight, table.moments, units, row_groups=GROUPS)
    embedding, rows = packed.embedding()
    rows["params"] = jax.tree.map(half, rows["params"])
    used = embedding.clone(param_dtype=jnp.float16).size().state_bytes + 2 * vocab
    head, _ = packed.head(table.bias)
    if table.is_tied:
      head = PackedHead(vocab, dim, use_bias=True, embedding=embedding)
    return *table.replaced(rows, head, embedding), used
