"""The JSON files of a run folder: their schemas, and how they are read.

The module loads neither JAX nor a package of the lab, so that a table of runs is quick.
"""

import dataclasses
import os
import pathlib
from typing import Any, Literal

from vqjax.lm import records

__all__ = ["read_config", "read_metrics", "read_result"]


@dataclasses.dataclass
class Config:
  """Schema of `config.json`."""

  hash: str
  config: dict[str, Any]
  data: dict[str, Any]
  source: dict[str, Any] | None = None


@dataclasses.dataclass
class SplitScores:
  """Schema of the scores of a split."""

  nats_per_token: float
  perplexity: float
  bits_per_byte: float | None = None
  tokens: int = 0


@dataclasses.dataclass
class Result:
  """Schema of `result.json`."""

  status: Literal["finished", "failed"]
  name: str = ""
  config_hash: str = ""
  seed: int = 0
  error: str = ""
  commit: str | None = None
  device: str = ""
  date: str = ""
  versions: dict[str, str | None] = dataclasses.field(default_factory=dict)
  valid: SplitScores | None = None
  test: SplitScores | None = None
  head: dict[str, Any] | None = None
  embedding: dict[str, Any] | None = None
  model: dict[str, int] = dataclasses.field(default_factory=dict)
  mesh: dict[str, int] = dataclasses.field(default_factory=dict)
  loss: dict[str, Any] | None = None
  train: dict[str, Any] = dataclasses.field(default_factory=dict)
  last_row: str = ""


@dataclasses.dataclass
class MetricsRow:
  """Schema of a row of `metrics.jsonl`."""

  step: int
  loss: float | None = None
  valid: dict[str, float] | None = None
  recluster: dict[str, Any] | None = None


def read_result(folder: str | os.PathLike) -> dict | None:
  """Return the content of a folder's result.json, or None before the run has ended."""
  path = pathlib.Path(folder) / "result.json"
  return records.read(path, Result, "Remove it and run again: the run then measures once more.")


def read_config(folder: str | os.PathLike) -> dict | None:
  """Return the content of a folder's config.json, or None without one."""
  path = pathlib.Path(folder) / "config.json"
  return records.read(path, Config, "Restore it, or run the folder's command again to write it.")


def read_metrics(folder: str | os.PathLike) -> records.JSONRows:
  """Return the rows of a folder's metrics.jsonl; none without one."""
  path = pathlib.Path(folder) / "metrics.jsonl"
  remedy = (
    "Restore it, or run the folder's command again (without result.json) to go on without it."
  )
  found = records.read_json_rows(path, MetricsRow, remedy)
  result = None if found.problem else read_result(folder)
  # The checksums of rows do not tell that the last ones are gone.
  last = result and result.get("last_row")
  if last and found.checksums[-1:] != [last]:
    found.problem = records.DamagedError(f"{path} is damaged: its last rows are missing. {remedy}")
  return found
