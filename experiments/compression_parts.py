"""Bytes that each part of the compression of a table saves, at equal expected loss.

python -m experiments.compression_parts --model gemma-3-270m-q4_k_m.gguf --work runs/gemma
python -m experiments.compression_parts --model gemma-3-270m-q4_k_m.gguf --work runs/gemma --time
python -m experiments.compression_parts --penn-treebank --work runs/ptb

Every few rows of the table are coded with all parts, and with one of them left out or replaced. An
error e of the row of a token of probability p costs p · eᵀ M e / 2 nats. What a way needs for the
loss of the whole is read from a cubic through its steps. WORK has the moments and the counts that
`experiments.gemma_compression` wrote. The results are docs/results/compression-parts.json. With
`--penn-treebank` the table is the tied one of the comparison of heads, which is trained in WORK.
With `--time` the whole table is compressed to 65 MB and decoded; the results, seconds of all cores
together and on the clock, are docs/results/compression-time.json.
"""

import argparse
import pathlib
import resource
import time
from collections.abc import Callable

import numpy as np

from experiments.studies.comparison import compressed, ptb
from vqjax.lab import exits
from vqjax.lab.config import with_fields
from vqjax.lab.training import fit, read_run_variables
from vqjax.lab.training.provenance import provenance
from vqjax.lab.training.run_folder import load_text
from vqjax.lm import checkpoints, records
from vqjax.lm.texts import data_path
from vqjax.tables import Moments, container, entropy_coder, pack, probabilities, search
from vqjax.tables.coded import BIT, CodedTable, Coordinates, Transform, row_group_steps

EVERY = 64
"""Rows of which one is coded."""

STEPS = 0.0121, 0.0264
"""Steps of the whole table of 65 and of 45 MB."""

PARTS = 16, 24
"""What the float32 bytes of Penn Treebank's table are divided by."""

TRIED = np.geomspace(0.002, 0.04, 8)
"""Steps of the other ways, through which a curve is laid."""


class EqualSteps(Coordinates):
  """One step for all rows."""

  def __init__(self, table, moments):
    super().__init__(table, moments)
    self._p = np.full(len(table), 1 / len(table))


class NoTransform(Coordinates):
  """The columns of the table, each in the scale of what its errors cost."""

  def __init__(self, table, moments):
    super().__init__(table, moments)
    inverse = np.diag(1 / np.sqrt(np.diag(moments.metric())))
    scale = inverse.max()
    inverse = (inverse / scale).astype(np.float16)
    forward = np.linalg.inv(inverse.astype(np.float64))
    self._basis = Transform(forward, inverse, np.ones(len(inverse)), float(scale))


class Rounded(Coordinates):
  """Multiples of a step that are near, of one quantiser, of few bits."""

  def coded(self, step: float) -> CodedTable:
    """The integers, twice as far apart as those of the trellis at most are."""
    row_group, steps = row_group_steps(self._p, 2 * step * self._basis.scale)
    x = self._scaled(np.arange(len(row_group)), steps[row_group])
    nearest = np.rint(x).astype(np.int32)
    lower, levels = nearest - np.sign(nearest), nearest
    for _ in range(2):
      bits, which = bits_of_symbols(levels, row_group, len(steps))
      own = which[row_group]
      # A bit costs BIT squared steps of the trellis, of which there are two in a step.
      costs = [(x - to) ** 2 + BIT / 4 * bits[own, symbols_of(to)] for to in (nearest, lower)]
      levels = np.where(costs[1] < costs[0], lower, nearest)
    return CodedTable(levels, row_group, steps, self._basis.inverse, self._mean)


class Feedback(Rounded):
  """Rounding column by column, of which later columns make up for the errors, as GPTQ does.

  The basis has uncorrelated columns, but errors of one column cost more or less by those of others.
  """

  def __init__(self, table, moments):
    super().__init__(table, moments)
    _, vectors = np.linalg.eigh(np.cov(table.T, bias=True))
    vectors = vectors[:, ::-1]
    upper = np.linalg.cholesky(vectors.T @ moments.metric() @ vectors).T
    lengths = np.diag(upper)
    inverse = (vectors / lengths).T
    scale = np.abs(inverse).max()
    inverse = (inverse / scale).astype(np.float16)
    forward = np.linalg.inv(inverse.astype(np.float64))
    self._basis = Transform(forward, inverse, np.ones(len(inverse)), float(scale))
    self._upper = (upper / lengths).astype(np.float32)

  def coded(self, step: float) -> CodedTable:
    """The integers; what bits cost chooses nothing."""
    row_group, steps = row_group_steps(self._p, 2 * step * self._basis.scale)
    x = self._scaled(np.arange(len(row_group)), steps[row_group])
    error, levels = np.zeros_like(x), np.empty(x.shape, np.int32)
    for column in reversed(range(x.shape[1])):
      pull = error[:, column + 1 :] @ self._upper[column, column + 1 :]
      levels[:, column] = np.rint(x[:, column] + pull)
      error[:, column] = x[:, column] - levels[:, column]
    return CodedTable(levels, row_group, steps, self._basis.inverse, self._mean)


def symbols_of(levels: np.ndarray) -> np.ndarray:
  """Symbols of integers of one quantiser; none of them is far away at these steps."""
  return np.clip(levels, -container.LARGEST, container.LARGEST) + container.LARGEST


def bits_of_symbols(levels, row_group, row_groups) -> tuple[np.ndarray, np.ndarray]:
  """Bits of symbols by distribution, [K, S], and the distributions of row groups and columns."""
  columns = levels.shape[1]
  place = (row_group[:, None].astype(np.int64) * columns + np.arange(columns)) * container.SYMBOLS
  flat = np.bincount(
    (place + symbols_of(levels)).ravel(), minlength=row_groups * columns * container.SYMBOLS
  ).reshape(-1, container.SYMBOLS)
  frequencies, which = entropy_coder.clusters(flat, entropy_coder.MOST_DISTRIBUTIONS)
  bits = container.PRECISION - np.log2(np.maximum(frequencies, 2.0**-4))
  return bits, which.reshape(row_groups, columns)


def bytes_of_one_quantizer(coded: CodedTable) -> float:
  """Bytes of integers that are their own indices, of an ideal coder with the same histograms."""
  bits, which = bits_of_symbols(coded.levels, coded.row_group, len(coded.steps))
  return bits[which[coded.row_group], symbols_of(coded.levels)].sum() / 8


def bytes_of_trellis(coded: CodedTable) -> float:
  """Bytes of the integers of the dependent quantiser."""
  groups = len(coded.steps)
  return entropy_coder.distributions_of(coded.levels, coded.row_group, groups)[1].sum() / 8


WAYS: dict[str, tuple[type[Coordinates], Callable[[CodedTable], float]]] = {
  "all parts": (Coordinates, bytes_of_trellis),
  "rounding instead of the trellis": (Rounded, bytes_of_one_quantizer),
  "rounding with feedback instead of the trellis": (Feedback, bytes_of_one_quantizer),
  "one step for all rows": (EqualSteps, bytes_of_trellis),
  "no transform": (NoTransform, bytes_of_trellis),
}


def expected_loss(table, found, moments: Moments) -> float:
  """Expected loss of a table in place of another, nats a token."""
  root = np.linalg.cholesky(moments.metric())
  error = ((np.asarray(table, np.float64) - found) @ root) ** 2
  return float(probabilities(moments.counts) @ error.sum(axis=1) / 2)


SIZE = 65_000_000
"""Bytes of the table whose compression is timed."""


def timed(table: np.ndarray, moments: Moments) -> dict[str, dict[str, float]]:
  """Seconds that the stages of a compression take, of all cores and on the clock."""
  found, clocks = {}, (time.process_time, time.monotonic)

  def stage(name, work):
    begun = [clock() for clock in clocks]
    made = work()
    cores, wall = (clock() - start for clock, start in zip(clocks, begun))
    found[name] = {"cores": cores, "clock": wall}
    print(name, found[name], flush=True)
    return made

  tables = search.Tables({"table": table}, {"table": moments})
  stage("the basis", lambda: tables.limits)
  measure = lambda step: search.Point(step, tables.size(step), None)
  point = stage("the step", lambda: search.search(measure, size=SIZE, limits=tables.limits)[0])
  _, _, parts = stage("the file, read again", lambda: tables.coded(point.step, SIZE))
  read = container.CompressedTable(parts["table"])
  stage("all rows, decoded", lambda: [None for _ in read.blocks()])
  stage("a block of rows, decoded", lambda: read.rows(0, container.RESTART))
  streams = entropy_coder.decoded
  try:
    entropy_coder.decoded = container.decoded
    stage("an eighth of the integers, by NumPy", lambda: read.levels(0, len(table) // 8))
  finally:
    entropy_coder.decoded = streams
  return found


def penn_treebank(folder: pathlib.Path) -> tuple[np.ndarray, Moments]:
  """The tied table of the comparison's LSTM that begins with contexts, and its moments."""
  experiment = ptb.study().experiment("tied-contexts")
  experiment = with_fields(experiment, {"train.learning_rate": 40.0})
  fit(experiment, folder)
  text, (variables, _) = load_text(experiment), read_run_variables(folder)
  model = text.experiment.model
  moments = compressed.moments_of(model, variables, text)
  return compressed.TrainedTable(model, variables, moments, 0).weight, moments


def step_of(size: float, table: np.ndarray, moments: Moments) -> float:
  """The step at which a table has a number of bytes."""
  made, low, high = Coordinates(table, moments), 1e-4, 1e2
  for _ in range(24):
    middle = (low * high) ** 0.5
    low, high = (middle, high) if bytes_of_trellis(made.coded(middle)) > size else (low, middle)
  return high


def more_bytes(table: np.ndarray, moments: Moments, steps: tuple[float, ...]) -> dict:
  """What each way needs above all parts, at the losses of their steps; None outside of a curve."""
  curves: dict[str, list[tuple[float, float]]] = {}
  for name, (kind, bytes_of) in WAYS.items():
    made = kind(table, moments)
    curves[name] = []
    for step in steps if name == "all parts" else steps[0] / STEPS[0] * TRIED:
      coded = made.coded(step)
      curves[name].append((expected_loss(table, coded.table(), moments), bytes_of(coded)))
  curves["no entropy coder"] = []
  for bits in (2.25, 2.75, 3.25, 3.75, 4.25, 4.75):
    units = int(table.size * bits / 16)
    found = pack(table, moments, units, is_trellis=False).table()
    curves["no entropy coder"].append((expected_loss(table, found, moments), 2.0 * units))
  rows = {}
  for name in list(curves)[1:]:
    losses, sizes = np.log(np.array(sorted(curves[name]))).T
    curve = np.polynomial.Polynomial.fit(losses, sizes, 3)
    rows[name] = [
      float(np.exp(curve(np.log(loss))) / size - 1)
      if losses[0] <= np.log(loss) <= losses[-1]
      else None
      for loss, size in curves["all parts"]
    ]
    print(name, rows[name], flush=True)
  losses, sizes = np.array(curves["all parts"]).T.tolist()
  return {"more_bytes": rows, "steps": steps, "losses": losses, "bytes": sizes}


def main() -> int:
  """Code the rows in all ways."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  given = parser.add_mutually_exclusive_group(required=True)
  given.add_argument("--model", help="Gemma 3 270M: a GGUF or a folder")
  given.add_argument("--penn-treebank", action="store_true", help="a table that is trained in WORK")
  parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/gemma"))
  parser.add_argument("--json", type=pathlib.Path, help="results")
  parser.add_argument("--time", action="store_true", help="time the compression of all of Gemma")
  options = parser.parse_args()
  results = pathlib.Path("docs/results")
  path = options.json or results / f"compression-{'time' if options.time else 'parts'}.json"
  if options.penn_treebank:
    table, moments = penn_treebank(options.work)
    name, every = "Penn Treebank", 1
    steps = tuple(step_of(4 * table.size / part, table, moments) for part in PARTS)
  else:
    _, variables, _ = checkpoints.load(data_path(options.model, kind="--model"))
    table = np.asarray(variables["params"]["embedding"]["weight"])
    whole = Moments.load(options.work / "moments.safetensors")
    if options.time:
      found = {"seconds": timed(table, whole), "provenance": provenance()}
      found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
      records.write(path, found)
      return 0
    name, every, steps = "Gemma 3 270M", EVERY, STEPS
    table = table[::EVERY]
    moments = Moments(whole.hidden, whole.counts[::EVERY], whole.tokens, whole.inputs)
  kept = dict(records.read(path, dict) or {})
  found = more_bytes(table, moments, steps) | {"every": every, "provenance": provenance()}
  records.write(path, kept | {name: found})
  return 0


if __name__ == "__main__":
  exits.run_main(main)
