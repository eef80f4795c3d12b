"""Compression of the vocabulary tables of a pretrained model to a divergence or to a size.

One step gives the tables of a model, so that a bit costs as much divergence in each of them. It is
searched on calibration text; what is reported is measured on text that nothing was fitted to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fcntl
import functools
import hashlib
import math
import os
import pathlib
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vqjax.convert.variables import Variables
from vqjax.lm import checkpoints, records
from vqjax.lm.checkpoints.readers import check_not_compressed
from vqjax.lm.compression.calibration import SEED, collect
from vqjax.lm.compression.exports import ROWS, copy_folder
from vqjax.lm.compression.trimming import pieces
from vqjax.lm.models import Transformer
from vqjax.lm.texts import data_path, read_text
from vqjax.ops import distillation
from vqjax.tables import Moments, PackedTable, QuantizedTable, container, gguf_types, pack
from vqjax.tables.files import check_output, publish, whole
from vqjax.tables.grids import check_rows
from vqjax.tables.integers import MOST_LEVELS, SMOOTHING, Coordinates, Levels
from vqjax.tables.moments import SHRINKAGE
from vqjax.tables.packed import fixed_bytes

WINDOW = 256
"""Tokens of a window, with the one that begins every text."""

LEAST_WINDOW = 3
"""Least tokens of a window: the first prediction has no context, and the last no target."""

TOKENS_AT_ONCE = 512
"""Tokens that are scored at a time."""

CLOSE, CLOSE_SIZE = 0.92, 0.985
"""A divergence or size that is at least this part of the bound is close enough."""

MOST_STEPS = 12
"""Most steps that a search of a divergence tries."""

CLOSEST = 2 ** (1 / 256)
"""A search of a size ends when the steps on both sides of it differ by this factor."""

AIM = 0.997
"""Part of a bound of bytes that is aimed at, once it is known by how much the sample errs."""

MOST_CODINGS = 8
"""Most steps at which the tables are coded to meet a size."""

FINE_STEP = 2.0**-10
"""Step in which a sample of rows is kept, to count the bytes of larger ones."""

ROUNDED = 1.13
"""Coordinates take about as many bits where they are rounded to multiples of so many steps."""

SAMPLE = 2**15
"""Rows of a sample, or up to twice as many."""

LEAST_STEP, LARGEST_STEP = 2.0**-14, 2.0**10
"""Steps that are tried, unless the coordinates of a table are very large."""

LEAST_BITS, MOST_BITS = 0.25, 8.0
"""Bits of a number of packed tables, on average."""

RESAMPLES = 1000
"""Draws of windows from which the interval of a mean divergence is taken."""

OTHER_FILES = 2**24
"""Bytes of the disk that are left for the tokenizer, the config and the report."""


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

  A long text is encoded in pieces that end with a line or word, since some tokenizers take
  quadratic time.
  """
  begin = list(tokenizer.encode(""))
  tokens = []
  for piece in pieces([text], 2**16):
    tokens += list(tokenizer.encode(piece))[len(begin) :]
  return begin, tokens


TABLES = "embedding", "head"
"""Tables of a decoder; a tied one has the first alone."""


def tables_of(model: Transformer, variables: Variables) -> dict[str, np.ndarray]:
  """The tables of a decoder, [V, D] each; a tied model has one."""
  names = TABLES if model.head.embedding is None else TABLES[:1]
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
  """Means of a comparison, of all tokens and by domain.

  "kl_interval" has 95 % of the mean divergences of windows that are drawn with replacement. It is
  that of texts like these: windows of one document are not independent.
  """

  def means(rows):
    kl = found["kl"][rows].astype(np.float64)
    own = kl.mean(axis=1)
    drawn = np.random.default_rng(0).integers(0, len(own), (RESAMPLES, len(own)))
    return {
      "tokens": int(kl.size),
      "kl": float(kl.mean()),
      "kl_interval": [float(x) for x in np.quantile(own[drawn].mean(axis=1), (0.025, 0.975))],
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

  @functools.cached_property
  def _coordinates(self) -> dict[str, Coordinates]:
    """What is the same for every step."""
    return {name: Coordinates(table, self.moments[name]) for name, table in self.tables.items()}

  @functools.cached_property
  def limits(self) -> tuple[float, float]:
    """The least step, at which integers do not overflow, and one at which all of them are 0."""
    largest = max(own.largest for own in self._coordinates.values())
    return max(LEAST_STEP, 1.01 * largest / MOST_LEVELS), max(LARGEST_STEP, 2.1 * largest)

  def quantized(self, step: float) -> dict[str, QuantizedTable]:
    """The tables as integers."""
    return {name: own.quantized(step) for name, own in self._coordinates.items()}

  def coded(
    self, step: float, size: int | None, progress: Callable[[float], None] = lambda part: None
  ) -> tuple[float, dict[str, QuantizedTable], dict[str, dict[str, np.ndarray]]]:
    """The tables at a step, or at one near it that fills a size from below, and their parts.

    A search counts the bytes of a sample of rows, which may err by a few hundredths to either side.
    Here all rows are coded, again at another step where that missed the size.

    Raises:
      ValueError: the tables need more bytes at any step.
      RuntimeError: a table is not read as it was written.
    """
    best, made = None, step
    totals: dict[float, int] = {}
    for _ in range(MOST_CODINGS):
      quantized = {}  # given back before there are new ones
      made, quantized = step, self.quantized(step)
      coded = {name: container.encode(table, progress) for name, table in quantized.items()}
      total = sum(array.nbytes for parts in coded.values() for array in parts.values())
      totals[step] = total
      fits = size is None or total <= size
      if fits and (best is None or step < best[0]):
        best = step, coded
      if size is None or (fits and (total >= CLOSE_SIZE * size or step <= self.limits[0])):
        break
      if not fits and step >= self.limits[1]:
        raise ValueError(
          f"`--bytes` must be reachable: the least size of these tables is {total:,} bytes; got"
          f" {size:,}. Give at least {total:,}, or a model with a smaller vocabulary."
        )
      del coded  # unless they are the best
      step = self._next_step(totals, size)
      if step in totals:
        break
    if best is None:
      return self.coded(self.limits[1], size, progress)
    step, coded = best
    if made != step:
      quantized = {}
      quantized = self.quantized(step)
    for name, parts in coded.items():
      read, levels = container.CompressedTable(parts), quantized[name].levels
      for first in range(0, len(levels), 2**13):
        last = min(first + 2**13, len(levels))
        if not np.array_equal(read.levels(first, last), levels[first:last]):
          raise RuntimeError(f"the table {name} is not read as it was written: report it")
    return step, quantized, coded

  def _next_step(self, totals: Mapping[float, int], size: int) -> float:
    """A step to code at, from the bytes of steps that were coded, the last of them nearest to it.

    One that was coded if no other is left.
    """
    high = min((s for s, total in totals.items() if total <= size), default=self.limits[1])
    large = (s for s, total in totals.items() if total > size and s < high)
    low = max(large, default=self.limits[0])
    if low * CLOSEST >= high:
      return high
    if low in totals and high in totals:
      # Straight in logarithms of what depends on the step, as far as that is known.
      fixed = totals.get(self.limits[1], 0)
      x, aim, y = (
        math.log(max(total - fixed, 1)) for total in (totals[low], AIM * size, totals[high])
      )
      part = (x - aim) / (x - y)
      return low * (high / low) ** min(0.95, max(0.05, part))
    step, total = list(totals.items())[-1]
    # The sample errs by about as large a part at a step near this one.
    part = total / self.size(step)
    least = part * self.size(high)
    if high not in totals and size < (least if len(totals) == 1 else 2 * least):
      return high  # which says whether any step reaches the size
    if 0.5 < part < 2:
      point, _ = search(
        lambda step: Point(step, self.size(step), None),
        size=max(1, int(AIM * size / part)),
        step=step,
        limits=self.limits,
        close=AIM,
      )
      if low < point.step < high:
        return point.step
    return math.sqrt(low * high)

  @functools.cached_property
  def _samples(self) -> tuple[float, dict[str, tuple[QuantizedTable, int]]]:
    """A fine step; some rows of the tables rounded to it, and the number of all rows."""
    fine, samples = max(FINE_STEP, 2 * self.limits[0]), {}
    for name, own in self._coordinates.items():
      samples[name] = own.rounded(fine, max(1, own.shape[0] // SAMPLE)), own.shape[0]
    return fine, samples

  def size(self, step: float) -> int:
    """Bytes of all tables at a step, about, from a sample of their rows."""
    fine, samples = self._samples
    # No table has a smaller step, and integers would overflow.
    ratio = fine / (ROUNDED * max(step, self.limits[0]))
    total = 0
    for own, rows in samples.values():
      levels = Levels(own.shape)
      for first in range(0, len(levels), ROWS):
        block = slice(first, first + ROWS)
        levels[block] = np.rint(own.levels[block] * ratio).astype(np.int32)
      total += container.coded_bytes(dataclasses.replace(own, levels=levels), rows, quantizers=1)
    return total


class Compression(Tables):
  """The tables of one model at any step."""

  first_step = 1.0

  def __init__(
    self,
    model: Transformer,
    variables: Variables,
    moments: Moments,
    runtime: checkpoints.Runtime = checkpoints.RUNTIMES[container.UNPACKED],
  ):
    """Check that the moments are those of the model.

    Raises:
      ValueError: the moments have another width or vocabulary.
    """
    self.model, self.variables, self.runtime = model, variables, runtime
    tables = tables_of(model, variables)
    super().__init__(tables, moments.of_tables(list(tables)))

  def variables_of(self, quantized: Mapping[str, QuantizedTable | PackedTable]) -> Variables:
    """The variables of the model with the rows that these tables have in memory."""
    made = {}
    for name, own in quantized.items():
      rows_VD = own.table()
      for first in range(0, len(rows_VD), ROWS):
        rows_VD[first : first + ROWS] = self.runtime.rounded(rows_VD[first : first + ROWS])
      made[name] = jnp.asarray(rows_VD, self.model.dtype)
      del rows_VD
    return with_tables(self.variables, made)

  def point(self, step: float, reference: Reference | None) -> Point:
    """Size and divergence at a step."""
    size = self.size(step)
    if reference is None:
      return Point(step, size, None)
    # The integers are given back before the scores are made.
    student = self.variables_of(self.quantized(step))
    (found,) = reference.compare([student])
    return Point(step, size, float(found["kl"].mean(dtype=np.float64)))


class PackedCompression(Compression):
  """The tables of one model as packed bits, which are their form in the file and in memory.

  All tables have equally many bits a number, and a step is 2^-bits: the divergence is about
  proportional to its square, as it is for integers.
  """

  first_step = 2.0**-4
  limits = 2.0**-MOST_BITS, 2.0**-LEAST_BITS

  def _units(self, step: float) -> dict[str, int]:
    """Elements of the stream of each table."""
    bits = -math.log2(step)
    return {name: 1 + int(table.size * bits / 16) for name, table in self.tables.items()}

  @property
  def _others(self) -> int:
    """Bytes that do not depend on the step."""
    return sum(fixed_bytes(*table.shape) for table in self.tables.values())

  def size(self, step: float) -> int:
    """Bytes of all tables at a step, in the file and in memory."""
    return self._others + 2 * sum(self._units(step).values())

  def quantized(
    self, step: float, progress: Callable[[float], None] = lambda part: None
  ) -> dict[str, PackedTable]:
    """The packed tables."""
    made = {}
    for number, (name, units) in enumerate(self._units(step).items()):
      own = lambda part, number=number: progress((number + part) / len(self.tables))
      table, moments = self.tables[name], self.moments[name]
      made[name] = pack(table, moments, units, is_trellis=False, progress=own)
    return made

  def coded(
    self, step: float, size: int | None, progress: Callable[[float], None] = lambda part: None
  ) -> tuple[float, dict[str, PackedTable], dict[str, dict[str, np.ndarray]]]:
    """The tables at a step, or at that which fills a size, and their parts.

    Raises:
      ValueError: the tables need more bytes.
    """
    if size is not None:
      numbers = sum(table.size for table in self.tables.values())
      # An element more for each table may be needed than its bits say.
      bits = 8 * (size - self._others - 4 * len(self.tables)) / numbers
      if bits < LEAST_BITS:
        least = self.size(self.limits[1]) + 4 * len(self.tables)
        raise ValueError(
          f"`--bytes` must be reachable: packed tables need {least:,} bytes; got {size:,}. Give at"
          f" least {least:,}, or leave out `--runtime packed`."
        )
      step = 2.0 ** -min(bits, MOST_BITS)
    packed = self.quantized(step, progress)
    return step, packed, {name: table.parts() for name, table in packed.items()}


COMPRESSIONS = {container.PACKED: PackedCompression}
"""What compresses for a form in memory; `Compression` does for the others."""


def search(
  measure: Callable[[float], Point],
  *,
  kl: float | None = None,
  size: int | None = None,
  points: Sequence[Point] = (),
  step: float = 1.0,
  limits: tuple[float, float] = (LEAST_STEP, LARGEST_STEP),
  close: float = CLOSE_SIZE,
) -> tuple[Point, list[Point]]:
  """The largest step whose divergence is at most `kl`, or the smallest of at most `size` bytes.

  Args:
    measure: gives the point of a step.
    kl: bound of the divergence in nats a token; or
    size: bound of the bytes.
    points: points that are known.
    step: step to begin with.
    limits: least and largest step.
    close: part of `size` that is close enough.

  Returns:
    The point, and all that are known. Where the measured bytes are above `size` at all steps, it is
    that of the largest step: `Tables.coded` finds whether they really are.

  Raises:
    ValueError: no step reaches `kl`; the message says the least that one reaches.
  """
  step = min(max(step, limits[0]), limits[1])
  is_known = lambda point: kl is None or point.kl is not None
  known = {point.step: point for point in points if is_known(point)}
  if kl is not None:
    best = _search_divergence(measure, kl, known, step, limits)
  else:
    best = _search_size(measure, size, known, step, limits, close)
  return best, sorted(known.values(), key=lambda point: point.step)


def _search_size(measure, size, known, step, limits, close):
  """The point of the smallest step of at most so many bytes; those that it measures are added."""

  def at(step):
    if step not in known:
      known[step] = measure(step)
    return known[step]

  # What does not depend on the step: the basis, the histograms, the states of the coder.
  fixed = at(limits[1]).bytes
  excess = lambda point: max(point.bytes - fixed, 1)
  for number in range(10 * MOST_STEPS):
    fitting = (p for p in known.values() if p.bytes <= size)
    # Of steps at which nothing but zeros is left, the smallest.
    best = max(fitting, key=lambda p: (p.bytes, -p.step), default=None)
    if best is None:
      return at(limits[1])
    if best.bytes >= close * size or best.step <= limits[0]:
      break
    smaller = [p for p in known.values() if p.step < best.step]
    large = max(smaller, key=lambda p: p.step, default=None)
    if large is None:
      step = max(limits[0], min(step, best.step / 8))
      at(step)
      continue
    if best.step <= large.step * CLOSEST:
      break
    part = 0.5
    aim = (close + 1) / 2 * size - fixed
    if excess(best) < 0.05 * aim:
      # Next to nothing but zeros: the bytes say nothing of the steps between.
      part = min(part, math.log(8) / math.log(best.step / large.step))
    elif number % 3:
      # Straight in logarithms.
      x, y = math.log(excess(large)), math.log(excess(best))
      part = min(0.9, max(0.1, (x - math.log(aim)) / (x - y))) if x > y else part
    at(large.step * (best.step / large.step) ** part)
  return best


def _search_divergence(measure, bound, known, step, limits):
  """The point of the largest step of at most so much divergence; those measured are added.

  The divergence is about proportional to the square of the step.
  """
  for _ in range(MOST_STEPS):
    ordered = sorted(known.values(), key=lambda point: point.step)
    good = [point for point in ordered if point.kl <= bound]
    if good and max(point.kl for point in good) >= CLOSE * bound:
      break
    step = _next_step(ordered, bound) or step
    if step in known or not limits[0] <= step <= limits[1]:
      break
    known[step] = measure(step)
    # A divergence that no longer falls is that of rounding, not of the step.
    is_least = len(ordered) > 2 and not good and 2 * step <= ordered[0].step
    if is_least and known[step].kl > 0.8 * ordered[0].kl:
      break
  good = [point for point in known.values() if point.kl <= bound]
  if not good:
    least = min(point.kl for point in known.values())
    raise ValueError(
      f"`--kl` must be reachable: the least divergence of these tables is {least:.3g} nats a"
      f" token; got {bound:g}. Give at least {_rounded_up(least):g}, or keep the model as it is."
    )
  return max(good, key=lambda point: point.kl)


def _next_step(ordered, bound):
  """The step to try after those that are known, or None before there is one."""
  if not ordered:
    return None
  small = [point for point in ordered if point.kl <= bound]
  large = [point for point in ordered if point.kl > bound]
  if small and large:
    a, b = small[-1], large[0]
    # Straight in logarithms, a little below the bound.
    x, y = math.log(max(a.kl, 1e-12)), math.log(max(b.kl, 1e-12))
    part = (math.log(0.97 * bound) - x) / (y - x) if y > x else 0.5
    part = min(0.9, max(0.1, part))
    return math.exp(math.log(a.step) + part * (math.log(b.step) - math.log(a.step)))
  nearest = small[-1] if small else large[0]
  factor = math.sqrt(0.97 * bound / max(nearest.kl, 1e-12))
  return nearest.step * min(8.0, max(1 / 8, factor))


def _rounded_up(value):
  digits = 10.0 ** (math.floor(math.log10(max(value, 1e-12))) - 1)
  return math.ceil(1.05 * value / digits) * digits


def read_moments(path: str | os.PathLike[str]) -> Moments:
  """Moments of a file; FileNotFoundError names it."""
  if not os.path.isfile(path):
    raise FileNotFoundError(
      f"`--moments` must be a file that Moments.save wrote; got {path}, which is not a file. Write"
      " it, or leave the option out."
    )
  return Moments.load(path)


WORK_FORMAT = 3
"""Changes when work that was kept is no longer what would be computed."""


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
    moments: file of moments, whose counts are weighed like those of the texts; None: they are
      collected.
    hidden_tokens: tokens of the second moment of hidden states.
    search_tokens: tokens of calibration text on which a step is judged.
    held_out_tokens: tokens on which the result is judged.
    window: tokens of a window.
    dtype: number format in which the model is loaded and the rest of it is written.
    runtime: name of the form of the tables in memory, one of `checkpoints.RUNTIMES`.
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
  runtime: str = container.UNPACKED

  def identity(self) -> str:
    """A hash of everything that the kept work depends on; the bound is not part of it."""
    facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    for name in ("kl", "size", "out", "search_tokens", "held_out_tokens"):
      del facts[name]
    # What another version computes may differ.
    facts["format"] = WORK_FORMAT
    if self.moments is not None:
      facts["moments"] = records.file_checksum(self.moments)
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
    ValueError: the bound cannot be reached, a text has no known token, a number of the model is
      not finite, or the moments are those of another model.
    OSError: something is at `out`, or the disk has no room.
  """
  check_paths(job)
  begin = time.monotonic()
  model, variables, tokenizer = loaded
  runtime = checkpoints.RUNTIMES[job.runtime]
  runtime.check(model)
  # Moments of such a model are not finite either, which says less.
  for name, table in tables_of(model, variables).items():
    check_rows(table, name)
  check_finite(variables)
  work = work_of(job.out)
  calibration, held_out, counts = _texts(job, tokenizer, model)
  with open_work(work, job.identity()), ProgressBars() as bars:
    moments = _moments(job, work, model, variables, calibration, counts, bars)
    kind = COMPRESSIONS.get(job.runtime, Compression)
    compression = kind(model, variables, moments, runtime)
    tokens = job.search_tokens
    reference = None
    own = calibration.tokens.shape[1] - 2  # tokens of a window that are judged
    if job.kl is not None:
      some = calibration.take(-(-tokens // own))
      reference = Reference(model, variables, some)
    rows = work / "points.jsonl"
    read = records.read_rows(rows, _PointRow)
    known = [Point(r["step"], r["bytes"], r["kl"]) for r in read.rows if r["tokens"] == tokens]

    def measure(step: float) -> Point:
      point = compression.point(step, reference)
      read.checksums.append(_append(rows, point, tokens, read.checksums))
      value = "" if point.kl is None else f", KL {point.kl:.5f}"
      say(f"step {step:.4g}: {point.bytes:,} bytes{value}")
      return point

    best, points = search(
      measure,
      kl=job.kl,
      size=job.size,
      points=known,
      step=compression.first_step,
      limits=compression.limits,
    )
    step, quantized, coded = compression.coded(best.step, job.size, bars("coding"))
    seconds = time.monotonic() - begin
    sizes = {name: sum(a.nbytes for a in parts.values()) for name, parts in coded.items()}
    student = compression.variables_of(quantized)
    del quantized
    some = held_out.take(-(-job.held_out_tokens // own))
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
      "settings": settings_of(job, moments),
      "seconds": round(seconds, 1),
      "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    _write(job, work, loaded, coded, result)
  return result


def check_finite(variables: Variables) -> None:
  """Raise ValueError unless all numbers of a model are finite."""
  for path, value in jax.tree_util.tree_leaves_with_path(variables["params"]):
    if not np.isfinite(np.asarray(value)).all():
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      raise ValueError(
        f"`{name}` must be finite; got NaN or an infinity. The model is damaged: download it again."
      )


def settings_of(job: Job, moments: Moments) -> dict[str, Any]:
  """What a result depends on beside the model, the texts and the bound."""
  return {
    "runtime": job.runtime,
    "calibration_tokens": moments.tokens,
    "search_tokens": job.search_tokens,
    "window": job.window,
    "dtype": job.dtype,
    "shrinkage": SHRINKAGE,
    "smoothing": SMOOTHING,
    "seed": None if job.moments else SEED,
  }


def in_block_types(
  compression: Compression, judge: Reference, progress: Callable[[float], None]
) -> dict[str, dict[str, Any]]:
  """Bytes and divergence of the tables in each block type of GGUF that suits their width.

  Numbers are rounded as llama.cpp does without an importance matrix, and under "TYPE, fitted"
  chosen in the metric of the table's use where levels are even. Without the package `gguf` there
  are none.
  """
  try:
    import gguf
  except ImportError:
    return {}
  metrics = {name: moments.metric() for name, moments in compression.moments.items()}
  ways = []
  for name, kind in gguf_types.TYPES.items():
    if not any(table.shape[1] % kind.block for table in compression.tables.values()):
      ways.append((name, name, {}))
      # With 8 bits there is next to nothing to choose; levels at unequal distances take minutes.
      if len(kind.grid.levels) < 2**7 and kind.grid.is_uniform:
        ways.append((f"{name}, fitted", name, metrics))
  found = {}
  for number, (title, name, metric) in enumerate(ways):
    size, tables = 0, {}
    for owner, table in compression.tables.items():
      tables[owner] = np.empty_like(table)
      for first in range(0, len(table), ROWS):
        packed = gguf_types.encode(name, table[first : first + ROWS], metric.get(owner))
        values = gguf.dequantize(packed, gguf.GGMLQuantizationType[name])
        tables[owner][first : first + ROWS] = values
        size += packed.nbytes
    own = lambda part, number=number: progress((number + part) / len(ways))
    (compared,) = judge.compare([with_tables(compression.variables, tables)], own)
    found[title] = {"bytes": size} | summary(compared, judge.windows)
  return found


def check_paths(job: Job) -> None:
  """Raise an error unless the model can be compressed into the folder in this way.

  Raises:
    ValueError: the model is compressed already, or a bound, window or number is impossible.
    OSError: something is where the folder shall be, a file does not exist, or the disk has no room.
  """
  if job.model.is_dir() or job.model.suffix == ".safetensors":
    check_not_compressed(checkpoints.readers.open_source(job.model))
  check_output(job.out, "--out")
  if (job.kl is None) == (job.size is None):
    raise ValueError("give either `--kl` or `--bytes`, and not both.")
  if job.kl is not None and not 0 < job.kl < math.inf:
    raise ValueError(f"`--kl` must be positive; got {job.kl:g}. 0.01 is usual.")
  if job.size is not None and job.size < 1:
    raise ValueError(f"`--bytes` must be positive; got {job.size}. Give such as 65MB.")
  check_window(job.window)
  check_tokens(job.hidden_tokens)
  if job.moments is not None:
    read_moments(job.moments)
  # What the tables take is exactly known when they are coded, minutes later.
  parts = checkpoints.inspect(job.model).parts
  copied = sum(part.params for part in parts if part.name not in TABLES)
  least = least_bytes(job.size, sum(part.params for part in parts if part.name in TABLES))
  # Half a model that an interrupted call wrote is removed first.
  left = sum(file.stat().st_size for file in (work_of(job.out) / "model").glob("*"))
  weights = copied * jnp.dtype(job.dtype).itemsize + least
  check_free(job.out.absolute().parent, weights - left)


def work_of(out: pathlib.Path) -> pathlib.Path:
  """The folder of an interrupted call."""
  return out.with_name(f".{out.name}.partial")


def check_window(length: int) -> None:
  """Raise ValueError unless windows of so many tokens have one that is predicted from another."""
  if length < LEAST_WINDOW:
    raise ValueError(
      f"`--window` must be at least {LEAST_WINDOW} tokens, and not above the model's context; got"
      f" {length}. {WINDOW} is usual."
    )


def check_tokens(count: int) -> None:
  """Raise ValueError unless there are tokens to calibrate with."""
  if count < 1:
    raise ValueError(f"`--tokens` must be at least 1; got {count}. 16384 is usual.")


@contextlib.contextmanager
def open_work(work: pathlib.Path, identity: str) -> Iterator[None]:
  """The folder of an interrupted call, empty if it was one of another model or other texts.

  Raises:
    ValueError: another process uses it, or it is not one of such a call.
  """
  record = work / "identity.json"
  is_ours = work.is_dir() and ((work / "lock").is_file() or not any(work.iterdir()))
  if work.exists() and not is_ours:
    raise ValueError(
      f"{work} must be what an interrupted call left; got something else. Move it, or give another"
      " `--out`."
    )
  work.mkdir(exist_ok=True)
  with open(work / "lock", "a") as lock:
    # The kernel releases it when the process ends, even when it is killed.
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f"another process is working in {work}. Wait for it, or give another `--out`."
      ) from None
    with_it = records.read(record, _Identity)
    for path in work.iterdir():
      is_kept = with_it is not None and with_it["identity"] == identity and path.name != "model"
      if path.name == "lock" or is_kept:
        continue
      shutil.rmtree(path) if path.is_dir() else path.unlink()
    records.write(record, {"identity": identity})
    yield


def _append(path, point, tokens, checksums):
  """Add a row to the points that are known; return its checksum."""
  row = records.sealed(
    dataclasses.asdict(point) | {"tokens": tokens}, checksums[-1] if checksums else ""
  )
  with open(path, "a", encoding="utf-8") as out:
    out.write(records.dumps(row))
  return row[records.CHECKSUM]


def read_texts(paths: Sequence[pathlib.Path], option: str = "--text") -> dict[str, str]:
  """Texts by the names of their files; by their paths where two files have one name.

  Raises:
    FileNotFoundError: a file does not exist.
    ValueError: a file is given twice, is a folder, or is not text.
  """
  found = [data_path(str(path), kind=option) for path in paths]
  for path in found:
    if path.is_dir():
      raise ValueError(f"`{option}` must name files; {path} is a folder. Give the files in it.")
  check_different([path.resolve() for path in found], option)
  names = [path.name for path in paths]
  return {
    str(path) if names.count(path.name) > 1 else path.name: read_text(file)
    for path, file in zip(paths, found)
  }


def check_different(values: Sequence[Any], option: str) -> None:
  """Raise ValueError for files or texts of which two are the same."""
  if len(set(values)) < len(values):
    twice = next(value for value in values if values.count(value) > 1)
    raise ValueError(f"`{option}` must name different files; got {twice} twice. Give it once.")


def encode_texts(
  texts: Mapping[str, str], tokenizer: Any, length: int, least: Callable[[int], int], option: str
) -> tuple[list[int], dict[str, list[int]]]:
  """The tokens that begin every text, and those of each text, of which each has a window.

  Args:
    texts: texts by their names.
    tokenizer: the tokenizer of the model.
    length: tokens of a window.
    least: tokens of a window without those that begin it -> tokens that a text must have.
    option: how the texts were given.

  Raises:
    ValueError: a text has too few tokens, or none that the tokenizer knows.
  """
  begin, encoded = list(tokenizer.encode("")), {}
  check_window(length)
  if length <= len(begin):
    raise ValueError(
      f"`--window` must be above the {len(begin)} tokens that begin every text; got {length}. Give"
      " more."
    )
  needed = least(length - len(begin))
  for name, text in texts.items():
    _, tokens = encode(tokenizer, text)
    check_known(name, text, tokens, tokenizer, option)
    if len(tokens) < needed:
      raise ValueError(
        f"each text of `{option}` must have {needed:,} tokens for a window of {length}; got"
        f" {len(tokens):,} in {name}. Give more text, or leave it out."
      )
    encoded[name] = tokens
  return begin, encoded


def _texts(job, tokenizer, model):
  """Windows to calibrate with, windows that are held out, and counts of tokens."""
  length = min(job.window, model.context)
  check_window(length)
  # The last fifth is a window at least.
  least = lambda own: own if job.held_out else 5 * own
  begin, ours = encode_texts(job.texts, tokenizer, length, least, "--text")
  if job.held_out:
    _, others = encode_texts(job.held_out, tokenizer, length, lambda own: own, "--held-out")
  else:
    cut = lambda tokens: len(tokens) * 4 // 5
    others = {name: tokens[cut(tokens) :] for name, tokens in ours.items()}
    ours = {name: tokens[: cut(tokens)] for name, tokens in ours.items()}
  counts = counts_of(ours, begin, model.head.vocab, length)
  made = [windows(side, begin, length) for side in (ours, others)]
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


def check_known(name: str, text: str, tokens: Sequence[int], tokenizer: Any, option: str) -> None:
  """Raise ValueError for a text, given by `option`, of which the tokenizer knows nothing."""
  pieces = (tokenizer.decode([token]).strip() for token in dict.fromkeys(tokens[:10_000]))
  if text.strip() and not any(piece and piece in text for piece in pieces):
    raise ValueError(
      f"`{option}` must hold tokens of the model's tokenizer; got none in {name}. Give text in a"
      " language that the model knows."
    )


def _moments(job, work, model, variables, calibration, counts, bars):
  if job.moments is not None:
    return with_counts(read_moments(job.moments), counts)
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


def with_counts(moments: Moments, counts: np.ndarray) -> Moments:
  """Moments whose counts are half those of a text, half their own.

  Raises:
    ValueError: the moments have another vocabulary.
  """
  moments.check(len(counts), len(moments.hidden))
  own = moments.counts * (counts.sum() / moments.counts.sum())
  return dataclasses.replace(moments, counts=(counts + own) / 2)


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
  check_output(job.out, "--out")
  source = checkpoints.readers.open_source(job.model)
  check_not_compressed(source)
  if source.kind != "safetensors":
    raise ValueError(
      f"`--table` needs a folder of safetensors; got {job.model}, which is {source.kind}. Leave it"
      " out, and give `--text`."
    )
  moments = {name: read_moments(path) for name, path in job.moments.items()}
  of_two_axes = [name for name, tensor in source.tensors.items() if len(tensor.shape) == 2]
  for name in moments:
    if name not in of_two_axes:
      near = difflib.get_close_matches(name, of_two_axes, 3, 0.0)
      raise ValueError(
        f"`--table` must be a tensor [V, D] of {job.model}; got {name}. Similar names:"
        f" {', '.join(near)}."
      )
    moments[name].check(*source.tensors[name].shape)
  others = sum(tensor.nbytes for name, tensor in source.tensors.items() if name not in moments)
  numbers = sum(math.prod(source.tensors[name].shape) for name in moments)
  folder = job.out.absolute().parent
  check_free(folder, others + least_bytes(job.size, numbers))
  tables = {}
  for name in moments:
    tensor = source.tensors[name]
    checkpoints.readers.verify(name, tensor, source.path)
    # Mapped from the file: only blocks of rows are turned into float32.
    tables[name] = tensor.read(slice(None))
    for first in range(0, tensor.shape[0], ROWS):
      rows = tables[name][first : first + ROWS]
      check_rows(np.asarray(rows, np.float32), name)
      checkpoints.readers.release(rows)
  made = Tables(tables, moments)

  def measure(step: float) -> Point:
    point = Point(step, made.size(step), None)
    say(f"step {step:.4g}: {point.bytes:,} bytes")
    return point

  best, _ = search(measure, size=job.size, limits=made.limits)
  with ProgressBars() as bars:
    step, coded = made.coded(best.step, job.size, bars("coding"))[::2]
  sizes = {name: sum(array.nbytes for array in parts.values()) for name, parts in coded.items()}
  replaced = lambda name, _: {
    name + container.SEPARATOR + part: array for part, array in coded[name].items()
  }
  manifest = {
    "format": container.FORMAT,
    "version": container.VERSION,
    "tables": {
      name: {"tensor": name, "shape": list(tables[name].shape), "bytes": size}
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
  check_free(folder, others + sum(sizes.values()))
  with whole(job.out, "--out") as partial:
    try:
      copy_folder(source, partial, lambda n, t: replaced(n, t) if n in coded else None)
    except Exception as error:  # safetensors has an error of its own for a failed write
      raise records.disk_error(error, partial) from error
    records.write(partial / container.MANIFEST, manifest)
  return manifest


def least_bytes(size: int | None, numbers: int) -> int:
  """Bytes that tables of so many numbers will take, before they are coded; 0 without a bound.

  They fill most of the bound, but one of more than 8 bits a number may not be reached.
  """
  return 0 if size is None else int(min(CLOSE_SIZE * size, numbers))


def check_free(folder: pathlib.Path, weights: int) -> None:
  """Raise OSError unless the disk of a folder has room for so many bytes and `OTHER_FILES`."""
  needed, free = weights + OTHER_FILES, shutil.disk_usage(folder).free
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
  check_free(work, result["bytes"] + sum(x.nbytes for x in body))
  folder = work / "model"
  try:
    tensors = checkpoints.save(folder, model, variables, tokenizer, compressed=coded)
  except Exception as error:  # safetensors has an error of its own for a failed write
    raise records.disk_error(error, folder) from error
  tables = {n: {"tensor": tensors[n]} | result["tables"][n] for n in coded}
  manifest = {"format": container.FORMAT, "version": container.VERSION, "tables": tables}
  manifest["runtime"] = job.runtime
  manifest["report"] = {n: v for n, v in result.items() if n not in ("tables", "hardest")}
  records.write(folder / container.MANIFEST, manifest)
  sizes = {f.name: f.stat().st_size for f in sorted(folder.iterdir())}
  records.write_text(folder / "report.md", report(job, result, sizes))
  publish(folder, job.out)
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
    f" and {result['peak_bytes'] / 1e9:.2f} GB of memory. When the folder is"
    f" loaded, the tables are {checkpoints.RUNTIMES[job.runtime].described}.",
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
    "KL is that of the compressed model from the original one, in nats a token. 95 % of the means"
    " of windows drawn with replacement are between the two numbers.",
    "",
    line(
      "domain",
      "tokens",
      "KL",
      "95 % of means",
      "99th percentile",
      "same best token",
      "nats",
      "nats before",
    ),
    line("---", *["---:"] * 7),
  ]
  for name, row in [*held["domains"].items(), ("all", held)]:
    lines.append(
      line(
        name,
        f"{row['tokens']:,}",
        f"{row['kl']:.5f}",
        " to ".join(f"{x:.5f}" for x in row["kl_interval"]),
        f"{row['kl_p99']:.4f}",
        f"{100 * row['top1']:.2f} %",
        f"{row['nats']:.4f}",
        f"{row['nats_before']:.4f}",
      )
    )
  types = result["block_types"]
  if types:
    columns = *held["domains"], "all"
    lines += ["", "## Block types of GGUF", ""]
    lines += [
      "KL of the same tables and text, with numbers rounded as llama.cpp does without an importance"
      " matrix, and, where that is quick, with numbers fitted as `vqjax export` does.",
      "",
    ]
    lines += [line("tables", "bytes", *columns), line("---", *["---:"] * (len(columns) + 1))]
    rows = {"this folder": held | {"bytes": result["bytes"]}} | types
    for name, row in sorted(rows.items(), key=lambda entry: -entry[1]["bytes"]):
      kls = [f"{own['kl']:.5f}" for own in (*row["domains"].values(), row)]
      lines.append(line(name, f"{row['bytes']:,}", *kls))
  lines += ["", "## Size against KL", "", "On calibration text, by the steps that were tried.", ""]
  lines += [line("step", "bytes", "KL"), line("---:", "---:", "---:")]
  for point in result["points"]:
    kl = "-" if point["kl"] is None else f"{point['kl']:.5f}"
    lines.append(line(f"{point['step']:.4g}", f"{point['bytes']:,}", kl))
  lines += ["", "## Hardest tokens", "", line("domain", "before", "token", "KL")]
  lines += [line("---", "---", "---", "---:")]
  for row in result["hardest"]:
    lines.append(
      line(row["domain"], f"`{cell(row['before'])}`", f"`{cell(row['token'])}`", f"{row['kl']:.3f}")
    )
  return "\n".join(lines) + "\n"
