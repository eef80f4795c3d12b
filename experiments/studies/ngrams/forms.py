"""The table of a trained memory in other forms: real files with all that they need.

`forms_of` scores the test text with each form in place of the table, and trains nothing again; a
row that begins from `Coded` trains the decoder around the rounded table.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from vqjax import DenseEmbedding
from vqjax.lab.config import Experiment
from vqjax.lab.training import evaluate, make_scorer, read_run_variables
from vqjax.lab.training.run_folder import EncodedText, load_text
from vqjax.lm.compression.calibration import memory_counts
from vqjax.lm.models import Transformer
from vqjax.ops.ngrams import count_rows
from vqjax.tables import SmallTable, compress_rows, gguf_types

BITS = 2.0, 1.5, 0.8, 0.3
"""Bits a weight of entropy-coded files."""

WINDOWS = 64
"""Windows of the training text by which rows are weighed."""


class Form(NamedTuple):
  """A table in another form.

  Attributes:
    name: of the form.
    bits: bits a weight, with scales and headers.
    table: the table that the form stands for.
  """

  name: str
  bits: float
  table: np.ndarray


def forms(table: np.ndarray, counts: np.ndarray, weighed: np.ndarray) -> Iterator[Form]:
  """The table in uniform types, all rows alike, and in files whose steps follow the rows' use.

  Args:
    table: [V, D].
    counts: how often the training text reads each row, [V].
    weighed: the counts times what an error of a row costs where it is read, [V].
  """
  rows, dim = table.shape
  for bits in (8, 4, 3, 2):
    yield Form(f"int{bits}, a scale a row", bits + 16 / dim, _uniform(table, bits))
  kind = gguf_types.block_type("IQ4_NL", dim)
  blocks = kind.rounded(np.ascontiguousarray(table))
  scale = np.repeat(blocks.scale.astype(np.float32), kind.block, axis=1)
  yield Form("IQ4_NL", 8 * kind.bytes / kind.block, scale * blocks.level)
  asked = [("by counts and gradients", weighed, bits) for bits in BITS]
  asked += [("by counts", counts, bits) for bits in BITS[2:]]
  asked += [("alike", np.ones(rows, np.int64), bits) for bits in BITS[::2]]
  for name, weights, bits in asked:
    yield Form(f"steps {name}, {bits} bits", *_coded(table, weights, bits))


def _uniform(table: np.ndarray, bits: int) -> np.ndarray:
  """Whole bits, with the scale of each row that has the least squared error."""
  low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
  best, least = np.zeros_like(table), (table**2).sum(1)
  # A sign of the scale says on which side the further level lies.
  for part in np.linspace(0.3, 1.0, 15):
    for sign in (1, -1):
      scale = (sign * part * np.abs(table).max(1, keepdims=True) / -low).astype(np.float16)
      scale = scale.astype(np.float32)
      levels = np.clip(np.round(table / np.where(scale, scale, 1)), low, high)
      error = ((levels * scale - table) ** 2).sum(1)
      is_less = error < least
      best[is_less], least = (levels * scale)[is_less], np.minimum(error, least)
  return best


def _coded(table: np.ndarray, weights: np.ndarray, bits: float) -> tuple[float, np.ndarray]:
  """Bits a weight of an entropy-coded file, and the table that it holds."""
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "table.safetensors")
    compress_rows(table, weights, file, size=int(bits * table.size / 8))
    return 8 * file.stat().st_size / table.size, np.asarray(SmallTable.load(file).table())


def _row_weights(text: EncodedText, variables: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
  """How often the training text reads each row, and this times what an error costs there."""
  model, train = text.experiment.model, np.asarray(text.splits["train"].tokens)
  counts = count_rows(model.memories[0].lookup.ngrams, train)
  windows = train[: len(train) // model.context * model.context].reshape(-1, model.context)
  few = windows[:: -(-len(windows) // WINDOWS)]
  return counts, memory_counts(model, variables, few, counts)


def forms_of(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """What the forms of the dense table of a run's memory take and lose.

  Returns:
    `read`: the part of the rows that the training text reads, and `forms`: name -> bits a weight
    and the scores of the test text. Nothing for other runs.
  """
  memories = experiment.model.memories
  has_table = bool(memories) and isinstance(memories[0].lookup.table, DenseEmbedding)
  if not has_table or isinstance(experiment.init_from, Coded):
    return {}
  text = load_text(experiment)
  model = text.experiment.model
  variables = jax.device_put(read_run_variables(folder)[0])
  counts, weighed = _row_weights(text, variables)
  scorer, split, found = make_scorer(model), text.splits["test"], {}
  for form in forms(_table_of(variables), counts, weighed):
    own = with_table(variables, form.table)
    batches = experiment.loader.whole(split, batch=64, context=model.context)
    score = evaluate(scorer, own, batches, experiment.loader.text_bytes(split)).numbers()
    found[form.name] = {"bits": form.bits, **score}
  return {"read": float((counts > 0).mean()), "forms": found}


@dataclasses.dataclass(frozen=True)
class Coded:
  """The variables of a trained run whose table of n-grams is rounded.

  Attributes:
    folder: the run folder.
    bits: bits a weight of the file, whose steps follow counts and gradients; None: not rounded.
  """

  folder: str
  bits: float | None = None

  def __call__(self, text: EncodedText, model: Transformer, variables: Any) -> dict[str, Any]:
    """The variables of the run, with the rows that the file decodes to."""
    del model, variables
    trained = jax.device_put(read_run_variables(self.folder)[0])
    if self.bits is None:
      return trained
    _, weighed = _row_weights(text, trained)
    return with_table(trained, _coded(_table_of(trained), weighed, self.bits)[1])


def _table_of(variables: Mapping[str, Any]) -> np.ndarray:
  return np.asarray(variables["params"]["memories_0"]["lookup"]["table"]["weight"])


def with_table(variables: Mapping[str, Any], table: np.ndarray) -> dict[str, Any]:
  """A decoder's variables with another table of n-grams."""
  memory = variables["params"]["memories_0"]
  lookup = {**memory["lookup"], "table": {"weight": table}}
  params = variables["params"] | {"memories_0": {**memory, "lookup": lookup}}
  return {**variables, "params": params}
