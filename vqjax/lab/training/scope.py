"""Which of its parameters does a run train?"""

import difflib
from typing import Any

import jax


def trained(params: dict, prefixes: tuple[str, ...]) -> dict:
  """Marks the parameters that are trained: those below one of the dotted prefixes; () marks all.

  "head" marks every parameter of the head, "head.codebook" that one.

  Raises:
    ValueError: a prefix under which there is no parameter; the message names the near ones.
  """
  names = [_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
  for prefix in prefixes:
    if not any(_is_below(name, prefix) for name in names):
      raise ValueError(_unknown(prefix, names))
  below_any = lambda name: not prefixes or any(_is_below(name, prefix) for prefix in prefixes)
  return jax.tree_util.tree_map_with_path(lambda path, _: below_any(_name(path)), params)


def split(params: dict, prefixes: tuple[str, ...]) -> tuple[dict, dict]:
  """The trained parameters and the others, each with None in the other's places."""
  marks = trained(params, prefixes)
  select = lambda wanted: jax.tree.map(lambda m, x: x if m == wanted else None, marks, params)
  return select(True), select(False)


def joined(some: dict, others: dict) -> dict:
  """The inverse of `split`."""
  pick = lambda one, other: other if one is None else one
  return jax.tree.map(pick, some, others, is_leaf=lambda x: x is None)


def _name(path: tuple[Any, ...]) -> str:
  return ".".join(str(key.key) for key in path)


def _is_below(name: str, prefix: str) -> bool:
  return name == prefix or name.startswith(f"{prefix}.")


def _unknown(prefix: str, names: list[str]) -> str:
  parts = [name.split(".") for name in names]
  every = dict.fromkeys(".".join(p[:end]) for p in parts for end in range(1, len(p) + 1))
  near = difflib.get_close_matches(prefix, every, 3) or dict.fromkeys(p[0] for p in parts)
  return f"train.trainable: no parameter is below {prefix!r}; near ones are {', '.join(near)}"
