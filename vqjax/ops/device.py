"""Limits of the device in use, and the choices that follow from them: one table for all of `ops`.

Programs may be compiled for a device that is not here, so that the kind of an accelerator is looked
up in a table, while the caches of a CPU are read from the machine.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from vqjax.ops import vocab_parallel

__all__ = ["Device", "current", "using"]


class Device(NamedTuple):
  """What tiles and programs are chosen by.

  Attributes:
    tokens: largest number of tokens in a tile.
    vocab: largest number of rows in a tile.
    balance: floating-point operations of a product in the time in which a byte reaches memory.
    scores: largest number of scores in a tile, where its sides leave a choice.
    fuses: whether reductions of a product's result fuse into the product.
    rounds: whether scores of bfloat16 operands leave the product in bfloat16, as stored logits do:
      half of the traffic of what no reduction fuses into.
    kept: bytes of scores that are kept for the gradient instead of computed twice.
    scratch: bytes of scores that a sum of losses keeps until their gradient is formed.
    few: largest number of hidden vectors whose scores of the whole vocabulary decoding stores.
    stored: largest number of scores that decoding stores instead of computing blocks of them.
    block: largest number of scores of a block.
  """

  tokens: int
  vocab: int
  balance: float
  scores: int = 2**62
  fuses: bool = False
  rounds: bool = False
  kept: int = 2**25
  scratch: int = 2**26
  few: int = 256
  stored: int = 2**25
  block: int = 2**22


# TPUs: scores of a tile leave the matrix unit as bfloat16 cotangents of at most a quarter of the
# vector memory (VMEM) of a device: 128 MiB from v5e on, 32 or 16 MiB before. The sides are the
# fastest by the compiler's own account (`make bench-tpu`). Peaks and bandwidths are as published.
_TPU = (
  ("TPU v5 lite", Device(4096, 4096, 197e12 / 819e9, fuses=True)),
  ("TPU v5e", Device(4096, 4096, 197e12 / 819e9, fuses=True)),
  ("TPU v5", Device(16384, 1024, 459e12 / 2765e9, fuses=True)),
  ("TPU v6", Device(4096, 4096, 918e12 / 1640e9, fuses=True)),
  ("TPU v2", Device(2048, 1024, 46e12 / 700e9, fuses=True)),
  ("TPU v3", Device(2048, 1024, 123e12 / 900e9, fuses=True)),
  ("TPU v4", Device(2048, 2048, 275e12 / 1228e9, fuses=True)),
  ("TPU", Device(4096, 4096, 918e12 / 1640e9, fuses=True)),
)
# GPUs: all tokens by as many rows as give 256 MiB of bfloat16 scores: products are large, and the
# gradient of a row is written once.
# Decoding has one product up to a batch of 1,024 by 262,144 tokens: its small steps took ten times
# as long.
_GPU = Device(
  tokens=2**16,
  vocab=2**18,
  balance=989e12 / 3350e9,
  scores=2**27,
  rounds=True,
  scratch=2**30,
  few=1024,
  stored=2**28,
  block=2**27,
)
# CPUs: 330 GFLOP/s beside 12 GB/s, on two cores with AVX-512.
_CPU_BALANCE = 27.0
_CACHES = pathlib.Path("/sys/devices/system/cpu/cpu0/cache")

_CHOSEN: contextvars.ContextVar[Device | None] = contextvars.ContextVar("device", default=None)


@contextlib.contextmanager
def using(device: Device) -> Iterator[None]:
  """Compute with other limits inside of a `with`, where programs are traced.

  A function under `jax.jit` that has been traced before keeps its limits.
  """
  before = _CHOSEN.set(device)
  try:
    yield
  finally:
    _CHOSEN.reset(before)


def current() -> Device:
  """The limits of `using`, or those of the platform and number of devices in use."""
  here = vocab_parallel.devices()
  return _CHOSEN.get() or of(here.platform, here.kind, here.count)


@functools.cache
def of(platform: str, kind: str = "", devices: int = 1) -> Device:
  """The limits of one of `devices` devices; `kind` as in `jax.Device.device_kind`."""
  if platform == "tpu":
    return next(limits for name, limits in _TPU if kind.startswith(name) or name == "TPU")
  if platform != "cpu":
    return _GPU
  # Tiles of a twelfth of the last cache, which several devices share.
  level2, level3 = _cache_sizes()
  scores = min(2**20, max(level3 // 12, level2) // 4) // devices
  tokens = 512 if devices == 1 else 256
  # Below 256 rows the loops cost more than what a cache saves.
  vocab = max(256, scores // tokens // 128 * 128)
  # Scores that leave the cache cost more than a product of usual width. A virtual machine of two
  # cores may name the cache of a whole socket, 480 MiB.
  return Device(tokens, vocab, _CPU_BALANCE, kept=min(2**25, level3 // 8) // devices)


def _cache_sizes() -> tuple[int, int]:
  """Bytes of the second and of the last cache; those of a common processor if unknown."""
  found = {}
  for folder in _CACHES.glob("index*"):
    try:
      level = int((folder / "level").read_text())
      size = int((folder / "size").read_text().strip("K\n"))
    except (OSError, ValueError):
      continue
    found[level] = max(found.get(level, 0), 1024 * size)
  return found.get(2, 2**20), found.get(3, 2**25)
