"""The contract of output heads: a test class inherits `HeadContract` and names its cases.

The methods of a case are compiled once, in one program where several claims read its results, and
are shared by all tests of the case: compilation is most of the time of these tests.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

from tests import reference
from tests.contract_on_meshes import (
  Compiled,
  ContractOnMeshes,
  as_float64,
  mesh_cases,
)
from vqjax import nnx as layers
from vqjax.ops import sampling


def costly(test):
  """Marks a slow test with programs of its own, which runs for the cases of the meshes alone."""
  test.is_costly = True
  return pytest.mark.slow(test)


@functools.lru_cache(maxsize=8)
def compiled(contract: type, case: str, vocab: int) -> Compiled:
  """The compiled case of a contract's class; a few of them are kept."""
  return Compiled(contract.cases[case](vocab, contract.dim))


class OneDeviceContract:
  """Claims about every head on one device. A subclass gives `cases`.

  They are functions (vocab, dim) -> head, by name.
  `reference_logits(head, variables, hidden)` computes the logits independently, in float64 NumPy.
  """

  cases: dict
  vocab = 101  # prime
  dim = 12

  @pytest.fixture
  def run(self, case):
    return compiled(type(self), case, self.vocab)

  @pytest.fixture
  def head(self, run):
    return run.head

  @pytest.fixture
  def variables(self, run):
    return run.variables

  @pytest.fixture
  def hidden(self):
    return jax.random.normal(jax.random.key(2), (3, 5, self.dim))

  @pytest.fixture
  def tokens(self):
    ends = jnp.array([0, self.vocab - 1])
    middle = jax.random.randint(jax.random.key(3), (13,), 0, self.vocab)
    return jnp.concatenate([ends, middle]).reshape(3, 5)

  @pytest.fixture
  def cotangent(self):
    return jax.random.normal(jax.random.key(4), (3, 5))

  @pytest.fixture
  def expected(self, head, variables, hidden):
    """float64 log-probabilities of all tokens, computed independently of the head."""
    logits = self.reference_logits(head, as_float64(variables), np.asarray(hidden, np.float64))
    return reference.log_softmax(logits)

  def reference_logits(self, head, variables, hidden):
    raise AssertionError("a head's test class computes its logits independently")

  def test_logits_and_log_prob_equal_an_independent_computation(
    self, run, hidden, tokens, cotangent, expected
  ):
    logits, log_prob, _, _ = run.core(hidden, tokens, cotangent)
    assert logits.shape == (3, 5, self.vocab)
    assert log_prob.dtype == jnp.float32
    # float32 sums of D + V terms of order one: a few hundred roundings of 6e-8.
    np.testing.assert_allclose(reference.log_softmax(logits), expected, atol=2e-5)
    own = np.take_along_axis(expected, tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(log_prob, own, atol=2e-5)

  def test_probabilities_sum_to_one(self, run, hidden, cotangent):
    row = jnp.broadcast_to(hidden[0, 0], hidden.shape)
    every = np.resize(np.arange(self.vocab), (math.ceil(self.vocab / 15), 3, 5))
    log_prob = [run.core(row, jnp.asarray(tokens), cotangent)[1] for tokens in every]
    total = np.exp(np.concatenate(log_prob, axis=None, dtype=np.float64)[: self.vocab]).sum()
    np.testing.assert_allclose(total, 1, atol=1e-5)

  def test_gradients_equal_those_of_a_float64_dense_reference(
    self, run, head, variables, hidden, tokens, cotangent
  ):
    gradients = run.core(hidden, tokens, cotangent)[2]
    expected = float64_gradients(self, head, variables, hidden, tokens, cotangent)
    assert jax.tree.structure(gradients) == jax.tree.structure(expected)
    # Central differences of step 1e-5 in float64 are good to 1e-9; what remains is float32.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), gradients, expected)

  @pytest.mark.parametrize("token", [-1, 101, 2**30])
  def test_a_token_outside_the_vocabulary_is_nan(self, run, hidden, cotangent, token):
    tokens = jnp.zeros((3, 5), jnp.int32).at[1, 2].set(token)
    log_prob = run.core(hidden, tokens, cotangent)[1]
    assert np.argwhere(np.isnan(log_prob)).tolist() == [[1, 2]]

  def test_top_k_equals_brute_force(self, run, hidden, tokens, cotangent, expected):
    for log_probs, best in run.core(hidden, tokens, cotangent)[3]:
      k = best.shape[-1]
      np.testing.assert_allclose(log_probs, np.sort(expected)[..., ::-1][..., :k], atol=2e-5)
      own = np.take_along_axis(expected, np.asarray(best), -1)
      np.testing.assert_allclose(own, log_probs, atol=2e-5)
      assert all(len(set(row)) == k for row in np.asarray(best).reshape(-1, k))

  @costly
  def test_the_best_token_is_that_of_top_k_and_of_temperature_zero(self, run, hidden, expected):
    log_prob, best = run("top_k", hidden, k=1)
    np.testing.assert_allclose(log_prob[..., 0], expected.max(axis=-1), atol=2e-5)
    drawn = run("sample", hidden, jax.random.key(0), temperature=0)
    for tokens in (best, drawn[..., None]):
      own = np.take_along_axis(expected, np.asarray(tokens), -1)[..., 0]
      np.testing.assert_allclose(own, expected.max(axis=-1), atol=2e-5)

  @costly
  def test_log_prob_at_a_temperature_is_of_the_sharpened_distribution(
    self, run, head, variables, hidden, tokens, cotangent
  ):
    @jax.jit
    def at_temperature(params, hidden):
      given = variables | {"params": params}
      loss = lambda h: head.apply(given, h, tokens, 0.7, method="log_prob")
      value, pull = jax.vjp(loss, hidden)
      return value, pull(cotangent)[0]

    found, gradient = at_temperature(variables["params"], hidden)
    wide = as_float64(variables)
    sharp = lambda h: reference.log_softmax(self.reference_logits(head, wide, h) / 0.7)
    own = lambda h: np.take_along_axis(sharp(h), np.asarray(tokens)[..., None], -1)[..., 0]
    exact = np.asarray(hidden, np.float64)
    # Some hundred roundings of 6e-8 of scores of order one, divided by 0.7.
    np.testing.assert_allclose(found, own(exact), atol=4e-5)
    direction = np.random.default_rng(0).normal(size=exact.shape)
    change = own(exact + 1e-5 * direction) - own(exact - 1e-5 * direction)
    slope = (np.asarray(cotangent, np.float64) * change).sum() / 2e-5
    np.testing.assert_allclose((gradient * direction).sum(), slope, atol=1e-3)

  @costly
  def test_tokens_that_are_left_out_contribute_exactly_zero(self, run, variables, hidden, tokens):
    tokens = tokens.at[1, 2:].set(-100).at[2, 0].set(self.vocab)
    known = (tokens >= 0) & (tokens < self.vocab)
    hidden = jnp.where(known[..., None], hidden, jnp.nan)

    def loss(params, hidden, tokens, mask):
      given = variables | {"params": params}
      log_prob, terms = run.head.apply(given, hidden, tokens, mask, -100, method="loss_terms")
      return sum(terms.values(), -log_prob.sum())

    both = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, (of_params, of_hidden) = both(variables["params"], hidden, tokens, tokens < self.vocab)
    kept = both(variables["params"], hidden[known], tokens[known], jnp.ones(known.sum(), bool))
    np.testing.assert_allclose(value, kept[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), of_params, kept[1][0])
    np.testing.assert_allclose(of_hidden[known], kept[1][1], atol=1e-5)
    assert not np.any(of_hidden[~known])

  @costly
  def test_the_share_of_the_gradient_is_that_of_a_float64_projection(
    self, run, head, variables, hidden, tokens
  ):
    found = run("gradient_share", hidden[0], tokens[0])
    logits = lambda h: self.reference_logits(head, as_float64(variables), h)
    expected = reference.gradient_share(logits, np.asarray(hidden[0], np.float64), tokens[0])
    for own, wanted in zip(found, expected, strict=True):
      # Central differences are good to 1e-9; what remains is float32.
      np.testing.assert_allclose(own, wanted, atol=1e-4)

  @pytest.mark.parametrize("vocab", [4099])
  def test_no_value_of_batch_times_vocabulary_is_made(self, case, vocab):
    head, rows = self.cases[case](vocab, self.dim), 2053
    hidden = jax.ShapeDtypeStruct((rows, self.dim), jnp.float32)
    tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)
    variables = jax.eval_shape(head.init, jax.random.key(0), jnp.zeros((1, self.dim)))

    def loss(params, rest, hidden, tokens):
      return -head.apply(rest | {"params": params}, hidden, tokens, method="log_prob").mean()

    rest = {name: value for name, value in variables.items() if name != "params"}
    both = jax.value_and_grad(loss, (0, 2))
    largest = reference.largest_value(both, variables["params"], rest, hidden, tokens)
    assert largest < rows * vocab / 4

  @costly
  @pytest.mark.parametrize("vocab", [9001])
  def test_a_vocabulary_of_several_blocks_is_searched_and_drawn_from_whole(self, case, vocab):
    run, draws = compiled(type(self), case, vocab), 300
    hidden = jax.random.normal(jax.random.key(2), (self.dim,))
    assert math.ceil(vocab / sampling.block_width(draws, vocab)) == 3
    # The first rows may draw one token, in the first block or in the ragged last one; the others
    # may draw the last three fifths, where a token that two blocks hold must not be favoured.
    single, few = np.array([0, 4096, vocab - 1]), np.arange(vocab) > vocab / 2.5
    allowed = np.concatenate([(np.arange(vocab) == single[:, None]), np.tile(few, (draws, 1))])

    @jax.jit
    def program(variables, hidden, allowed):
      call = lambda *args, **options: run.head.apply(variables, *args, **options)
      rows = jnp.broadcast_to(hidden, (len(allowed), self.dim))
      drawn = call(rows, jax.random.key(1), allowed=allowed, method="sample")
      return call(hidden, method="logits"), call(hidden, 500, method="top_k"), drawn

    logits, (log_probs, tokens), drawn = program(run.variables, hidden, allowed)
    expected = reference.log_softmax(logits)
    np.testing.assert_allclose(log_probs, np.sort(expected)[::-1][:500], atol=2e-5)
    assert len(set(np.asarray(tokens))) == 500
    np.testing.assert_array_equal(drawn[:3], single)
    wanted = np.exp(reference.log_softmax(np.where(few, np.asarray(logits), -np.inf)))
    edges = np.linspace(0, vocab, 10).astype(int)
    counts = np.histogram(drawn[3:], edges)[0]
    share = np.add.reduceat(wanted, edges[:-1]) * draws
    some = share > 5
    assert counts[~some].sum() <= 10
    assert scipy.stats.chisquare(counts[some], share[some], sum_check=False).pvalue > 1e-4

  def test_size_is_the_real_count(self, head, variables):
    own = {c: {k: v for k, v in tree.items() if k != "embedding"} for c, tree in variables.items()}
    assert head.size().params == sum(x.size for x in jax.tree.leaves(own.get("params", {})))
    assert head.size().state_bytes == sum(x.nbytes for x in jax.tree.leaves(own))

  def test_logical_axes_name_every_axis_of_every_variable(self, head, variables):
    axes = head.logical_axes()
    ranks = jax.tree.map(lambda x: x.ndim, variables)
    assert jax.tree.map(len, axes, is_leaf=lambda x: isinstance(x, tuple)) == ranks

  @costly
  def test_the_nnx_layer_computes_the_same(self, head, variables, hidden, tokens, expected):
    layer = layers.from_linen(head, variables)
    both = nnx.jit(lambda layer, h, t: (layer.log_prob(h, t), layer.logits(h)))
    log_prob, logits = both(layer, hidden, tokens)
    np.testing.assert_allclose(reference.log_softmax(logits), expected, atol=2e-5)
    own = np.take_along_axis(expected, tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(log_prob, own, atol=2e-5)

  @costly
  def test_bfloat16_agrees_with_float64_on_the_same_values(self, case, hidden, tokens):
    run = Compiled(self.cases[case](self.vocab, self.dim).clone(dtype=jnp.bfloat16))
    rounded = jax.tree.map(
      lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 and x.shape[-1] == self.dim else x,
      run.variables,
    )
    low = hidden.astype(jnp.bfloat16)
    log_prob = run("log_prob", low, tokens)
    expected = self.reference_logits(run.head, as_float64(rounded), np.asarray(low, np.float64))
    expected = np.take_along_axis(reference.log_softmax(expected), tokens[..., None], -1)[..., 0]
    assert log_prob.dtype == jnp.float32
    np.testing.assert_allclose(log_prob, expected, atol=2e-3)

  @costly
  def test_one_token_without_a_batch_axis_and_an_empty_batch(self, run):
    row, token = jnp.ones((self.dim,)), jnp.int32(3)
    log_prob = run("log_prob", row, token)
    assert log_prob.shape == ()
    np.testing.assert_allclose(log_prob, run("log_prob", row[None], token[None])[0], rtol=1e-6)
    empty = jnp.zeros((0, self.dim))
    assert run("log_prob", empty, jnp.zeros((0,), jnp.int32)).shape == (0,)
    assert run("sample", empty, jax.random.key(0)).shape == (0,)
    assert all(x.shape == (0, 2) for x in run("top_k", empty, k=2))

  @costly
  def test_hidden_of_another_width_and_k_outside_the_vocabulary_are_refused(
    self, head, variables, hidden
  ):
    with pytest.raises(ValueError, match=r"hidden.*13.*12"):
      head.apply(variables, jnp.zeros((2, 13)), jnp.zeros((2,), jnp.int32), method="log_prob")
    for k in (0, 102):
      with pytest.raises(ValueError, match=rf"`?k`?.*{k}"):
        head.apply(variables, hidden, k, method="top_k")


class HeadContract(OneDeviceContract, ContractOnMeshes):
  """Claims about every head, on one device and on many."""


def for_each_case(metafunc):
  """Runs each test of a contract once for each of its class's cases."""
  if "case" in metafunc.fixturenames:
    few = getattr(metafunc.function, "is_costly", False)
    first, *others = mesh_cases(metafunc.cls) if few else metafunc.cls.cases
    rest = [pytest.param(name, marks=pytest.mark.slow) for name in others]
    metafunc.parametrize("case", [first, *rest])
  if "mesh_case" in metafunc.fixturenames:
    metafunc.parametrize("mesh_case", mesh_cases(metafunc.cls))


def float64_gradients(contract, head, variables, hidden, tokens, cotangent):
  """Gradients of sum(cotangent · log_prob) by central differences of the float64 reference."""
  exact, hidden = as_float64(variables), np.asarray(hidden, np.float64)
  tokens, cotangent = np.asarray(tokens), np.asarray(cotangent, np.float64)

  def loss(params, hidden):
    logits = contract.reference_logits(head, exact | {"params": params}, hidden)
    log_prob = np.take_along_axis(reference.log_softmax(logits), tokens[..., None], -1)[..., 0]
    return (log_prob * cotangent).sum()

  def differences(array):
    gradient = np.zeros_like(array)
    for index in np.ndindex(array.shape):
      kept = array[index]
      array[index] = kept + 1e-5
      above = loss(exact["params"], hidden)
      array[index] = kept - 1e-5
      gradient[index] = (above - loss(exact["params"], hidden)) / 2e-5
      array[index] = kept
    return gradient

  writable = jax.tree.map(np.array, exact["params"])
  exact["params"] = writable
  return jax.tree.map(differences, writable), differences(hidden)
