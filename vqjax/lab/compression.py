"""Compression of the vocabulary tables of a pretrained model to a divergence or to a size.

One step gives the tables of a model, so that a bit costs as much divergence in each of them. It is
searched on calibration text; what is reported is measured on text that nothing was fitted to.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import math
import os
import pathlib
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vqjax import checkpoints
from vqjax.checkpoints import table_file
from vqjax.compression import Moments, QuantizedTable, gguf_types, quantize
from vqjax.compression.calibration import collect
from vqjax.compression.exports import ROWS, copy_folder
from vqjax.compression.grids import check_rows
from vqjax.compression.outputs import check_output, whole
from vqjax.convert.variables import Variables
from vqjax.lab import records
from vqjax.lab.training.run import disk_error
from vqjax.models import Transformer
from vqjax.ops import distillation

WINDOW = 256
"""Tokens of a window, with the one that begins every text."""

TOKENS_AT_ONCE = 512
"""Tokens that are scored at a time."""

CLOSE, CLOSE_SIZE = 0.92, 0.985
"""A divergence or size that is at least this part of the bound is close enough."""

MOST_STEPS = 12
"""Most steps that a search tries."""

FINE_STEP = 2.0**-10
"""Step in which a sample of rows is kept, to count the bytes of larger ones."""

SAMPLE = 2**15
"""Rows of a sample, or up to twice as many."""

LEAST_STEP, LARGEST_STEP = 2.0**-14, 2.0**10


@dataclasses.dataclass(frozen=True)
class Windows:
  """Windows of text of several domains.

  Attributes:
    tokens: int32 [N, T].
    domain: domain of each window, [N].
    names: names of the domains.
  """

  tokens: np.ndarray
  domain: np.ndarray
  names: tuple[str, ...]

  def take(self, count: int) -> "Windows":
    """Evenly many windows of each domain, `count` in all or fewer."""
    at = _round_robin([np.flatnonzero(self.domain == d) for d in range(len(self.names))])[:count]
    return Windows(self.tokens[at], self.domain[at], self.names)


def windows(encoded: Mapping[str, Sequence[int]], begin: Sequence[int], length: int) -> Windows:
  """Windows of tokens of each domain, each with the tokens that begin every text.

  Args:
    encoded: tokens of the text of each domain, without those that begin it.
    begin: tokens that begin every text.
    length: tokens of a window.
  """
  rows, domain = [], []
  own = length - len(begin)
  for number, tokens in enumerate(encoded.values()):
    for first in range(0, len(tokens) - own + 1, own):
      rows.append([*begin, *tokens[first : first + own]])
      domain.append(number)
  shape = (len(rows), length)
  return Windows(
    np.asarray(rows, np.int32).reshape(shape), np.asarray(domain, np.int64), tuple(encoded)
  )


def _round_robin(groups):
  """One entry of each group in turn."""
  longest = max(map(len, groups), default=0)
  entries = [group[at] for at in range(longest) for group in groups if at < len(group)]
  return np.asarray(entries, np.int64)


def encode(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
  """The tokens that begin every text, and those of the text itself.

  A long text is encoded by paragraphs, since some tokenizers take quadratic time.
  """
  begin = list(tokenizer.encode(""))
  tokens = []
  for first in range(0, len(text), 2**16):
    tokens += list(tokenizer.encode(text[first : first + 2**16]))[len(begin) :]
  return begin, tokens


PATHS = {"embedding": ("params", "embedding", "weight"), "head": ("params", "head", "weight")}
"""Tables of a decoder."""


def tables_of(model: Transformer, variables: Variables) -> dict[str, np.ndarray]:
  """The tables of a decoder, [V, D] each; a tied model has one."""
  names = ["embedding"] if model.head.embedding is not None else ["embedding", "head"]
  return {name: np.asarray(variables["params"][name]["weight"]) for name in names}


def with_tables(variables: Variables, tables: Mapping[str, Any]) -> Variables:
  """The variables with other tables."""
  params = dict(variables["params"])
  for name, table in tables.items():
    params[name] = dict(params[name]) | {"weight": table}
  return dict(variables) | {"params": params}


class Reference:
  """A model whose distributions others are compared with, over given windows."""

  def __init__(self, model: Transformer, variables: Variables, of: Windows):
    """Compute the hidden states, which are kept."""
    self.model, self.variables, self.windows = model, variables, of
    self._hidden = [self._states(variables, row) for row in of.tokens]

  def _states(self, variables, row):
    states = _states(variables, jnp.asarray(row)[None], model=self.model)[0]
    # The first prediction has no context, and the last no target.
    return np.asarray(states[1:-1])

  def compare(
    self, students: Sequence[Variables], progress: Callable[[float], None] = lambda part: None
  ) -> list[dict[str, np.ndarray]]:
    """Divergence, agreement and log-probabilities of each token: arrays [N, T - 2] a student."""
    found: list[list[Any]] = [[] for _ in students]
    count = len(self.windows.tokens)
    at_once = max(1, TOKENS_AT_ONCE // (self.windows.tokens.shape[1] - 2))
    for first in range(0, count, at_once):
      rows = range(first, min(first + at_once, count))
      # The last part is filled up with its last window, so that it needs no program of its own.
      filled = [*rows] + [rows[-1]] * (at_once - len(rows))
      hidden = []
      for variables in students:
        own = {row: self._states(variables, self.windows.tokens[row]) for row in rows}
        hidden.append(np.concatenate([own[row] for row in filled]))
      teacher = np.concatenate([self._hidden[row] for row in filled])
      targets = self.windows.tokens[filled][:, 2:].reshape(-1)
      compared = _compared(students, self.variables, hidden, teacher, targets, model=self.model)
      for own, part in zip(found, compared):
        own.append([np.asarray(x).reshape(at_once, -1)[: len(rows)] for x in part])
      progress(rows.stop / count)
    fields = distillation.LinearComparison._fields
    return [dict(zip(fields, map(np.concatenate, zip(*own)))) for own in found]


@functools.partial(jax.jit, static_argnames="model")
def _states(variables, tokens_BT, *, model):
  return model.apply(variables, tokens_BT, method="hidden")


@functools.partial(jax.jit, static_argnames="model")
def _compared(students, teacher, hidden, teacher_hidden, targets, *, model):
  def side(prefix, own, vectors):
    weight, bias = model.apply(own, method=lambda m: m.head.linear())
    return distillation.Side(prefix, vectors, weight, bias, model.head.softcap)

  return distillation.linear_comparison(
    [side("", own, vectors) for own, vectors in zip(students, hidden)],
    side("teacher_", teacher, teacher_hidden),
    targets,
  )


def summary(found: Mapping[str, np.ndarray], of: Windows) -> dict[str, Any]:
  """Means of a comparison, of all tokens and by domain."""

  def means(rows):
    kl = found["kl"][rows].astype(np.float64)
    return {
      "tokens": int(kl.size),
      "kl": float(kl.mean()),
      "kl_p99": float(np.quantile(kl, 0.99)),
      "top1": float(found["agrees"][rows].mean()),
      "nats": float(-found["log_prob"][rows].mean(dtype=np.float64)),
      "nats_before": float(-found["teacher_log_prob"][rows].mean(dtype=np.float64)),
    }

  present = [d for d in range(len(of.names)) if (of.domain == d).any()]
  domains = {of.names[d]: means(of.domain == d) for d in present}
  return means(slice(None)) | {"domains": domains}


@dataclasses.dataclass(frozen=True)
class Point:
  """What a step gives.

  Attributes:
    step: the step.
    bytes: bytes of all tables in the file, about.
    kl: mean divergence on calibration text, nats a token; None: it was not needed.
  """

  step: float
  bytes: int
  kl: float | None


class Tables:
  """Tables at any step.

  Attributes:
    tables: the tables by their names.
    moments: what errors of each cost.
  """

  def __init__(self, tables: Mapping[str, np.ndarray], moments: Mapping[str, Moments]):
    """Check that the moments are those of the tables.

    Raises:
      ValueError: the moments have another width or vocabulary.
    """
    self.tables, self.moments = tables, moments
    for name, table in tables.items():
      moments[name].check(*table.shape)

  def quantized(self, step: float) -> dict[str, QuantizedTable]:
    """The tables as integers."""
    return {n: quantize(table, self.moments[n], step) for n, table in self.tables.items()}

  def coded(
    self, step: float, size: int | None, progress: Callable[[float], None] = lambda part: None
  ) -> tuple[float, dict[str, QuantizedTable], dict[str, dict[str, np.ndarray]]]:
    """The tables at a step, or at a little larger one that fits the size, and their bytes.

    The search counts the bytes of a sample of rows, which may be a hundredth too few.

    Raises:
      RuntimeError: a table is not read as it was written.
    """
    while True:
      quantized = self.quantized(step)
      coded = {name: table_file.encode(table, progress) for name, table in quantized.items()}
      excess = sum(array.nbytes for parts in coded.values() for array in parts.values())
      excess -= math.inf if size is None else size
      if excess <= 0:
        break
      numbers = sum(table.size for table in self.tables.values())
      # At least a tenth of a bit for each hundred numbers, so that it ends.
      step *= 2 ** (2 * max(8 * excess / numbers, 1e-3))
    for name, parts in coded.items():
      read, levels = table_file.CompressedTable(parts), quantized[name].levels
      for first in range(0, len(levels), 2**14):
        last = min(first + 2**14, len(levels))
        if not np.array_equal(read.levels(first, last), levels[first:last]):
          raise RuntimeError(f"the table {name} is not read as it was written: report it")
    return step, quantized, coded

  @functools.cached_property
  def _samples(self) -> dict[str, tuple[QuantizedTable, int]]:
    """Some rows of the tables in fine steps, and the number of all rows."""
    samples = {}
    for name, fine in self.quantized(FINE_STEP).items():
      some = slice(None, None, max(1, len(fine.levels) // SAMPLE))
      # Copies, so that the other rows are given back.
      levels, owner = fine.levels[some].copy(), fine.step_class[some].copy()
      own = dataclasses.replace(fine, levels=levels, step_class=owner)
      samples[name] = own, len(fine.levels)
    return samples

  def size(self, step: float) -> int:
    """Bytes of all tables at a step, about, from a sample of their rows."""
    total = 0
    for fine, rows in self._samples.values():
      levels = np.rint(fine.levels * (FINE_STEP / step)).astype(np.int32)
      total += table_file.coded_bytes(dataclasses.replace(fine, levels=levels), rows)
    return total


class Compression(Tables):
  """The tables of one model at any step."""

  def __init__(self, model: Transformer, variables: Variables, moments: Moments):
    """Check that the moments are those of the model.

    Raises:
      ValueError: the moments have another width or vocabulary.
    """
    self.model, self.variables = model, variables
    tables = tables_of(model, variables)
    super().__init__(tables, moments.of_tables(list(tables)))

  def variables_of(self, quantized: Mapping[str, QuantizedTable]) -> Variables:
    """The variables of the model with these tables."""
    made = {name: jnp.asarray(q.table(), self.model.dtype) for name, q in quantized.items()}
    return with_tables(self.variables, made)

  def point(self, step: float, reference: Reference | None) -> Point:
    """Size and divergence at a step."""
    size = self.size(step)
    if reference is None:
      return Point(step, size, None)
    quantized = self.quantized(step)
    (found,) = reference.compare([self.variables_of(quantized)])
    return Point(step, size, float(found["kl"].mean(dtype=np.float64)))


def search(
  measure: Callable[[float], Point],
  *,
  kl: float | None = None,
  size: int | None = None,
  points: Sequence[Point] = (),
  step: float = 1.0,
) -> tuple[Point, list[Point]]:
  """The largest step whose divergence is at most `kl`, or the smallest of at most `size` bytes.

  The divergence is about proportional to the square of the step, and a table has about a bit less
  for each number when the step is doubled; the search begins there and then bisects.

  Args:
    measure: gives the point of a step.
    kl: bound of the divergence in nats a token; or
    size: bound of the bytes.
    points: points that are known.
    step: step to begin with.

  Returns:
    The point, and all that are known.

  Raises:
    ValueError: no step reaches the bound; the message says the least that one reaches.
  """
  value = lambda point: point.kl if kl is not None else point.bytes
  bound = kl if kl is not None else size
  close = CLOSE if kl is not None else CLOSE_SIZE
  is_good = lambda point: value(point) <= bound
  known = {point.step: point for point in points if value(point) is not None}
  for _ in range(MOST_STEPS):
    ordered = sorted(known.values(), key=lambda point: point.step)
    good = [point for point in ordered if is_good(point)]
    if good and max(map(value, good)) >= close * bound:
      break
    step = _next_step(ordered, value, bound, rises=kl is not None) or step
    if step in known or not LEAST_STEP <= step <= LARGEST_STEP:
      break
    known[step] = measure(step)
    # A divergence that no longer falls is that of rounding, not of the step.
    is_least = kl is not None and len(ordered) > 2 and not good and 2 * step <= ordered[0].step
    if is_least and known[step].kl > 0.8 * ordered[0].kl:
      break
  good = [point for point in known.values() if is_good(point)]
  if not good:
    least = min(map(value, known.values()))
    if kl is not None:
      raise ValueError(
        f"`--kl` must be reachable: the least divergence of these tables is {least:.3g} nats a"
        f" token; got {kl:g}. Give at least {_rounded_up(least):g}, or keep the model as it is."
      )
    raise ValueError(
      f"`--bytes` must be reachable: the least size of these tables is {least:,} bytes; got"
      f" {size:,}. Give at least {int(1.05 * least):,}, or a model with a smaller vocabulary."
    )
  best = max(good, key=value)
  return best, sorted(known.values(), key=lambda point: point.step)


def _next_step(ordered, value, bound, rises):
  """The step to try after those that are known, or None before there is one."""
  if not ordered:
    return None
  above = lambda point: (value(point) > bound) == rises  # the step is too large
  small = [point for point in ordered if not above(point)]
  large = [point for point in ordered if above(point)]
  if small and large:
    a, b = small[-1], large[0]
    if rises:
      # Straight in logarithms, a little below the bound.
      x, y = math.log(max(a.kl, 1e-12)), math.log(max(b.kl, 1e-12))
      part = (math.log(0.97 * bound) - x) / (y - x) if y > x else 0.5
    else:
      part = (0.994 * bound - a.bytes) / (b.bytes - a.bytes) if b.bytes != a.bytes else 0.5
    part = min(0.9, max(0.1, part))
    return math.exp(math.log(a.step) + part * (math.log(b.step) - math.log(a.step)))
  nearest = small[-1] if small else large[0]
  if rises:
    factor = math.sqrt(0.97 * bound / max(nearest.kl, 1e-12))
  else:
    factor = nearest.bytes / (0.97 * bound)
    factor = factor**2
  factor = min(8.0, max(1 / 8, factor))
  return nearest.step * factor


def _rounded_up(value):
  digits = 10.0 ** (math.floor(math.log10(max(value, 1e-12))) - 1)
  return math.ceil(1.05 * value / digits) * digits


def read_moments(path: str | os.PathLike[str]) -> Moments:
  """Moments of a file; FileNotFoundError names it."""
  if not os.path.isfile(path):
    raise FileNotFoundError(
      f"`--moments` must be a file that Moments.save wrote; got {path}, which does not exist. Write"
      " it, or leave the option out."
    )
  return Moments.load(path)


@dataclasses.dataclass(frozen=True)
class Job:
  """A call of `compress_model`.

  Attributes:
    model: path of the pretrained model.
    texts: files of text by the names of their domains.
    out: folder to be written.
    kl: bound of the divergence on calibration text, nats a token; or
    size: bound of the bytes of all tables.
    held_out: files of text of which nothing else is taken; empty: the last fifth of each text.
    moments: file of moments; None: they are collected.
    hidden_tokens: tokens of the second moment of hidden states.
    search_tokens: tokens of calibration text on which a step is judged.
    held_out_tokens: tokens on which the result is judged.
    window: tokens of a window.
    dtype: number format in which the model is loaded and the rest of it is written.
  """

  model: pathlib.Path
  texts: Mapping[str, str]
  out: pathlib.Path
  kl: float | None = None
  size: int | None = None
  held_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
  moments: pathlib.Path | None = None
  hidden_tokens: int = 2**14
  search_tokens: int = 2**11
  held_out_tokens: int = 2**12
  window: int = WINDOW
  dtype: str = "float32"

  def identity(self) -> str:
    """A hash of everything that the kept work depends on; the bound is not part of it."""
    facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    for name in ("kl", "size", "out", "search_tokens", "held_out_tokens"):
      del facts[name]
    files = sorted(self.model.iterdir()) if self.model.is_dir() else [self.model]
    facts["files"] = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()


@dataclasses.dataclass
class _Identity:
  identity: str


@dataclasses.dataclass
class _PointRow:
  step: float
  bytes: int
  kl: float | None
  tokens: int


def compress_model(job: Job, loaded: Any, say: Callable[[str], None]) -> dict[str, Any]:
  """Compress the tables of a model into a folder that is whole or not there; return the report.

  What an interrupted call has computed is in a hidden folder beside `out`, from which the same
  call goes on.

  Args:
    job: what to do.
    loaded: the model, its variables and its tokenizer.
    say: prints a line.

  Raises:
    ValueError: the bound cannot be reached, the folder exists, a text has no known token, a table
      is not finite, or the moments are those of another model.
  """
  check_paths(job)
  begin = time.monotonic()
  model, variables, tokenizer = loaded
  # Moments of such a model are not finite either, which says less.
  for name, table in tables_of(model, variables).items():
    check_rows(table, name)
  work = job.out.with_name(f".{job.out.name}.partial")
  _open_work(work, job.identity())
  calibration, held_out, counts = _texts(job, tokenizer, model)
  with ProgressBars() as bars:
    moments = _moments(job, work, model, variables, calibration, counts, bars)
    compression = Compression(model, variables, moments)
    tokens = job.search_tokens
    reference = None
    if job.kl is not None:
      some = calibration.take(-(-tokens // (job.window - 2)))
      reference = Reference(model, variables, some)
    rows = work / "points.jsonl"
    read = records.read_rows(rows, _PointRow)
    known = [Point(r["step"], r["bytes"], r["kl"]) for r in read.rows if r["tokens"] == tokens]

    def measure(step: float) -> Point:
      point = compression.point(step, reference)
      read.checksums.append(_append(rows, point, tokens, read.checksums))
      value = "" if point.kl is None else f", KL {point.kl:.5f}"
      say(f"step {step:.4g}: {point.bytes / 1e6:.2f} MB{value}")
      return point

    best, points = search(measure, kl=job.kl, size=job.size, points=known)
    step, quantized, coded = compression.coded(best.step, job.size, bars("coding"))
    seconds = time.monotonic() - begin
    sizes = {name: sum(a.nbytes for a in parts.values()) for name, parts in coded.items()}
    student = compression.variables_of(quantized)
    del quantized
    some = held_out.take(-(-job.held_out_tokens // (job.window - 2)))
    judge = Reference(model, variables, some)
    (found,) = judge.compare([student], bars("held-out text"))
    del student
    beside = in_block_types(compression, judge, bars("block types of GGUF"))
  result = {
    "step": step,
    "tables": {
      name: {"shape": list(compression.tables[name].shape), "bytes": size}
      for name, size in sizes.items()
    },
    "bytes": sum(sizes.values()),
    "parts": {n: {part: a.nbytes for part, a in parts.items()} for n, parts in coded.items()},
    "calibration_kl": best.kl,
    "held_out": summary(found, some),
    "block_types": beside,
    "hardest": hardest(found, some, tokenizer),
    "points": [dataclasses.asdict(point) for point in points],
    "seconds": round(seconds, 1),
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
  }
  _write(job, work, loaded, coded, result)
  return result


def in_block_types(
  compression: Compression, judge: Reference, progress: Callable[[float], None]
) -> dict[str, dict[str, Any]]:
  """Bytes and divergence of the tables in each block type of GGUF that suits their width.

  Numbers are rounded as llama.cpp does without an importance matrix. Without the package `gguf`
  there are none.
  """
  try:
    import gguf
  except ImportError:
    return {}
  fitting = [
    name
    for name, kind in gguf_types.TYPES.items()
    if not any(table.shape[1] % kind.block for table in compression.tables.values())
  ]
  found = {}
  for number, name in enumerate(fitting):
    size, tables = 0, {}
    for owner, table in compression.tables.items():
      tables[owner] = np.empty_like(table)
      for first in range(0, len(table), ROWS):
        packed = gguf_types.encode(name, table[first : first + ROWS])
        values = gguf.dequantize(packed, gguf.GGMLQuantizationType[name])
        tables[owner][first : first + ROWS] = values
        size += packed.nbytes
    own = lambda part, number=number: progress((number + part) / len(fitting))
    (compared,) = judge.compare([with_tables(compression.variables, tables)], own)
    found[name] = {"bytes": size} | summary(compared, judge.windows)
  return found


def check_not_compressed(model: pathlib.Path) -> None:
  """Raise ValueError for a folder that has compressed tables."""
  if (model / table_file.MANIFEST).is_file():
    raise ValueError(
      f"`model` must not be compressed already; got {model} with {table_file.MANIFEST}. Give the"
      " model that it was made of."
    )


def check_paths(job: Job) -> None:
  """Raise ValueError unless the model can be compressed into the folder."""
  check_not_compressed(job.model)
  if job.out.exists():
    raise ValueError(
      f"`--out` must be a new folder; got {job.out}, which exists. Give another one."
    )
  if (job.kl is None) == (job.size is None):
    raise ValueError("give either `--kl` or `--bytes`, and not both.")
  if job.kl is not None and not 0 < job.kl < math.inf:
    raise ValueError(f"`--kl` must be positive; got {job.kl:g}. 0.01 is usual.")
  if job.size is not None and job.size < 1:
    raise ValueError(f"`--bytes` must be positive; got {job.size}. Give such as 65MB.")


def _open_work(work, identity):
  """The folder of an interrupted call, empty if it was one of another model or other texts."""
  record = work / "identity.json"
  with_it = records.read(record, _Identity) if work.is_dir() else None
  if with_it is None or with_it["identity"] != identity:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    records.write(record, {"identity": identity})
  shutil.rmtree(work / "model", ignore_errors=True)


def _append(path, point, tokens, checksums):
  """Add a row to the points that are known; return its checksum."""
  row = records.sealed(
    dataclasses.asdict(point) | {"tokens": tokens}, checksums[-1] if checksums else ""
  )
  with open(path, "a", encoding="utf-8") as out:
    out.write(records.dumps(row))
  return row[records.CHECKSUM]


def _texts(job, tokenizer, model):
  """Windows to calibrate with, windows that are held out, and counts of tokens."""
  sides: list[dict[str, list[int]]] = [{}, {}]
  begin: list[int] = []
  for texts, side in ((job.texts, 0), (job.held_out, 1)):
    for name, text in texts.items():
      begin, tokens = encode(tokenizer, text)
      check_known(name, text, tokens, tokenizer)
      if not side and not job.held_out:
        cut = len(tokens) * 4 // 5
        sides[1][name] = tokens[cut:]
        tokens = tokens[:cut]
      sides[side][name] = tokens
  length = min(job.window, model.context)
  counts = counts_of(sides[0], begin, model.head.vocab, length)
  made = [windows(side, begin, length) for side in sides]
  for kind, side in zip(("calibration", "held-out"), made):
    if not len(side.tokens):
      raise ValueError(
        f"`--text` must hold at least a window of {length} tokens of {kind} text; got fewer. Give"
        " more text."
      )
  return made[0].take(len(made[0].tokens)), made[1], counts


def counts_of(
  encoded: Mapping[str, Sequence[int]], begin: Sequence[int], vocab: int, length: int
) -> np.ndarray:
  """Occurrences of each token, [V]; each text counts alike, however long it is.

  Args:
    encoded: tokens of each text, without those that begin it.
    begin: tokens that begin every text.
    vocab: number of tokens of the vocabulary.
    length: tokens of a window.
  """
  counts = np.zeros(vocab)
  for tokens in encoded.values():
    counts += np.bincount(np.asarray(tokens, np.int64), minlength=vocab) / max(1, len(tokens))
  counts *= sum(map(len, encoded.values())) / len(encoded)
  # What begins every text is an input of each window, and all later positions attend to it.
  counts[begin] += counts.sum() / length
  return counts


def check_known(name: str, text: str, tokens: Sequence[int], tokenizer: Any) -> None:
  """Raise ValueError for a text of which the tokenizer knows nothing."""
  pieces = (tokenizer.decode([token]).strip() for token in dict.fromkeys(tokens[:10_000]))
  if text.strip() and not any(piece and piece in text for piece in pieces):
    raise ValueError(
      f"`--text` must hold tokens of the model's tokenizer; got none in {name}. Give text in a"
      " language that the model knows."
    )


def _moments(job, work, model, variables, calibration, counts, bars):
  if job.moments is not None:
    return read_moments(job.moments)
  kept = work / "moments.safetensors"
  if kept.is_file():
    return Moments.load(kept)
  moments = collect(
    model,
    variables,
    calibration.tokens,
    counts,
    hidden_tokens=job.hidden_tokens,
    expected_tokens=job.hidden_tokens // 4,
    fisher_tokens=job.hidden_tokens // 16,
    cache=work / "sums.npz",
    progress=bars("calibration"),
  )
  partial = work / "moments.partial"
  moments.save(partial)
  partial.replace(kept)
  return moments


class ProgressBars:
  """Bars on standard error, of which each is made by calling this with its title."""

  def __enter__(self) -> Callable[[str], Callable[[float], None]]:
    from rich.console import Console

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    self._bars = Progress(
      *columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not sys.stderr.isatty()
    )
    self._bars.start()

    def bar(title: str) -> Callable[[float], None]:
      task = self._bars.add_task(title, total=1.0)
      return lambda part: self._bars.update(task, completed=part)

    return bar

  def __exit__(self, *error: object) -> None:
    self._bars.stop()


@dataclasses.dataclass(frozen=True)
class TensorJob:
  """A call of `compress_tensors`.

  Attributes:
    model: a folder of safetensors, of any architecture.
    out: folder to be written.
    size: bound of the bytes of all tables.
    moments: files of moments by the names of the tensors that are compressed, [V, D] each.
  """

  model: pathlib.Path
  out: pathlib.Path
  size: int
  moments: Mapping[str, pathlib.Path]


def compress_tensors(job: TensorJob, say: Callable[[str], None]) -> dict[str, Any]:
  """Compress tensors of a folder, whose model is not run; return what `vqjax.json` says.

  All other files and tensors are copied. The new folder is whole or not there.

  Raises:
    ValueError: the folder is compressed already or not of safetensors, lacks a tensor, or has one
      that is not finite; the size cannot be reached; moments are those of another table.
  """
  begin = time.monotonic()
  check_not_compressed(job.model)
  check_output(job.out, "--out")
  source = checkpoints.files.open_source(job.model)
  if source.kind != "safetensors":
    raise ValueError(
      f"`--table` needs a folder of safetensors; got {job.model}, which is {source.kind}. Leave it"
      " out, and give `--text`."
    )
  moments = {name: read_moments(path) for name, path in job.moments.items()}
  of_two_axes = [name for name, tensor in source.tensors.items() if len(tensor.shape) == 2]
  tables = {}
  for name in moments:
    if name not in of_two_axes:
      near = difflib.get_close_matches(name, of_two_axes, 3, 0.0)
      raise ValueError(
        f"`--table` must be a tensor [V, D] of {job.model}; got {name}. Similar names:"
        f" {', '.join(near)}."
      )
    tensor = source.tensors[name]
    checkpoints.files.verify(name, tensor, source.path)
    moments[name].check(*tensor.shape)
    # Mapped from the file: only blocks of rows are turned into float32.
    tables[name] = tensor.read(slice(None))
    for first in range(0, tensor.shape[0], ROWS):
      check_rows(np.asarray(tables[name][first : first + ROWS], np.float32), name)
  made = Tables(tables, moments)

  def measure(step: float) -> Point:
    point = Point(step, made.size(step), None)
    say(f"step {step:.4g}: {point.bytes / 1e6:.2f} MB")
    return point

  best, _ = search(measure, size=job.size)
  with ProgressBars() as bars:
    step, quantized, coded = made.coded(best.step, job.size, bars("coding"))
  sizes = {name: sum(array.nbytes for array in parts.values()) for name, parts in coded.items()}
  replaced = lambda name, _: {
    name + table_file.SEPARATOR + part: array for part, array in coded[name].items()
  }
  manifest = {
    "format": table_file.FORMAT,
    "version": table_file.VERSION,
    "tables": {
      name: {"tensor": name, "shape": list(quantized[name].shape), "bytes": size}
      for name, size in sizes.items()
    },
    "report": {
      "step": step,
      "bytes": sum(sizes.values()),
      "parts": {n: {part: a.nbytes for part, a in parts.items()} for n, parts in coded.items()},
      "seconds": round(time.monotonic() - begin, 1),
      "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    },
  }
  others = (tensor.nbytes for name, tensor in source.tensors.items() if name not in coded)
  check_free(job.out.absolute().parent, sum(sizes.values()) + sum(others) + 2**24)
  with whole(job.out, "--out") as partial:
    try:
      copy_folder(source, partial, lambda n, t: replaced(n, t) if n in coded else None)
    except Exception as error:  # safetensors has an error of its own for a failed write
      raise disk_error(error, partial) from error
    records.write(partial / table_file.MANIFEST, manifest)
  return manifest


def check_free(folder: pathlib.Path, needed: int) -> None:
  """Raise OSError unless the disk of a folder has so many bytes free."""
  free = shutil.disk_usage(folder).free
  if free < needed:
    raise OSError(
      f"`--out` must be on a disk with {needed:,} bytes free; got {free:,}. Free some space, and"
      " run the same command again."
    )


def hardest(
  found: Mapping[str, np.ndarray], of: Windows, tokenizer: Any, count: int = 12
) -> list[dict[str, Any]]:
  """The tokens before which the distributions differ most."""
  kl = found["kl"]
  order = np.argsort(-kl, axis=None)[:count]
  rows = []
  for window, at in zip(*np.unravel_index(order, kl.shape)):
    tokens = of.tokens[window]
    rows.append(
      {
        "domain": of.names[of.domain[window]],
        "before": tokenizer.decode([int(t) for t in tokens[max(0, at - 6) : at + 2]]),
        "token": tokenizer.decode([int(tokens[at + 2])]),
        "kl": float(kl[window, at]),
      }
    )
  return rows


def _write(job, work, loaded, coded, result):
  """Write the folder beside its place, and move it there."""
  model, variables, tokenizer = loaded
  body = jax.tree.leaves({k: v for k, v in variables["params"].items() if k not in coded})
  needed = result["bytes"] + sum(x.nbytes for x in body) + 2**24
  check_free(work, needed)
  folder = work / "model"
  try:
    tensors = checkpoints.save(folder, model, variables, tokenizer, compressed=coded)
  except Exception as error:  # safetensors has an error of its own for a failed write
    raise disk_error(error, folder) from error
  tables = {n: {"tensor": tensors[n]} | result["tables"][n] for n in coded}
  manifest = {"format": table_file.FORMAT, "version": table_file.VERSION, "tables": tables}
  manifest["report"] = {n: v for n, v in result.items() if n not in ("tables", "hardest")}
  records.write(folder / table_file.MANIFEST, manifest)
  sizes = {f.name: f.stat().st_size for f in sorted(folder.iterdir())}
  records.write_text(folder / "report.md", report(job, result, sizes))
  folder.rename(job.out)
  shutil.rmtree(work, ignore_errors=True)


def report(job: Job, result: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
  """The report page of a compressed folder, in Markdown."""
  line = lambda *cells: "| " + " | ".join(map(str, cells)) + " |"
  cell = lambda text: repr(text)[1:-1].replace("|", "\\|")
  held = result["held_out"]
  before = sum(4 * math.prod(table["shape"]) for table in result["tables"].values())
  lines = [
    f"# {job.out.name}",
    "",
    f"The vocabulary tables take {result['bytes']:,} bytes, {before / result['bytes']:.1f} times"
    f" less than in float32. On {held['tokens']:,} held-out tokens the mean divergence from the"
    f" original model is {held['kl']:.5f} nats a token. Compressing took {result['seconds']:.0f} s"
    f" and {result['peak_bytes'] / 1e9:.2f} GB of memory.",
    "",
    "## Size",
    "",
    line("file or part", "bytes"),
    line("---", "---:"),
    *(line(name, f"{size:,}") for name, size in sizes.items()),
  ]
  for name, parts in result["parts"].items():
    lines += [line(f"{name}: {part}", f"{n:,}") for part, n in sorted(parts.items())]
  lines += [
    "",
    "## Held-out text",
    "",
    "KL is that of the compressed model from the original one, in nats a token.",
    "",
    line("domain", "tokens", "KL", "99th percentile", "same best token", "nats before", "nats"),
    line("---", *["---:"] * 6),
  ]
  for name, row in [*held["domains"].items(), ("all", held)]:
    lines.append(
      line(
        name,
        f"{row['tokens']:,}",
        f"{row['kl']:.5f}",
        f"{row['kl_p99']:.4f}",
        f"{100 * row['top1']:.2f} %",
        f"{row['nats_before']:.4f}",
        f"{row['nats']:.4f}",
      )
    )
  types = result["block_types"]
  if types:
    columns = *held["domains"], "all"
    lines += ["", "## Block types of GGUF", ""]
    lines += ["KL of the same tables and text, numbers rounded as llama.cpp does.", ""]
    lines += [line("tables", "bytes", *columns), line("---", *["---:"] * (len(columns) + 1))]
    rows = {"this folder": held | {"bytes": result["bytes"]}} | types
    for name, row in sorted(rows.items(), key=lambda entry: -entry[1]["bytes"]):
      kls = [f"{own['kl']:.5f}" for own in (*row["domains"].values(), row)]
      lines.append(line(name, f"{row['bytes']:,}", *kls))
  lines += ["", "## Size against KL", "", "On calibration text, by the steps that were tried.", ""]
  lines += [line("step", "MB", "KL"), line("---:", "---:", "---:")]
  for point in result["points"]:
    kl = "-" if point["kl"] is None else f"{point['kl']:.5f}"
    lines.append(line(f"{point['step']:.4g}", f"{point['bytes'] / 1e6:.2f}", kl))
  lines += ["", "## Hardest tokens", "", line("domain", "before", "token", "KL")]
  lines += [line("---", "---", "---", "---:")]
  for row in result["hardest"]:
    lines.append(
      line(row["domain"], f"`{cell(row['before'])}`", f"`{cell(row['token'])}`", f"{row['kl']:.3f}")
    )
  return "\n".join(lines) + "\n"
