"""A compressed row has the trained model's scores, but for the error of its smaller table."""

import dataclasses

import jax
import numpy as np
import pytest

import vqjax
from tests import tiny
from vqjax.lab.config import FROM_TOKENIZER, config_hash
from vqjax.lab.study import Compressed, FromCompressed
from vqjax.lab.study.compressed import moments_of
from vqjax.lab.training import read_run_variables
from vqjax.lab.training.run_folder import load_text


@pytest.mark.slow
def test_an_eight_bit_table_is_a_third_as_large_and_scores_as_the_trained_one(finished):
  run, folder, trained = finished
  row = Compressed("dense", bytes=None, method=vqjax.Int8(16))
  found = row.measure(run, folder)["result"]
  for split in ("valid", "test"):
    assert found[split]["tokens"] == trained[split]["tokens"]
    # A step of 8 bits is 1/127 of the largest number of its 16.
    own, other = found[split]["nats_per_token"], trained[split]["nats_per_token"]
    assert 0 < abs(own - other) < 0.01
  assert found["head"]["state_bytes"] < trained["head"]["state_bytes"] / 3
  assert found["embedding"]["shipped_bytes"] == trained["embedding"]["shipped_bytes"]


def test_where_a_table_is_written_is_no_part_of_a_runs_identity():
  made = [FromCompressed("run", 1 / 16, file=file) for file in ("", "table.safetensors")]
  assert len({*map(config_hash, made)}) == 1


@pytest.mark.slow
def test_a_run_begins_with_the_rows_of_the_file_and_all_else_of_the_other_run(finished, tmp_path):
  run, folder, _ = finished
  text, file = load_text(run), tmp_path / "table.safetensors"
  begun = FromCompressed(str(folder), 1 / 2, file=str(file))(text, text.experiment.model, None)
  trained, _ = read_run_variables(folder)
  head, own = begun["params"].pop("head"), trained["params"].pop("head")
  small = vqjax.SmallTable.load(file)
  assert small.nbytes <= sum(x.nbytes for x in own.values()) / 2
  np.testing.assert_array_equal(head["weight"], small.table())
  jax.tree.map(np.testing.assert_array_equal, begun, trained)


@pytest.mark.slow
def test_a_tied_table_has_the_moments_of_its_two_uses(tmp_path):
  embedding = vqjax.DenseEmbedding(FROM_TOKENIZER, 16)
  run = tiny.experiment(
    tiny.write_text(tmp_path / "text"), vqjax.DenseHead(FROM_TOKENIZER, 16, embedding=embedding)
  )
  run = dataclasses.replace(run, model=run.model.clone(embedding=embedding))
  with tiny.own_cache(tmp_path / "cache"):
    text = load_text(run)
  model = text.experiment.model
  variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8), np.int32))
  found = moments_of(model, variables, text)
  for moment in (found.hidden, found.inputs):
    np.testing.assert_allclose(moment, moment.T, rtol=1e-4, atol=1e-9)
    assert np.linalg.eigvalsh(moment).max() > 0
  assert found.counts.sum() == len(text.splits["train"].tokens)
