"""Settings of all tests: compilation, simulated devices, types and caches."""

import collections
import ctypes
import gc
import importlib.metadata
import os
import pathlib
import sys

# Most of the time of these tests is compilation, of programs that then run for milliseconds. They
# and the programs that they start are compiled with the least effort, and each program once: the
# workers share a persistent cache. `make check` runs the numeric tests also as users' programs
# are compiled, with JAX_DISABLE_MOST_OPTIMIZATIONS=false.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
# jaxlib 0.12 has no other emitters, and ends the process at an unknown flag.
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "true" and importlib.metadata.version(
  "jaxlib"
).startswith(("0.10", "0.11")):
  # Each program is compiled by one thread, as one module: the workers use the other cores.
  least = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {least}"
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".jax_cache")
)
# Small programs too: there are many, and most are compiled again in other modules.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import pytest

# Tracing allocates much that lives: collections at the usual counts take a tenth of the time.
gc.set_threshold(50_000, 20, 50)

# Meshes of several devices are tested on this machine's processor. Not by an environment variable:
# programs that a test starts see one device, as a user would.
jax.config.update("jax_num_cpu_devices", 8)

# `make test-all` checks the shapes and types of every public signature while the tests run.
if os.environ.get("VQJAX_RUNTIME_TYPES"):
  import jaxtyping
  import numpy as np

  # NumPy's arrays are as good as JAX's: shapes and dtypes are what is checked.
  jaxtyping.Array = jax.Array | np.ndarray
  _hook = jaxtyping.install_import_hook(
    [
      "vqjax.ops",
      "vqjax.heads",
      "vqjax.embeddings",
      "vqjax.assign",
      "vqjax.lm.models",
      "vqjax.lm.checkpoints",
      "vqjax.lm.sources",
      "vqjax.lm.tokenizers",
      "vqjax.lm.generation",
      "vqjax.lm.drafting",
      "vqjax.lm.lenses",
    ],
    "beartype.beartype",
  )


# `make test-gpu`: tests of one device run on a GPU, and none where there is no GPU.
ON_GPU = bool(os.environ.get("VQJAX_TEST_GPU"))


@pytest.fixture(scope="session", autouse=True)
def _common_caches():
  """Gives the processor the caches of a common one, so that programs are the same everywhere."""
  from vqjax.ops import device  # after the hook above

  device._CACHES = pathlib.Path("none")
  device.of.cache_clear()


@pytest.fixture(autouse=True)
def _enough_gpus(request, monkeypatch):
  """Skips a test on a mesh of more GPUs than there are."""
  if not ON_GPU:
    return

  def or_skipped(make_mesh):
    def made(*args, **options):
      try:
        return make_mesh(*args, **options)
      except ValueError as error:
        pytest.skip(f"the mesh needs more GPUs than {len(jax.devices())}: {error}")

    return made

  for module in (jax, request.module):
    if hasattr(module, "make_mesh"):
      monkeypatch.setattr(module, "make_mesh", or_skipped(module.make_mesh))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` says
def pytest_collection_modifyitems(items):
  """Marks the cases of a test as slow, except for as many as its mark `fast_cases` says.

  Where types are checked, tests whose subject is what a function says of a wrong type are left out.
  """
  if os.environ.get("VQJAX_RUNTIME_TYPES"):
    items[:] = [item for item in items if not item.get_closest_marker("untyped")]
  if ON_GPU and jax.default_backend() != "gpu":
    for item in items:
      item.add_marker(pytest.mark.skip(f"JAX sees no GPU here, but {jax.default_backend()}"))
  cases = {}
  for item in items:
    if item.get_closest_marker("fast_cases") and not item.get_closest_marker("slow"):
      cases.setdefault((item.cls, item.function), []).append(item)
  for same in cases.values():
    count = same[0].get_closest_marker("fast_cases").args[0]
    fast = {round(i * (len(same) - 1) / max(count - 1, 1)) for i in range(count)}
    for i, item in enumerate(same):
      if i not in fast:
        item.add_marker(pytest.mark.slow)


MOST_PROGRAMS = 20
"""Programs of a fast test: to lower each takes 13 ms, which no cache saves (`tests/jitted.py`)."""

EVENTS = collections.Counter()
"""What JAX has reported so far, by the names of its events."""

jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: EVENTS.update([name]))


@pytest.fixture
def programs():
  """A function that returns the number of programs so far."""
  return lambda: EVENTS["/jax/core/compile/jaxpr_to_mlir_module_duration"]


@pytest.fixture(autouse=True)
def _few_programs(request, programs):
  """Fails a fast test that compiles more than `MOST_PROGRAMS`, or than its mark `programs` says."""
  before = programs()
  yield
  if not request.node.get_closest_marker("slow"):
    made, mark = programs() - before, request.node.get_closest_marker("programs")
    most = mark.args[0] if mark else MOST_PROGRAMS
    assert made <= most, f"{made} programs: compute what is compared in one `jax.jit`"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
  monkeypatch.setenv("VQJAX_CACHE", str(tmp_path / "cache"))


MOST_RESIDENT = 5 * 2**30
"""Bytes of resident memory above which compiled programs are dropped after a module."""


@pytest.fixture(autouse=True, scope="module")
def _drop_programs():
  """Frees compiled programs after a module, once memory exceeds `MOST_RESIDENT`."""
  yield
  if _resident_bytes() < MOST_RESIDENT:
    return
  jax.clear_caches()
  gc.collect()
  if sys.platform == "linux":
    ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> float:
  """Resident memory of this process; infinite on systems that do not report it."""
  statm = pathlib.Path("/proc/self/statm")
  if not statm.exists():
    return float("inf")
  return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def real_data() -> pathlib.Path:
  """Folder of the real datasets; tests that need it are skipped without it."""
  beside = pathlib.Path(__file__).parents[2] / "shared" / "data"
  folder = pathlib.Path(os.environ.get("VQJAX_DATA") or beside)
  if not folder.is_dir():
    pytest.skip("no real data: set VQJAX_DATA to a folder that holds ptb/, wikitext-2/, ...")
  return folder
