"""The contract of mechanisms that heads share, for one head of each kind.

`DenseHead` stands for the heads that inherit `Head.sample` and the loops over a sharded vocabulary;
`CodebookHead`, `GroupedHead` and `HierarchicalHead` have their own.
"""

import jax
import numpy as np
import pytest
import scipy.stats
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests import reference
from tests.contract import HeadContract, costly
from tests.contract_on_meshes import Compiled, as_float64
from tests.jitted import random_variables, results
from vqjax.sharding import MeshShape, make_mesh

SOME = {"allowed": np.arange(HeadContract.vocab) % 3 == 1}
OPTIONS = {}, {"temperature": 0.5}, {"top_k": 7}, {"top_p": 0.6}, SOME


class RepresentativeContract(HeadContract):
  """Claims about draws and about kinds of meshes, beyond those about every head."""

  is_representative = True

  @costly
  def test_samples_follow_the_distribution_that_the_options_leave(self, run, hidden):
    self.check_draws(run, hidden[0, 0], *OPTIONS)

  def check_draws(self, run, row, *options):
    logits = self.reference_logits(run.head, as_float64(run.variables), np.asarray(row, np.float64))
    draws = 6_000
    sample = lambda own, h: [own.sample(h, jax.random.key(5), **option) for option in options]
    every = run(sample, np.broadcast_to(row, (draws, self.dim)))
    for option, drawn in zip(options, every, strict=True):
      expected = filtered(logits, **option)
      counts = np.bincount(drawn, minlength=self.vocab)
      # Where whole codes tie at the edge of a top-k, any may be cut: compare the masses.
      assert counts[expected == 0].sum() == 0 or "top_k" in option
      likely = expected * draws > 5
      seen = np.append(counts[likely], draws - counts[likely].sum())
      wanted = np.append(expected[likely], 1 - expected[likely].sum()) * draws
      enough = wanted > 1e-6
      p_value = scipy.stats.chisquare(seen[enough], wanted[enough], sum_check=False).pvalue
      assert p_value > 1e-4, option

  @costly
  def test_a_row_with_nothing_allowed_draws_minus_one(self, run, hidden):
    allowed = np.zeros((3, 5, self.vocab), bool)
    allowed[0, 0, 4] = True
    sample = lambda own, h, allowed: own.sample(h, jax.random.key(0), allowed=allowed)
    tokens = run(sample, hidden, allowed)
    assert tokens[0, 0] == 4
    assert (tokens.ravel()[1:] == -1).all()

  @pytest.mark.slow
  def test_draws_on_a_mesh_follow_the_distribution(self, mesh_case, first_mesh_case):
    run = Compiled(self.spread(mesh_case, self.vocab, self.dim))
    row = np.random.default_rng(2).standard_normal(self.dim, np.float32)
    options = {}, {"temperature": 0.5, "top_k": 7}, {"top_p": 0.9} | SOME
    with jax.set_mesh(make_mesh(MeshShape(2, 2, 2))):
      self.check_draws(run, row, *(options if mesh_case == first_mesh_case else options[:1]))

  @pytest.mark.slow
  def test_a_mesh_of_one_axis_and_a_vocabulary_that_divides_change_nothing(self, first_mesh_case):
    # To a head, `data` and `fsdp` are both axes of tokens.
    self.check_meshes(first_mesh_case, 101, (1, 1, 8))
    self.check_meshes(first_mesh_case, 104, (1, 8, 1))

  @pytest.mark.slow
  def test_a_mesh_without_the_axis_is_refused_and_no_mesh_is_one_device(self, first_mesh_case):
    head = self.spread(first_mesh_case, self.vocab, self.dim)
    alone = self.cases[first_mesh_case](self.vocab, self.dim)
    hidden, tokens = np.ones((2, self.dim), np.float32), np.zeros(2, np.int32)
    variables = random_variables(alone)
    expected, found = results(
      lambda v, h: [x.apply(v, h, tokens, method="log_prob") for x in (alone, head)],
      *(variables, hidden),
    )
    np.testing.assert_array_equal(found, expected)
    message = "`vocab_axis`.*rows, columns, or .*; got .model."
    other = jax.make_mesh((4, 2), ("rows", "columns"), (AxisType.Auto,) * 2)
    for argument, method in ((tokens, "log_prob"), (1, "top_k")):
      with jax.set_mesh(other), pytest.raises(ValueError, match=message):
        head.apply(variables, hidden, argument, method=method)
    part = jax.shard_map(
      lambda h: head.clone(vocab_axis=("rows", "columns")).apply(variables, h, 1, method="top_k"),
      in_specs=P("rows"),
      out_specs=P("rows"),
      axis_names={"rows"},
    )
    with jax.set_mesh(other), pytest.raises(ValueError, match="whole inside or outside"):
      part(np.ones((4, self.dim), np.float32))

  @pytest.mark.slow
  def test_inside_of_a_shard_map_over_the_batch_each_device_does_its_rows(self, first_mesh_case):
    head = self.cases[first_mesh_case](self.vocab, self.dim)
    variables, rng = random_variables(head), np.random.default_rng(2)
    hidden = rng.standard_normal((16, self.dim), np.float32)
    tokens = rng.integers(0, self.vocab, 16).astype(np.int32)

    def parts(hidden, tokens):
      run = lambda *args, **options: head.apply(variables, hidden, *args, **options)
      mine = jax.nn.one_hot(tokens, self.vocab, dtype=bool)
      return (
        run(tokens, method="log_prob"),
        run(7, method="top_k")[0],
        run(jax.random.key(0), top_p=0.9, allowed=mine, method="sample"),
        run(jax.random.key(0), method="sample"),
      )

    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    spread = jax.shard_map(parts, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    log_prob, best, forced, drawn = results(spread, hidden, tokens)
    logits = self.reference_logits(head, as_float64(variables), np.asarray(hidden, np.float64))
    exact = reference.log_softmax(logits)
    np.testing.assert_allclose(log_prob, exact[np.arange(16), tokens], atol=2e-5)
    np.testing.assert_allclose(best, np.sort(exact)[:, ::-1][:, :7], atol=2e-5)
    np.testing.assert_array_equal(forced, tokens)
    assert ((drawn >= 0) & (drawn < self.vocab)).all()


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
