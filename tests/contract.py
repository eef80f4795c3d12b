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
from flax.nnx import bridge

from tests import reference
from tests.contract_on_meshes import (
  Compiled,
  ContractOnMeshes,
  as_float64,
  mesh_cases,
)
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
  def test_positions_without_a_target_contribute_exactly_zero(self, run, variables, hidden, tokens):
    """Padded batches have targets outside the vocabulary, whose log_prob the loss leaves out."""
    tokens = tokens.at[1, 2:].set(-1).at[2, 0].set(self.vocab)
    known = (tokens >= 0) & (tokens < self.vocab)

    def loss(params, hidden, tokens, known):
      given = variables | {"params": params}
      log_prob, terms = run.head.apply(given, hidden, tokens, method="loss_terms")
      return sum(terms.values(), -jnp.where(known, log_prob, 0).sum())

    both = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, (of_params, of_hidden) = both(variables["params"], hidden, tokens, known)
    kept = both(variables["params"], hidden[known], tokens[known], jnp.ones(known.sum(), bool))
    np.testing.assert_allclose(value, kept[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), of_params, kept[1][0])
    np.testing.assert_allclose(of_hidden[known], kept[1][1], atol=1e-5)
    assert not np.any(of_hidden[~known])

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
  def test_samples_follow_the_distribution(self, run, hidden):
    self.check_draws(run, hidden[0, 0])

  @costly
  def test_samples_at_a_temperature_follow_the_sharpened_distribution(self, run, hidden):
    self.check_draws(run, hidden[0, 0], temperature=0.5)

  @costly
  def test_samples_among_the_best_follow_the_cut_distribution(self, run, hidden):
    self.check_draws(run, hidden[0, 0], top_k=7)

  @costly
  def test_samples_of_the_nucleus_follow_the_cut_distribution(self, run, hidden):
    self.check_draws(run, hidden[0, 0], top_p=0.6)

  @costly
  def test_samples_are_of_allowed_tokens_alone(self, run, hidden):
    self.check_draws(run, hidden[0, 0], allowed=np.arange(self.vocab) % 3 == 1)

  def check_draws(self, run, row, **options):
    logits = self.reference_logits(run.head, as_float64(run.variables), np.asarray(row, np.float64))
    expected = filtered(logits, **options)
    draws = 6_000
    rows = jnp.broadcast_to(row, (draws, self.dim))
    sample = jax.jit(lambda v, h, k: run.head.apply(v, h, k, **options, method="sample"))
    counts = np.bincount(sample(run.variables, rows, jax.random.key(5)), minlength=self.vocab)
    # Where whole codes tie at the edge of a top-k, any of them may be cut: compare the masses.
    assert counts[expected == 0].sum() == 0 or "top_k" in options
    likely = expected * draws > 5
    seen = np.append(counts[likely], draws - counts[likely].sum())
    wanted = np.append(expected[likely], 1 - expected[likely].sum()) * draws
    enough = wanted > 1e-6
    p_value = scipy.stats.chisquare(seen[enough], wanted[enough], sum_check=False).pvalue
    assert p_value > 1e-4

  @costly
  def test_a_row_with_nothing_allowed_draws_minus_one(self, run, hidden):
    allowed = np.zeros((3, 5, self.vocab), bool)
    allowed[0, 0, 4] = True
    sample = lambda v, h, k, a: run.head.apply(v, h, k, allowed=a, method="sample")
    tokens = jax.jit(sample)(run.variables, hidden, jax.random.key(0), allowed)
    assert tokens[0, 0] == 4
    assert (tokens.ravel()[1:] == -1).all()

  @costly
  @pytest.mark.parametrize("vocab", [9001])
  def test_a_vocabulary_of_several_blocks_is_searched_and_drawn_from_whole(self, case, vocab):
    run = compiled(type(self), case, vocab)
    head, variables = run.head, run.variables
    hidden = jax.random.normal(jax.random.key(2), (3, self.dim))
    assert math.ceil(vocab / sampling.block_width(3, vocab)) == 3
    logits = run("logits", hidden)
    log_probs, tokens = run("top_k", hidden, k=500)
    expected = reference.log_softmax(logits)
    np.testing.assert_allclose(log_probs, np.sort(expected)[:, ::-1][:, :500], atol=2e-5)
    assert all(len(set(row)) == 500 for row in np.asarray(tokens))
    # Each token on its own can be drawn, in the first block and in the ragged last one.
    draw = jax.jit(
      lambda h, key, only: head.apply(variables, h, key, allowed=only, method="sample")
    )
    for token in (0, 4096, vocab - 1):
      assert (draw(hidden, jax.random.key(0), jnp.arange(vocab) == token) == token).all()
    # A draw that named repeated tokens of the ragged last block twice would favour them.
    draws = 1_000
    rows = jnp.broadcast_to(hidden[0], (draws, self.dim))
    few = 2.5 * jnp.arange(vocab) > vocab
    drawn = draw(rows, jax.random.key(1), few)
    wanted = np.exp(reference.log_softmax(np.where(few, np.asarray(logits[0]), -np.inf)))
    edges = np.linspace(0, vocab, 10).astype(int)
    counts = np.histogram(drawn, edges)[0]
    share = np.add.reduceat(wanted, edges[:-1]) * draws
    some = share > 5
    assert counts[~some].sum() <= 30
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
  def test_works_through_the_nnx_bridge(self, head, hidden, tokens):
    model = bridge.ToNNX(head, rngs=nnx.Rngs(0))
    bridge.lazy_init(model, hidden)
    both = lambda m, h, t: (m(h, t, method="log_prob"), m(h, method="logits"))
    log_prob, logits = nnx.jit(both)(model, hidden, tokens)
    expected = np.take_along_axis(reference.log_softmax(logits), tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(log_prob, expected, atol=2e-5)

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
    nothing = jnp.zeros((0, self.dim)), jnp.zeros((0,), jnp.int32)
    assert run("log_prob", *nothing).shape == (0,)

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


def filtered(logits, temperature=1.0, top_k=None, top_p=None, allowed=None):
  """The distribution that `sample` promises, by sorting in float64."""
  logits = np.where(True if allowed is None else np.asarray(allowed), logits, -np.inf) / temperature
  if top_k is not None:
    chosen = np.argsort(-logits, kind="stable")[:top_k]
    logits = np.where(np.isin(np.arange(logits.size), chosen), logits, -np.inf)
  probability = np.exp(reference.log_softmax(logits))
  if top_p is not None:
    order = np.argsort(-probability, kind="stable")
    before = np.cumsum(probability[order]) - probability[order]
    edge = probability[order][before < top_p][-1]
    probability = np.where(probability >= edge - 1e-9, probability, 0)
  return probability / probability.sum()
