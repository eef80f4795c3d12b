"""The decoder equals its definition, is causal, and does not depend on how it is computed."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.jitted import apply, init, results
from tests.lm.checkpoints.families import random_variables
from tests.lm.checkpoints.families import small as pretrained
from vqjax import (
  CentroidQuantizer,
  CodebookHead,
  DenseEmbedding,
  DenseHead,
  DPQEmbedding,
  GroupedHead,
)
from vqjax.lab import config
from vqjax.lm.models import Transformer
from vqjax.lm.models import attention as attention_module
from vqjax.ngrams import NGramEmbedding, NGramMemory
from vqjax.ops import narrow
from vqjax.ops.ngrams import XorHash


def decoder(**changes):
  fields = {
    "embedding": DenseEmbedding(31, 8),
    "head": DenseHead(31, 8),
    "dim": 8,
    "layers": 2,
    "heads": 2,
    "context": 16,
  }
  return Transformer(**(fields | changes))


def initialised(model, length=16):
  tokens = jnp.zeros((1, length), jnp.int32)
  return init(model, jax.random.key(0), tokens, tokens, method="loss_terms")


def assert_equal_up_to_rounding(found, expected, summands):
  """Float32 results of the same sums in another order.

  A sum of n numbers of size m differs from the exact one by at most n · 2^-24 · m, and two orders
  of summation by twice that. The size is taken to be the largest entry of an array.
  """

  def check(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=summands * 2**-23 * np.abs(b).max(initial=0))

  jax.tree.map(check, found, expected)


@pytest.fixture
def tokens():
  return np.random.default_rng(1).integers(0, 31, (3, 16)).astype(np.int32)


def test_a_position_sees_no_later_token(tokens):
  model = decoder()
  variables = random_variables(model, 0.1)
  changed = np.where(np.arange(16) < 9, tokens, (tokens + 1) % 31)
  before, after = (np.asarray(apply(model, variables, t)) for t in (tokens, changed))
  np.testing.assert_array_equal(before[:, :9], after[:, :9])
  assert (before[:, 9:] != after[:, 9:]).any()


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_a_change_reaches_as_far_as_the_windows_of_the_blocks_allow(remat, tokens, monkeypatch):
  monkeypatch.setattr(attention_module, "tile_size", lambda *_: 5)
  model = decoder(window=5, layers=3, remat=remat)
  params = random_variables(model, 0.5)["params"]
  # Of the three blocks only the second, which has the window, mixes positions.
  only = lambda x: x * np.array([0, 1, 0], x.dtype).reshape(3, *[1] * (x.ndim - 1))
  out = jax.tree.map(only, params["blocks"]["attention_out"])
  local = params["blocks"] | {"attention_out": out}
  changed = np.where(np.arange(16) == 3, (tokens + 1) % 31, tokens)
  hidden = lambda params, t: np.asarray(apply(model, {"params": params}, t, method="hidden"))

  def reached(params):
    return np.flatnonzero((hidden(params, tokens) != hidden(params, changed)).any((0, 2))).tolist()

  assert reached(params | {"blocks": local}) == [3, 4, 5, 6, 7]
  assert reached(params) == list(range(3, 16))


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_an_exported_decoder_takes_texts_of_any_number_and_length(family):
  model, variables = pretrained(family)
  b, t = jax.export.symbolic_shape("b, t")
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), variables)
  program = jax.jit(model.apply)
  exported = jax.export.export(program)(shapes, jax.ShapeDtypeStruct((b, t), jnp.int32))
  text = np.random.default_rng(0).integers(0, model.head.vocab, (2, 19)).astype(np.int32)
  for given in (text, text[:1, :1]):
    found, expected = exported.call(variables, given), program(variables, given)
    # Sums of float32 in another order.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_add_up(tied):
  embedding = DenseEmbedding(31, 8)
  head = DenseHead(31, 8, embedding=embedding) if tied else DenseHead(31, 8)
  model = decoder(embedding=embedding, head=head)
  variables = jax.eval_shape(lambda: initialised(model))
  block = 2 * 2 * 8 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)
  expected = embedding.size().params + head.size().params + 16 * 8 + 2 * block + 2 * 8
  assert sum(x.size for x in jax.tree.leaves(variables)) == expected


def test_recomputing_activations_changes_neither_loss_nor_gradient(tokens, monkeypatch):
  monkeypatch.setattr(attention_module, "tile_size", lambda *_: 5)

  def gradient(model):
    loss = lambda v: (
      -model.apply(
        v, tokens, tokens, False, method="log_prob", rngs={"dropout": jax.random.key(2)}
      ).mean()
    )
    return results(jax.value_and_grad(loss), random_variables(decoder(), 0.1))

  fields = {"dropout": 0.5, "window": 7}
  kept, again = gradient(decoder(**fields)), gradient(decoder(**fields, remat=True))
  # The longest sums are those of gradients over all 3 x 16 positions.
  assert_equal_up_to_rounding(again, kept, summands=48)


def test_bfloat16_computes_with_float32_parameters(tokens):
  model = decoder(dtype=jnp.bfloat16)
  variables = random_variables(model, 0.1)
  made = jax.eval_shape(lambda: initialised(model))
  assert {x.dtype for x in jax.tree.leaves(made)} == {jnp.dtype("float32")}
  assert apply(model, variables, tokens, method="hidden").dtype == jnp.bfloat16
  close = apply(decoder(), variables, tokens, tokens, method="log_prob")
  found = apply(model, variables, tokens, tokens, method="log_prob")
  assert found.dtype == jnp.float32
  # bfloat16 keeps 8 bits, 2^-8 of a number; scores of order one pass through about ten roundings.
  np.testing.assert_allclose(found, close, atol=0.05)


@pytest.mark.parametrize("contracted", [(48, 31), (3, 16, 31)])
def test_a_product_of_few_vectors_is_that_of_float64(contracted):
  *inner, outer = contracted
  rng, axes = np.random.default_rng(0), len(inner)
  vectors, weight = rng.normal(size=(1, 3, *inner)), rng.normal(size=contracted)
  numbers = (tuple(range(2, 2 + axes)), tuple(range(axes))), ((), ())
  given = (x.astype(np.float32) for x in (vectors, weight))
  found = results(lambda *given: narrow.dot_general(*given, numbers), *given)
  expected = np.tensordot(vectors, weight, axes)
  assert found.shape == (1, 3, outer)
  # Sums of 48 products of order one.
  np.testing.assert_allclose(found, expected, atol=48 * 2**-22)


@pytest.mark.parametrize("head", [CodebookHead(31, 8, 5), GroupedHead(31, 8)])
def test_any_head_fits_and_its_logits_and_log_prob_agree(head, tokens):
  model = decoder(head=head)
  variables = random_variables(model, 0.1)
  log_prob = apply(model, variables, tokens, tokens, method="log_prob")
  expected = reference.log_softmax(apply(model, variables, tokens))
  expected = reference.of_tokens(expected, tokens)
  # Log-probabilities near 3.4 = log 31, of sums of 31 terms: 31 · 2^-24 · 3.4.
  np.testing.assert_allclose(log_prob, expected, atol=1e-5)


def test_dropout_is_off_by_default(tokens):
  model = decoder(dropout=0.5)
  variables = random_variables(model, 0.1)
  first, second = (apply(model, variables, tokens, method="hidden") for _ in range(2))
  np.testing.assert_array_equal(first, second)


def test_a_shorter_row_has_the_same_logits(tokens):
  model = decoder()
  variables = random_variables(model, 0.1)
  whole, part = apply(model, variables, tokens), apply(model, variables, tokens[:1, :1])
  # Logits of order one, after two blocks with sums of at most 32 terms: 2 · 32 · 2^-24.
  np.testing.assert_allclose(np.asarray(whole)[:1, :1], part, atol=1e-5)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"heads": 3}, "`heads` must divide dim 8; got 3"),
    ({"layers": 0}, "`layers` must be at least 1; got 0"),
    ({"window": 0}, "`window` must be at least 1, .* got 0"),
    ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\); got 1.0"),
    ({"head": DenseHead(31, 9)}, "`head` must have the model's dim 8; got 9"),
    ({"head": DenseHead(30, 8)}, "`head` must have the embedding's vocab 31; got 30"),
  ],
)
def test_parts_that_do_not_fit_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda: initialised(decoder(**changes)))


def test_a_sequence_longer_than_the_context_is_refused(tokens):
  model = decoder(context=15)
  with pytest.raises(ValueError, match="`tokens` must have at most context 15 columns; got 16"):
    jax.eval_shape(lambda: model.apply(initialised(model, 15), tokens))


def float64_hidden(params, tokens, heads, windows):
  """The decoder by its definition (Radford et al., 2019), in NumPy.

  `windows` has the number of positions that each block attends to.
  """

  def norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

  def dense(x, p):
    return x @ p["kernel"] + p["bias"]

  def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

  length = tokens.shape[1]
  x = params["embedding"]["weight"][tokens] + params["position"][:length]
  for layer, window in enumerate(windows):
    past = np.tril(np.ones((length, length))) - np.tril(np.ones((length, length)), -window)
    p = jax.tree.map(lambda stacked, layer=layer: stacked[layer], params["blocks"])
    p["query_key_value"] = {
      "kernel": p["query_key_value"]["kernel"].reshape(x.shape[-1], -1),
      "bias": p["query_key_value"]["bias"].reshape(-1),
    }
    p["attention_out"]["kernel"] = p["attention_out"]["kernel"].reshape(-1, x.shape[-1])
    q, k, v = np.split(dense(norm(x, p["attention_norm"]), p["query_key_value"]), 3, axis=-1)
    mixed = np.zeros_like(x)
    for part in np.split(np.arange(x.shape[-1]), heads):
      scores = q[..., part] @ k[..., part].swapaxes(1, 2) / np.sqrt(len(part))
      scores = np.where(past == 1, scores, -np.inf)
      weight = np.exp(scores - scores.max(-1, keepdims=True))
      mixed[..., part] = weight / weight.sum(-1, keepdims=True) @ v[..., part]
    x = x + dense(mixed, p["attention_out"])
    x = x + dense(gelu(dense(norm(x, p["mlp_norm"]), p["mlp_in"])), p["mlp_out"])
  return norm(x, params["final_norm"])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("window", [None, 1, 5, 99])
def test_the_hidden_vectors_equal_an_independent_float64_decoder(window, tokens):
  model = decoder(window=window)
  variables = random_variables(model, 0.5)
  hidden = apply(model, variables, tokens, method="hidden")
  exact = jax.tree.map(lambda x: np.asarray(x, np.float64), variables["params"])
  expected = float64_hidden(exact, tokens, 2, [99, window or 99])
  # Hidden vectors of order one, from scores of order ten: a rounding 10 · 2^-24 of a score is a
  # relative error of its softmax weight, and ten layers of sums of 32 numbers follow.
  np.testing.assert_allclose(hidden, expected, atol=2e-4)


def test_output_projections_start_smaller_by_the_depth_of_the_residual_stream():
  deep = decoder(embedding=DenseEmbedding(31, 64), head=DenseHead(31, 64), dim=64, layers=8)
  params = jax.device_get(initialised(deep)["params"])
  for name, expected in (("attention_out", 0.02 / 4), ("mlp_out", 0.02 / 4), ("mlp_in", 0.02)):
    found = np.mean([params["blocks"][name]["kernel"][i].std() for i in range(8)])
    np.testing.assert_allclose(found, expected, rtol=0.05)


def test_terms_of_the_loss_are_named_by_embedding_and_head(tokens):
  embedding = DPQEmbedding(31, 8, CentroidQuantizer(3, 4, commitment=0.5))
  model = decoder(embedding=embedding, head=CodebookHead(31, 8, 5, commitment=1.0))
  names = lambda module, *given: {
    *jax.eval_shape(
      lambda: module.init_with_output(jax.random.key(0), *given, method="loss_terms")[0][1]
    )
  }
  own = names(embedding, tokens)
  assert own >= {"commitment"}
  expected = {*(f"embedding/{name}" for name in own), "head/commitment"}
  assert names(model, tokens, tokens) == expected


def test_remat_recomputes_in_the_backward_pass(tokens):
  def backward_text(model):
    loss = lambda v: model.apply(v, tokens, method="hidden").sum()
    return str(jax.make_jaxpr(jax.grad(loss))(jax.eval_shape(lambda: initialised(model))))

  assert "remat" in backward_text(decoder(remat=True))
  assert "remat" not in backward_text(decoder())


def small(name):
  """The model of a config, with a small vocabulary if the tokenizer sets it."""
  experiment = config.load_config(pathlib.Path(__file__).parents[3] / "configs" / f"{name}.py")
  return config.with_vocab(experiment, experiment.model.embedding.vocab or 1031).model


CONFIGS = [p.stem for p in (pathlib.Path(__file__).parents[3] / "configs").glob("lm_*.py")]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_axis_of_every_variable_has_a_name(name):
  model = small(name)
  tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
  variables = jax.eval_shape(
    lambda key, t: model.init(key, t, t, method="loss_terms"), jax.random.key(0), tokens
  )
  is_names = lambda x: isinstance(x, tuple)
  ranks = jax.tree.map(len, model.logical_axes(), is_leaf=is_names)
  assert ranks == jax.tree.map(lambda x: x.ndim, variables)


@pytest.mark.parametrize("has_memory", [False, True])
def test_the_program_does_not_grow_with_the_depth(has_memory, tokens):
  ngrams = XorHash.qwen4(31, end=0, heads=2, least=50)
  memory = NGramMemory(NGramEmbedding(ngrams, DenseEmbedding(ngrams.rows, 4)), 8)
  more = {"memories": (memory,), "memory_blocks": (1,)} if has_memory else {}

  def length(layers):
    model = decoder(layers=layers, **more)
    loss = lambda v: model.apply(v, tokens, tokens, method="log_prob").sum()
    return len(str(jax.make_jaxpr(jax.grad(loss))(jax.eval_shape(lambda: initialised(model)))))

  assert length(24) < 1.02 * length(3)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("length", "window"), [(13, None), (13, 4), (1, 4), (0, 4)])
def test_attention_in_tiles_equals_attention_in_one_piece_with_its_gradients(
  length, window, monkeypatch
):
  monkeypatch.setattr(attention_module, "tile_size", lambda *_: 5)
  parts = np.random.default_rng(0).standard_normal((4, 3, length, 2, 7), np.float32)
  window = None if window is None else np.asarray(window, np.int32)

  position = jnp.arange(length)
  in_one_piece = lambda q, k, v, window: attention_module.attend(
    q, k, v, position, position, window
  )

  def mixed_and_gradients(attend):
    whole = lambda q, k, v: attend(q, k, v, window)
    mixed, pull_back = jax.vjp(whole, *parts[:3])
    return mixed, pull_back(parts[3])

  both = in_one_piece, functools.partial(attention_module.attend_to_itself, tiled=True)
  expected, found = results(lambda: [mixed_and_gradients(attend) for attend in both])
  # Sums over 13 positions of products that are sums over 7 numbers.
  assert_equal_up_to_rounding(found, expected, summands=13 + 7)


def test_a_training_step_with_remat_has_no_array_of_all_pairs_of_positions():
  def gradient_text(remat):
    embedding, head = DenseEmbedding(31, 64), GroupedHead(31, 64)
    model = Transformer(embedding, head, 64, layers=2, heads=8, context=509, remat=remat, window=99)
    tokens = jax.ShapeDtypeStruct((32, 509), jnp.int32)
    init = lambda t: model.init(jax.random.key(0), t, t, method="loss_terms")
    loss = lambda v, t: model.apply(v, t, t, method="log_prob").mean()
    return str(jax.make_jaxpr(jax.grad(loss))(jax.eval_shape(init, tokens), tokens))

  assert "509,509]" in gradient_text(remat=False)
  assert "509,509]" not in gradient_text(remat=True)


@pytest.mark.parametrize(
  ("shape", "most", "size"),
  [
    ((32, 512, 8, 16), 2**22, 32),
    ((32, 509, 8, 16), 2**22, 32),
    ((32, 512, 8, 16), 1, 16),
    ((3, 16, 2, 4), 2**22, 16),
    ((1, 1, 1, 1), 1, 1),
    ((1, 7, 1, 2), 1, 2),
    ((0, 7, 1, 2), 9, 7),
    ((3, 0, 1, 2), 9, 1),
  ],
)
def test_tiles_are_equal_parts_of_bounded_size(shape, most, size):
  assert attention_module.tile_size(shape, most) == size
