"""Does the grouped bench count what the paper counts, and keep what it has measured?"""

import json

import jax
import numpy as np
import pytest

from experiments.bench import group_sizes as grouped_sizes
from experiments.bench import grouped as bench_grouped
from experiments.bench import training_step as grouped_cost
from experiments.bench.training_step import CONTENDERS, Decoder, experiment, macs
from vqjax import DenseHead, GroupedHead
from vqjax.lab.training.program import Program
from vqjax.sharding import MeshShape, make_mesh


@pytest.mark.parametrize(("dim", "millions"), [(128, 8.1), (2048, 506.8)])
def test_decoders_have_the_papers_parameters(dim, millions):
  one = make_mesh(MeshShape(), jax.devices()[:1])
  state = Program(experiment(Decoder(dim), CONTENDERS["gpt-2"]), one).abstract_state
  count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  assert count / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize(
  ("name", "dim", "attention", "billions"),
  [
    ("gpt-2", 128, False, 4.10),
    ("gpt-neo", 128, True, 4.64),
    ("gpt-neo", 1024, True, 82.0),
    ("grouped", 128, False, 0.83),
    ("grouped", 1024, False, 52.0),
  ],
)
def test_operations_are_those_of_table_3(name, dim, attention, billions):
  decoder = Decoder(dim)
  work = macs(decoder, experiment(decoder, CONTENDERS[name]).model.head)
  counted = work["weights"] + attention * work["attention"]
  assert counted / 1e9 == pytest.approx(billions, rel=0.01)


def test_figure_3_has_the_papers_sizes():
  sizes = bench_grouped.FULL.sizes
  assert len(sizes) == 56
  assert (sizes[0], sizes[-1]) == (6, 8372)
  assert grouped_sizes.equal(50_258, 8372) == (*[8372] * 6, 26)
  assert grouped_sizes.equal(21, 7) == (7, 7, 7)


def test_sizes_near_the_least_memory_are_told():
  peaks = {3: 200, 5: 101, 7: 100, 11: 102, 13: 103}
  rows = [
    {"size": s, "peak_bytes": p, "head_temp_bytes": s, "untiled_temp_bytes": 2 * p}
    for s, p in peaks.items()
  ]
  found = grouped_sizes.least(100, rows)
  assert found["step"] == {"size": 7, "bytes": 100, "near": [5, 11]}
  assert found["head"] == {"size": 3, "bytes": 3, "near": [3, 3]}
  assert found["untiled"] == {"size": 7, "bytes": 200, "near": [5, 11]}
  assert (found["sqrt"], found["corrected"]) == (10, 5)


def test_untiled_and_materialised_losses_are_those_of_the_heads():
  keys = jax.random.split(jax.random.key(0), 2)
  hidden = jax.random.normal(keys[0], (11, 6))
  tokens = jax.random.randint(keys[1], (11,), 0, 31)
  groups = grouped_sizes.equal(31, 7)
  pairs = (
    (grouped_sizes.UntiledHead(31, 6, sizes=groups), GroupedHead(31, 6, sizes=groups)),
    (grouped_cost.MaterialisedHead(31, 6), DenseHead(31, 6)),
  )

  def both(own, head):
    variables = head.init(keys[0], hidden)
    return tuple(one.apply(variables, hidden, tokens, method="log_prob") for one in (own, head))

  for found, expected in jax.jit(lambda: [both(*pair) for pair in pairs])():
    np.testing.assert_allclose(found, expected, atol=1e-5)  # float32 sums of 31 terms


def test_grouped_bench_prints_and_writes_every_part(tmp_path, capsys, monkeypatch):
  few = {name: CONTENDERS[name] for name in ("gpt-2", "grouped")}
  monkeypatch.setattr(grouped_cost, "CONTENDERS", few)
  monkeypatch.setattr(grouped_cost, "LEAST_SECONDS", 0.0)
  monkeypatch.setattr(bench_grouped, "QUICK", bench_grouped.QUICK._replace(sizes=(7,)))
  file = tmp_path / "new" / "cost.json"
  assert bench_grouped.main(["--quick", "--json", str(file)]) == 0
  figures, out = json.loads(file.read_text()), capsys.readouterr().out
  for text in ("faster than tiled", "slower, unshared", "tokens/s", "head alone", "of the step"):
    assert text in out
  assert figures["loss"]["rows"]["materialised"]["faster_than_materialised"] == 1
  assert figures["steps"].keys() == {"8"}
  for row in figures["steps"]["8"].values():
    assert row["tokens_per_s"] == pytest.approx(16 / row["step_seconds"])
    assert 0 < row["temp_bytes"] < row["peak_bytes"]
    assert row["without_remat"]["peak_bytes"] > 0
  assert [(r["size"], r["groups"]) for r in figures["sizes"]] == [(7, 73)]
  assert figures["least"]["sqrt"] == 22
  assert figures["images"]["draw_of_step"] > 0
  assert figures["provenance"].keys() == bench_grouped.PARTS.keys()


def test_steps_beyond_the_budget_or_the_device_are_compiled_alone(monkeypatch):
  class Fake:
    peak_bytes, temp_bytes, params = 10, 5, 1

    def __init__(self, run):
      self.large = run.model.dim > 16

    def __call__(self):
      assert not self.large
      return 100.0

    def end(self):
      pass

  monkeypatch.setattr(grouped_cost, "Stepping", Fake)
  small, large = (Decoder(dim, layers=1, heads=2, vocab=509) for dim in (8, 32))
  *_, found = grouped_cost.tables_2_and_3([small, large], budget_seconds=1e-9)
  assert "tokens_per_s" in found["8"]["grouped"]
  assert found["32"]["grouped"]["peak_bytes"] == 10
  assert "tokens_per_s" not in found["32"]["grouped"]
  monkeypatch.setattr(grouped_cost, "device_bytes", lambda: 9)
  *_, found = grouped_cost.tables_2_and_3([small], budget_seconds=100)
  assert "tokens_per_s" not in found["8"]["grouped"]


def test_a_part_is_kept_and_measured_again_alone(tmp_path, monkeypatch):
  file = tmp_path / "cost.json"

  def interrupted(scale, budget):
    yield {"steps": {"8": 1}}
    raise KeyboardInterrupt

  monkeypatch.setattr(
    bench_grouped, "PARTS", {"loss": lambda *_: [{"loss": 7}], "steps": interrupted}
  )
  with pytest.raises(KeyboardInterrupt):
    bench_grouped.main(["--quick", "--json", str(file)])
  before = json.loads(file.read_text())
  assert (before["loss"], before["steps"]) == (7, {"8": 1})
  monkeypatch.setitem(bench_grouped.PARTS, "steps", lambda *_: [{"steps": {"8": 2}}])
  assert bench_grouped.main(["--json", str(file), "--only", "steps"]) == 0
  after = json.loads(file.read_text())
  assert (after["loss"], after["steps"]) == (7, {"8": 2})
  assert after["provenance"]["loss"] == before["provenance"]["loss"]
  assert not after["provenance"]["steps"]["quick"]


def test_a_file_of_something_else_is_not_written_over(tmp_path, capsys):
  file = tmp_path / "other.json"
  for text in ("{", "[]", '{"name": 1}'):
    file.write_text(text)
    with pytest.raises(SystemExit, match="2"):
      bench_grouped.main(["--quick", "--json", str(file)])
    assert "other.json holds no figures of this bench" in capsys.readouterr().err
    assert file.read_text() == text


def test_an_unknown_part_is_refused(capsys):
  with pytest.raises(SystemExit):
    bench_grouped.main(["--only", "loss,speed"])
  assert "no part speed; there are loss, steps, sizes, images" in capsys.readouterr().err
