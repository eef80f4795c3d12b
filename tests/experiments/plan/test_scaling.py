"""The grid of plans covers its sizes, and shows what is missing or failed."""

import json

import jax
import pytest

from experiments.plan import scaling, scaling_report
from vqjax.lab.training.program import Program
from vqjax.sharding import MeshShape, make_mesh


def test_the_grid_is_weakly_scaled():
  cells = list(scaling.grid(sizes=[16, 1024]))
  assert len(set(cells)) == 2 * 3 * (2 + 1) * 3
  for cell in (cells[0], cells[-1]):
    made = cell.experiment()
    assert made.train.batch * made.model.context == 4096 * cell.chips
    assert made.model.head.vocab == cell.vocab


def test_a_large_decoder_has_the_size_in_its_name():
  for config, size in (("lm_1b", 1e9), ("lm_8b", 8e9)):
    made = scaling.GridCell(config, "dense", 32_768, "v5p", 16).experiment()
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    state = Program(made, mesh).abstract_state
    body = sum(leaf.size for leaf in jax.tree.leaves(state.params["blocks"]))
    assert body == pytest.approx(size, rel=0.02)


def test_failed_cells_are_shown_as_such_and_sizes_without_plans_have_no_column(tmp_path):
  cells = list(scaling.grid(["lm_1b"], devices=["v5p"], sizes=[16, 64]))
  largest = [cell for cell in cells if cell.vocab == cells[-1].vocab]
  rows = dict.fromkeys(cells) | {largest[0]: {"failed": "no memory"}}
  page = tmp_path / "page.md"
  names = "plans", "lm_1b"
  page.write_text("".join(f"<!-- generated: {n} -->\n<!-- end: {n} -->\n" for n in names))
  scaling_report.update(rows, page)
  lines = [
    [c.strip() for c in line.strip("|").split("|")] for line in page.read_text().splitlines()
  ]
  assert ["v5p", "0", "18"] in lines
  assert ["memory", "dense", "failed"] in lines
  assert ["memory", "codebook", "–"] in lines
  assert not any("64 v5p" in line for line in lines)


def test_rows_are_read_back_newest_first(tmp_path):
  cell = scaling.GridCell("lm_1b", "dense", 32_768, "v5p", 16)
  key = {"config": "lm_1b", "head": "dense", "vocab": 32_768, "device": "v5p", "chips": 16}
  file = tmp_path / "rows.jsonl"
  file.write_text("".join(json.dumps(key | more) + "\n" for more in ({"failed": "x"}, {"plan": 1})))
  assert scaling.read_plan_rows(file) == {cell: key | {"plan": 1}}
  file.write_text("{}\n")
  with pytest.raises(ValueError, match=r"rows.jsonl, line 1, is damaged: `config`"):
    scaling.read_plan_rows(file)
