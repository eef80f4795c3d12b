"""A million items need 4 GB: loss, gradient, sample, top-k, save and load of every head."""

import sys

import pytest

from experiments.bench import catalogues
from experiments.plan.isolated import isolated


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("name", catalogues.HEADS)
def test_a_head_of_a_million_items_fits_in_four_gigabytes(name):
  found = isolated(catalogues.measured, name, catalogues.ITEMS)
  assert found["peak_bytes"] < catalogues.MOST_BYTES
