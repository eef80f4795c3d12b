"""Numbers as text with three digits and the right prefix."""

import math
from collections.abc import Callable

__all__ = ["MISSING", "count", "fixed", "milliseconds", "ratio", "size"]

MISSING = "–"


def count(value: float) -> str:
  """Format 1_570_000 as "1.57 M"."""
  return _scaled(value, 1000, ["", "k", "M", "G", "T", "P"])


def size(value: float) -> str:
  """Format 6_400_000 bytes as "6.10 MiB"."""
  return _scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"])


def milliseconds(value: float) -> str:
  """Format 0.0123 seconds as "12.3"."""
  return _three_digits(1000 * value)


def ratio(value: float) -> str:
  """Format 0.42 as "0.42×" and 0.00321 as "0.0032×"."""
  return f"{value:.2f}×" if value >= 0.1 or value == 0 else f"{value:.2g}×"


def fixed(digits: int) -> Callable[[float], str]:
  """Return a formatter with a fixed number of digits after the point."""
  return lambda value: f"{value:,.{digits}f}"


def _scaled(value: float, base: int, prefixes: list[str]) -> str:
  if not math.isfinite(value):
    return str(value)
  scale = 0
  # 999.6 would round to 1000: it reads better as 1.00 of the next prefix.
  while abs(value) >= base * 0.9995 and scale < len(prefixes) - 1:
    value, scale = value / base, scale + 1
  number = _three_digits(value) if scale else f"{value:g}"
  return f"{number} {prefixes[scale]}".rstrip()


def _three_digits(value: float) -> str:
  magnitude = abs(value)
  digits = 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2
  return f"{value:,.{digits}f}"


def shorten(text: str, limit: int = 32) -> str:
  """Return the text, without its middle where it is longer than `limit` characters."""
  if len(text) <= limit:
    return text
  half = (limit - 1) // 2
  return f"{text[:half]}…{text[-half:]}"
