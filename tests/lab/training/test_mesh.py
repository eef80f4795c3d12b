"""A run on eight devices equals that on one device, and each device holds its share."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tests import tiny
from tests.lab.training.test_step import counting_model
from vqjax import CodebookHead, DenseEmbedding, DenseHead, GroupedHead, Int8Embedding
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Windows
from vqjax.lab.training import RowwiseTables, fit, read_run_variables
from vqjax.lab.training.checkpoint import Checkpoints
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.step import _leaf_checksum
from vqjax.lm.models import Transformer
from vqjax.ngrams import NGramEmbedding, NGramMemory
from vqjax.ops.ngrams import XorHash
from vqjax.sharding import MeshShape, make_mesh

PRIME = 53
HEADS = {
  "dense": lambda e: DenseHead(PRIME, 16, use_bias=True),
  "tied": lambda e: DenseHead(PRIME, 16, embedding=e),
  "codebook": lambda e: CodebookHead(PRIME, 16, codes=8, token_bias=True),
  "grouped": lambda e: GroupedHead(PRIME, 16, use_bias=True),
}
ONE, ALL_AXES = (1, 1, 1), (2, 2, 2)


def small(head="dense", **train):
  embedding = DenseEmbedding(PRIME, 16)
  fields = {"dim": 16, "layers": 2, "heads": 2, "context": 8, "dropout": 0.1}
  model = Transformer(embedding=embedding, head=HEADS[head](embedding), **fields)
  settings = Train(**({"batch": 8, "steps": 10, "warmup": 2} | train))
  return Experiment("small", model, None, None, Windows(), settings)


def program(experiment, shape):
  return Program(experiment, make_mesh(MeshShape(*shape)))


def text(rows=8):
  tokens = np.random.default_rng(0).integers(0, PRIME, (rows, 9)).astype(np.int32)
  return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def ten_steps(experiment, shape):
  """Returns losses and gradient norms, Adam's state after one step, and the last parameters."""
  on = program(experiment, shape)
  state, batch, rows = on.init(keys(0)[0]), on.place(text()), []
  for _ in range(10):
    state, metrics = on.step(state, batch)
    rows.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    if len(rows) == 1:
      first = jax.device_get(state.opt_state)
  return np.array(rows), first, jax.device_get(state.params)


@pytest.fixture(scope="module")
def one_device():
  return functools.cache(lambda head: ten_steps(small(head), ONE))


# On a mesh of all axes, and with all parameters sharded over the batch's axis.
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("head", "shape"), [("tied", ALL_AXES), ("grouped", (1, 8, 1))])
def test_loss_gradient_and_ten_steps_equal_those_of_one_device(head, shape, one_device):
  expected, found = one_device(head), ten_steps(small(head), shape)
  # A sum in another order: of 64 tokens' terms of one size, 64 · 2^-24 = 4e-6 of it.
  np.testing.assert_allclose(found[0], expected[0], rtol=4e-6)
  close = lambda atol: lambda a, b: np.testing.assert_allclose(a, b, atol=atol)
  # Adam keeps a tenth of a gradient whose norm is at most 1.
  jax.tree.map(close(4e-7), found[1], expected[1])
  # Adam divides a gradient by its own size: one that nearly cancels keeps three digits of the
  # seven. Ten steps of at most 1e-3 then differ by 1e-5.
  jax.tree.map(close(1e-5), found[2], expected[2])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [ALL_AXES, (1, 8, 1)])
def test_blocks_beside_a_memory_train_alike_on_any_mesh(shape):
  ngrams = XorHash.qwen4(PRIME, end=0, heads=2, least=50)
  rows = ngrams.rows + -ngrams.rows % 8
  memory = NGramMemory(NGramEmbedding(ngrams, DenseEmbedding(rows, 4)), 16)
  run = small()
  fields = {"layers": 4, "remat": True, "memories": (memory,), "memory_blocks": (1,)}
  run = dataclasses.replace(run, model=run.model.clone(**fields))
  expected, found = ten_steps(run, ONE), ten_steps(run, shape)
  np.testing.assert_allclose(found[0], expected[0], rtol=4e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found[2], expected[2])
  table = program(run, shape).abstract_state.params["memories_0"]["lookup"]["table"]["weight"]
  assert table.sharding.spec == P(("fsdp", "model"), None)


def int8(**train):
  """A decoder whose tied table is trained in bytes."""
  experiment = small("tied", optimizer=RowwiseTables(), **train)
  embedding = Int8Embedding(PRIME, 16, trained=True, group=16)
  model = experiment.model.clone(embedding=embedding, head=HEADS["tied"](embedding))
  return dataclasses.replace(experiment, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [ALL_AXES, (1, 1, 8)])
def test_a_table_trained_in_bytes_is_rounded_alike_on_any_mesh(shape):
  expected, found = ten_steps(int8(), ONE), ten_steps(int8(), shape)
  # Another order of a sum may round a number to its other neighbour, which later steps see.
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-3)
  levels, others = (tree[2]["embedding"]["levels"] for tree in (found, expected))
  assert levels.dtype == np.int8
  assert np.mean(levels != others) < 0.02
  assert np.abs(levels.astype(int) - others).max() <= 2
  state = program(int8(), shape).abstract_state
  moments = optax.tree_utils.tree_get(state.opt_state, "moments")["embedding"]["levels"]
  # 53 rows are not divisible, so that their width is sharded where that is.
  width = state.params["embedding"]["levels"].sharding.spec[1]
  assert width
  assert moments.sharding.spec[0] == state.params["embedding"]["levels"].sharding.spec[0]


@pytest.mark.slow
def test_a_run_with_a_table_in_bytes_is_resumed_bit_for_bit(tmp_path):
  embedding = Int8Embedding(FROM_TOKENIZER, 16, trained=True, group=8)
  text = tiny.write_text(tmp_path / "text")
  head = DenseHead(FROM_TOKENIZER, 16, embedding=embedding)
  run = tiny.experiment(text, head, optimizer=RowwiseTables())
  run = dataclasses.replace(run, model=run.model.clone(embedding=embedding))
  fit(run, tmp_path / "whole")
  losses = [row["loss"] for row in tiny.rows(tmp_path / "whole") if "loss" in row]
  assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1
  assert "after step 17," in tiny.fit_and_interrupt(run, tmp_path / "cut", 17)
  fit(run, tmp_path / "cut")
  whole, cut = (read_run_variables(tmp_path / name) for name in ("whole", "cut"))
  jax.tree.map(np.testing.assert_array_equal, whole, cut)


def arrays_in_shares(tree, devices, vocab_only):
  """Whether each device holds exactly its share of every large array (of the vocabulary)."""
  large = [x for x in jax.tree.leaves(tree) if x.size >= 16 * PRIME]
  large = [x for x in large if PRIME in x.shape or not vocab_only]
  assert large
  return all(x.addressable_shards[0].data.size * devices == x.size for x in large)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 8, 1), (1, 1, 8)])
def test_every_device_holds_an_eighth_of_parameters_and_moments(shape):
  on = program(small(), shape)
  # Two attention heads cannot be spread over eight devices along `model`.
  in_shares = lambda tree: arrays_in_shares(tree, 8, vocab_only=shape[2] == 8)
  state = on.init(keys(0)[0])
  assert in_shares(state.params)
  assert in_shares(state.opt_state)
  state, _ = on.step(state, on.place(text()))
  assert in_shares((state.params, state.opt_state))


def wide():
  """Returns a model whose parameters are far larger than its activations."""
  embedding = DenseEmbedding(1024, 128)
  fields = {"dim": 128, "layers": 4, "heads": 8, "context": 8}
  model = Transformer(embedding=embedding, head=DenseHead(1024, 128), **fields)
  return Experiment("wide", model, None, None, Windows(), Train(batch=64, mesh=MeshShape(1, 8, 1)))


@pytest.mark.slow
def test_initialisation_never_holds_an_unsharded_copy():
  on = program(wide(), (1, 8, 1))
  memory = on.init.lower(keys(0)[0]).compile().memory_analysis()
  largest = max(x.size * 4 for x in jax.tree.leaves(on.abstract_state.params))
  assert memory.temp_size_in_bytes < largest
  whole = sum(x.size * 4 for x in jax.tree.leaves(on.abstract_state))
  assert memory.output_size_in_bytes < whole / 7


@pytest.mark.slow
def test_the_devices_share_the_arithmetic():
  flops, shape = {}, (2, 2, 2)
  for mesh in (ONE, shape):
    on = program(wide(), mesh)
    compiled = on.step.lower(on.abstract_state, on.abstract_batch).compile()
    flops[mesh] = compiled.cost_analysis()["flops"]
  assert flops[shape] < flops[ONE] / 8 * 1.3


@pytest.mark.slow
@pytest.mark.parametrize(
  "made",
  [
    lambda: small("codebook"),
    lambda: small("codebook", trainable=("head.codebook", "embedding")),
    lambda: dataclasses.replace(small(), model=counting_model()),
  ],
  ids=["whole", "partly trained", "counts"],
)
def test_a_checkpoint_of_eight_devices_is_restored_on_one_and_back(made, tmp_path):
  eight, one = (program(made(), shape) for shape in (ALL_AXES, ONE))
  batch = jax.tree.map(lambda x: x % 16, text())
  state, _ = eight.step(eight.init(keys(0)[0]), eight.place(batch))
  expected = jax.device_get(state)
  for counts in state.model_state.get("counts", {}).values():
    np.testing.assert_array_equal(counts["seen"], np.bincount(batch["targets"].ravel(), None, 16))
    assert counts["seen"].addressable_shards[0].data.shape == (8,)
  for folder, there in (("eight", one), ("one", eight)):
    checkpoints = Checkpoints(tmp_path / folder, keep=1)
    checkpoints.save(state, {})
    checkpoints.wait()
    state = checkpoints.restore(there.abstract_state).state
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), expected)
    placed = jax.tree.map(lambda x, like: x.sharding == like.sharding, state, there.abstract_state)
    assert all(jax.tree.leaves(placed))


@pytest.mark.slow
def test_a_run_begun_on_eight_devices_ends_on_one(experiment, tmp_path):
  on = lambda *shape: dataclasses.replace(
    experiment, train=dataclasses.replace(experiment.train, mesh=MeshShape(*shape))
  )
  assert "after step 1," in tiny.fit_and_interrupt(on(2, 2, 2), tmp_path, 1)
  result = fit(on(1, 1, 1), tmp_path)
  assert result["status"] == "finished"
  assert result["mesh"] == {"data": 1, "fsdp": 1, "model": 1}
  assert sorted({row["step"] for row in tiny.rows(tmp_path)}) == list(range(1, 41))


@pytest.mark.parametrize("train", [{"batch": 6}, {"batch": 8, "accumulate": 4}])
def test_a_batch_that_the_devices_do_not_divide_is_refused_with_the_numbers(train):
  micro = train["batch"] // train.get("accumulate", 1)
  with pytest.raises(ValueError, match=rf"train.batch.*data=2 x fsdp=2.*{micro} rows"):
    program(small(**train), (2, 2, 2))


@dataclasses.dataclass(frozen=True)
class Rows:
  """An optimiser with a number of state for each row of a matrix."""

  learning_rate = staticmethod(lambda train: lambda step: train.learning_rate)

  def rule(self, train):
    """Adafactor's, without a state of columns."""
    init = lambda params: Row(jax.tree.map(lambda x: x[..., 0] if x.ndim > 1 else x, params))
    return optax.GradientTransformation(init, lambda updates, state, params: (updates, state))


class Row(NamedTuple):
  """State of a rule."""

  of: Any


def test_a_number_for_each_row_lies_with_its_row():
  on = program(small(optimizer=Rows()), (1, 8, 1))
  kernel = lambda tree: tree["blocks"]["mlp_in"]["kernel"].sharding.spec
  assert "fsdp" in kernel(on.abstract_state.params)
  (state,) = jax.tree.leaves(on.abstract_state.opt_state, is_leaf=lambda x: isinstance(x, Row))
  assert tuple(kernel(state.of)) == kernel(on.abstract_state.params)[:-1]


def test_a_model_without_logical_axes_is_replicated():
  class Unnamed(Transformer):
    logical_axes = None

  experiment = small()
  fields = {f: getattr(experiment.model, f) for f in ("dim", "layers", "heads", "context")}
  model = Unnamed(experiment.model.embedding, experiment.model.head, **fields)
  on = program(dataclasses.replace(experiment, model=model), (8, 1, 1))
  assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(on.abstract_state))


def test_a_checksum_is_the_weighted_sum_of_the_bits_in_their_order():
  for shape in ((), (7,), (3, 5, 2)):
    x = np.float32(np.random.default_rng(1).normal(size=shape))
    bits = np.asarray(x).view(np.uint32).ravel().astype(object)
    exact = sum(int(b) * (2 * i + 1) for i, b in enumerate(bits)) % 2**32
    assert int(jax.jit(_leaf_checksum)(x)) == exact
    assert math.prod(shape) == len(bits)
  assert int(jax.jit(_leaf_checksum)(np.array([True, False, True]))) == 1 + 5
