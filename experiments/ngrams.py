"""Memories of hashed n-grams beside a small decoder: trained, and compressed by the counts of rows.

python -m experiments.ngrams                      train and measure what is missing
python -m experiments.ngrams --only none-s0,65536-int8-s1

Every decoder has three blocks of width 160, BPE of 4,096 tokens, and 1,500 steps of 2,048 tokens
of WikiText-2. A memory of four heads, two of pairs and two of triples, is added after the first
block. Then the table of a trained memory is stored in other forms, real files with all that they
need, nothing is trained again, and the test text is scored with each. The results are
runs/ngrams/results.json.
"""

import argparse
import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from vqjax import CentroidQuantizer, DenseEmbedding, DenseHead, DPQEmbedding, Int8Embedding
from vqjax.lab import exits
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import BPETokenizer, WikiText, Windows
from vqjax.lab.training import evaluate, fit, make_scorer, read_run_variables
from vqjax.lab.training.optimizer import decayed, learning_rate
from vqjax.lab.training.provenance import provenance
from vqjax.lab.training.run_folder import load_text
from vqjax.lm import records
from vqjax.lm.models import Transformer
from vqjax.ngrams import NGramEmbedding, NGramMemory
from vqjax.ops.ngrams import XorHash, count_rows
from vqjax.row_updates import rowwise
from vqjax.tables import SmallTable, compress_rows, gguf_types

V, DIM, WIDTH = 4096, 160, 32

TABLES = {
  "dense": lambda rows: DenseEmbedding(rows, WIDTH),
  "int8": lambda rows: Int8Embedding(rows, WIDTH, trained=True),
  "dpq": lambda rows: DPQEmbedding(rows, WIDTH, CentroidQuantizer(codes=256, subspaces=8)),
}
"""Forms in which a table is trained, by their names."""

ROWS = {
  "none": (0, "dense"),
  "8192": (8_192, "dense"),
  "65536": (65_536, "dense"),
  "262144": (262_144, "dense"),
  "65536-int8": (65_536, "int8"),
  "65536-dpq": (65_536, "dpq"),
}
"""Rows of each of the four heads, and the form of the table; 0: no memory."""

SEEDS = 0, 1, 2

BITS = 3.0, 2.0, 1.5, 0.8, 0.3
"""Bits a weight of entropy-coded files."""


@dataclasses.dataclass(frozen=True)
class TableByRows:
  """AdamW, and one second moment a row and no momentum for the table of n-grams.

  Attributes:
    times: ratio of the table's learning rate to that of all else.
  """

  times: float

  def learning_rate(self, train: Train) -> optax.Schedule:
    """Return step -> learning rate, the schedule of AdamW."""
    return learning_rate(dataclasses.replace(train, optimizer=None))

  def rule(self, train: Train) -> optax.GradientTransformation:
    """Return the optimiser, without clipping."""
    schedule = self.learning_rate(train)
    rules = {
      "rows": rowwise(lambda step: self.times * schedule(step)),
      "other": optax.adamw(
        schedule, b1=train.beta1, b2=train.beta2, weight_decay=train.weight_decay, mask=decayed
      ),
    }
    return optax.multi_transform(rules, _labels)


def _labels(params):
  is_row = lambda path: (
    "lookup" in jax.tree_util.keystr(path, simple=True, separator=".").split(".")
  )
  return jax.tree.map_with_path(lambda path, _: "rows" if is_row(path) else "other", params)


def row_experiment(row: str, seed: int, steps: int, times: float = 10.0) -> Experiment:
  """The training of a decoder with the memory of a row of `ROWS`."""
  size, kind = ROWS[row]
  embedding = DenseEmbedding(FROM_TOKENIZER, DIM)
  fields = {
    "embedding": embedding,
    "head": DenseHead(FROM_TOKENIZER, DIM, use_bias=True, embedding=embedding),
    "dim": DIM,
    "layers": 3,
    "heads": 5,
    "context": 128,
    "dropout": 0.1,
  }
  optimizer = None
  if size:
    ngrams = XorHash.qwen4(V, end=0, heads=2, least=size)
    lookup = NGramEmbedding(ngrams, TABLES[kind](ngrams.rows))
    fields |= {"memories": (NGramMemory(lookup, DIM),), "memory_blocks": (1,)}
    optimizer = TableByRows(times)
  train = Train(
    steps=steps,
    batch=16,
    learning_rate=3e-3,
    final_fraction=1 / 30,
    warmup=100,
    beta2=0.98,
    eval_every=500,
    save_every=500,
    keep=1,
    log_every=100,
    optimizer=optimizer,
  )
  model = Transformer(**fields)
  return Experiment(
    f"{row}-s{seed}", model, WikiText(), BPETokenizer(V), Windows(), train, seed=seed
  )


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


def forms(table: np.ndarray, counts: np.ndarray) -> Iterator[Form]:
  """The table in uniform types, all rows alike, and in files whose steps follow the counts."""
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
  costs = {"steps by counts": counts, "one step": np.ones(rows, np.int64)}
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "table.safetensors")
    for name, count in costs.items():
      for bits in BITS if count is counts else BITS[:3]:
        compress_rows(table, count, file, size=int(bits * table.size / 8))
        small = SmallTable.load(file)
        used = 8 * file.stat().st_size / table.size
        yield Form(f"{name}, {bits} bits", used, np.asarray(small.table()))


def measured_row(row: str, seed: int, work: pathlib.Path, steps: int) -> dict[str, Any]:
  """Train a row where it is not trained, and measure it and the forms of a dense table."""
  (size, kind), run, name = ROWS[row], row_experiment(row, seed, steps), f"{row}-s{seed}"
  result = fit(run, work / name)
  kept = {split: result[split] for split in ("valid", "test")}
  found = {"rows": size, "table": kind, "seed": seed, "steps": steps, "trained": kept}
  found |= {"step_seconds": result["train"]["step_seconds"], "provenance": provenance()}
  say(f"{name}: {kept['test']['nats_per_token']:.4f} nats a token")
  if not size or kind != "dense":
    return found
  text = load_text(run)
  model = text.experiment.model
  variables, _ = read_run_variables(work / name)
  table = np.asarray(variables["params"]["memories_0"]["lookup"]["table"]["weight"])
  counts = count_rows(model.memories[0].lookup.ngrams, np.asarray(text.splits["train"].tokens))
  found["read"] = float((counts > 0).mean())
  scorer, split = make_scorer(model), text.splits["test"]
  for form in forms(table, counts):
    own = with_table(variables, form.table)
    batches = run.loader.whole(split, batch=64, context=model.context)
    score = evaluate(scorer, own, batches, run.loader.text_bytes(split)).numbers()
    found.setdefault("forms", {})[form.name] = {"bits": form.bits, **score}
    more = score["nats_per_token"] / kept["test"]["nats_per_token"] - 1
    say(f"{name}, {form.name}: {form.bits:.3f} bits, {100 * more:+.3f} %")
  return found


def with_table(variables: Mapping[str, Any], table: np.ndarray) -> dict[str, Any]:
  """A decoder's variables with another table of n-grams."""
  memory = variables["params"]["memories_0"]
  lookup = {**memory["lookup"], "table": {"weight": table}}
  params = variables["params"] | {"memories_0": {**memory, "lookup": lookup}}
  return {**variables, "params": params}


def say(text: str) -> None:
  """Print a line of progress."""
  print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def main() -> int:
  """Train and measure what is missing."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--only", help="names of rows, with commas, such as 65536-s0")
  parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/ngrams"))
  parser.add_argument("--steps", type=int, default=1500, help="steps of each training")
  options = parser.parse_args()
  file = options.work / "results.json"
  result = json.loads(file.read_text("utf-8")) if file.exists() else {"rows": {}}
  known = {f"{row}-s{seed}": (row, seed) for seed in SEEDS for row in ROWS}
  names = options.only.split(",") if options.only else list(known)
  if unknown := set(names) - set(known):
    parser.error(f"--only must name rows; got {', '.join(unknown)}. There are {', '.join(known)}.")
  for name in names:
    if name not in result["rows"] or options.only:
      result["rows"][name] = measured_row(*known[name], options.work, options.steps)
      records.write(file, result)
  return 0


if __name__ == "__main__":
  exits.run_main(main)
