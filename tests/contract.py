"""The contract of output heads: a test class inherits `HeadContract` and names its cases.

The methods of a case are compiled once, in one program where several claims read its results, and
are shared by all tests of the case: compilation is most of the time of these tests.
"""

import contextlib
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
from tests.jitted import abstract_variables, results
from vqjax import assign
from vqjax import nnx as layers
from vqjax.ops import sampling


@contextlib.contextmanager
def strict_modes():
  """What JAX refuses on request: operands of other dtypes and of other ranks."""
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


def costly(test):
  """Marks a slow test with programs of its own, which runs for the cases of the meshes alone."""
  test.is_costly = True
  return pytest.mark.slow(test)


@functools.lru_cache(maxsize=8)
def compiled(contract: type, case: str, vocab: int) -> Compiled:
  """The compiled case of a contract's class; a few of them are kept."""
  return Compiled(contract.cases[case](vocab, contract.dim), contract.prepared)


class OneDeviceContract:
  """Claims about every head on one device. A subclass gives `cases`.

  They are functions (vocab, dim) -> head, by name.
  `reference_logits(head, variables, hidden)` computes the logits independently, in float64 NumPy.
  """

  cases: dict
  vocab = 101  # prime
  dim = 12
  bfloat16_tolerance = 2e-3

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
    return np.random.default_rng(2).standard_normal((3, 5, self.dim), np.float32)

  @pytest.fixture
  def tokens(self):
    ends = [0, self.vocab - 1]
    middle = np.random.default_rng(3).integers(0, self.vocab, 13)
    return np.concatenate([ends, middle]).reshape(3, 5).astype(np.int32)

  @pytest.fixture
  def cotangent(self):
    return np.random.default_rng(4).standard_normal((3, 5), np.float32)

  @pytest.fixture
  def expected(self, head, variables, hidden):
    """float64 log-probabilities of all tokens, computed independently of the head."""
    logits = self.reference_logits(head, as_float64(variables), np.asarray(hidden, np.float64))
    return reference.log_softmax(logits)

  def reference_logits(self, head, variables, hidden):
    raise AssertionError("a head's test class computes its logits independently")

  def bfloat16_logits(self, head, variables, hidden):
    """The logits of a head that computes in bfloat16, independently, from what it rounds."""
    narrow = lambda x: reference.in_bfloat16(x) if x.ndim > 1 and x.shape[-1] == self.dim else x
    return self.reference_logits(head, jax.tree.map(narrow, variables), hidden)

  @staticmethod
  def prepared(head, variables):
    """Variables that are not initialised but made of others."""
    del head
    return variables

  def test_logits_and_log_prob_equal_an_independent_computation(
    self, run, hidden, tokens, cotangent, expected
  ):
    logits, log_prob, _, _ = run.core(hidden, tokens, cotangent)
    assert logits.shape == (3, 5, self.vocab)
    assert log_prob.dtype == jnp.float32
    # float32 sums of D + V terms of order one: a few hundred roundings of 6e-8.
    np.testing.assert_allclose(reference.log_softmax(logits), expected, atol=2e-5)
    np.testing.assert_allclose(log_prob, reference.of_tokens(expected, tokens), atol=2e-5)

  def test_every_row_has_its_temperature_and_nucleus(
    self, head, variables, hidden, tokens, expected
  ):
    warm = np.float32([[0.0, 0.5, 1.0, 2.0, np.nan]] * 3)
    positive, tiny = np.where(warm > 0, warm, 1), np.full((3, 5), 1e-6, np.float32)

    def run(variables, hidden, tokens, warm, positive, tiny):
      draw = lambda *options: head.apply(
        variables, hidden, jax.random.key(1), *options, method="sample"
      )
      log_prob = head.apply(variables, hidden, tokens, positive, method="log_prob")
      return log_prob, draw(warm), draw(warm, 7, 1.0), draw(0.9, None, tiny)

    log_prob, any_token, of_seven, best = results(
      run, variables, hidden, tokens, warm, positive, tiny
    )
    scaled = reference.log_softmax(expected / positive[..., None])
    np.testing.assert_allclose(log_prob, reference.of_tokens(scaled, tokens), atol=1e-4)
    top = expected.max(axis=-1)
    for drawn, greedy in ((any_token, [0, 4]), (of_seven, [0, 4]), (best, slice(None))):
      assert ((drawn >= 0) & (drawn < self.vocab)).all(), drawn
      of_drawn = reference.of_tokens(expected, drawn)
      # Tokens of equal scores are equally good.
      np.testing.assert_allclose(of_drawn[:, greedy], top[:, greedy], atol=2e-5)
    seventh = -np.sort(-expected, axis=-1)[..., 6]
    assert (reference.of_tokens(expected, of_seven) >= seventh - 2e-5).all()

  def test_probabilities_sum_to_one(self, run, hidden, cotangent):
    row = np.broadcast_to(hidden[0, 0], hidden.shape)
    every = np.resize(np.arange(self.vocab), (math.ceil(self.vocab / 15), 3, 5)).astype(np.int32)
    log_prob = [run.core(row, tokens, cotangent)[1] for tokens in every]
    total = np.exp(np.concatenate(log_prob, axis=None, dtype=np.float64)[: self.vocab]).sum()
    np.testing.assert_allclose(total, 1, atol=1e-5)

  def test_gradients_equal_those_of_a_float64_dense_reference(
    self, run, head, variables, hidden, tokens, cotangent
  ):
    gradients = run.core(hidden, tokens, cotangent)[2]
    exact = as_float64(variables)

    def loss(params, hidden):
      logits = self.reference_logits(head, exact | {"params": params}, hidden)
      return (reference.of_tokens(reference.log_softmax(logits), tokens) * cotangent).sum()

    reference.check_slopes(gradients, loss, exact["params"], np.asarray(hidden, np.float64))

  def test_a_token_outside_the_vocabulary_is_nan(self, run, hidden, cotangent):
    tokens = np.zeros((3, 5), np.int32)
    tokens[1, 2:] = -1, self.vocab, 2**30
    log_prob = run.core(hidden, tokens, cotangent)[1]
    assert np.argwhere(np.isnan(log_prob)).tolist() == [[1, 2], [1, 3], [1, 4]]

  def test_top_k_equals_brute_force(self, run, hidden, tokens, cotangent, expected):
    for log_probs, best in run.core(hidden, tokens, cotangent)[3]:
      k = best.shape[-1]
      np.testing.assert_allclose(log_probs, np.sort(expected)[..., ::-1][..., :k], atol=2e-5)
      np.testing.assert_allclose(np.take_along_axis(expected, best, -1), log_probs, atol=2e-5)
      assert all(len(set(row)) == k for row in best.reshape(-1, k))

  @costly
  def test_the_best_token_is_that_of_top_k_and_of_temperature_zero(self, run, hidden, expected):
    (log_prob, best), drawn = run(
      lambda own, h: (own.top_k(h, k=1), own.sample(h, jax.random.key(0), temperature=0)), hidden
    )
    np.testing.assert_allclose(log_prob[..., 0], expected.max(axis=-1), atol=2e-5)
    for tokens in (best[..., 0], drawn):
      found = reference.of_tokens(expected, tokens)
      np.testing.assert_allclose(found, expected.max(axis=-1), atol=2e-5)

  @costly
  def test_log_prob_at_a_temperature_is_of_the_sharpened_distribution(
    self, run, head, variables, hidden, tokens, cotangent
  ):
    def at_temperature(own, hidden):
      value, pull = jax.vjp(lambda h: own.log_prob(h, tokens, 0.7), hidden)
      return value, pull(cotangent)[0]

    found, gradient = run(at_temperature, hidden)
    wide = as_float64(variables)
    sharp = lambda h: reference.log_softmax(self.reference_logits(head, wide, h) / 0.7)
    own = lambda h: reference.of_tokens(sharp(h), tokens)
    exact = np.asarray(hidden, np.float64)
    # Some hundred roundings of 6e-8 of scores of order one, divided by 0.7.
    np.testing.assert_allclose(found, own(exact), atol=4e-5)
    reference.check_slopes((gradient,), lambda h: (own(h) * cotangent).sum(), exact)

  @costly
  def test_tokens_that_are_left_out_contribute_exactly_zero(self, run, variables, hidden, tokens):
    tokens[1, 2:], tokens[2, 0] = -100, self.vocab
    known = (tokens >= 0) & (tokens < self.vocab)
    hidden = np.where(known[..., None], hidden, np.nan).astype(np.float32)

    def loss(params, hidden, tokens, mask):
      given = variables | {"params": params}
      log_prob, terms = run.head.apply(given, hidden, tokens, mask, -100, method="loss_terms")
      return sum(terms.values(), -log_prob.sum())

    both = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, (of_params, of_hidden) = jax.device_get(
      both(variables["params"], hidden, tokens, tokens < self.vocab)
    )
    kept = both(variables["params"], hidden[known], tokens[known], np.ones(known.sum(), bool))
    np.testing.assert_allclose(value, kept[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), of_params, kept[1][0])
    np.testing.assert_allclose(of_hidden[known], kept[1][1], atol=1e-5)
    assert not np.any(of_hidden[~known])

  @costly
  def test_log_prob_leaves_out_what_loss_terms_does(self, run, variables, hidden, tokens):
    tokens[1, 2:], tokens[2, 0] = -100, self.vocab
    known = (tokens >= 0) & (tokens < self.vocab)
    hidden = np.where(known[..., None], hidden, np.nan).astype(np.float32)

    def loss(params, hidden, method):
      given, options = variables | {"params": params}, {"mask": tokens < self.vocab}
      found = run.head.apply(given, hidden, tokens, ignore_index=-100, method=method, **options)
      return -(found if method == "log_prob" else found[0]).sum()

    both = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    found, expected = (
      jax.device_get(both(variables["params"], hidden, name)) for name in ("log_prob", "loss_terms")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)

  @costly
  def test_the_share_of_the_gradient_is_that_of_a_float64_projection(
    self, run, head, variables, hidden, tokens
  ):
    found = run(lambda own, h: own.gradient_share(h, tokens[0]), hidden[0])
    logits = lambda h: self.reference_logits(head, as_float64(variables), h)
    expected = reference.gradient_share(logits, np.asarray(hidden[0], np.float64), tokens[0])
    for own, wanted in zip(found, expected, strict=True):
      # Central differences are good to 1e-9; what remains is float32.
      np.testing.assert_allclose(own, wanted, atol=1e-4)

  # Large, since a block of the vocabulary may have 4 Mi scores whatever the vocabulary is.
  @pytest.mark.parametrize("vocab", [16_411])
  def test_no_value_of_batch_times_vocabulary_is_made(self, case, vocab):
    head, rows = self.cases[case](vocab, self.dim), 2053
    hidden = jax.ShapeDtypeStruct((rows, self.dim), jnp.float32)
    tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)
    variables = jax.eval_shape(lambda h: head.init(jax.random.key(0), h), hidden)

    def loss(params, rest, hidden, tokens):
      return -head.apply(rest | {"params": params}, hidden, tokens, method="log_prob").mean()

    rest = {name: value for name, value in variables.items() if name != "params"}
    both = jax.value_and_grad(loss, (0, 2))
    largest = reference.largest_value(both, variables["params"], rest, hidden, tokens)
    assert largest < rows * vocab / 4

  @costly
  def test_all_products_have_the_precision_of_the_head(self, case, hidden, tokens):
    head = self.cases[case](self.vocab, self.dim).clone(precision="highest")
    variables = abstract_variables(head)

    def run(variables, hidden):
      # The rules of a gradient are traced after the call, which a compiled function shows.
      call = jax.jit(head.apply, static_argnames="method")
      loss = lambda v, h: call(v, h, tokens, method="loss_terms")[0].sum()
      gradients = jax.grad(loss, (0, 1), allow_int=True)(variables, hidden)
      return gradients, call(variables, hidden, method="logits")

    found = reference.precisions_of(run, variables, hidden)
    assert found <= {(jax.lax.Precision.HIGHEST,) * 2}

  @costly
  @pytest.mark.parametrize("vocab", [9001])
  def test_a_vocabulary_of_several_blocks_is_searched_and_drawn_from_whole(self, case, vocab):
    run, draws = compiled(type(self), case, vocab), 300
    hidden = np.random.default_rng(2).standard_normal(self.dim, np.float32)
    assert math.ceil(vocab / sampling.block_width(draws, vocab)) == 3
    # The first rows may draw one token, in the first block or in the ragged last one; the others
    # may draw the last three fifths, where a token that two blocks hold must not be favoured.
    single, few = np.array([0, 4096, vocab - 1]), np.arange(vocab) > vocab / 2.5
    allowed = np.concatenate([(np.arange(vocab) == single[:, None]), np.tile(few, (draws, 1))])

    def program(own, hidden, allowed):
      rows = jnp.broadcast_to(hidden, (len(allowed), self.dim))
      drawn = own.sample(rows, jax.random.key(1), allowed=allowed)
      return own.logits(hidden), own.top_k(hidden, 500), drawn

    logits, (log_probs, tokens), drawn = run(program, hidden, allowed)
    expected = reference.log_softmax(logits)
    np.testing.assert_allclose(log_probs, np.sort(expected)[::-1][:500], atol=2e-5)
    assert len(set(tokens)) == 500
    np.testing.assert_array_equal(drawn[:3], single)
    wanted = np.exp(reference.log_softmax(np.where(few, logits, -np.inf)))
    edges = np.linspace(0, vocab, 10).astype(int)
    counts = np.histogram(drawn[3:], edges)[0]
    share = np.add.reduceat(wanted, edges[:-1]) * draws
    some = share > 5
    assert counts[~some].sum() <= 10
    assert scipy.stats.chisquare(counts[some], share[some], sum_check=False).pvalue > 1e-4

  def test_modes_of_jax_change_neither_methods_nor_dtypes(self, head, variables, hidden, tokens):
    def program(variables, hidden, tokens):
      call = lambda *args, method: head.apply(variables, *args, method=method)
      rest = {name: tree for name, tree in variables.items() if name != "params"}

      def loss(params, hidden):
        given = rest | {"params": params}
        log_prob, terms = head.apply(given, hidden, tokens, tokens > 0, -1, method="loss_terms")
        return sum(terms.values(), -log_prob.sum())

      key, allowed = jax.random.key(0), np.ones(self.vocab, bool)
      warm = np.ones(tokens.shape, np.float32)
      floats = [call(hidden, tokens, t, method="log_prob") for t in (1.0, 0.7, warm)]
      floats += [call(hidden, method="logits"), jax.grad(loss, (0, 1))(variables["params"], hidden)]
      options = (), (0,), (0.7, 7, 0.9, allowed), (warm, 7, warm, allowed)
      draws = [call(hidden, key, *given, method="sample") for given in options]
      share = call(hidden, tokens, method="gradient_share")
      (log_probs, best), initial = call(hidden, 5, method="top_k"), head.init(key, hidden)
      floats += [share.kept, share.gain, share.norm, log_probs, initial.get("params", {})]
      return floats, (draws, best, share.rank)

    with jax.enable_x64(True), strict_modes():
      floats, integers = jax.eval_shape(program, {"params": {}} | variables, hidden, tokens)
    assert {x.dtype for x in jax.tree.leaves(floats)} == {np.dtype(np.float32)}
    assert {x.dtype for x in jax.tree.leaves(integers)} == {np.dtype(np.int32)}

  @costly
  def test_a_program_is_exported_for_any_number_of_tokens(self, run, hidden, tokens):
    def program(variables, hidden, tokens, key):
      call = lambda *args, method: run.head.apply(variables, *args, method=method)
      terms = call(hidden, tokens, tokens > 0, method="loss_terms")
      draws = [call(hidden, key, *given, method="sample") for given in ((), (0.7, 7, 0.9))]
      found = call(hidden, method="logits"), call(hidden, tokens, method="log_prob"), terms
      return found, call(hidden, 5, method="top_k"), draws

    b, t = jax.export.symbolic_shape("b, t")
    given = run.variables, hidden, tokens, jax.random.key(0)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    symbolic = [jax.ShapeDtypeStruct((b, t, *x.shape[2:]), x.dtype) for x in shapes[1:3]]
    exported = jax.export.export(jax.jit(program))(shapes[0], *symbolic, shapes[3])
    # More tokens than a chunk has, of which the last is not full.
    many = lambda x: np.tile(x, (1, 5, *[1] * (x.ndim - 2)))
    given = run.variables, many(hidden), many(tokens), given[3]
    found, (log_probs, best), draws = exported.call(*given)
    expected, (of_best, _), _ = jax.jit(program)(*given)
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
    jax.tree.map(near, (found, log_probs), (expected, of_best))
    assert all(x.shape == given[2].shape for x in draws)
    assert all((x >= 0).all() and (x < self.vocab).all() for x in (best, *draws))

  def test_size_is_the_real_count(self, head, variables):
    own = {c: {k: v for k, v in tree.items() if k != "embedding"} for c, tree in variables.items()}
    assert head.size().params == sum(x.size for x in jax.tree.leaves(own.get("params", {})))
    assert head.size().state_bytes == sum(x.nbytes for x in jax.tree.leaves(own))

  def test_logical_axes_name_every_axis_of_every_variable(self, head, variables):
    axes = head.logical_axes()
    ranks = jax.tree.map(lambda x: x.ndim, variables)
    assert jax.tree.map(len, axes, is_leaf=lambda x: isinstance(x, tuple)) == ranks

  @costly
  def test_a_text_gives_the_first_distribution_of_a_head(self, head, variables):
    ids = np.random.default_rng(0).zipf(1.3, 3000) % self.vocab
    text = assign.TextStats.of(ids, self.vocab)
    begun = head.started_from(text)
    assert begun == head.started_from(text)
    assert hash(begun) == hash(head.started_from(text))
    if begun is head:
      return
    # The same words as codes, orders and rows of zeros leave: what biases alone give.
    fresh = begun.init(jax.random.key(0), np.zeros((1, self.dim), np.float32))
    given = {"params": variables["params"] | fresh["params"]}
    logits = begun.apply({**variables, **fresh, **given}, np.zeros(self.dim, np.float32))
    log_prob = reference.log_softmax(np.float64(logits))
    frequency = text.counts / text.counts.sum()
    has_bias = getattr(head, "use_bias", False) or getattr(head, "token_bias", False)
    if has_bias and all(getattr(head, name, None) is None for name in ("softcap", "output")):
      np.testing.assert_allclose(np.exp(log_prob), frequency, atol=2e-3)
    assert -(frequency * log_prob).sum() < np.log(self.vocab) + 0.5

  @costly
  def test_the_nnx_layer_computes_the_same(self, head, variables, hidden, tokens, expected):
    layer = layers.from_linen(head, variables)
    both = nnx.jit(lambda layer, h, t: (layer.log_prob(h, t), layer.logits(h)))
    log_prob, logits = both(layer, hidden, tokens)
    np.testing.assert_allclose(reference.log_softmax(logits), expected, atol=2e-5)
    np.testing.assert_allclose(log_prob, reference.of_tokens(expected, tokens), atol=2e-5)

  @costly
  def test_bfloat16_agrees_with_float64_on_the_same_values(self, run, hidden, tokens):
    head, low = run.head.clone(dtype=jnp.bfloat16), hidden.astype(jnp.bfloat16)
    log_prob = results(lambda v, h: head.apply(v, h, tokens, method="log_prob"), run.variables, low)
    expected = self.bfloat16_logits(head, as_float64(run.variables), low.astype(np.float64))
    expected = reference.of_tokens(reference.log_softmax(expected), tokens)
    assert log_prob.dtype == jnp.float32
    np.testing.assert_allclose(log_prob, expected, atol=self.bfloat16_tolerance)

  @costly
  def test_one_token_without_a_batch_axis_and_an_empty_batch(self, run, hidden):
    def program(own, row):
      empty, token = jnp.zeros((0, self.dim)), jnp.int32(3)
      of_empty = own.log_prob(empty, jnp.zeros((0,), jnp.int32)), own.sample(empty, key)
      return (
        own.log_prob(row, token),
        own.log_prob(row[None], token[None]),
        of_empty,
        own.top_k(empty, 2),
      )

    key = jax.random.key(0)
    log_prob, of_batch, of_empty, best = run(program, hidden[0, 0])
    assert log_prob.shape == ()
    np.testing.assert_allclose(log_prob, of_batch[0], rtol=1e-6)
    assert all(x.shape == (0,) for x in of_empty)
    assert all(x.shape == (0, 2) for x in best)

  @costly
  def test_arguments_outside_their_range_are_refused(self, head, variables, hidden, tokens):
    call = lambda h, *args, method: jax.eval_shape(
      lambda v, h: head.apply(v, h, *args, method=method), variables, h
    )
    with pytest.raises(ValueError, match=r"hidden.*13.*12"):
      call(np.zeros((2, 13), np.float32), np.zeros((2,), np.int32), method="log_prob")
    for k in (0, 102):
      with pytest.raises(ValueError, match=rf"`?k`?.*{k}"):
        call(hidden, k, method="top_k")
    with pytest.raises(ValueError, match=r"`temperature` must be positive .* got 0"):
      call(hidden, tokens, 0, method="log_prob")


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
