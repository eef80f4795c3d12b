"""Counts of operations and of sent bytes equal those made by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from vqjax.lab.plan import hlo, loops
from vqjax.lab.plan.collectives import collectives, parse_groups, spanned
from vqjax.lab.plan.compiling import compile_lowered
from vqjax.lab.plan.flops import matmul_flops

M, K, N, TRIPS = 24, 40, 16, 7


@pytest.fixture(scope="module")
def mesh():
  return jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:8])


def compiled(function, mesh, *arrays):
  """The partitioned program of a function of arrays that are given as (shape, spec)."""
  place = lambda shape, spec: jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=NamedSharding(mesh, spec)
  )
  with jax.set_mesh(mesh):
    lowered = jax.jit(function).lower(*(place(*array) for array in arrays))
    result = compile_lowered(lowered, mesh)
  assert result.stage == "partitioned"
  program = hlo.parse_hlo(result.text)
  return program, loops.runs(program)


def sent(program, runs, mesh):
  """(kind, axes, bytes, times), of scalars and up."""
  found = collectives(program, runs, dict(mesh.shape))
  return sorted((one.kind, one.axes, one.bytes, one.times) for one in found)


def test_products_in_a_scan_under_shard_map_count_once_a_trip(mesh):
  def body(x, w):
    step = lambda carry, _: (jnp.sin(carry @ w), None)
    return lax.scan(step, x, None, length=TRIPS)[0]

  spread = jax.shard_map(body, in_specs=(P("data"), P()), out_specs=P("data"))
  program, runs = compiled(spread, mesh, ((M, K), P("data")), ((K, K), P()))
  assert runs.unknown == ()
  assert matmul_flops(program, runs) == 2 * (M // 2) * K * K * TRIPS


def test_nested_loops_multiply_from_any_start(mesh):
  def nested(x, w):
    inner = lambda _, x: jnp.sin(x @ w)
    return lax.fori_loop(3, 8, lambda _, x: lax.fori_loop(-2, 9, inner, x), x)

  program, runs = compiled(nested, mesh, ((M, K), P("data")), ((K, K), P()))
  assert matmul_flops(program, runs) == 2 * (M // 2) * K * K * 5 * 11


def test_a_loop_of_unknown_length_is_counted_once_and_named(mesh):
  def until_small(x, w):
    return lax.while_loop(lambda x: x.sum() > 1, lambda x: jnp.sin(x @ w), x)

  program, runs = compiled(until_small, mesh, ((M, K), P()), ((K, K), P()))
  assert len(runs.unknown) == 1
  assert matmul_flops(program, runs) == 2 * M * K * K


def test_a_product_over_a_spread_axis_is_reduced_along_it(mesh):
  program, runs = compiled(
    lambda x, w: jnp.sum(x @ w), mesh, ((M, K), P("data", "model")), ((K, N), P("model"))
  )
  assert matmul_flops(program, runs) == 2 * (M // 2) * (K // 4) * N
  kinds = {(kind, axes) for kind, axes, _, _ in sent(program, runs, mesh)}
  assert kinds <= {("all-reduce", ("model",)), ("all-reduce", ("data",))} | {
    ("all-reduce", ("data", "model"))
  }
  assert kinds


def test_psum_in_a_loop_sends_its_operand_once_a_trip(mesh):
  def body(x):
    step = lambda carry, _: (lax.psum(jnp.sin(carry), "model") / 4, None)
    return lax.scan(step, x, None, length=TRIPS)[0]

  spread = jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), check_vma=False)
  program, runs = compiled(spread, mesh, ((M, K), P("data")))
  assert sent(program, runs, mesh) == [("all-reduce", ("model",), 4 * (M // 2) * K, TRIPS)]
  (one,) = collectives(program, runs, dict(mesh.shape))
  assert one.sent == 2 * 3 / 4 * 4 * (M // 2) * K * TRIPS


PART = 4 * (M // 2) * (K // 4)


@pytest.mark.parametrize(
  ("function", "expected"),
  [
    (lambda x: lax.all_gather(x, "model"), ("all-gather", ("model",), 4 * PART, 1)),
    (lambda x: lax.psum(x, ("data", "model")), ("all-reduce", ("data", "model"), PART, 1)),
    (lambda x: lax.psum_scatter(x, "data"), ("reduce-scatter", ("data",), PART, 1)),
    (
      lambda x: lax.all_to_all(x.reshape(4, -1), "model", 0, 1),
      ("all-to-all", ("model",), PART, 1),
    ),
    (
      lambda x: lax.ppermute(x, "model", [(at, (at + 1) % 4) for at in range(4)]),
      ("collective-permute", ("model",), PART, 1),
    ),
  ],
)
def test_each_kind_is_found_with_its_axes_and_bytes(mesh, function, expected):
  # Two rows, so that `psum_scatter` has a row for each device of `data`.
  body = lambda x: jnp.sum(function(x.reshape(2, -1)))[None, None]
  spread = jax.shard_map(
    body, in_specs=P("data", "model"), out_specs=P("data", "model"), check_vma=False
  )
  program, runs = compiled(spread, mesh, ((M, K), P("data", "model")))
  assert expected in sent(program, runs, mesh)


def test_an_all_reduce_that_is_sliced_at_once_is_a_reduce_scatter(mesh):
  def product(x, w):
    return lax.with_sharding_constraint(x @ w, P("model"))

  program, runs = compiled(product, mesh, ((M, K), P(None, "model")), ((K, N), P("model")))
  assert sent(program, runs, mesh) == [("reduce-scatter", ("model",), 4 * M * N, 1)]


@pytest.mark.parametrize(
  ("text", "groups"),
  [
    ("{{0,2},{1,3}}, to_apply=%add", [[0, 2], [1, 3]]),
    ("{}", [[0, 1, 2, 3]]),
    ("[2,2]<=[4], dimensions={0}", [[0, 1], [2, 3]]),
    ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
    ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
    ("mesh['a'=2,'b'=2] {'a'}, x=1", [[0, 2], [1, 3]]),
    ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
    ("mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
    ("mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
  ],
)
def test_groups_are_read_in_every_form(text, groups):
  assert np.array_equal(parse_groups(text, 4), groups)


def test_unknown_groups_are_an_error():
  with pytest.raises(ValueError, match=r"`replica_groups` .*got '<odd>'"):
    parse_groups("<odd>", 4)


def test_groups_span_the_axes_along_which_they_differ():
  mesh = {"data": 2, "fsdp": 3, "model": 5}
  assert spanned(np.arange(30).reshape(-1, 5), mesh) == ("model",)
  assert spanned(np.arange(30).reshape(-1, 15), mesh) == ("fsdp", "model")
  assert spanned(np.array([[0, 15]]), mesh) == ("data",)


ASYNC = """\
HloModule pair, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inside (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %permuted = bf16[8,4]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (x: bf16[8,4]) -> f32[] {
  %x = bf16[8,4]{1,0} parameter(0)
  %start = (bf16[8,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%x), replica_groups=[2,2]<=[4]
  %done = bf16[16,4]{1,0} all-gather-done(%start)
  %go = ((bf16[8,4]), bf16[8,4], s32[]) async-start(%x), calls=%inside
  %came = bf16[8,4]{1,0} async-done(%go), calls=%inside
  %c = (f32[], /*index=1*/f32[6]{0}) all-reduce(%y, %z), replica_groups={}, to_apply=%add
  %y = f32[] constant(1)
  %z = f32[6]{0} constant({1,2,3,4,5,6})
  ROOT %r = f32[] get-tuple-element(%c), index=0
}
"""


def test_asynchronous_pairs_count_once():
  program = hlo.parse_hlo(ASYNC)
  found = collectives(program, loops.runs(program), {"data": 2, "model": 2})
  assert sorted((one.kind, one.bytes, one.axes) for one in found) == [
    ("all-gather", 2 * 64, ("model",)),
    ("all-reduce", 28, ("data", "model")),
    ("collective-permute", 64, ("model",)),
  ]


# A product of two batches of 6 matrices, as a TPU's compiler writes it: 5x7 by 7x3 each.
BATCHED = """\
HloModule batched

ENTRY %main (x: bf16[6,5,7], y: bf16[6,7,3]) -> bf16[6,5,3] {
  %x = bf16[6,5,7]{2,1,0} parameter(0)
  %y = bf16[6,7,3]{2,1,0} parameter(1)
  ROOT %c = bf16[6,5,3]{2,1,0} convolution(%x, %y), WINDOW, dim_labels=0bf_0io->0bf
}
"""


def test_a_batched_product_written_as_a_convolution_counts_as_one():
  text = BATCHED.replace("WINDOW", "window={size=6 stride=5 lhs_dilate=6}")
  program = hlo.parse_hlo(text)
  assert matmul_flops(program, loops.runs(program)) == 2 * 6 * 5 * 7 * 3


def test_text_without_an_entry_is_an_error():
  with pytest.raises(ValueError, match="ENTRY"):
    hlo.parse_hlo("module {}")
