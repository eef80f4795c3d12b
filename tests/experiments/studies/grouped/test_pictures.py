"""Pictures of classes: their drawings, splits, loader and classifier."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.grouped.shapes import dense, grouped, shapes_run
from experiments.studies.grouped import shapes
from experiments.studies.grouped.convnet import ConvNet
from experiments.studies.grouped.drawings import Drawn, Shapes
from experiments.studies.grouped.shapes import Grid
from vqjax import DenseHead, GroupedHead
from vqjax.lab.config import Train
from vqjax.lab.data.pipeline import NONE
from vqjax.lab.training import fit

COUNTS = (8, 4, 6, 12, 5, 2, 4, 2)  # as the paper lists them

draw = jax.jit(shapes.draw)
render = jax.jit(jax.vmap(shapes._picture, (0, None)))


def classes_of(attributes):
  return np.ravel_multi_index(np.transpose(attributes), COUNTS)


def pictures(attributes):
  """Pictures of classes by their attributes, all from the same key; compiled for 16 at a time."""
  classes, key = classes_of(attributes), jax.random.key(3)
  parts = [classes[first : first + 16] for first in range(0, len(classes), 16)]
  found = [np.asarray(render(np.resize(part, 16), key))[: len(part)] for part in parts]
  return np.concatenate(found)


@pytest.mark.slow
def test_each_attribute_is_visible_for_all_values_of_the_others():
  """A changed attribute changes pixels by a twentieth of their range."""
  bases = np.random.default_rng(0).integers(0, COUNTS, (6, 8))
  faint = [0, 0, 0, 3, 0, 0, 0, 0]  # a tiny circle without a pattern or noise, hardly to be seen
  for base in map(list, [*bases, faint]):
    changed = [
      [*base[:at], value, *base[at + 1 :]] for at, n in enumerate(COUNTS) for value in range(n)
    ]
    of_attribute = np.split(pictures(changed), np.cumsum(COUNTS)[:-1])
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
  images = pictures([[shape, 0, 2, 2, 4, 0, 3, 0] for shape in range(8)])
  area = (np.abs(images - images[:, :1, :1]).max(axis=-1) > 0.2).sum(axis=(1, 2))
  radius = np.sqrt(area[0] / np.pi) - 1.2  # of the circle: all have the same key
  assert abs(radius / 41 - 1) < 0.04
  for name, found in zip(shapes.NAMES["shape"], area, strict=True):
    z, after = corners(name), np.roll(corners(name), -1)
    polygon = (z.conj() * after).imag.sum() / 2 * radius**2
    around = np.abs(after - z).sum() * radius * 1.2
    # Corners of the border are mitred, and a pixel counts whole: 3 % of the area.
    assert abs(found / (polygon + around) - 1) < 0.03, name


def test_the_number_moves_a_shape_but_never_out_of_the_picture_or_to_another_size():
  huge = classes_of([[1, 0, 3, 4, 4, 0, 3, 0]])
  images = np.asarray(draw(np.stack([np.repeat(huge, 16), np.arange(16)], axis=1)))
  assert images.shape == (16, 100, 100, 3)
  assert 0 <= images.min() < 0.2
  assert 0.8 < images.max() <= 1
  rim = np.concatenate([images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]], axis=1)
  assert (rim == rim[:, :1]).all()  # ground
  assert len({image.tobytes() for image in images}) == 16
  radius = shapes.RADIUS
  assert (radius[:-1] * (1 + shapes.SCALE) < radius[1:] * (1 - shapes.SCALE)).all()


def test_a_grid_has_the_classes_of_its_values():
  grid = Grid(shape=(7, 2), pattern=(1,), rotation=(0, 5), texture=(1,), opacity=(2,), border=(0,))
  wanted = list(itertools.product((7, 2), (1,), (0, 5), range(12), range(5), (1,), (2,), (0,)))
  assert grid.num_classes == len(wanted)
  np.testing.assert_array_equal(grid.classes, classes_of(wanted))
  np.testing.assert_array_equal(Grid().classes, np.arange(184_320))
  for wrong in ((), (1, 1), (8,), (-1,)):
    with pytest.raises(ValueError, match=r"`grid\.shape` must"):
      Grid(shape=wrong)


SMALL = Grid(pattern=(0,), rotation=(0,), colour=(1,), size=(3,), texture=(0,), border=(1,))


def test_classes_are_stratified_and_no_picture_is_in_two_splits():
  data = Shapes(SMALL, train_images=100, valid_images=40, test_images=7, seed=3)
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


def test_the_loader_has_each_picture_once_an_epoch_and_fills_the_last_batch():
  split, loader = Shapes(SMALL, 33, 9, 9).split("train"), Drawn()
  batches = loader.batches(split, batch=11, context=1, seed=5)
  epoch = [next(batches) for _ in range(3)]
  numbers = np.concatenate([batch["inputs"][:, 1] for batch in epoch])
  assert sorted(numbers - numbers.min()) == list(range(33))
  declared = jax.tree.map(lambda x: (x.shape, x.dtype), loader.shapes(11, 1))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), epoch[0]) == declared
  last = list(loader.whole(split, batch=10, context=1))[-1]
  assert (last["targets"][3:] == NONE).all()
  assert (last["targets"][:3] != NONE).all()


def variables_of(model, inputs):
  init = lambda x: model.init(jax.random.key(0), x, jnp.zeros(len(x), int), method="loss_terms")
  return jax.jit(init)(inputs)


@pytest.mark.parametrize(("head_of", "count"), [(dense, 104_087_552), (grouped, 10_340_999)])
def test_the_classifier_has_as_many_parameters_as_the_paper_says(head_of, count):
  model = ConvNet(head_of(shapes.NUM_CLASSES, 512), images=shapes.draw)
  inputs = jax.ShapeDtypeStruct((2, 2), jnp.int32)
  params = jax.eval_shape(lambda x: variables_of(model, x), inputs)["params"]
  assert sum(x.size for x in jax.tree.leaves(params)) == count
  assert sum(x.size for x in jax.tree.leaves(params["head"])) == count - 9_531_392


def in_float64(variables, x, train):
  """The hidden vectors, by loops over pixels."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), variables)
  x = np.asarray(x, np.float64)
  for at in range(2):
    kernel, bias = (p["params"][f"convolutions_{at}"][name] for name in ("kernel", "bias"))
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    high, wide = x.shape[1:3]
    y = np.zeros((*x.shape[:3], len(bias))) + bias
    for row, column in itertools.product(range(3), range(3)):
      y += padded[:, row : row + high, column : column + wide] @ kernel[row, column]
    norm, kept = p["params"][f"norms_{at}"], p["batch_stats"][f"norms_{at}"]
    mean, var = (y.mean((0, 1, 2)), y.var((0, 1, 2))) if train else (kept["mean"], kept["var"])
    y = np.maximum((y - mean) / np.sqrt(var + 1e-5) * norm["scale"] + norm["bias"], 0)
    y = y[:, : high // 2 * 2, : wide // 2 * 2]
    x = np.max([y[:, r::2, c::2] for r, c in itertools.product(range(2), range(2))], axis=0)
  layer = p["params"]["dense"]
  return np.maximum(x.reshape(len(x), -1) @ layer["kernel"] + layer["bias"], 0)


@pytest.mark.parametrize("train", [False, True])
def test_hidden_vectors_and_their_gradient_are_those_of_the_formula(train):
  """Compiled as in a step, where the compiler may recompute a maximum with other rounding."""
  random = np.random.default_rng(1)
  images = random.random((6, 12, 13, 3), np.float32)
  weight = random.normal(size=(6, 5))
  model = ConvNet(DenseHead(7, 5), dim=5, channels=(4, 6))
  variables = variables_of(model, images)

  def score(params):
    own = variables | {"params": params}
    hidden, _ = model.apply(own, images, not train, method="hidden", mutable=["batch_stats"])
    return (weight * hidden).sum(), hidden

  both = jax.jit(jax.value_and_grad(score, has_aux=True))
  (_, hidden), gradient = both(variables["params"])
  np.testing.assert_allclose(hidden, in_float64(variables, images, train), rtol=1e-4, atol=1e-5)
  params, gradient = (
    jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    for tree in (variables["params"], gradient)
  )

  def moved(by):
    far = jax.tree.map(lambda x, g: x + by * g, params, gradient)
    return (weight * in_float64(variables | {"params": far}, images, train)).sum()

  slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
  square = sum((g**2).sum() for g in jax.tree.leaves(gradient))
  assert abs(slope / square - 1) < 1e-3


def test_class_and_group_are_right_where_their_arg_max_is():
  images = np.random.default_rng(1).random((40, 4, 4, 3), np.float32)
  targets = np.arange(40) % 11
  model = ConvNet(GroupedHead(11, 5, groups=3), dim=5, channels=(6,))
  variables = variables_of(model, images)
  hits = jax.jit(lambda v: model.apply(v, images, targets, method="hits"))(variables)
  every = lambda m: m.head.logits(m.hidden(images))
  logits = np.asarray(jax.jit(lambda v: model.apply(v, method=every))(variables), np.float64)
  np.testing.assert_array_equal(hits["accuracy"], logits.argmax(axis=-1) == targets)
  starts = model.head.starts
  mass = np.add.reduceat(np.exp(logits), starts[:-1], axis=1)
  wanted = mass.argmax(axis=1) == np.searchsorted(starts[1:-1], targets, "right")
  np.testing.assert_array_equal(hits["group_accuracy"], wanted)


@pytest.mark.slow
def test_the_classifier_learns(tmp_path):
  # Red and blue circles and crosses.
  four = Grid((0, 7), (0,), (0,), (0, 2), (3,), (0,), (3,), (0,))
  train = Train(steps=12, batch=16, accumulate=2, learning_rate=3e-3, warmup=1, eval_every=12)
  made = shapes_run("four", grouped, four, train=train, dim=16, channels=(3, 4, 4))
  result = fit(made, tmp_path / "run")
  assert result["test"]["tokens"] == 4
  assert result["valid"]["nats_per_token"] < 1.2  # log 4 is 1.39
  assert {"accuracy", "group_accuracy"} <= result["valid"].keys()
