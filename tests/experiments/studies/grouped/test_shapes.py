"""Tests of the pictures: classes, drawings, splits and loader."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies.grouped import shapes
from experiments.studies.grouped.pictures import Drawn, Shapes
from experiments.studies.grouped.shapes import Grid
from vqjax.lab.data.pipeline import NONE

EVERY = np.arange(shapes.NUM_CLASSES)
COUNTS = (8, 4, 6, 12, 5, 2, 4, 2)  # as the paper lists them


def pictures(classes, keys=None):
  """Pictures of classes, all from the same key or from keys of their own, by one program."""
  # The key that `draw` makes depends on the class.
  keys = jnp.broadcast_to(jax.random.key(3), (16,)) if keys is None else keys
  parts = [classes[first : first + 16] for first in range(0, len(classes), 16)]
  found = [np.asarray(shapes.render(np.resize(part, 16), keys))[: len(part)] for part in parts]
  return np.concatenate(found)


def test_there_are_as_many_classes_as_in_the_paper():
  assert shapes.NUM_CLASSES == 184_320 == math.prod(COUNTS)
  assert tuple(len(names) for names in shapes.NAMES.values()) == COUNTS


def test_numbers_and_attributes_are_each_others_inverse():
  values = shapes.attributes(EVERY)
  for value, digit in zip(values, np.unravel_index(EVERY, COUNTS), strict=True):
    np.testing.assert_array_equal(value, digit)
  np.testing.assert_array_equal(shapes.class_of(values), EVERY)
  on_device = jax.jit(lambda c: shapes.class_of(shapes.attributes(c)))(jnp.asarray(EVERY))
  np.testing.assert_array_equal(on_device, EVERY)


def test_every_class_has_a_caption_of_its_own():
  assert len({shapes.caption(int(c)) for c in EVERY[::97]}) == len(EVERY[::97])


@pytest.mark.slow
def test_each_attribute_is_visible_for_all_values_of_the_others():
  """A changed attribute changes pixels by a twentieth of their range."""
  bases = np.random.default_rng(0).integers(0, COUNTS, (6, 8))
  faint = [0, 0, 0, 3, 0, 0, 0, 0]  # a tiny circle without a pattern or noise, hardly to be seen
  for base in map(list, [*bases, faint]):
    changed = [
      [*base[:at], value, *base[at + 1 :]] for at, n in enumerate(COUNTS) for value in range(n)
    ]
    found = pictures(np.ravel_multi_index(np.transpose(changed), COUNTS))
    of_attribute = np.split(found, np.cumsum(COUNTS)[:-1])
    for name, values in zip(shapes.NAMES, of_attribute, strict=True):
      for one, other in itertools.combinations(values, 2):
        differ = np.abs(one - other).max(axis=-1) > 0.05
        assert differ.sum() >= 25, (base, name)


def corners(shape):
  """The corners of the outline as complex numbers, at distance 1 from the centre."""
  ring = lambda n, turn=0.0: np.exp(1j * (2 * np.pi * np.arange(n) / n + turn))
  sides = {"circle": 400, "square": 4, "triangle": 3, "pentagon": 5, "hexagon": 6, "octagon": 8}
  if shape == "star":
    return np.stack([ring(5), 0.5 * ring(5, np.pi / 5)], axis=1).ravel()
  if shape == "cross":
    arm = np.array([0.35 - 0.35j, 1 - 0.35j, 1 + 0.35j])
    return (1j ** np.arange(4)[:, None] * arm).ravel()
  return ring(sides[shape])


def test_outlines_have_the_area_of_the_named_polygons():
  """Huge solid shapes cover the polygon and half the border around it."""
  at = [[shape, 0, 2, 2, 4, 0, 3, 0] for shape in range(8)]
  images = pictures(np.ravel_multi_index(np.transpose(at), COUNTS))
  area = (np.abs(images - images[:, :1, :1]).max(axis=-1) > 0.2).sum(axis=(1, 2))
  radius = np.sqrt(area[0] / np.pi) - 1.2  # of the circle: all have the same key
  assert abs(radius / 41 - 1) < 0.04
  for name, found in zip(shapes.NAMES["shape"], area, strict=True):
    z, after = corners(name), np.roll(corners(name), -1)
    polygon = (z.conj() * after).imag.sum() / 2 * radius**2
    around = np.abs(after - z).sum() * radius * 1.2
    # Corners of the border are mitred, and a pixel counts whole: 3 % of the area.
    assert abs(found / (polygon + around) - 1) < 0.03, name


def test_the_key_moves_a_shape_but_never_out_of_the_picture_or_to_another_size():
  huge = np.ravel_multi_index([1, 0, 3, 4, 4, 0, 3, 0], COUNTS)
  images = pictures(np.full(16, huge), jax.random.split(jax.random.key(0), 16))
  rim = np.concatenate([images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]], axis=1)
  assert (rim == rim[:, :1]).all()  # ground
  assert len({image.tobytes() for image in images}) == 16
  radius = shapes.RADIUS
  assert (radius[:-1] * (1 + shapes.SCALE) < radius[1:] * (1 - shapes.SCALE)).all()


@pytest.mark.slow
def test_pictures_are_in_range_and_depend_only_on_class_and_key():
  classes = jnp.array([[3, 100_003], [184_319, 3]])
  keys = jax.random.split(jax.random.key(1), (2, 2))
  images = shapes.render(classes, keys)
  assert images.shape == (2, 2, 100, 100, 3)
  assert images.dtype == jnp.float32
  assert 0 <= images.min() < 0.2
  assert 0.8 < images.max() <= 1
  assert (images[0, 0] != images[1, 1]).any()
  one = shapes.render(classes[0, 1], keys[0, 1])
  mapped = jax.jit(jax.vmap(shapes.render))(classes.ravel(), keys.ravel())
  # Programs of other shapes may round otherwise.
  np.testing.assert_allclose(images[0, 1], one, atol=1e-5)
  np.testing.assert_allclose(images.reshape(mapped.shape), mapped, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32])
def test_integers_of_any_type_are_classes(dtype):
  classes = np.array([5, 200 if dtype == np.uint8 else 32_001])
  np.testing.assert_array_equal(pictures(classes.astype(dtype)), pictures(classes.astype(np.int32)))
  found, wanted = (shapes.attributes(x) for x in (classes.astype(dtype), classes))
  np.testing.assert_array_equal(found, wanted)
  assert shapes.class_of(shapes.Attributes(*(x.astype(np.int8) for x in found))).max() > 127


def test_a_number_outside_the_classes_is_refused_or_drawn_as_nan():
  key = jax.random.key(0)
  for wrong in (-1, shapes.NUM_CLASSES):
    with pytest.raises(ValueError, match=rf"`class_index` must be in \[0, 184320\); got {wrong}"):
      shapes.render(np.asarray(wrong), key)
    with pytest.raises(ValueError, match=f"got {wrong}"):
      shapes.attributes(wrong)
  classes = np.array([[-1, 0], [shapes.NUM_CLASSES, 0], [7, 0]])
  images = np.asarray(jax.jit(shapes.draw)(classes))
  assert np.isnan(images[:2]).all()
  assert np.isfinite(images[2]).all()
  with pytest.raises(TypeError, match="`class_index` must be integers; got float64"):
    shapes.attributes(0.5)
  with pytest.raises(ValueError, match=r"`pattern` must be .* got 4"):
    shapes.class_of(shapes.Attributes(0, 4, 0, 0, 0, 0, 0, 0))
  with pytest.raises(ValueError, match=r"`key` must have the shape \(2,\) .* got \(\)"):
    shapes.render(np.arange(2), key)


def test_a_grid_has_the_classes_of_its_values():
  grid = Grid(shape=(7, 2), pattern=(1,), rotation=(0, 5), texture=(1,), opacity=(2,), border=(0,))
  assert grid.num_classes == 2 * 2 * 12 * 5 == len(grid.classes)
  wanted = itertools.product((7, 2), (1,), (0, 5), range(12), range(5), (1,), (2,), (0,))
  np.testing.assert_array_equal(
    grid.classes, np.ravel_multi_index(np.transpose(list(wanted)), COUNTS)
  )
  np.testing.assert_array_equal(Grid().classes, EVERY)


SMALL = Grid(pattern=(0,), rotation=(0,), colour=(1,), size=(3,), texture=(0,), border=(1,))


def test_classes_are_stratified_and_no_picture_is_in_two_splits():
  data = Shapes(SMALL, train_images=100, valid_images=40, test_images=7, seed=3)
  assert data.vocab == 32
  seen = set()
  for name, images in (("train", 100), ("valid", 40), ("test", 7)):
    split = data.split(name)
    assert len(split) == images
    batch = split(np.arange(images))
    np.testing.assert_array_equal(SMALL.classes[batch["targets"]], batch["inputs"][:, 0])
    counts = np.bincount(batch["targets"], minlength=32)
    assert counts.max() - counts.min() <= 1
    seen |= set(batch["inputs"][:, 1].tolist())
  assert len(seen) == 147
  other = Shapes(SMALL, 100, 40, 7, seed=4)
  assert other.fingerprint() != data.fingerprint()
  assert seen.isdisjoint(other.split("train")(np.arange(100))["inputs"][:, 1])


def test_the_loader_has_each_picture_once_an_epoch_and_resumes_at_its_position():
  split = Shapes(SMALL, 33, 9, 9).split("train")
  loader = Drawn()
  read = lambda: loader.batches(split, batch=11, context=1, seed=5)
  batches = read()
  epoch = [next(batches) for _ in range(3)]
  numbers = np.concatenate([batch["inputs"][:, 1] for batch in epoch])
  assert sorted(numbers - numbers.min()) == list(range(33))
  state = batches.get_state()
  wanted, again = next(batches), read()
  again.set_state(state)
  assert jax.tree.all(jax.tree.map(np.array_equal, next(again), wanted))
  shapes_of = jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
  assert shapes_of == jax.tree.map(lambda x: (x.shape, x.dtype), loader.shapes(11, 1))
  last = list(loader.whole(split, batch=10, context=1))[-1]
  assert (last["targets"][3:] == NONE).all()
  assert (last["targets"][:3] != NONE).all()
  assert (last["inputs"] >= 0).all()  # pictures all the same: none is nan


@pytest.mark.parametrize(
  ("make", "fields", "message"),
  [
    (Shapes, {"valid_images": 0}, "valid_images` must be at least 1; got 0"),
    (Shapes, {"train_images": 2**30}, "at most 1073741824 pictures"),
    (Shapes, {"seed": -1}, r"data\.seed` must be .* got -1"),
    *((Grid, {"shape": wrong}, r"grid\.shape") for wrong in ((), (1, 1), (8,), (-1,))),
  ],
)
def test_an_impossible_grid_or_set_of_pictures_is_refused(make, fields, message):
  with pytest.raises(ValueError, match=message):
    make(**fields)
