"""A compressed row has the trained model's scores, but for the error of its smaller table."""

import pytest

import vqjax
from vqjax.lab.study import Compressed
from vqjax.lab.study.compressed import measure_compressed


@pytest.mark.slow
def test_an_eight_bit_table_is_a_third_as_large_and_scores_as_the_trained_one(finished):
  run, folder, trained = finished
  row = Compressed("dense", bytes=None, method=vqjax.Int8(16))
  found = measure_compressed(run, folder, row)["result"]
  for split in ("valid", "test"):
    assert found[split]["tokens"] == trained[split]["tokens"]
    # A step of 8 bits is 1/127 of the largest number of its 16.
    own, other = found[split]["nats_per_token"], trained[split]["nats_per_token"]
    assert 0 < abs(own - other) < 0.01
  assert found["head"]["state_bytes"] < trained["head"]["state_bytes"] / 3
  assert found["embedding"]["shipped_bytes"] == trained["embedding"]["shipped_bytes"]
