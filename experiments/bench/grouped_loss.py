"""How fast and small is the grouped head's loss beside a dense one's, and what was asked of it?"""

from typing import Any

from experiments.bench import losses
from experiments.bench.losses import Shape
from experiments.bench.timing import Timed, compare
from experiments.bench.training_step import say
from vqjax import CodebookHead, DenseHead, GroupedHead, UnsharedGroupedHead
from vqjax.heads.workload import loss_and_gradient

MATERIALISED, TILED, GROUPED, UNSHARED = "materialised", "tiled", "grouped", "unshared"


def costs(shape: Shape, codes: int, rounds: int) -> dict[str, Any]:
  """Loss and gradient, in the hidden vectors and all of a head's parameters, in float32."""
  heads = {
    TILED: DenseHead(shape.vocab, shape.dim),
    GROUPED: GroupedHead(shape.vocab, shape.dim),
    UNSHARED: UnsharedGroupedHead(shape.vocab, shape.dim),
    "codebook": CodebookHead(shape.vocab, shape.dim, codes),
  }
  programs = {MATERIALISED: (losses.gradient(losses.materialised_loss), losses.arrays(shape))}
  programs |= {name: loss_and_gradient(head, shape.tokens) for name, head in heads.items()}
  say(f"timing loss and gradient, {shape}")
  timed = compare(programs, rounds)
  rows = {name: _beside(one, timed) for name, one in timed.items()}
  return {"shape": shape._asdict(), "codes": codes, "rows": rows, "claims": _claims(rows)}


def _beside(one: Timed, timed: dict[str, Timed]) -> dict[str, float]:
  full = timed[MATERIALISED]
  return {
    "seconds": one.seconds,
    "faster_than_materialised": full.seconds / one.seconds,
    "faster_than_tiled": timed[TILED].seconds / one.seconds,
    "temp_bytes": one.temp_bytes,
    "temp_smaller": full.temp_bytes / max(one.temp_bytes, 1),
  }


def _claims(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
  own = rows[GROUPED]
  claim = lambda asked, measured: {"asked": asked, "measured": measured}
  return {
    "faster than materialised": claim("at least 30", own["faster_than_materialised"]),
    "faster than tiled": claim("at least 15", own["faster_than_tiled"]),
    "temporaries smaller than materialised": claim("at least 40", own["temp_smaller"]),
    "slower, unshared": claim("at most 3", rows[UNSHARED]["seconds"] / own["seconds"]),
  }
