"""What did the runs below a folder write down?"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Run:
  """One run folder, as its JSON files describe it.

  Attributes:
    folder: where the files lie.
    config: the experiment's nested description; empty where there is no `config.json`.
    config_hash: identifies the experiment; None where there is no `config.json`.
    metrics: the rows of `metrics.jsonl`, in their order.
    result: the content of `result.json`; None while the run has not ended.
  """

  folder: pathlib.Path
  config: Mapping[str, Any]
  config_hash: str | None
  metrics: tuple[Mapping[str, Any], ...]
  result: Mapping[str, Any] | None

  @property
  def name(self) -> str:
    """What the experiment calls itself; else the folder's name."""
    return str(self.get("name") or self.config.get("name") or self.folder.name)

  @property
  def status(self) -> str:
    """ "finished", "failed" or, while there is no result, "unfinished"."""
    return "unfinished" if self.result is None else str(self.get("status") or "finished")

  def get(self, path: str) -> Any:
    """A value of the result by its dotted path, such as "head.params"; None where it is missing."""
    value: Any = self.result
    for part in path.split("."):
      value = value.get(part) if isinstance(value, Mapping) else None
    return value


def read_run(folder: str | pathlib.Path) -> Run:
  """The run in a folder; any of its files may be missing.

  Raises:
    ValueError: a file is not the JSON it should be; the message names the file and the line.
  """
  folder = pathlib.Path(folder)
  config = _read_object(folder / "config.json") or {}
  return Run(
    folder=folder,
    config=config.get("config", {}),
    config_hash=config.get("hash"),
    metrics=_read_rows(folder / "metrics.jsonl"),
    result=_read_object(folder / "result.json"),
  )


def read_runs(folder: str | pathlib.Path) -> list[Run]:
  """Every run in or below a folder, in the order of their paths."""
  files = pathlib.Path(folder).rglob("*.json")
  folders = {file.parent for file in files if file.name in ("config.json", "result.json")}
  return [read_run(found) for found in sorted(folders)]


def labels(runs: Sequence[Run]) -> list[str]:
  """A name for each run; where two share one, the folder's name is added."""
  names = [run.name for run in runs]
  return [
    f"{name} ({run.folder.name})" if names.count(name) > 1 else name
    for run, name in zip(runs, names, strict=True)
  ]


def _read_object(path: pathlib.Path) -> dict[str, Any] | None:
  return _parse(path.read_text(), path, 1) if path.is_file() else None


def _read_rows(path: pathlib.Path) -> tuple[dict[str, Any], ...]:
  if not path.is_file():
    return ()
  *lines, unfinished = path.read_text().split("\n")
  rows = [_parse(line, path, at) for at, line in enumerate(lines, 1) if line.strip()]
  try:
    return (*rows, _parse(unfinished, path, len(lines) + 1)) if unfinished else tuple(rows)
  except ValueError:
    return tuple(rows)  # a run that still writes has not ended its last line


def _parse(text: str, path: pathlib.Path, line: int) -> dict[str, Any]:
  try:
    value = json.loads(text)
  except json.JSONDecodeError as error:
    at = f"{path}, line {line + error.lineno - 1}"
    raise ValueError(f"{at}: damaged JSON ({error.msg}); mend it or remove the run") from None
  if not isinstance(value, dict):
    raise ValueError(f"{path}, line {line}: {value!r} is no JSON object; mend it or remove the run")
  return value
