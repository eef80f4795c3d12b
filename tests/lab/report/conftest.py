"""Run folders for the tests of reports."""

import math

import pytest

from tests import tiny
from vqjax.lm import records


def quality(perplexity: float) -> dict:
  nats = math.log(perplexity)
  return {"nats_per_token": nats, "perplexity": perplexity, "bits_per_byte": nats / 2}


@pytest.fixture
def write_run(tmp_path):
  """Writes a run folder below `tmp_path / "runs"`, unfinished without `result`."""

  def write(folder: str, result: dict | None, steps: int = 40, config: dict | None = None):
    path = tmp_path / "runs" / folder
    path.mkdir(parents=True)
    own = {"name": folder, "seed": 0, **(config or {})}
    records.write(path / "config.json", {"hash": "0123456789ab", "config": own, "data": {}})
    rows = [{"step": s, "loss": 5 + 4 * math.exp(-s / 9)} for s in range(1, steps + 1)]
    rows += [{"step": steps, "valid": quality(150.0)}] if steps else []
    tiny.write_rows(path, rows)
    if result is not None:
      records.write(path / "result.json", result)
    return path

  return write


@pytest.fixture
def finished():
  """The result of a finished run, as a function of what the tests vary."""

  dense = {"class": "vqjax.heads.dense.DenseHead", "params": 1_570_000, "state_bytes": 6_400_000}

  def make(name="dense", perplexity=120.0, seconds=0.01, **more) -> dict:
    return {
      "name": name,
      "status": "finished",
      "config_hash": "0123456789ab",
      "seed": 17,
      "commit": "c0ffee",
      "device": "cpu",
      "versions": {"jax": "0.10.0"},
      "date": "2026-01-02",
      "valid": quality(perplexity * 1.1),
      "test": quality(perplexity),
      "head": dense,
      "model": {"params": 4_770_000, "state_bytes": 19_080_000},
      "loss": {"seconds": seconds, "temp_bytes": 270 * 2**20, "tokens": 8192},
      "train": {"steps": 40, "tokens_per_second": 137_000.0},
    } | more

  return make


@pytest.fixture
def demo(write_run, finished, tmp_path):
  """A folder with a dense, a codebook, a failed and an unfinished run."""
  write_run("a_dense", finished())
  head = {"class": "vqjax.heads.codebook.CodebookHead", "params": 98_304, "state_bytes": 425_984}
  write_run("b_codebook", finished("codebook", perplexity=200.5, seconds=0.0025, head=head))
  write_run("c_failed", {"name": "broken", "status": "failed", "error": "loss is nan <b>"})
  write_run("d_started", None, steps=7)
  return tmp_path / "runs"
