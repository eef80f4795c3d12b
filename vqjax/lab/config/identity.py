"""Are two experiments the same one, and where do they differ?"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from vqjax.lab.config.describe import describe
from vqjax.lab.config.tree import join


def flatten(description: Mapping[str, Any]) -> dict[str, Any]:
  """A nested description as {"model.head.codes": 512, ...}; a list of plain values stays one."""
  flat: dict[str, Any] = {}

  def visit(value: Any, path: str):
    below = value
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
      below = dict(enumerate(value))
    if not isinstance(below, Mapping) or not below:
      flat[path] = value
      return
    for name, item in below.items():
      visit(item, join(path, str(name)))

  visit(description, "")
  return flat


def config_hash(experiment: Any) -> str:
  """12 hexadecimal digits that identify an experiment, the same in every process.

  They begin the SHA-256 of its description in canonical JSON: sorted keys and no spaces. Import
  paths and fields at their defaults are not part of it, so that neither a moved class nor a new
  field with a default changes the identity of an existing run.
  """
  canonical = json.dumps(
    describe(experiment, defaults=False), sort_keys=True, separators=(",", ":")
  )
  return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
  """Where two descriptions differ: lines like `model.head.codes: 512 here, 1024 there`."""
  left, right = flatten(here), flatten(there)
  paths = [*left, *(path for path in right if path not in left)]
  show = lambda flat, path: repr(flat[path]) if path in flat else "absent"
  return [
    f"{path}: {show(left, path)} here, {show(right, path)} there"
    for path in paths
    if path not in left or path not in right or left[path] != right[path]
  ]
