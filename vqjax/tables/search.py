"""The step at which tables have a size or a divergence.

One step gives all tables of a model, so that a bit costs as much divergence in each of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vqjax.convert.packed_table import PackedTable
from vqjax.tables import container, entropy_coder
from vqjax.tables.coded import MOST_LEVELS, CodedTable, Coordinates
from vqjax.tables.moments import Moments
from vqjax.tables.packing import fixed_bytes, pack

__all__ = ["PackedTables", "Point", "Tables", "search"]

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

LEAST_STEP, LARGEST_STEP = 2.0**-14, 2.0**10
"""Steps that are tried, unless the coordinates of a table are very large or very small."""

LEAST_BITS, MOST_BITS = 0.25, 8.0
"""Bits of a number of packed tables, on average."""


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


def step_limits(largest: Sequence[float]) -> tuple[float, float]:
  """The least step, at which integers do not overflow, and one at which all of them are 0.

  Args:
    largest: largest magnitude of a coordinate of each table, where the step is 1.
  """
  # A table of small numbers needs small steps.
  least = LEAST_STEP * min([1.0, *filter(None, largest)])
  return (
    max(least, 1.01 * max(largest) / MOST_LEVELS),
    max(LARGEST_STEP, 2.1 * max(largest)),
  )


class Tables:
  """Tables as entropy-coded integers, at any step.

  Attributes:
    tables: the tables by their names.
    moments: what errors of each cost.
  """

  first_step = 1.0

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
    return step_limits([own.largest for own in self._coordinates.values()])

  def tables_at(self, step: float) -> dict[str, CodedTable]:
    """The tables as integers."""
    return {name: own.coded(step) for name, own in self._coordinates.items()}

  def coded(
    self, step: float, size: int | None, progress: Callable[[float], None] = lambda part: None
  ) -> tuple[float, dict[str, CodedTable], dict[str, dict[str, np.ndarray]]]:
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
      tables = {}  # given back before there are new ones
      made, tables = step, self.tables_at(step)
      coded = {name: entropy_coder.encode_table(table, progress) for name, table in tables.items()}
      total = sum(array.nbytes for parts in coded.values() for array in parts.values())
      totals[step] = total
      fits = size is None or total <= size
      if fits and (best is None or step < best[0]):
        best = step, coded
      if size is None or (fits and (total >= CLOSE_SIZE * size or step <= self.limits[0])):
        break
      if not fits and step >= self.limits[1]:
        raise ValueError(
          f"`bytes` must be reachable: the least size of these tables is {total:,} bytes; got"
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
      tables = {}
      tables = self.tables_at(step)
    for name, parts in coded.items():
      read, levels = container.CompressedTable(parts), tables[name].levels
      for first in range(0, len(levels), 2**13):
        last = min(first + 2**13, len(levels))
        if not np.array_equal(read.levels(first, last), levels[first:last]):
          raise RuntimeError(f"the table {name} is not read as it was written: report it")
    return step, tables, coded

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

  def size(self, step: float) -> int:
    """Bytes of all tables at a step, about, from a sample of their rows."""
    # No table has a smaller step, and integers would overflow.
    step = max(step, self.limits[0])
    return sum(own.size(step) for own in self._coordinates.values())


class PackedTables(Tables):
  """Tables as packed bits, which are their form in the file and in memory.

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

  def tables_at(
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
          f"`bytes` must be reachable: packed tables need {least:,} bytes; got {size:,}. Give at"
          f" least {least:,}, or leave out `--runtime packed`."
        )
      step = 2.0 ** -min(bits, MOST_BITS)
    packed = self.tables_at(step, progress)
    return step, packed, {name: table.parts() for name, table in packed.items()}


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
  for number in range(2 * MOST_STEPS):
    ordered = sorted(known.values(), key=lambda point: point.step)
    good = [point for point in ordered if point.kl <= bound]
    if good and (number >= MOST_STEPS or max(point.kl for point in good) >= CLOSE * bound):
      break
    wanted = _next_step(ordered, bound) or step
    wanted = min(max(wanted, limits[0]), limits[1])
    if wanted in known:
      break
    known[wanted] = measure(wanted)
  good = [point for point in known.values() if point.kl <= bound]
  if not good:
    least = min(point.kl for point in known.values())
    raise ValueError(
      f"`kl` must be reachable: the least divergence of these tables is {least:.3g} nats a"
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
  if small:
    nearest = small[-1]
    return nearest.step * min(8.0, math.sqrt(0.97 * bound / max(nearest.kl, 1e-12)))
  # Nothing is good enough: the slope is that of the last two, and the step falls by a fifth at
  # least, so that a slow approach reaches the bound too.
  slope, (nearest, *others) = 2.0, large
  if others and others[0].step > nearest.step:
    fall = math.log(max(others[0].kl / nearest.kl, 1)) / math.log(others[0].step / nearest.step)
    slope = min(4.0, max(0.1, fall))
  factor = (0.95 * bound / nearest.kl) ** (1 / slope)
  return nearest.step * min(0.8, max(1 / 8, factor))


def _rounded_up(value):
  digits = 10.0 ** (math.floor(math.log10(max(value, 1e-12))) - 1)
  return math.ceil(1.05 * value / digits) * digits
