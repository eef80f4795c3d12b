"""Rotary embeddings in the words of configs of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from vqjax.lm.models import Rotary, rotary

__all__ = []


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
  """What a config says of its rotary embeddings, in old words or in new; old ones count first.

  Where kinds of blocks differ, it is that of blocks that attend to all positions.
  """
  old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
  if "full_attention" in new:
    return dict(new["full_attention"]) | dict(old)
  return dict(old or new)


def rotary_of(
  rope: Mapping[str, Any], config: Mapping[str, Any], width: int | None = None
) -> Rotary:
  """Rotary embeddings as transformers has them.

  Args:
    rope: a scaling, which may be empty; its `rope_theta` counts before that of the config.
    config: the config around it.
    width: width of a head, which is compared with the scaling; None: unknown.
  """

  def get(key: str, default: Any = None) -> Any:
    value = rope.get(key)
    is_number = type(value) is int and key != "original_max_position_embeddings"
    return default if value is None else float(value) if is_number else value

  kind = get("rope_type", get("type"))
  if kind is None and get("factor") is not None:
    raise ValueError("`rope_type` is missing beside the `factor` of a scaling")
  kind = kind or "default"
  kind = "longrope" if kind == "su" else kind
  base = get("rope_theta", config.get("rope_theta"))
  context = config.get("original_max_position_embeddings")
  context = context or get("original_max_position_embeddings")
  context = context or config.get("max_position_embeddings")
  fraction = get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
  needed = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "divisors": ("divisors",),
  }.get(kind, ())
  if absent := [key for key in needed if get(key) is None]:
    raise ValueError(f"`{absent[0]}` is missing, which `rope_type` {kind} needs")
  if kind not in ("yarn", "longrope") and get("attention_factor") is not None:
    raise ValueError(f"`attention_factor` must be left out with `rope_type` {kind}")
  make = {
    "default": lambda: None,
    "linear": lambda: rotary.LinearScaling(get("factor")),
    "dynamic": lambda: rotary.Dynamic(get("factor"), config["max_position_embeddings"]),
    "longrope": lambda: rotary.LongRope(
      *(tuple(map(float, get(key))) for key in needed),
      context,
      _longrope_magnitude(get, config["max_position_embeddings"], context),
    ),
    "llama3": lambda: rotary.Llama3(*map(get, needed), context),
    "yarn": lambda: rotary.Yarn(
      get("factor"),
      context,
      get("beta_fast") or 32.0,
      get("beta_slow") or 1.0,
      _yarn_magnitude(get),
      get("truncate") is not False,
    ),
    "divisors": lambda: rotary.Divisors(tuple(map(float, get("divisors")))),
  }
  made = make[kind]()
  if isinstance(made, rotary.Llama3) and made.low >= made.high:
    raise ValueError(
      f"`low_freq_factor` must be below `high_freq_factor`; got {made.low} and {made.high}"
    )
  if isinstance(made, rotary.Yarn) and made.slow > made.fast:
    raise ValueError(f"`beta_slow` must not be above `beta_fast`; got {made.slow} and {made.fast}")
  turned = None if width is None else int(width * fraction)
  if turned is not None and (turned < 2 or turned % 2):
    raise ValueError(
      f"`partial_rotary_factor` must turn an even part of `head_dim` {width}; got {fraction}"
    )
  for key in needed:
    if isinstance(get(key), list) and turned is not None and 2 * len(get(key)) != turned:
      raise ValueError(
        f"`{key}` must have a number for each pair of coordinates that is turned, {turned // 2};"
        f" got {len(get(key))}"
      )
  return Rotary(1e4 if base is None else float(base), made, fraction)


def _longrope_magnitude(get: Callable[[str], Any], longest: int, context: int) -> float:
  """The factor of cosines and sines that a config asks for, or that of the paper."""
  if get("attention_factor") is not None:
    return get("attention_factor")
  factor = get("factor") or longest / context
  return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))


def _yarn_magnitude(get: Callable[[str], float | None]) -> float | None:
  """The factor of cosines and sines that a config asks for; None: that of the paper.

  `mscale` and `mscale_all_dim` are DeepSeek's, and count only together.
  """
  both = get("mscale"), get("mscale_all_dim")
  if get("attention_factor") is not None or not all(both):
    return get("attention_factor")
  over, under = (rotary.yarn_magnitude(get("factor"), mscale) for mscale in both)
  return over / under


def rotary_config(turn: Rotary) -> dict[str, Any]:
  """`rope_theta` and `rope_scaling` of a config."""
  scaling, fields = turn.scaling, None
  if isinstance(scaling, rotary.LinearScaling):
    fields = {"rope_type": "linear", "factor": scaling.factor}
  elif isinstance(scaling, rotary.Llama3):
    fields = {
      "rope_type": "llama3",
      "factor": scaling.factor,
      "low_freq_factor": scaling.low,
      "high_freq_factor": scaling.high,
      "original_max_position_embeddings": scaling.context,
    }
  elif isinstance(scaling, rotary.Yarn):
    fields = {
      "rope_type": "yarn",
      "factor": scaling.factor,
      "original_max_position_embeddings": scaling.context,
      "beta_fast": scaling.fast,
      "beta_slow": scaling.slow,
    }
    if scaling.attention is not None:
      fields["attention_factor"] = scaling.attention
    if not scaling.truncate:
      fields["truncate"] = False
  elif isinstance(scaling, rotary.Dynamic):
    fields = {"rope_type": "dynamic", "factor": scaling.factor}
  elif isinstance(scaling, rotary.LongRope):
    fields = {
      "rope_type": "longrope",
      "short_factor": list(scaling.short),
      "long_factor": list(scaling.long),
      "original_max_position_embeddings": scaling.context,
      "attention_factor": scaling.magnitude,
    }
  # These words are read by all versions of transformers, `rope_parameters` by new ones only.
  return {"rope_theta": turn.base, "rope_scaling": fields}
