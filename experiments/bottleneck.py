"""What heads do to gradients and to ranks: small decoders on Penn Treebank, one for each head.

python -m experiments.bottleneck                  train and measure what is missing, render
python -m experiments.bottleneck --only dense-32,mixture
python -m experiments.bottleneck --render         the tables alone

Each decoder is trained for the same steps, with the learning rate of all. Then the same positions
of the validation split are its contexts: of some the share of the logits' gradient that the head
passes on, of all the singular values of the matrix of log-probabilities, which never exists whole.
The results are docs/results/bottleneck.json.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from experiments.studies import study_page
from experiments.studies.comparison.rows import zipf_tree
from vqjax import DenseEmbedding, Head, SoftmaxQuantizer, assign, convert, heads
from vqjax.convert.trained_variables import part_of
from vqjax.lab import exits, starting_points
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import PennTreebank, Windows, WordTokenizer
from vqjax.lab.report.frames import markdown
from vqjax.lab.training import fit, read_run_variables
from vqjax.lab.training.provenance import provenance
from vqjax.lab.training.run_folder import load_text
from vqjax.lm import records
from vqjax.lm.models import Transformer
from vqjax.ops import sampling

PAGE = study_page.DOCS / "results" / "bottleneck.md"
RESULTS = PAGE.with_suffix(".json")

V = FROM_TOKENIZER
WIDTH = 32
"""Width of the decoders whose name has no other."""
CONTEXTS = 1024
"""Positions whose log-probabilities are the columns of the matrix."""
GRADIENTS = 128
"""Positions of which gradients are measured."""
SKETCH = 384
"""Random combinations of the rows of the matrix: no rank above it is found."""


@dataclasses.dataclass(frozen=True)
class TrainedRow:
  """A decoder.

  Attributes:
    label: its head in tables.
    head: width -> the head.
    dim: width of the decoder.
    start: `Experiment.init_from`.
  """

  label: str
  head: Callable[[int], Head]
  dim: int = WIDTH
  start: Any = None


def _dense(dim: int) -> Head:
  return heads.DenseHead(V, dim, use_bias=True)


def _from_contexts(target: Any, equal_lengths: bool = False) -> starting_points.FromVectors:
  return starting_points.FromVectors(convert.ContextVectors(0, equal_lengths), target)


def _codes(alone: float) -> starting_points.FromVectors:
  return _from_contexts(convert.ToCodebook(convert.KMeans(power=0.5, alone=alone, seed=0)))


ROWS: Mapping[str, TrainedRow] = {
  **{f"dense-{d}": TrainedRow(f"dense, D = {d}", _dense, d) for d in (8, 16, 32, 64)},
  "dense-contexts": TrainedRow(
    "dense, D = 32, from contexts", _dense, start=_from_contexts(convert.ToDense())
  ),
  "dense-equal": TrainedRow(
    "dense, D = 32, from contexts of equal lengths",
    _dense,
    start=_from_contexts(convert.ToDense(), equal_lengths=True),
  ),
  "tied": TrainedRow("tied", lambda d: heads.DenseHead(V, d, True, embedding=DenseEmbedding(V, d))),
  "mixture": TrainedRow(
    "mixture of 4 softmaxes", lambda d: heads.MixtureHead(V, d, components=4, use_bias=True)
  ),
  "sigsoftmax": TrainedRow(
    "sigsoftmax", lambda d: heads.DenseHead(V, d, use_bias=True, output=heads.SigSoftmax())
  ),
  "low-rank": TrainedRow("low rank, r = 8", lambda d: heads.LowRankHead(V, d, 8, use_bias=True)),
  "codebook-256": TrainedRow(
    "codebook, K = 256",
    lambda d: heads.CodebookHead(V, d, 256, token_bias=True),
    start=_codes(0.5),
  ),
  "codebook-1024": TrainedRow(
    "codebook, K = 1,024",
    lambda d: heads.CodebookHead(V, d, 1024, token_bias=True),
    start=_codes(0.5),
  ),
  "product": TrainedRow(
    "product, K = 64, M = 8",
    lambda d: heads.ProductHead(V, d, 64, 8, token_bias=True),
    start=_from_contexts(convert.ToProduct(power=0.5, seed=0)),
  ),
  "dpq": TrainedRow("DPQ, K = 64, M = 8", lambda d: heads.DPQHead(V, d, SoftmaxQuantizer(64, 8))),
  "grouped": TrainedRow("grouped, G = 100", lambda d: heads.GroupedHead(V, d, use_bias=True)),
  "unshared": TrainedRow(
    "grouped, unshared", lambda d: heads.UnsharedGroupedHead(V, d, use_bias=True)
  ),
  "residual": TrainedRow(
    "codebook and low rank, K = 256, r = 4",
    lambda d: heads.ResidualCodebookHead(V, d, 256, 4, token_bias=True),
    start=_from_contexts(convert.ToResidual(convert.KMeans(power=0.5, alone=0.25, seed=0))),
  ),
  "adaptive": TrainedRow(
    "adaptive softmax", lambda d: heads.AdaptiveHead(V, d, (750, 3000))
  ),
  "class-based": TrainedRow(
    "class-based, 100 classes", lambda d: heads.ClassBasedHead(V, d, 100, assign.contiguous)
  ),
  "tree": TrainedRow("tree softmax", lambda d: heads.HierarchicalHead(V, d, zipf_tree)),
}  # fmt: skip

OFF_PAGE = "dense-8", "dense-16", "codebook-256", "unshared", "residual"
"""Rows near others, which only the CSV file has."""


def row_experiment(name: str, steps: int = 300) -> Experiment:
  """The training of a row."""
  row = ROWS[name]
  head = row.head(row.dim)
  embedding = getattr(head, "embedding", None) or DenseEmbedding(V, row.dim)
  model = Transformer(
    embedding=embedding, head=head, dim=row.dim, layers=2, heads=4, context=32
  )  # fmt: skip
  train = Train(
    steps=steps,
    batch=16,
    learning_rate=3e-3,
    warmup=30,
    weight_decay=0.1,
    eval_every=steps,
    save_every=steps,
    keep=1,
    log_every=50,
  )
  return Experiment(
    name,
    model,
    PennTreebank(),
    WordTokenizer(split=False),
    Windows(),
    train,
    seed=0,
    init_from=row.start,
  )


def log_prob_blocks(
  head: Head, variables: Any, hidden: jax.Array
) -> tuple[Callable[[int], tuple[np.ndarray, np.ndarray]], int, float]:
  """Parts of the matrix [V, N] of log-probabilities, centred along the contexts.

  The mean of a token over the contexts is subtracted: it is what a unigram would say. It is taken
  in float64, because the error of a float32 mean is a direction of its own.

  Returns:
    index -> rows [W, N] and their tokens [W]; the number of parts; and the largest absolute
    log-probability.
  """

  def of_blocks(read, *given):
    return head.apply(variables, read, hidden, *given, method="over_blocks")

  def read(blocks, log_z, index):
    score_WN, token_W = blocks.block(index)
    return score_WN - log_z, token_W

  block = jax.jit(lambda log_z, index: of_blocks(read, log_z, index))
  log_z = jax.jit(lambda: of_blocks(sampling.log_z))()
  count = of_blocks(lambda blocks: blocks.count)

  def rows_of(index):
    rows, tokens = block(log_z, index)
    # Rows that a block repeats score -inf.
    there = np.isfinite(rows).all(axis=1, keepdims=True)
    return np.where(there, np.asarray(rows, np.float64), 0.0), np.asarray(tokens)

  def centred(index):
    rows, tokens = rows_of(index)
    return rows - rows.mean(axis=1, keepdims=True), tokens

  return centred, count, max(float(np.abs(rows_of(index)[0]).max()) for index in range(count))


def singular_values(
  block: Callable[[int], tuple[np.ndarray, Any]], count: int, size: int, seed: int = 0
) -> np.ndarray:
  """The largest singular values of a matrix [V, N] that comes in blocks of rows.

  Random combinations of all rows span the space of their largest directions (Halko, Martinsson and
  Tropp, Algorithm 4.3 without powers); the rows are projected on it in a second pass.

  Args:
    block: index -> rows [W, N], and what they are rows of.
    count: number of blocks.
    size: number of combinations, at least the rank for exact values.
    seed: seed of the combinations.
  """
  random = np.random.default_rng(seed)
  sketch = 0.0
  for index in range(count):
    rows = block(index)[0]
    sketch = sketch + random.standard_normal((len(rows), size)).T @ rows
  basis, _ = np.linalg.qr(sketch.T)
  triangle = np.zeros((0, basis.shape[1]))
  for index in range(count):
    rows = block(index)[0] @ basis
    # A triangular factor has the singular values of the rows, and squares none of them.
    triangle = np.linalg.qr(np.concatenate([triangle, rows]), mode="r")
  return np.linalg.svd(triangle, compute_uv=False)


def numerical_ranks(values: np.ndarray, shape: tuple[int, int], largest: float) -> dict[str, int]:
  """Singular values above the noise of float32, and those that have 99 % of the squares.

  Args:
    values: the singular values.
    shape: (V, N).
    largest: the largest absolute log-probability: float32 rounds in proportion to it.
  """
  # A matrix of independent errors e has singular values up to e · (sqrt V + sqrt N).
  noise = 4 * np.finfo(np.float32).eps * largest * sum(map(math.sqrt, shape))
  squares = np.cumsum(values**2) / (values**2).sum()
  return {
    "rank": int((values > noise).sum()),
    "noise": float(noise),
    "rank_99": int(np.searchsorted(squares, 0.99) + 1),
  }


def measured_row(name: str, work: pathlib.Path, steps: int) -> dict[str, Any]:
  """Train a row where it is not trained, and measure it."""
  run = row_experiment(name, steps)
  begun = time.monotonic()
  result = fit(run, work / name)
  say(
    f"{name}: perplexity {result['valid']['perplexity']:.1f} after {time.monotonic() - begun:.0f} s"
  )
  text = load_text(run)
  model, split = text.experiment.model, text.splits["valid"]
  variables, _ = read_run_variables(work / name)
  whole = run.loader.whole(split, batch=run.train.batch, context=model.context)
  hidden, targets = [], []
  apply = jax.jit(lambda v, tokens: model.apply(v, tokens, method="hidden"))
  for batch in whole:
    hidden.append(np.asarray(apply(variables, batch["inputs"])).reshape(-1, model.dim))
    targets.append(np.asarray(batch["targets"]).reshape(-1))
    if sum(map(len, targets)) >= CONTEXTS:
      break
  hidden, targets = jnp.asarray(np.concatenate(hidden)), jnp.asarray(np.concatenate(targets))
  kept = jnp.flatnonzero(targets >= 0)[:CONTEXTS]
  hidden, targets = hidden[kept], targets[kept]
  head, own = model.head, part_of(variables, "head")
  if getattr(head, "embedding", None) is not None:
    own = {"params": {**own.get("params", {}), "embedding": variables["params"]["embedding"]}}
  some = np.linspace(0, len(targets) - 1, GRADIENTS).astype(int)
  share = jax.jit(lambda v, h, t: head.apply(v, h, t, method="gradient_share"))
  found = jax.tree.map(np.asarray, share(own, hidden[some], targets[some]))
  block, count, largest = log_prob_blocks(head, own, hidden)
  values = singular_values(block, count, SKETCH)
  shape = head.vocab, len(targets)
  say(f"{name}: keeps {100 * found.kept.mean():.1f} %, {numerical_ranks(values, shape, largest)}")
  return {
    "name": name,
    "dim": model.dim,
    "parameters": head.size().params,
    "steps": steps,
    "perplexity": result["valid"]["perplexity"],
    "contexts": len(targets),
    "gradients": len(some),
    "kept": {
      "mean": float(found.kept.mean()),
      "p5": float(np.quantile(found.kept, 0.05)),
      "p95": float(np.quantile(found.kept, 0.95)),
    },
    "gain": float(found.gain.mean()),
    "dimensions": int(found.rank.max()),
    "random": float(math.sqrt(found.rank.max() / (head.vocab - 1))),
    "sketch": SKETCH,
    **numerical_ranks(values, shape, largest),
    "values": [float(f"{value:.4g}") for value in values[:: SKETCH // 48]],
    "provenance": provenance(),
  }  # fmt: skip


def say(text: str) -> None:
  """Print a line of progress."""
  print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def heads_table(rows: Mapping[str, Any]) -> pd.DataFrame:
  """What each head passes on, and its ranks; a row without a result has its label alone."""
  shown = []
  for name, one in ROWS.items():
    shown.append({"head": one.label})
    if row := rows.get(name):
      kept = {key: f"{100 * value:.1f}" for key, value in row["kept"].items()}
      is_above = row["rank"] >= row["sketch"]
      shown[-1] |= {
        "perplexity": f"{row['perplexity']:.0f}",
        "kept, %": kept["mean"],
        "5th to 95th percentile": f"{kept['p5']} to {kept['p95']}",
        "gain": f"{row['gain']:.2f}",
        "rank": f"≥ {row['sketch']}" if is_above else str(row["rank"]),
        "99 % of the squares": str(row["rank_99"]),
      }
  return pd.DataFrame(shown)


def update(path: pathlib.Path, result: Mapping[str, Any]) -> bool:
  """Rewrite the tables of the page and its CSV file; return whether the page changed."""
  rows = result["rows"]
  distinct = lambda key: ", ".join(sorted({str(r["provenance"][key]) for r in rows.values()}))
  origin = f"Commits {distinct('commit')}, on {distinct('device')}."
  heads = heads_table(rows)
  study_page.save_table(path.with_suffix(".csv"), heads)
  shown = heads[~heads["head"].isin([ROWS[name].label for name in OFF_PAGE])]
  shown = shown.drop(columns="5th to 95th percentile", errors="ignore")
  blocks = {"heads": markdown(shown), "origin": origin}
  return study_page.update_page(path, blocks)


def main() -> int:
  """Train and measure what is missing, and rewrite the page."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--only", help="names of rows, with commas")
  parser.add_argument("--render", action="store_true", help="rewrite the tables alone")
  parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/bottleneck"))
  parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="the results")
  parser.add_argument("--steps", type=int, default=300, help="steps of each training")
  options = parser.parse_args()
  result = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {"rows": {}}
  names = options.only.split(",") if options.only else list(ROWS)
  if unknown := set(names) - set(ROWS):
    parser.error(f"--only must name rows; got {', '.join(unknown)}. There are {', '.join(ROWS)}.")
  for name in [] if options.render else names:
    if name not in result["rows"] or options.only:
      result["rows"][name] = measured_row(name, options.work, options.steps)
      records.write(options.json, result)
  if options.json == RESULTS:
    update(PAGE, result)
  return 0


if __name__ == "__main__":
  exits.run_main(main)
