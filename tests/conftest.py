"""How are all tests set up: shapes checked at run time, and no cache outside the test's folder?"""

import ctypes
import gc
import os
import pathlib
import sys

# Most of the time of these tests is compilation, of programs that then run for milliseconds: they
# and the programs that they start are compiled with the least effort, which halves the time.
# (The commands of `make smoke` and the benchmarks are compiled as users' programs are.)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

import jax
import jaxtyping
import pytest

# Meshes of several devices are tested on this machine's processor. Not by an environment variable:
# programs that a test starts see one device, as a user would.
jax.config.update("jax_num_cpu_devices", 8)

# Every public signature is checked while the tests run: a wrong shape fails where it appears.
_hook = jaxtyping.install_import_hook(
  ["vqjax.ops", "vqjax.heads", "vqjax.embeddings", "vqjax.assign", "vqjax.models"],
  "beartype.beartype",
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
  monkeypatch.setenv("VQJAX_CACHE", str(tmp_path / "cache"))


MOST_RESIDENT = 4 * 2**30
"""Bytes of memory from which on compiled programs are not kept from module to module."""


@pytest.fixture(autouse=True, scope="module")
def _memory_given_back():
  """Compiled programs of all modules together fill gigabytes; those of a few save time."""
  yield
  if _resident_bytes() < MOST_RESIDENT:
    return
  jax.clear_caches()
  gc.collect()
  if sys.platform == "linux":
    ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> float:
  """Memory of this process; infinite where the system does not say."""
  found = pathlib.Path("/proc/self/statm")
  if not found.exists():
    return float("inf")
  return int(found.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def real_data() -> pathlib.Path:
  """Folder with the real datasets; the test is skipped, with the reason, where there is none."""
  beside = pathlib.Path(__file__).parents[2] / "shared" / "data"
  folder = pathlib.Path(os.environ.get("VQJAX_DATA", beside))
  if not folder.is_dir():
    pytest.skip("no real data: set VQJAX_DATA to a folder that holds ptb/, wikitext-2/, ...")
  return folder
