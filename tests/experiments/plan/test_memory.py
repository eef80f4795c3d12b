"""No loss of a large vocabulary holds more than its bound, by any compiler, on one device or eight.

Nothing is run: what a compiler allocates beside arguments and results is in its own account.
"""

import os

import jax
import pytest

import vqjax
from experiments.plan import memory
from vqjax import Head


def test_every_head_has_a_case():
  heads = {name for name in vqjax.__all__ if name.endswith("Head") and name != "Head"}
  heads &= {kind.__name__ for kind in _subclasses(Head)}
  assert len(heads) <= sum(name.endswith("head") for name in memory.CASES) - 1  # two of DPQ


def _subclasses(kind):
  return {kind}.union(*map(_subclasses, kind.__subclasses__()))


# The others compile for minutes in all: `make test-all`.
SOME = ["dense head", "codebook head", "unshared grouped head", "linear_log_prob"]
NAMES = [*memory.CASES] if os.environ.get("VQJAX_EXHAUSTIVE") else SOME


@pytest.fixture
def _as_users_compile():
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.slow
@pytest.mark.usefixtures("_as_users_compile")
@pytest.mark.parametrize("devices", memory.DEVICES)
@pytest.mark.parametrize("compiler", memory.SCRATCH)
@pytest.mark.parametrize("name", NAMES)
def test_temporaries_are_tiles_and_arrays_as_large_as_the_hidden_vectors(name, compiler, devices):
  if extra := memory.missing(compiler):
    pytest.skip(f"needs the extra `{extra}`: pip install 'vqjax[{extra}]'")
  assert memory.temporaries(name, compiler, devices) <= memory.bound(name, compiler)
