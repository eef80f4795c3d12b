"""A plan states what a run holds and sends; a wrong call names the remedy."""

import importlib.util
import json
import math
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from configs.base import language_model
from vqjax import DenseHead
from vqjax.commands import plan as command
from vqjax.lab import chips
from vqjax.lab.config import load_config
from vqjax.lab.plan import compiling, step_plan
from vqjax.lab.plan.collectives import Collective
from vqjax.lab.plan.roofline import roofline
from vqjax.lab.training.program import Program
from vqjax.sharding import MeshShape, make_mesh

ROOT = pathlib.Path(__file__).parents[3]
CONFIG = str(ROOT / "configs" / "lm_dense.py")
SMALL = ["model.layers=1", "train.mesh.fsdp=2", "train.mesh.model=2"]
WITHOUT_LIBTPU = importlib.util.find_spec("libtpu") is None
needs_libtpu = pytest.mark.skipif(WITHOUT_LIBTPU, reason="needs libtpu: pip install 'vqjax[plan]'")

NO_CUDA = not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
needs_cuda = pytest.mark.skipif(NO_CUDA, reason="needs jax[cuda13]: pip install 'vqjax[plan-gpu]'")


@pytest.fixture
def experiment():
  made = language_model("dense", lambda vocab, dim, _: DenseHead(vocab, dim))
  return step_plan.with_vocab_everywhere(made, 512)


def called(capsys, *arguments):
  """Exit code and standard error of the command."""
  code = command.main([CONFIG, "--vocab", "512", *SMALL, *arguments])
  return code, capsys.readouterr().err


def test_held_bytes_are_those_of_real_arrays(experiment):
  mesh = make_mesh(MeshShape(data=2, fsdp=2, model=2), jax.devices()[:8])
  program = Program(experiment, mesh)
  placed = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
  state = jax.tree.map(placed, program.abstract_state)
  one = jax.devices()[3]
  on_one = lambda tree: sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(tree)
    for shard in leaf.addressable_shards
    if shard.device == one
  )
  held = step_plan.held_bytes(program)
  assert held["params"] == on_one(state.params)
  assert held["opt_state"] == on_one(state.opt_state)
  # Adam's two moments lie with the parameter.
  assert held["head"] == 3 * on_one(state.params["head"])
  # Inputs and targets, and a byte a row that says whether it begins anew.
  assert held["batch"] == (2 * 4 * 64 + 1) * 8 // 4


@pytest.mark.slow
def test_a_plan_for_gpus_is_written_whole(tmp_path, capsys):
  file = tmp_path / "new" / "plan.json"
  # bfloat16: its sums over devices once aborted the CPU's compiler.
  low = ["model.dtype=bfloat16", "model.head.dtype=bfloat16"]
  code, _ = called(capsys, *low, "--devices", "8", "--json", str(file))
  assert code == 0
  found = json.loads(file.read_text())
  assert found["chips"] == math.prod(found["mesh"].values()) == 8
  # Only the GPU's own compiler knows its temporaries.
  assert found["fits"] is (None if NO_CUDA else True)
  assert found["flops"] > 0
  assert found["loops_counted_once"] == []
  assert {"all-gather", "all-reduce"} <= {row["kind"] for row in found["collectives"]}
  assert found["sent"] == sum(row["sent"] for row in found["collectives"])


@needs_cuda
@pytest.mark.parametrize("kind", chips.GPUS)
def test_a_program_is_compiled_for_every_gpu_of_the_table(kind):
  mesh = make_mesh(MeshShape(data=2), compiling.gpu_devices(kind, 2))
  square = jax.ShapeDtypeStruct((256, 256), np.float32, sharding=NamedSharding(mesh, P("data")))
  compiled = compiling.compile_lowered(jax.jit(lambda x: (x @ x.T).sum()).lower(square), mesh)
  assert compiled.own
  assert compiled.temporaries > 0
  assert "dot(" in compiled.text


@needs_libtpu
def test_a_plan_for_tpus_needs_no_tpu(tmp_path, capsys):
  file = tmp_path / "plan.json"
  code, error = called(capsys, "--topology", "v5e:2x4", "--json", str(file))
  assert code == 0, error
  found = json.loads(file.read_text())
  assert (found["chips"], found["stage"], found["fits"]) == (8, "optimised", True)
  # So small a step may keep all its temporaries off the chip's main memory.
  assert found["bytes"]["temporaries"] >= 0
  assert found["bytes"]["params"] > 0


@needs_libtpu
@pytest.mark.parametrize("kind", chips.TOPOLOGIES)
def test_every_topology_of_the_table_is_known_to_the_compiler(kind):
  for layout in chips.TOPOLOGIES[kind][1]:
    devices = compiling.tpu_devices(f"{kind}:{layout}")
    assert len(devices) == math.prod(int(n) for n in layout.split("x"))


def test_a_missing_compiler_names_the_extra(capsys, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  code, error = called(capsys, "--topology", "v5e:4x4")
  assert code == 2
  assert "vqjax[plan]" in error


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--devices", "8", "train.mesh.data=3"], "must have at most 8 devices; got 12"),
    (["--devices", "8", "train.batch=7"], "must be divisible by"),
    (["--devices", "8", "--device-kind", "H1"], "`device_kind` must be one of A100"),
    (["--devices", "4096"], "`count` must be at most 8"),
    (["--devices", "8", "--vocab", "-1"], "`--vocab` must be at least 1; got -1"),
    ([], "`--topology` and `--devices`"),
    (["--topology", "v5e:32x32"], "'v5e:32x32'"),
    (["--topology", "v5e:32x32"], "16x16"),
  ],
)
def test_a_wrong_call_names_the_remedy(capsys, arguments, message):
  code, error = called(capsys, *arguments)
  assert code == 2
  assert message in error
  # The vocabulary of a tokenizer must be given.
  assert command.main([CONFIG, "--devices", "8"]) == 2
  assert "`--vocab` must be given" in capsys.readouterr().err


def test_the_roofline_is_the_longest_of_its_limits():
  chip = chips.Chip("toy", 100.0, 1, 10.0, 5.0, node=8, network=1.0)
  near = Collective("all-gather", 20, 2, ("model",), 1, 1)
  far = Collective("all-reduce", 2, 2, ("data",), 8, 3)
  found = roofline(chip, 300.0, 20.0, [near, far])
  assert (found.compute, found.memory) == (3.0, 2.0)
  assert found.network == 10 / 5 + 6 / 1
  assert (found.seconds, found.limit) == (8.0, "network")


def test_another_vocabulary_leaves_the_table_of_ngrams_its_rows():
  made = load_config(ROOT / "configs" / "lm_1b_ngrams.py")
  lookup = step_plan.with_vocab_everywhere(made, 512).model.memories[0].lookup
  assert lookup.ngrams.vocab == 512
  assert 300_000_000 < lookup.table.vocab < 301_000_000
  lookup.check()
