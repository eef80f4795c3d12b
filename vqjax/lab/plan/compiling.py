"""Compilation of training steps for devices that are absent."""

import contextlib
import importlib.util
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from vqjax.lab import chips
from vqjax.lab.training.program import Program

__all__ = ["simulated_devices", "tpu_devices"]

_QUIET = {
  # The compiler looks for a TPU machine around it, and for other processes that use its TPU.
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_MIN_LOG_LEVEL": "3",
  "TPU_STDERR_LOG_LEVEL": "3",
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Compiled(NamedTuple):
  """A compiled step.

  Attributes:
    text: HLO of what runs on each device.
    stage: "optimised", the program that runs, or "partitioned", before it was optimised.
    own: whether the compiler of the device made the program, so that its temporaries are the
      device's.
    temporaries: bytes of device memory beside arguments and results; None where it is not known.
    code: bytes of the program itself.
    refused: why the compiler gave up, as it does where memory does not suffice; else None.
    seconds: wall time of the compilation.
  """

  text: str
  stage: str
  own: bool
  temporaries: int | None
  code: int
  refused: str | None
  seconds: float


def tpu_devices(topology: str) -> list:
  """Abstract chips of a TPU topology such as "v5e:4x4"; no TPU is needed.

  Raises:
    ValueError: no such topology; the message lists those that there are.
    ModuleNotFoundError: libtpu is not installed; the message names the extra.
  """
  chips.tpu(topology)
  if importlib.util.find_spec("libtpu") is None:
    raise ModuleNotFoundError(
      "libtpu, the compiler for TPUs, must be installed; got no such package. Call"
      " `pip install 'vqjax[plan]'`, on Linux and x86-64."
    )
  for name, value in _QUIET.items():
    os.environ.setdefault(name, value)
  return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


_GPU_TARGETS = {
  "A100": (
    "core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41 l2_cache_size: 41943040"
    " shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912"
    " cuda_compute_capability { major: 8 }"
  ),
  "H100": (
    "core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800"
    " shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448"
    " cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }"
  ),
  "B200": (
    "core_count: 148 fpus_per_core: 128 clock_rate_ghz: 1.965 l2_cache_size: 132644864"
    " shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448"
    " cuda_compute_capability { major: 10 feature_extension: ACCELERATED_FEATURES }"
  ),
}
"""What XLA's compiler asks of a GPU, from NVIDIA's documents; an H200 computes as an H100."""


def has_gpu_compiler() -> bool:
  """Whether the compiler for NVIDIA's GPUs is installed."""
  return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def check_gpu_compiler() -> None:
  """Check that the compiler for GPUs is installed.

  Raises:
    ModuleNotFoundError: it is not; the message names the extra.
  """
  if not has_gpu_compiler():
    raise ModuleNotFoundError(
      "jax[cuda13], the compiler for GPUs, must be installed; got no such package. Call"
      " `pip install 'vqjax[plan-gpu]'`, on Linux and x86-64."
    )


def gpu_devices(kind: str, count: int) -> list:
  """Devices to compile for: abstract GPUs of a kind, or simulated CPUs without their compiler.

  The compiler is that of `jax[cuda13]`; no GPU is needed.

  Raises:
    ValueError: a number below 1, or, without the compiler, jax runs already with fewer devices.
  """
  if count < 1:
    raise ValueError(f"`--devices` must be at least 1; got {count}. Give the number of GPUs.")
  if not has_gpu_compiler():
    return simulated_devices(count)
  chip = chips.GPUS[kind]
  target = (
    "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32"
    " threads_per_core_limit: 2048 shared_memory_per_block: 49152 registers_per_core_limit: 65536"
    " registers_per_block_limit: 65536 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535"
    f" block_dim_limit_z: 65535 memory_bandwidth: {int(chip.bandwidth)}"
    f" device_memory_size: {chip.memory} {_GPU_TARGETS[kind.replace('H200', 'H100')]} }}"
    ' platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }'
    f' device_description_str: "NVIDIA {chip.name}"'
  )
  # Hosts of eight, as the chips' nodes are.
  nodes, each = (count // chip.node, chip.node) if count % chip.node == 0 else (1, count)
  return topologies.get_topology_desc(
    platform="cuda", target_config=target, topology=f"{nodes}x1x{each}"
  ).devices


def simulated_devices(count: int) -> list:
  """Simulated CPU devices for compilation, before any other device is used.

  Raises:
    ValueError: a number below 1, or jax runs already, with fewer devices.
  """
  if count < 1:
    raise ValueError(f"`--devices` must be at least 1; got {count}. Give the number of GPUs.")
  # Where jax runs already it may have enough of them.
  with contextlib.suppress(RuntimeError):
    jax.config.update("jax_num_cpu_devices", count)
  devices = jax.devices("cpu")
  if len(devices) < count:
    raise ValueError(
      f"`count` must be at most {len(devices)}, the devices with which JAX runs already; got"
      f" {count}. Start another process."
    )
  return devices[:count]


def compile_step(program: Program) -> Compiled:
  """Compile the training step for the devices of the program's mesh."""
  lowered = program.step.lower(program.abstract_state, program.abstract_batch)
  return compile_lowered(lowered, program.mesh)


def compile_lowered(lowered: jax.stages.Lowered, mesh: Mesh) -> Compiled:
  """Compile a function for the devices of its mesh.

  The text comes from files that the compiler writes on the way: an executable for many TPUs does
  not always give its own.
  """
  with tempfile.TemporaryDirectory() as folder, _no_cache():
    options = {
      "xla_dump_to": folder,
      "xla_dump_hlo_as_text": True,
      "xla_dump_hlo_pass_re": "spmd-partitioning",
    }
    if mesh.devices.flat[0].platform == "cpu":
      # This pass aborts the process at sums of bfloat16 over devices.
      options["xla_disable_hlo_passes"] = "all-reduce-promotion"
    platform = mesh.devices.flat[0].platform
    start, refused, stats = time.perf_counter(), None, None
    try:
      stats = lowered.compile(compiler_options=options).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      refused = str(error)
    seconds = time.perf_counter() - start
    # Products are calls of libraries, and opaque kernels, in what a GPU runs.
    is_gpu = platform not in ("cpu", "tpu")
    text, stage = _text(pathlib.Path(folder), mesh.size, is_gpu)
  temporaries = stats.temp_size_in_bytes if stats else _wanted(refused)
  code = stats.generated_code_size_in_bytes if stats else 0
  return Compiled(text, stage, platform != "cpu", temporaries, code, refused, seconds)


@contextlib.contextmanager
def _no_cache():
  """Disable the persistent cache: a cached program writes no compiler output."""
  before = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()  # JAX reads the option once
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def _text(folder: pathlib.Path, devices: int, is_gpu: bool) -> tuple[str, str]:
  for stage, files in _candidates(folder, devices, is_gpu):
    if files:
      return max(files, key=lambda file: file.stat().st_size).read_text(), stage
  raise ValueError(
    "the compiler must write the HLO of the program; got none. Unset XLA_FLAGS, or use another"
    " version of jax."
  )


def _candidates(
  folder: pathlib.Path, devices: int, is_gpu: bool
) -> Iterator[tuple[str, list[pathlib.Path]]]:
  if is_gpu and devices == 1:
    yield "partitioned", list(folder.rglob("*before_optimizations.txt"))
  # The CPU's optimised program widens bfloat16 before it is sent, which a GPU's does not.
  yield "optimised", list(folder.rglob("*[0-9].after_optimizations.txt"))
  if devices > 1:
    yield "partitioned", list(folder.rglob("*after_*spmd-partitioning.before*.txt"))
  yield "optimised", list(folder.rglob("*after_optimizations.txt"))


def _wanted(refused: str) -> int | None:
  """Bytes of temporaries of a program that the compiler refused."""
  found = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds|program +([\d.]+)([KMGT]?)", refused)
  if not found:
    return None
  number, unit = (part for part in found.groups() if part is not None)
  return int(float(number) * _UNITS[unit])
