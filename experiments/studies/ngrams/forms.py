"""The table of a trained memory in other forms: real files with all that they need.

Nothing is trained again; the test text is scored with each form in place of the table.
"""

import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from vqjax import DenseEmbedding
from vqjax.lab.config import Experiment
from vqjax.lab.training import evaluate, make_scorer, read_run_variables
from vqjax.lab.training.run_folder import load_text
from vqjax.lm.compression.calibration import memory_counts
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
    most = 2 ** (bits - 1) - 1
    scale = (np.abs(table).max(1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    levels = np.clip(np.round(table / np.maximum(scale, 1e-12)), -most, most)
    yield Form(f"int{bits}, a scale a row", bits + 16 / dim, levels * scale)
  kind = gguf_types.block_type("IQ4_NL", dim)
  blocks = kind.rounded(np.ascontiguousarray(table))
  scale = np.repeat(blocks.scale.astype(np.float32), kind.block, axis=1)
  yield Form("IQ4_NL", 8 * kind.bytes / kind.block, scale * blocks.level)
  asked = [("by counts and gradients", weighed, bits) for bits in BITS]
  asked += [("by counts", counts, bits) for bits in BITS[2:]]
  asked += [("alike", np.ones(rows, np.int64), bits) for bits in BITS[::2]]
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "table.safetensors")
    for name, weights, bits in asked:
      compress_rows(table, weights, file, size=int(bits * table.size / 8))
      used = 8 * file.stat().st_size / table.size
      yield Form(f"steps {name}, {bits} bits", used, np.asarray(SmallTable.load(file).table()))


def forms_of(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """What the forms of the dense table of a run's memory take and lose.

  Returns:
    `read`: the part of the rows that the training text reads, and `forms`: name -> bits a weight
    and the scores of the test text. Nothing for a run without such a table.
  """
  memories = experiment.model.memories
  if not memories or not isinstance(memories[0].lookup.table, DenseEmbedding):
    return {}
  text = load_text(experiment)
  model = text.experiment.model
  variables = jax.device_put(read_run_variables(folder)[0])
  table = np.asarray(variables["params"]["memories_0"]["lookup"]["table"]["weight"])
  train = np.asarray(text.splits["train"].tokens)
  counts = count_rows(model.memories[0].lookup.ngrams, train)
  windows = train[: len(train) // model.context * model.context].reshape(-1, model.context)
  weighed = memory_counts(model, variables, windows[:: -(-len(windows) // WINDOWS)], counts)
  scorer, split, found = make_scorer(model), text.splits["test"], {}
  for form in forms(table, counts, weighed):
    own = with_table(variables, form.table)
    batches = experiment.loader.whole(split, batch=64, context=model.context)
    score = evaluate(scorer, own, batches, experiment.loader.text_bytes(split)).numbers()
    found[form.name] = {"bits": form.bits, **score}
  return {"read": float((counts > 0).mean()), "forms": found}


def with_table(variables: Mapping[str, Any], table: np.ndarray) -> dict[str, Any]:
  """A decoder's variables with another table of n-grams."""
  memory = variables["params"]["memories_0"]
  lookup = {**memory["lookup"], "table": {"weight": table}}
  params = variables["params"] | {"memories_0": {**memory, "lookup": lookup}}
  return {**variables, "params": params}
