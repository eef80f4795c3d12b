"""The text classifier equals its formula in float64, ignores padding, and learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from experiments.studies.dpq.data.documents import Documents
from experiments.studies.dpq.data.labelled import AGNews
from experiments.studies.dpq.models.classifier import TextClassifier
from tests.jitted import init
from vqjax import DenseEmbedding, DPQEmbedding, SoftmaxQuantizer
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import WordTokenizer
from vqjax.lab.training import fit
from vqjax.sharding import MeshShape

V, D, C, B, T = 23, 6, 3, 5, 7


def model(**fields):
  fields = {"embedding": DenseEmbedding(V, D), "classes": C, "dim": D, "context": T} | fields
  return TextClassifier(**fields)


def batch():
  draw = np.random.default_rng(1)
  length = np.array([7, 1, 0, 3, 6])
  tokens = np.where(np.arange(T) < length[:, None], draw.integers(0, V, (B, T)), -1)
  return tokens.astype(np.int32), draw.integers(0, C, B)


def in_float64(variables, tokens, train):
  """The scores, a text at a time, and the means and variances of the two norms."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), variables["params"])
  kept = jax.tree.map(lambda x: np.asarray(x, np.float64), variables["batch_stats"])
  table = p["embedding"]["weight"]
  x = np.stack([table[row[row >= 0]].mean(axis=0) if row[0] >= 0 else np.zeros(D)
                for row in np.asarray(tokens)])  # fmt: skip
  moments = []

  def norm(x, name):
    moments.append((x.mean(axis=0), x.var(axis=0)))
    mean, var = moments[-1] if train else (kept[name]["mean"], kept[name]["var"])
    y = (x - mean) / np.sqrt(var + 1e-3) * p[name]["scale"] + p[name]["bias"]
    return np.maximum(y, 0)

  x = norm(x, "mean_norm")
  x = norm(x @ p["hidden_layer"]["kernel"] + p["hidden_layer"]["bias"], "hidden_norm")
  return x @ p["output"]["kernel"] + p["output"]["bias"], moments


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_it_equals_the_formula_and_ignores_padding(train):
  tokens, targets = batch()
  classifier = model()
  variables = init(classifier, jax.random.key(0), tokens, targets, method="loss_terms")
  both = jax.jit(
    lambda v, *batch: classifier.apply(
      v, *batch, not train, method="loss_terms", mutable=["batch_stats"]
    )
  )
  (log_prob, terms), written = both(variables, tokens, targets)
  scores, moments = in_float64(variables, tokens, train)
  wanted = log_softmax(scores, axis=-1)[np.arange(B), np.asarray(targets)]
  np.testing.assert_allclose(log_prob, wanted, rtol=1e-4, atol=1e-5)
  assert terms == {}
  if train:
    for name, (mean, var) in zip(("mean_norm", "hidden_norm"), moments):
      np.testing.assert_allclose(
        written["batch_stats"][name]["mean"], 0.01 * mean, rtol=1e-3, atol=1e-6
      )
      np.testing.assert_allclose(
        written["batch_stats"][name]["var"], 0.99 + 0.01 * var, rtol=1e-4, atol=1e-6
      )


@pytest.mark.slow
def test_gradients_are_finite_where_texts_are_empty():
  tokens, targets = batch()
  classifier = model(embedding=DPQEmbedding(V, D, SoftmaxQuantizer(4, 2, D)))
  variables = init(classifier, jax.random.key(0), tokens, targets, method="loss_terms")

  def loss(params):
    (log_prob, _), _ = classifier.apply(
      variables | {"params": params},
      *(tokens, targets, False),
      method="loss_terms",
      mutable=["batch_stats"],
    )
    return -log_prob.mean()

  gradient = jax.jit(jax.grad(loss))(variables["params"])
  assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradient))
  absent = np.setdiff1d(np.arange(V), np.asarray(tokens))
  assert (np.asarray(gradient["embedding"]["query"])[absent] == 0).all()


def test_wrong_sizes_are_named():
  tokens, targets = batch()
  shapes = lambda model: jax.eval_shape(
    lambda: init(model, jax.random.key(0), tokens, targets, method="loss_terms")
  )
  with pytest.raises(ValueError, match="`embedding` must have the model's dim 6; got 5"):
    shapes(model(embedding=DenseEmbedding(V, 5)))
  with pytest.raises(ValueError, match="`classes` must be at least 2; got 1"):
    shapes(model(classes=1))


@pytest.mark.slow
def test_it_learns_topics(tmp_path):
  """Words of four topics: the class is that of most words."""
  (tmp_path / "news").mkdir()
  (tmp_path / "news" / "classes.txt").write_text("a\nb\nc\nd\n")
  draw = np.random.default_rng(0)
  rows = lambda n, first, text: "\n".join(
    text(label + first, " ".join(f"w{label}x{draw.integers(9)}" for _ in range(8)), i)
    for i, label in enumerate(draw.integers(0, 4, n))
  )
  for name, first, n, text in (
    ("subset2k_amrayach_train", 1, 90, lambda label, words, i: f"{label},t{i},{words}"),
    ("subset4k_keaml_train", 0, 9, lambda label, words, i: f"{label},{words}"),
    ("subset5k_keaml_unbalanced", 0, 9, lambda label, words, i: f"{label},{words}"),
    ("subset5k_lst11111_train", 0, 9, lambda label, words, i: f"{words},{label}"),
    ("test", 1, 20, lambda label, words, i: f"{label},u{i},{words}"),
  ):
    (tmp_path / "news" / f"{name}.csv").write_text(rows(n, first, text) + "\n")
  made = Experiment(
    name="topics",
    model=TextClassifier(
      DPQEmbedding(FROM_TOKENIZER, 16, SoftmaxQuantizer(8, 4, 16)),
      classes=4,
      dim=16,
      context=8,
      momentum=0.9,
    ),
    data=AGNews(str(tmp_path / "news")),
    tokenizer=WordTokenizer(lowercase=True),
    loader=Documents(),
    train=Train(
      steps=60, batch=16, learning_rate=1e-2, warmup=5, eval_every=30, mesh=MeshShape(2, 1, 2)
    ),
  )
  result = fit(made, tmp_path / "run")
  assert result["test"]["accuracy"] > 0.8
  assert result["test"]["tokens"] == 20
  assert result["head"] is None
  assert result["embedding"]["class"] == "DPQEmbedding"
