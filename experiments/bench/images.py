"""How long does it take to draw a batch of pictures, beside the step that learns from them?"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.bench.stepping import Stepping
from experiments.bench.training_step import ROUNDS, say, settled
from vqjax import GroupedHead
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import Drawn
from vqjax.lab.data.shapes import NUM_CLASSES, SIDE, draw
from vqjax.lab.models import ConvNet


class Pictures(NamedTuple):
  """The paper's network for pictures, and the rows that it sees at a time."""

  classes: int = NUM_CLASSES
  dim: int = 512
  channels: tuple[int, ...] = (32, 64, 128)
  batch: int = 64


class _Given(Drawn):
  """Pictures that somebody has drawn before."""

  def shapes(self, batch, context):
    given = jax.ShapeDtypeStruct((batch, SIDE, SIDE, 3), jnp.float32)
    return super().shapes(batch, context) | {"inputs": given}


def costs(pictures: Pictures) -> dict[str, Any]:
  """Seconds to draw a batch, of a step on drawn ones, and of the step that draws: all in turn."""
  net = lambda **more: ConvNet(
    head=GroupedHead(pictures.classes, pictures.dim, use_bias=True),
    dim=pictures.dim,
    channels=pictures.channels,
    **more,
  )
  run = lambda model, loader: Stepping(
    Experiment("step", model, None, None, loader, Train(batch=pictures.batch))
  )
  say("compiling the network for pictures")
  calls = {
    "draw": _drawing(pictures),
    "step": run(net(), _Given()),
    "step that draws": run(net(images=draw), Drawn()),
  }
  times = {name: [] for name in calls}
  for turn in range(ROUNDS):
    say(f"timing pictures, round {turn + 1} of {ROUNDS}")
    for name, call in calls.items():
      times[name].append(settled(call))
  seconds = {name: statistics.median(found) for name, found in times.items()}
  return {
    "batch": pictures.batch,
    "classes": pictures.classes,
    "params": calls["step"].params,
    "seconds": seconds,
    "draw_of_step": seconds["draw"] / seconds["step"],
  }


def _drawing(pictures: Pictures) -> Callable[[], float]:
  shape = pictures.batch, 2
  inputs = jax.random.randint(jax.random.key(0), shape, 0, pictures.classes)
  compiled = jax.jit(draw).lower(inputs).compile()

  def seconds():
    start = time.perf_counter()
    jax.block_until_ready(compiled(inputs))
    return time.perf_counter() - start

  return seconds
