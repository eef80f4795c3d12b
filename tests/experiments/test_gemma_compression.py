"""The page of compressed tables has the figures of the experiments."""

import argparse
import dataclasses
import json
import pathlib
import types

import numpy as np
import pytest

from experiments import gemma_compression
from tests.lm.checkpoints.families import V, small
from vqjax.lm.compression.decoder_tables import DecoderTables
from vqjax.lm.texts import TextWindows
from vqjax.tables import Moments

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_page_has_the_distance_from_an_ideal_coder():
  found, tables = (
    json.loads((DOCS / "results" / name).read_text("utf-8"))["sizes"]
    for name in ("compression-ideal.json", "compression.json")
  )
  page = (DOCS / "results" / "pretrained.md").read_text("utf-8")
  # The file is the one that was judged.
  assert all(row["bytes"] == tables[size]["bytes"] for size, row in found.items())
  assert all(row["step"] == tables[size]["step"] for size, row in found.items())
  more = [100 * (found[size]["bytes"] / found[size]["ideal_bytes"] - 1) for size in ("65", "45")]
  assert f"have {more[0]:.2f} and {more[1]:.2f} % more bytes than an ideal coder" in page


@pytest.fixture(scope="module")
def compression():
  """A small tied model and moments of it."""
  model, variables = small("gemma3_text", vocab_size=V)
  hidden = np.random.default_rng(0).normal(size=(64, model.dim))
  counts = np.random.default_rng(1).integers(0, 50, V)
  return DecoderTables(model, variables, Moments(hidden.T @ hidden / 64, counts, 64))


def test_a_packed_table_has_its_bytes_and_is_kept(compression, tmp_path):
  options = argparse.Namespace(work=tmp_path)
  known, variables = gemma_compression.with_packed_table(options, compression, 0.011)
  # Ranks were reckoned with 4 bytes, and so few rows need 1.
  assert 11_000 - 3 * V - 1 <= known["bytes"] <= 11_000 - 3 * V
  table = compression.made.tables["embedding"]
  error = np.asarray(variables["params"]["embedding"]["weight"]) - table
  assert 0 < (error**2).mean() < 0.1 * table.var()
  again, kept = gemma_compression.with_packed_table(options, compression, 0.011)
  assert again == known
  np.testing.assert_array_equal(
    kept["params"]["embedding"]["weight"], variables["params"]["embedding"]["weight"]
  )


def test_a_table_is_compared_with_an_ideal_coder(compression, tmp_path):
  options = argparse.Namespace(work=tmp_path, sizes=[0.007, 0.008])
  known, _ = gemma_compression.with_coded_table(options, compression, 0.007)
  assert 0.985 * 7000 < known["bytes"] <= 7000
  said = []
  (found,) = gemma_compression.beside_ideal(options, compression, said.append).values()
  assert said[1].startswith("0.008 MB: no table of this calibration is kept")
  assert (found["step"], found["bytes"]) == (known["step"], known["bytes"])
  # Few rows: the histograms are a large part of the file.
  assert 1000 < found["ideal_bytes"] < known["bytes"]


def test_kept_tables_of_other_moments_or_another_version_are_made_again(
  compression, tmp_path, monkeypatch
):
  options = argparse.Namespace(work=tmp_path)
  known, _ = gemma_compression.with_coded_table(options, compression, 0.007)
  assert gemma_compression.kept_table(tmp_path, compression, 0.007) == known
  own = compression.made.moments["embedding"]
  others = dataclasses.replace(own, counts=own.counts + 1)
  other = DecoderTables(compression.model, compression.variables, others)
  assert gemma_compression.kept_table(tmp_path, other, 0.007) is None
  monkeypatch.setattr(
    gemma_compression.container, "VERSION", gemma_compression.container.VERSION + 1
  )
  assert gemma_compression.kept_table(tmp_path, compression, 0.007) is None


def test_rows_of_other_tables_or_another_number_of_tokens_are_judged_again(
  compression, tmp_path, monkeypatch
):
  class Same:
    """Tables whose distributions are those of the model."""

    def __init__(self, model, variables, of):
      self.shape = len(of.tokens), of.tokens.shape[1] - 2

    def compare(self, students):
      names = "kl", "log_prob", "teacher_log_prob", "agrees"
      return [dict.fromkeys(names, np.zeros(self.shape)) for _ in students]

  monkeypatch.setattr(gemma_compression, "Reference", Same)
  domain = np.repeat(np.arange(len(gemma_compression.DOMAINS)), 2)
  tokens = np.zeros((len(domain), gemma_compression.WINDOW), np.int32)
  held_out = TextWindows(tokens, domain, gemma_compression.DOMAINS)

  def judged(identity, count):
    options = argparse.Namespace(work=tmp_path, packed=None, tokens=count)
    tables, kept, said = {"65": {"identity": identity, "bytes": 7}}, [], []
    keep = lambda rows: kept.append(len(rows))
    given = options, None, None, held_out, [None], tables, said.append, keep, {"commit": None}
    gemma_compression.judge(*given)
    assert kept[-1] == len(gemma_compression.DOMAINS)
    return kept[0]

  assert judged("a", 254) == 0
  assert judged("a", 254) == len(gemma_compression.DOMAINS)
  assert judged("b", 254) == 0
  assert judged("b", 300) == 0
  assert judged("a", 254) == len(gemma_compression.DOMAINS)


@pytest.mark.slow
def test_each_form_in_memory_is_timed(compression, tmp_path, monkeypatch):
  options = argparse.Namespace(work=tmp_path, sizes=(0.007,))
  monkeypatch.setattr(gemma_compression, "IN_MEMORY", 0.011)
  monkeypatch.setattr(gemma_compression, "SPEED_TOKENS", 3)
  monkeypatch.setattr(gemma_compression, "ROUNDS", 1)
  tokenizer = types.SimpleNamespace(encode=lambda text: [2, 5, 7])
  found = gemma_compression.generation_speed(options, compression, tokenizer, lambda line: None)
  table = compression.made.tables["embedding"]
  sizes = {name: way["table_bytes"] for name, way in found["ways"].items()}
  assert sizes["original, float32"] == 2 * sizes["original, bfloat16"] == table.nbytes
  # A level a number, and a scale for each 32.
  assert sizes["int8"] == table.size + table.size // 8
  assert 0 < sizes["packed"] < 11_000 + 2 * table.shape[1] ** 2 + 24 * 4 * table.shape[1]
  assert all(way["tokens_per_second"] > 0 for way in found["ways"].values())


def test_the_settings_are_those_of_the_tables(compression):
  found = gemma_compression.result_settings(compression.made.moments["embedding"], np.ones(V))
  assert found["classes"] == len(compression.made.tables_at(1.0)["embedding"].steps)
  assert found["calibration_tokens"] == 64
