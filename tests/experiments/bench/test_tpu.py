"""Tests of the page of losses on absent TPUs; nothing is compiled."""

import json

import pytest

from experiments.bench import tpu


def row(program, milliseconds):
  return {
    "program": program, "chip": "v5e", "dim": 2048, "vocab": 131072, "seconds": milliseconds / 1e3,
    "least_seconds": 0.134, "temp_bytes": 2**27, "parts": [["fusion.1 (dot)", "f32[8]", 3, 0.05]],
  }  # fmt: skip


@pytest.fixture
def results(tmp_path):
  path = tmp_path / "rows.jsonl"
  rows = row(tpu.OURS, 200.0), row(tpu.PEERS[0], 300.0), row(tpu.PEERS[1], 250.0)
  rows += row(f"{tpu.DENSE_BFLOAT16}, 1", 400.0), row("certified over float32, 1", 200.0)
  path.write_text("".join(json.dumps(one) + "\n" for one in (*rows, row(tpu.OURS, 190.0))))
  return path


def test_every_time_is_called_estimated_and_ours_has_its_ratio_to_the_best_peer(results, tmp_path):
  table = tmp_path / "page.md"
  table.write_text(
    "".join(f"<!-- generated: {x} -->\n<!-- end: {x} -->\n" for x in ("times", "decoding"))
  )
  tpu.render_losses(tpu.read_loss_rows(results), table)
  lines = table.read_text().splitlines()
  for header in (line for line in lines if line.startswith(("| D", "| program"))):
    assert "v5e, estimated" in header
  assert len((tmp_path / "page.csv").read_text().splitlines()) == 1 + 3
  # The newest row of a cell counts: 190 of 250 ms.
  assert any("190.0 (71%), 0.76×" in line for line in lines)
  assert any("certified over float32" in line and "(67%), 2.00×" in line for line in lines)


def test_what_has_an_estimate_is_not_compiled_again(results, monkeypatch):
  monkeypatch.setattr(tpu, "isolated", lambda *_: pytest.fail("compiled"))
  before = results.read_text()
  tpu.fill_losses(results, list(tpu.read_loss_rows(results)))
  assert results.read_text() == before


def test_a_line_that_is_no_row_is_named(tmp_path):
  (tmp_path / "rows.jsonl").write_text('{"program": 1}\n')
  with pytest.raises(ValueError, match=r"line 1 .* must be an estimate"):
    tpu.read_loss_rows(tmp_path / "rows.jsonl")
