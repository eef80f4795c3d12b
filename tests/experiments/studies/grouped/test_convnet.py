"""The image classifier equals its formula in float64, has the paper's size, and learns."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.grouped.shapes import dense, grouped
from experiments.studies.grouped import shapes
from experiments.studies.grouped.convnet import ConvNet
from experiments.studies.grouped.pictures import Drawn, Shapes
from experiments.studies.grouped.shapes import Grid
from vqjax import DenseHead, GroupedHead
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import WordTokenizer
from vqjax.lab.training import fit
from vqjax.lab.training.run_folder import load_text
from vqjax.sharding import MeshShape


def variables_of(model, inputs, targets=None):
  targets = jnp.zeros(len(inputs), jnp.int32) if targets is None else targets
  init = lambda *args: model.init(jax.random.key(0), *args, method="loss_terms")
  return jax.jit(init)(inputs, targets)


@pytest.mark.parametrize(("head_of", "count"), [(dense, 104_087_552), (grouped, 10_340_999)])
def test_it_has_as_many_parameters_as_the_paper_says(head_of, count):
  model = ConvNet(head_of(shapes.NUM_CLASSES, 512), images=shapes.draw)
  inputs = jax.ShapeDtypeStruct((2, 2), jnp.int32)
  found = jax.eval_shape(lambda x: variables_of(model, x), inputs)
  sizes = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  assert sizes(found["params"]) == count
  assert sizes(found["params"]) - sizes(found["params"]["head"]) == 9_531_392
  assert sizes(found["params"]["head"]) == model.head.size().params
  names = model.logical_axes()
  is_names = lambda x: isinstance(x, tuple)
  ranks = jax.tree.map(len, names, is_leaf=is_names)
  assert ranks == jax.tree.map(lambda x: len(x.shape), found)


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


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_it_equals_the_formula(train):
  images = jax.random.uniform(jax.random.key(1), (3, 11, 8, 3))
  model = ConvNet(DenseHead(7, 5), dim=5, channels=(4, 6))
  variables = variables_of(model, images)
  run = lambda method, *targets: jax.jit(
    lambda v: model.apply(v, images, *targets, not train, method=method, mutable=["batch_stats"])[0]
  )(variables)
  hidden = run("hidden")
  np.testing.assert_allclose(hidden, in_float64(variables, images, train), rtol=1e-4, atol=1e-5)
  log_prob = run("log_prob", jnp.array([0, 3, 6]))
  scores = np.asarray(hidden, np.float64) @ np.asarray(variables["params"]["head"]["weight"]).T
  wanted = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
  np.testing.assert_allclose(log_prob, wanted[np.arange(3), [0, 3, 6]], rtol=1e-4, atol=1e-5)


def test_the_gradient_is_that_of_the_formula():
  """Compiled as in a step, where the compiler may recompute a maximum with other rounding."""
  draw = np.random.default_rng(1)
  images = draw.random((6, 12, 13, 3), np.float32)
  weight = draw.normal(size=(6, 5))
  model = ConvNet(DenseHead(7, 5), dim=5, channels=(4, 6))
  variables = variables_of(model, images)

  def score(params):
    own = variables | {"params": params}
    hidden, _ = model.apply(own, images, False, method="hidden", mutable=["batch_stats"])
    return (weight * hidden).sum()

  gradient = jax.jit(jax.grad(score))(variables["params"])
  params, gradient = (
    jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    for tree in (variables["params"], gradient)
  )

  def moved(by):
    far = jax.tree.map(lambda x, g: x + by * g, params, gradient)
    return (weight * in_float64(variables | {"params": far}, images, True)).sum()

  slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
  square = sum((g**2).sum() for g in jax.tree.leaves(gradient))
  assert abs(slope / square - 1) < 1e-3


class Grouped(GroupedHead):
  """A head whose probabilities of groups are sums over their classes."""

  def group_of(self, tokens):
    return jnp.asarray(np.searchsorted(self.starts, np.arange(self.vocab), "right") - 1)[tokens]

  def log_group(self, hidden):
    p = jax.nn.softmax(self.logits(hidden))
    return jnp.log(jnp.stack([p[:, a:b].sum(1) for a, b in itertools.pairwise(self.starts)], 1))


@pytest.mark.slow
def test_class_and_group_are_right_where_their_arg_max_is():
  images = jax.random.uniform(jax.random.key(1), (40, 4, 4, 3))
  targets = jnp.arange(40) % 11
  of_head = {}
  for head in (Grouped(11, 5, groups=3), DenseHead(11, 5)):
    model = ConvNet(head, dim=5, channels=(6,))
    variables = variables_of(model, images)
    hits = jax.jit(lambda v, m=model: m.apply(v, images, targets, method="hits"))(variables)
    logits = np.asarray(jax.jit(lambda v, m=model: m.apply(v, images))(variables))
    np.testing.assert_array_equal(hits["accuracy"], logits.argmax(axis=-1) == targets)
    of_head[type(head)] = hits, logits
  assert of_head[DenseHead][0].keys() == {"accuracy"}
  hits, logits = of_head[Grouped]
  starts = Grouped(11, 5, groups=3).starts
  mass = np.add.reduceat(np.exp(np.asarray(logits, np.float64)), starts[:-1], axis=1)
  wanted = mass.argmax(axis=1) == np.searchsorted(starts[1:-1], targets, "right")
  np.testing.assert_array_equal(hits["group_accuracy"], wanted)


def test_sizes_that_do_not_fit_are_named():
  images = jnp.zeros((1, 4, 4, 3))
  with pytest.raises(ValueError, match="`head` must have the model's dim 5; got 4"):
    variables_of(ConvNet(DenseHead(7, 4), dim=5), images)
  with pytest.raises(ValueError, match=r"`channels` must .* got \(\)"):
    variables_of(ConvNet(DenseHead(7, 5), dim=5, channels=()), images)
  with pytest.raises(ValueError, match=r"`inputs` must have at least 8 x 8 pixels .* got \(4, 4\)"):
    variables_of(ConvNet(DenseHead(7, 5), dim=5), images)


def test_an_empty_batch_of_images_has_no_hidden_vectors():
  model = ConvNet(DenseHead(7, 5), dim=5, channels=(2,))
  variables = jax.eval_shape(lambda x: variables_of(model, x), jnp.zeros((1, 4, 4, 3)))
  hidden = lambda v: model.apply(v, jnp.zeros((0, 4, 4, 3)), method="hidden")
  assert jax.eval_shape(hidden, variables).shape == (0, 5)


FOUR = Grid(
  *((0, 7), (0,), (0,), (0, 2), (3,), (0,), (3,), (0,))
)  # red and blue circles and crosses


def tiny(head=GroupedHead, **train) -> Experiment:
  settings = Train(
    steps=6,
    batch=8,
    learning_rate=3e-3,
    warmup=1,
    log_every=1,
    eval_every=6,
    save_every=6,
    mesh=MeshShape(data=1),
  )
  return Experiment(
    name="four",
    model=ConvNet(head(FROM_TOKENIZER, 16), dim=16, channels=(3, 4, 4), images=shapes.draw),
    data=Shapes(FOUR, train_images=36, valid_images=8, test_images=10),
    tokenizer=None,
    loader=Drawn(),
    train=dataclasses.replace(settings, **train),
  )


@pytest.mark.slow
def test_it_learns(tmp_path):
  made = tiny(accumulate=2, steps=12, eval_every=12)
  whole = fit(made, tmp_path / "whole")
  assert whole["test"]["tokens"] == 10
  assert whole["valid"]["nats_per_token"] < 1.2  # log 4 is 1.39
  assert "accuracy" in whole["valid"]
  assert whole["embedding"] is None
  assert whole["head"]["class"] == "GroupedHead"


def test_pictures_have_no_tokenizer_and_text_has_one():
  with pytest.raises(ValueError, match=r"`tokenizer` must be None .* got WordTokenizer"):
    load_text(dataclasses.replace(tiny(), tokenizer=WordTokenizer()))
  with pytest.raises(ValueError, match="`split` must be drawings; got ndarray"):
    Drawn().batches(np.zeros(3), batch=1, context=1, seed=0)
  text = load_text(tiny())
  assert text.experiment.model.head.vocab == 4
  assert text.identity["tokens"] == {"train": 36, "valid": 8, "test": 10}
