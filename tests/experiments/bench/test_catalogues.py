"""A million items need 4 GB: loss, gradient, sample, top-k, save and load of every head."""

import os
import sys

import pytest

from experiments.bench import catalogues
from experiments.plan.isolated import isolated

# The others take minutes each: `make test-all`.
SOME = ["codebook"]
NAMES = [*catalogues.HEADS] if os.environ.get("VQJAX_EXHAUSTIVE") else SOME


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("name", NAMES)
def test_a_head_of_a_million_items_fits_in_four_gigabytes(name):
  found = isolated(catalogues.measured, name, catalogues.ITEMS)
  assert found["peak_bytes"] < catalogues.MOST_BYTES
