"""Published peaks of accelerators, and the topologies of TPUs."""

import dataclasses
import math

__all__ = ["GPUS", "Chip", "gpu", "of_kind", "tpu"]


@dataclasses.dataclass(frozen=True)
class Chip:
  """The published peaks of one accelerator.

  Attributes:
    name: the name that its maker uses.
    flops: dense bfloat16 operations a second.
    memory: bytes of device memory that a program may use.
    bandwidth: bytes a second between the chip and its memory.
    links: bytes a second that it sends to its neighbours, over all links in one direction.
    node: number of chips that `links` joins; None for all of a topology.
    network: bytes a second that it sends out of its node.
  """

  name: str
  flops: float
  memory: int
  bandwidth: float
  links: float
  node: int | None = None
  network: float = math.inf


# TPUs: docs.cloud.google.com/tpu/docs, pages v5e, v5p and v6e, "System architecture": peak compute
# per chip (bf16), HBM bandwidth, and half of the "bidirectional inter-chip interconnect bandwidth
# (per chip)", 400, 1200 and 800 GB/s. The memory is what the compiler grants to a program, a little
# less than the 16, 95 and 32 GB of the pages. Not v4: where there is no TPU its compiler knows a
# chip as two devices, which a real machine joins to one.
# GPUs: NVIDIA's datasheets of A100 80GB SXM, H100 SXM, H200 SXM and DGX B200: dense bf16, half of
# the figure "with sparsity"; NVLink's total of 600, 900, 900 and 1800 GB/s is for both directions.
# Between nodes of eight: an adapter for each GPU, 200 Gbit/s in a DGX A100, 400 in the later ones.
V5E = Chip("TPU v5e", 197e12, int(15.75 * 2**30), 819e9, 200e9)
V5P = Chip("TPU v5p", 459e12, int(95.74 * 2**30), 2765e9, 600e9)
V6E = Chip("TPU v6e", 918e12, int(31.25 * 2**30), 1600e9, 400e9)
GPUS = {
  "A100": Chip("A100 80GB SXM", 312e12, 80 * 10**9, 2039e9, 300e9, 8, 25e9),
  "H100": Chip("H100 SXM", 989e12, 80 * 10**9, 3350e9, 450e9, 8, 50e9),
  "H200": Chip("H200 SXM", 989e12, 141 * 10**9, 4800e9, 450e9, 8, 50e9),
  "B200": Chip("B200 SXM", 2250e12, 180 * 10**9, 8000e9, 900e9, 8, 50e9),
}

_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
TOPOLOGIES = {
  "v5e": (V5E, _FLAT),
  "v5p": (V5P, (*_CUBES, "8x16x16", "16x16x16", "16x16x24")),
  "v6e": (V6E, _FLAT),
}
"""Slices that exist and that the compiler knows; it also accepts some that do not exist."""


def tpu(topology: str) -> Chip:
  """The chip of a topology such as "v5e:4x4".

  Raises:
    ValueError: the topology does not exist; the message lists the existing ones.
  """
  kind, _, layout = topology.partition(":")
  if kind not in TOPOLOGIES or layout not in TOPOLOGIES[kind][1]:
    there = "; ".join(f"{name}: {', '.join(sizes)}" for name, (_, sizes) in TOPOLOGIES.items())
    raise ValueError(f"`topology` must be KIND:SIZE; got {topology!r}. There are {there}.")
  return TOPOLOGIES[kind][0]


def gpu(kind: str) -> Chip:
  """The chip that `--device-kind` names.

  Raises:
    ValueError: the kind is not in `GPUS`; the message lists them.
  """
  if kind not in GPUS:
    raise ValueError(f"`device_kind` must be one of {', '.join(GPUS)}; got {kind!r}. Name one.")
  return GPUS[kind]


_KINDS = {
  "TPU v5 lite": V5E,
  "TPU v5e": V5E,
  "TPU v5": V5P,
  "TPU v6": V6E,
  "NVIDIA A100": GPUS["A100"],
  "NVIDIA H100 80GB HBM3": GPUS["H100"],
  "NVIDIA H200": GPUS["H200"],
  "NVIDIA GH200": GPUS["H200"],
  "NVIDIA B200": GPUS["B200"],
}
"""Beginnings of `jax.Device.device_kind`, the longer ones first; an H100 with PCIe is slower."""


def of_kind(device_kind: str) -> Chip | None:
  """The chip of a `jax.Device.device_kind`; None where its peaks are not known."""
  return next((chip for name, chip in _KINDS.items() if device_kind.startswith(name)), None)
