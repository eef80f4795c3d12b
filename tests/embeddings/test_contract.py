"""The contract of embeddings: what each of them promises, whatever its vectors are made of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted
from tests.embeddings.quantized import QUANTIZERS
from tests.test_random_layers import rows_of
from vqjax import (
  CodebookEmbedding,
  ComposedEmbedding,
  DenseEmbedding,
  DPQEmbedding,
  GuidedEmbedding,
  assign,
)
from vqjax.embeddings import Int8Embedding, LowRankEmbedding, ProductEmbedding, ScalarEmbedding
from vqjax.quantizers import CentroidQuantizer, FreeQuantizer

V, D = 229, 12
FREE = FreeQuantizer(4, 3, 12, value_dim=6, additive=True, normalize=False)
COMPOSED = ComposedEmbedding(V, D, DPQEmbedding(V, 6, FREE), hidden=7)

# All but the last ones have a reference in float64.
CASES = {
  "dense": DenseEmbedding(V, D),
  "codebook": CodebookEmbedding(V, D, 11, assign.FrequentAlone()),
  "low rank": LowRankEmbedding(V, D, 3),
  "product": ProductEmbedding(V, D, 5, 4),
  "product, shared": ProductEmbedding(V, D, 5, 4, shared=True),
  "product, additive": ProductEmbedding(V, D, 5, 7, additive=True),
  "product, rotated": ProductEmbedding(V, D, 5, 5, rotated=True),
  "product, additive, shared": ProductEmbedding(V, D, 5, 7, additive=True, shared=True),
  "scalar": ScalarEmbedding(V, D, 6),
  "int8": Int8Embedding(V, D, 4),
  "composed": COMPOSED,
  "guided": GuidedEmbedding(V, D, DenseEmbedding(V, D)),
  "guided, composed": GuidedEmbedding(V, D, COMPOSED),
  "vq shared": DPQEmbedding(V, D, CentroidQuantizer(6, 3, D, shared=True)),
  **{name: DPQEmbedding(V, D, quantizer) for name, quantizer in QUANTIZERS.items()},
}
BY_REFERENCE = list(CASES)[:9]


@pytest.fixture(params=CASES)
def name(request):
  return request.param


@pytest.fixture
def embedding(name):
  return CASES[name]


@functools.cache
def variables_of(name):
  random = jitted.random_variables(CASES[name], np.zeros(1, np.int32))
  if name == "scalar":
    levels = np.random.default_rng(0).integers(0, 64, (V, D)).astype(np.uint8)
    random |= {"codes": {"levels": levels}}
  return random


@pytest.mark.fast_cases(6)
def test_vectors_are_rows_of_the_table_for_integers_of_any_width_and_nan_outside(name, embedding):
  tokens = np.array([[0, V - 1, -1], [7, V, 2**30]])

  @jax.jit
  def run(variables):
    own = embedding.bind(variables)
    return own(tokens), own(np.uint8([200, 44])), own(np.zeros((2, 0), np.int32)), own.table()

  found, narrow, nothing, table = jax.device_get(run(variables_of(name)))
  assert nothing.shape == (2, 0, D)
  expected = rows_of(embedding, variables_of(name)) if name in BY_REFERENCE else table
  np.testing.assert_allclose(table, expected, atol=1e-5)
  np.testing.assert_allclose(found[0, :2], table[[0, V - 1]], atol=1e-5)
  np.testing.assert_allclose(found[1, 0], table[7], atol=1e-5)
  np.testing.assert_allclose(narrow, table[[200, 44]], atol=1e-5)
  assert np.isnan(found).all(axis=-1).tolist() == [[False, False, True], [False, True, True]]


def test_size_and_axes_are_those_of_the_variables(name, embedding):
  variables = jitted.abstract_variables(embedding, np.zeros(1, np.int32))
  size, leaves = embedding.size(), jax.tree.leaves(variables)
  assert size.params == sum(x.size for x in jax.tree.leaves(variables["params"]))
  assert size.state_bytes == sum(x.size * x.dtype.itemsize for x in leaves)
  ranks = jax.tree.map(len, embedding.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
  assert ranks == jax.tree.map(lambda x: x.ndim, variables)


@pytest.mark.parametrize("name", list(CASES)[:10])
def test_the_dtypes_of_vectors_and_of_parameters_are_separate(name):
  token, variables = np.array([1]), variables_of(name)
  for dtype in (jnp.bfloat16, jnp.float32):
    low = CASES[name].clone(dtype=dtype)
    assert jax.eval_shape(low.apply, variables, token).dtype == dtype
  if name in ("scalar", "int8"):
    return  # their parameters are float32
  stored = CASES[name].clone(param_dtype=jnp.bfloat16)
  params = jax.eval_shape(stored.init, jax.random.key(0), token)["params"]
  assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))


@pytest.mark.fast_cases(2)
def test_on_eight_devices_vectors_terms_and_gradients_are_those_of_one(name, embedding):
  variables, tokens = variables_of(name), np.arange(32).reshape(8, 4) * 61 % V
  tokens[0, 0], tokens[0, 1] = V, tokens[0, 2]
  cotangent = np.random.default_rng(1).normal(size=(8, 4, D)).astype(np.float32)
  rest = {collection: tree for collection, tree in variables.items() if collection != "params"}

  def run(embedding, tokens):
    def loss(params):
      (vectors, terms), written = embedding.apply(
        *(rest | {"params": params}, tokens, False),
        method="loss_terms",
        mutable=list(rest),
        rngs={"sample": jax.random.key(6)},
      )
      known = jnp.where(jnp.isnan(vectors), 0.0, vectors)
      return (known * cotangent).sum() + sum(terms.values(), 0.0), (vectors, written)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])

  expected = jax.device_get(run(embedding, tokens))
  with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):  # explicit axes
    spread = embedding.clone(vocab_axis=("data", "model"))
    found = jax.device_get(run(spread, jax.device_put(tokens, jax.P("data"))))
  assert np.isnan(found[0][1][0][0, 0]).all()
  # The loss is a float32 sum of 32·D terms, in another order on the mesh.
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
  jax.tree.map(close, found, expected)


@pytest.mark.parametrize("name", ["vq shared", "sx"])
def test_a_step_of_training_is_exported_for_any_number_of_tokens(name):
  variables, (b, t) = variables_of(name), jax.export.symbolic_shape("b, t")
  rest = {collection: tree for collection, tree in variables.items() if collection != "params"}

  def loss(params, tokens):
    (vectors, terms), _ = CASES[name].apply(
      *(rest | {"params": params}, tokens, False), method="loss_terms", mutable=list(rest)
    )
    return sum(terms.values(), (vectors**2).sum())

  step = jax.jit(jax.grad(loss))
  exported = jax.export.export(step)(variables["params"], jax.ShapeDtypeStruct((b, t), np.int32))
  given = variables["params"], np.arange(6, dtype=np.int32).reshape(2, 3)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
  jax.tree.map(close, exported.call(*given), step(*given))


def test_a_lookup_has_a_forward_derivative():
  embedding, tokens = CASES["dense"], np.array([1, 1, 4])
  lookup = lambda v: embedding.apply(v, tokens)
  found, tangent = jax.jit(lambda v: jax.jvp(lookup, (v,), (v,)))(variables_of("dense"))
  np.testing.assert_array_equal(tangent, found)


WRONG_FIELDS = [
  (CodebookEmbedding(11, 6, 0), "codes.*0"),
  (CodebookEmbedding(11, 6, 12), "codes.*12"),
  (CodebookEmbedding(11, 6, 3, lambda vocab, codes: np.full(vocab, 3)), "got 3 for token 0"),
  (LowRankEmbedding(V, D, 13), r"`rank` .*\[1, 12\].*13"),
  (LowRankEmbedding(V, D, 0), "`rank` .*0"),
  (ProductEmbedding(V, D, 5, 5), "`subspaces` .*12.*5"),
  (ProductEmbedding(V, D, 5, 13, rotated=True), "`rotated` must be False with 13 subspaces"),
  (ProductEmbedding(V, D, 5, 4, rotated=True, additive=True), "`rotated` .*additive"),
  (ProductEmbedding(V, D, 0, 4), "`codes` and `subspaces` .*0 and 4"),
  (ProductEmbedding(0, D, 5, 4), "`vocab` .*0"),
  (ProductEmbedding(V, D, 5, 4, codes_init=lambda v, k, m: np.zeros((3, m), int)), "codes.*3, 4"),
  (ScalarEmbedding(V, D, 0), "`bits` .*0"),
  (ScalarEmbedding(V, D, 17), "`bits` .*17"),
  (Int8Embedding(V, D), "`group` must divide dim 12; got 32"),
  (ComposedEmbedding(V, D, DenseEmbedding(7, D), hidden=4), "`inner` .*7"),
  (ComposedEmbedding(V, D, DenseEmbedding(V, D), hidden=0), "`hidden` .*0"),
  (GuidedEmbedding(V, D, DenseEmbedding(V, 5)), "`student` .*229 and 5"),
  (GuidedEmbedding(V, D, DenseEmbedding(V, D), weight=-1.0), "`weight` .*-1.0"),
  (DPQEmbedding(V, 10, QUANTIZERS["vq"]), "`quantizer` .*10.*12"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_FIELDS, ids=[m for _, m in WRONG_FIELDS])
def test_fields_that_do_not_fit_are_refused(wrong, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(wrong.init, jax.random.key(0), np.zeros(1, np.int32))
