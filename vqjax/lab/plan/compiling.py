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

from vqjax.lab.plan import chips
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
    temporaries: bytes of device memory beside arguments and results; None where it is not known.
    code: bytes of the program itself.
    refused: why the compiler gave up, as it does where memory does not suffice; else None.
    seconds: wall time of the compilation.
  """

  text: str
  stage: str
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
    start, refused, stats = time.perf_counter(), None, None
    try:
      stats = lowered.compile(compiler_options=options).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      refused = str(error)
    seconds = time.perf_counter() - start
    text, stage = _text(pathlib.Path(folder), mesh.size)
  temporaries = stats.temp_size_in_bytes if stats else _wanted(refused)
  code = stats.generated_code_size_in_bytes if stats else 0
  return Compiled(text, stage, temporaries, code, refused, seconds)


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


def _text(folder: pathlib.Path, devices: int) -> tuple[str, str]:
  for stage, files in _candidates(folder, devices):
    if files:
      return max(files, key=lambda file: file.stat().st_size).read_text(), stage
  raise ValueError(
    "the compiler must write the HLO of the program; got none. Unset XLA_FLAGS, or use another"
    " version of jax."
  )


def _candidates(folder: pathlib.Path, devices: int) -> Iterator[tuple[str, list[pathlib.Path]]]:
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
