"""Wrong calls, as people make them: each error names the argument, its value and the remedy."""

import functools
import inspect
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vqjax
from vqjax import (
  CodebookHead,
  DenseEmbedding,
  DenseHead,
  DPQEmbedding,
  GroupedHead,
  Product,
  ProductHead,
  compress,
  linear_divergence,
  linear_sample,
  linear_sparse_target_loss,
  linear_top_k,
)
from vqjax import nnx as vqjax_nnx
from vqjax.ops.row_factory import columns
from vqjax.ops.softmax import linear_cross_entropy, linear_log_prob

V, D = 31, 8
HIDDEN, WEIGHT = np.ones((4, D), np.float32), np.ones((V, D), np.float32)
TOKENS = np.arange(4, dtype=np.int32)
KEY = jax.random.key(0)
HEAD = DenseHead(V, D)
VARIABLES = {"params": {"weight": WEIGHT}}


def log_prob(*operands, **options):
  """The op without run-time types, which users do not have."""
  return inspect.unwrap(linear_log_prob)(*operands, **options)


def cross_entropy(*operands, **options):
  """The loss without run-time types."""
  return inspect.unwrap(linear_cross_entropy)(*operands, **options)


def call(method, *arguments, **options):
  return HEAD.apply(VARIABLES, *arguments, **options, method=method)


MISTAKES = {
  "float tokens": (lambda: call("log_prob", HIDDEN, TOKENS.astype(float)), "`tokens` .* int32"),
  "a list of tokens": (
    lambda: call("log_prob", HIDDEN, [0, 1, 2, 3]),
    r"`tokens` .* list.*asarray",
  ),
  "a list of vectors": (lambda: call("logits", HIDDEN.tolist()), r"`hidden` .* list.*asarray"),
  "token ids for vectors": (lambda: HEAD.init(KEY, TOKENS), "`hidden` .* int32 .* embedding first"),
  "vectors for token ids": (
    lambda: DenseEmbedding(V, D).init(KEY, HIDDEN),
    "`tokens` must be integers; got float32",
  ),
  "fewer tokens": (lambda: call("log_prob", HIDDEN, TOKENS[:3]), r"`hidden` .* \(3,\) of `tokens`"),
  "codes that are an assignment": (
    lambda: CodebookHead(V, D, np.arange(V)).init(KEY, HIDDEN),
    "`codes` of CodebookHead must be an integer",
  ),
  "a [D, V] array for a weight": (
    lambda: DenseHead(V, D, weight_init=WEIGHT.T).init(KEY, HIDDEN),
    r"a given array must have shape \(31, 8\); got \(8, 31\). Transpose it",
  ),
  "a [D, V] kernel for a variable": (
    lambda: HEAD.apply({"params": {"weight": WEIGHT.T}}, HIDDEN),
    r"`weight` must have shape \(31, 8\); got \(8, 31\). Transpose it",
  ),
  "a [D, V] kernel for an NNX layer": (
    lambda: vqjax_nnx.from_linen(HEAD, {"params": {"weight": WEIGHT.T}}),
    r"params/weight' of shape \(31, 8\); got \(8, 31\). Transpose it",
  ),
  "a [D, V] kernel of a student": (
    lambda: linear_divergence(HIDDEN, WEIGHT.T, HIDDEN, WEIGHT),
    r"`weight` must be \[V, 8\] .*columns",
  ),
  "a mask of floats for log_prob": (
    lambda: HEAD.apply(VARIABLES, HIDDEN, TOKENS, mask=jnp.ones(4), method="log_prob"),
    "`mask` must be bool .* got float32",
  ),
  "a seed for a key": (lambda: call("sample", HIDDEN, 0), r"`key` .* got 0. Use jax.random.key"),
  "a number of tokens in floats": (lambda: call("top_k", HIDDEN, 3.0), "`k` .* got 3.0"),
  "a mask of floats": (
    lambda: call("loss_terms", HIDDEN, TOKENS, jnp.ones(4)),
    "`mask` must be bool .* got float32",
  ),
  "a table for an embedding": (
    lambda: DenseHead(V, D, embedding=WEIGHT).init(KEY, HIDDEN),
    "`embedding` must be an embedding",
  ),
  "a name for an output function": (
    lambda: DenseHead(V, D, output="sigsoftmax").init(KEY, HIDDEN),
    "`output`",
  ),
  "a name for a quantiser": (lambda: DPQEmbedding(V, D, "sx"), "`quantizer` .* got str"),
  "a head without variables": (lambda: HEAD.log_prob(HIDDEN, TOKENS), r"variables .*head.apply"),
  "a bias of another rank": (
    lambda: log_prob(HIDDEN, WEIGHT, TOKENS, jnp.ones((1, V))),
    r"`bias` must be \[31\] .* got \(1, 31\)",
  ),
  "a number for a bias": (lambda: log_prob(HIDDEN, WEIGHT, TOKENS, 0.0), "`bias` .* got float"),
  "a [D, V] kernel": (lambda: log_prob(HIDDEN, WEIGHT.T, TOKENS), "columns"),
  "one-hot tokens": (
    lambda: log_prob(HIDDEN, WEIGHT, jax.nn.one_hot(TOKENS, V)),
    r"`hidden` must have the shape \(4, 31\) of `tokens`",
  ),
  "a list for a weight": (
    lambda: log_prob(HIDDEN, WEIGHT.tolist(), TOKENS),
    "`weight` .* list.*asarray",
  ),
  "a number for a tile": (
    lambda: log_prob(HIDDEN, WEIGHT, TOKENS, tile=128),
    r"`tile` must be \(tokens, vocabulary rows\).* got 128",
  ),
  "a temperature that float32 lacks": (
    lambda: log_prob(HIDDEN, WEIGHT, TOKENS, temperature=1e-40),
    "`temperature` must be positive and finite; got 1e-40, in float32",
  ),
  "a softcap that float32 lacks": (
    lambda: log_prob(HIDDEN, WEIGHT, TOKENS, softcap=1e39),
    r"`softcap` must be positive and finite; got 1e\+39, in float32",
  ),
  "a single number for vectors": (
    lambda: log_prob(jnp.float32(1), WEIGHT, TOKENS[0]),
    r"`hidden` must be floating-point vectors; got float32 of shape \(\)",
  ),
  "vectors of 8 bits": (
    lambda: log_prob(HIDDEN.astype(jnp.float8_e4m3fn), WEIGHT, TOKENS),
    "`hidden` must have at least 16 bits a number; got float8_e4m3fn",
  ),
  "True for a number of tokens": (
    lambda: call("top_k", HIDDEN, True),
    r"`k` must be an integer in \[1, vocab\]; got True",
  ),
  "a seed for the key of an op": (
    lambda: linear_sample(HIDDEN, 0, WEIGHT),
    "`key` must be a key of jax.random; got 0",
  ),
  "a traced softcap": (
    lambda: jax.jit(lambda c: log_prob(HIDDEN, WEIGHT, TOKENS, softcap=c))(30.0),
    "`softcap` must be a Python number",
  ),
  "a temperature for each token": (
    lambda: log_prob(HIDDEN, WEIGHT, TOKENS, temperature=jnp.ones(4)),
    r"`temperature` must be a Python number, one for all tokens; got .* \(4,\)",
  ),
  "a traced label smoothing": (
    lambda: jax.jit(lambda s: cross_entropy(HIDDEN, WEIGHT, TOKENS, label_smoothing=s))(0.1),
    "`label_smoothing` must be a Python number",
  ),
  "a list for a weight to decode with": (
    lambda: inspect.unwrap(linear_top_k)(HIDDEN, WEIGHT.tolist(), 3),
    "`weight` .* list.*asarray",
  ),
  "a list for a kernel": (lambda: columns(WEIGHT.tolist()), "`kernel` .* list.*asarray"),
  "a name for a method": (
    lambda: compress(np.asarray(WEIGHT), method="product"),
    r"`method` .* got 'product'. Give vqjax.Product\(",
  ),
  "a class for a method": (
    lambda: compress(np.asarray(WEIGHT), method=Product),
    r"`method` must be a method with its sizes",
  ),
  "a path for a table": (
    lambda: compress("model.safetensors", bytes=1 / 4),
    "`table` must be an array of real numbers; got str",
  ),
  "a table inside of jit": (
    lambda: jax.jit(lambda x: compress(x, bytes=1 / 4))(WEIGHT),
    "`table` must have values; got a traced array",
  ),
  "fewer tokens for a tree": (
    lambda: jax.eval_shape(
      lambda: vqjax.HierarchicalHead(V, D).init(KEY, HIDDEN, TOKENS[:3], method="log_prob")
    ),
    r"`hidden` must have the shape \(3,\) of `tokens`",
  ),
  "a part of a size": (
    lambda: compress(WEIGHT, method=Product(2.5, 2)),
    "`codes` of Product must be an integer; got 2.5",
  ),
  "a number for moments": (lambda: compress(WEIGHT, bytes=0.5, moments=3), "`moments` .* got int"),
  "a text for a seed": (lambda: compress(WEIGHT, bytes=0.5, seed="x"), "`seed` .* got 'x'"),
  "two keys": (lambda: linear_sample(HIDDEN, jax.random.split(KEY), WEIGHT), r"`key` .* \(2,\)"),
  "weights of another shape": (
    lambda: jax.eval_shape(lambda: DenseHead(V, D, weight_init=np.int32).init(KEY, HIDDEN)),
    r"`weight_init` of DenseHead: .* Give an initialiser",
  ),
  "a list for the op": (
    lambda: cross_entropy(HIDDEN, WEIGHT, [0, 1, 2, 3]),
    "`tokens` .* list",
  ),
}


# With run-time types, which users do not have, jaxtyping refuses some calls before vqjax does.
@pytest.mark.skipif("VQJAX_RUNTIME_TYPES" in os.environ, reason="calls are checked by jaxtyping")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
  make, message = MISTAKES[mistake]
  with pytest.raises((ValueError, TypeError), match=message):
    make()


# Not mistakes, but variables of NNX where a function has an array, which jaxtyping does not know.
@pytest.mark.skipif("VQJAX_RUNTIME_TYPES" in os.environ, reason="calls are checked by jaxtyping")
def test_params_are_the_operands_of_every_loss():
  linear = nnx.Linear(D, V, rngs=nnx.Rngs(0))
  tokens, probs = np.arange(8).reshape(4, 2), np.full((4, 2), 0.5, np.float32)

  def total(kernel, bias):
    weight = columns(kernel)
    sparse = linear_sparse_target_loss(HIDDEN, weight, tokens, probs, bias).kl
    divergence = linear_divergence(HIDDEN, weight, HIDDEN, WEIGHT, bias, bias)
    return (sparse + divergence - linear_log_prob(HIDDEN, weight, TOKENS, bias)).sum()

  losses = nnx.value_and_grad(lambda linear: total(linear.kernel, linear.bias))
  value, gradient = nnx.jit(losses)(linear)
  expected = jax.jit(jax.value_and_grad(total, (0, 1)))(linear.kernel[...], linear.bias[...])
  np.testing.assert_allclose(value, expected[0], rtol=1e-6)
  np.testing.assert_allclose(gradient.kernel[...], expected[1][0], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(gradient.bias[...], expected[1][1], rtol=1e-5, atol=1e-6)


def test_an_array_is_accepted_where_a_function_makes_one():
  assignment = np.arange(V) % 5
  order = np.random.default_rng(0).permutation(V)
  codes = np.random.default_rng(1).integers(0, 3, (V, 2))
  head = CodebookHead(V, D, 5, assignment_init=assignment)
  heads = (
    head,
    GroupedHead(V, D, order_init=order),
    ProductHead(V, D, 3, 2, codes_init=codes),
    DenseHead(V, D, weight_init=np.asarray(WEIGHT, np.float64)),
  )

  @nnx.jit
  def made():
    native = vqjax_nnx.DenseHead(V, D, weight_init=WEIGHT, rngs=nnx.Rngs(0))
    return [own.init(jax.random.key(0), HIDDEN) for own in heads], native.weight[...]

  (coded, grouped, product, dense), native = made()
  np.testing.assert_array_equal(coded["codes"]["assignment"], assignment)
  np.testing.assert_array_equal(grouped["codes"]["order"], order)
  np.testing.assert_array_equal(product["codes"]["codes"], codes)
  np.testing.assert_array_equal(dense["params"]["weight"], WEIGHT)
  assert dense["params"]["weight"].dtype == jnp.float32
  np.testing.assert_array_equal(native, WEIGHT)
  assert head == CodebookHead(V, D, 5, assignment_init=list(assignment))
  assert hash(head) == hash(head.clone())
  assert head != CodebookHead(V, D, 5, assignment_init=assignment[::-1])
  assert pickle.loads(pickle.dumps(head)) == head


ARRAYS = {"hidden": (4, D), "weight": (V, D), "tokens": (4,), "bias": (V,), "mask": (4,)}
ARRAYS |= {"token_weight": (4,), "class_weight": (V,)}
LACKED = [object, str, "M8[s]", "m8[s]", complex, ">f4", np.longdouble, jnp.float8_e4m3fn, jnp.int4]


@pytest.mark.untyped
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_jax_lacks_is_refused_by_name(name):
  given, base = {"hidden": HIDDEN, "weight": WEIGHT, "tokens": TOKENS}, np.zeros(ARRAYS[name])
  wrong = [*map(base.astype, LACKED), np.ma.masked_array(base), *([None] if name in given else [])]
  for array in wrong:
    with pytest.raises((TypeError, ValueError), match=f"`{name}` must"):
      vqjax.linear_cross_entropy(**given | {name: array})


WRONG = [1e39, float("nan"), float("inf"), "x", b"1", [], {}, object(), 1j]
WRONG += [np.array([1.0, 2.0]), np.float32("nan"), -(2**70)]
OPTIONS = {
  "log_prob": ("temperature", "softcap", "scratch", "tile", "dtype"),
  "softmax": ("top_k", "output"),
  "cross_entropy": ("label_smoothing", "z_loss", "ignore_index", "reduction"),
  "sample": ("key", "temperature", "top_k", "top_p", "allowed"),
  "top_k": ("k",),
}


@pytest.mark.untyped
@pytest.mark.parametrize(
  ("name", "option"), [(n, o) for n, given in OPTIONS.items() for o in given]
)
def test_an_option_of_another_type_or_range_is_refused_by_name(name, option):
  given = {"sample": {"key": KEY}, "top_k": {"k": 2}}.get(name, {"tokens": TOKENS})
  for value in WRONG:
    call = functools.partial(getattr(vqjax, f"linear_{name}"), HIDDEN, weight=WEIGHT)
    with pytest.raises((TypeError, ValueError), match=f"`{option}`"):
      call(**given | {option: value})
