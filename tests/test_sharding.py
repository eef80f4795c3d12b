"""Arrays are sharded by the rules, and meshes that do not fit are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from vqjax import sharding
from vqjax.sharding import MeshShape, make_mesh, spec


def test_a_mesh_uses_all_devices_by_default():
  assert dict(make_mesh(MeshShape()).shape) == {"data": 8, "fsdp": 1, "model": 1}
  assert dict(make_mesh(MeshShape(fsdp=2, model=2)).shape) == {"data": 2, "fsdp": 2, "model": 2}
  assert set(make_mesh(MeshShape()).axis_types) == {AxisType.Auto}


def test_a_smaller_mesh_takes_the_first_devices():
  mesh = make_mesh(MeshShape(data=1, fsdp=3))
  assert set(mesh.devices.flat) == set(jax.devices()[:3])


@pytest.mark.parametrize(
  ("shape", "message"),
  [
    (MeshShape(2, 4, 2), r"\(data=2, fsdp=4, model=2\) must have at most 8 devices; got 16"),
    (MeshShape(model=3), r"divides 8 devices; got fsdp=1 and model=3"),
    (MeshShape(model=16), r"divides 8 devices; got .* model=16"),
  ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_its_numbers(shape, message):
  with pytest.raises(ValueError, match=message):
    make_mesh(shape)


@pytest.mark.parametrize("axis", ["data", "fsdp", "model"])
def test_an_axis_without_devices_is_refused(axis):
  with pytest.raises(ValueError, match=rf"`train\.mesh\.{axis}` must be at least 1; got 0"):
    MeshShape(**{axis: 0})


class FakeDevice:
  """A device of a process with this index."""

  def __init__(self, index):
    self.process_index = index


def test_several_processes_use_all_their_devices():
  with pytest.raises(ValueError, match=r"must use all 4 devices of several processes; got 2"):
    make_mesh(MeshShape(data=2), [FakeDevice(i // 2) for i in range(4)])


@pytest.mark.parametrize(
  ("logical", "shape", "expected"),
  [
    (("vocab", "table_embed"), (64, 16), P(("model",), ("fsdp",))),
    (("vocab", "table_embed"), (53, 16), P(None, ("fsdp", "model"))),  # a prime vocabulary
    (("vocab", "table_embed"), (53, 6), P(None, ("fsdp",))),
    (("vocab", "table_embed"), (53, 7), P(None, None)),
    (("ngrams", "table_embed"), (64, 16), P(("fsdp", "model"), None)),
    (("ngrams", "table_embed"), (54, 16), P(("model",), ("fsdp",))),
    (("embed", "vocab"), (16, 64), P(("fsdp",), ("model",))),
    (
      ("layers", "embed", "qkv", "heads", "head_dim"),
      (4, 16, 3, 2, 8),
      P(None, ("fsdp",), None, ("model",), None),
    ),
    (
      ("layers", "embed", "qkv", "heads", "head_dim"),
      (4, 16, 3, 1, 16),
      P(None, ("fsdp",), None, None, None),
    ),
    (("batch", None, "heads"), (8, 5, 2), P(("data", "fsdp"), None, ("model",))),
    (("batch", None, "heads"), (1, 5, 2), P(None, None, ("model",))),
    (("codes", "codes"), (8, 8), P(("model",), None)),
    ((), (), P()),
  ],
)
def test_a_rule_applies_where_it_divides_and_its_axes_are_free(logical, shape, expected):
  assert spec(logical, shape, make_mesh(MeshShape(2, 2, 2))) == expected


def test_rules_are_data_that_a_caller_may_replace():
  mesh = make_mesh(MeshShape(2, 2, 2))
  assert spec(("vocab", "embed"), (64, 16), mesh, (("embed", ("data",)),)) == P(None, ("data",))


def test_an_activation_is_sharded_on_a_mesh_and_unchanged_without_one():
  x = jnp.ones((8, 3, 6))
  assert sharding.constrain(x, ("batch", None, "heads")) is x
  with jax.set_mesh(make_mesh(MeshShape(2, 2, 2))):
    sharded = jax.jit(lambda x: sharding.constrain(x, ("batch", None, "heads")))(x)
  assert sharded.sharding.shard_shape(x.shape) == (2, 3, 3)
  with jax.set_mesh(jax.make_mesh((8,), ("mine",), (AxisType.Auto,))):
    assert sharding.constrain(x, ("batch", None, "heads")) is x


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 1, 8), (1, 3, 1)])
def test_one_process_reads_every_row_once(shape):
  mesh = make_mesh(MeshShape(*shape))
  np.testing.assert_array_equal(sharding.local_rows(24, mesh), np.arange(24))


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 1, 8)])
def test_a_batch_on_a_mesh_is_the_batch(shape):
  mesh, array = make_mesh(MeshShape(*shape)), np.arange(8 * 5).reshape(8, 5)
  found = sharding.global_batch({"x": array}, np.arange(8), 8, mesh)["x"]
  np.testing.assert_array_equal(found, array)
  assert found.sharding == sharding.batch_sharding(mesh)
