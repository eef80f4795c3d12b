"""NNX layers: the methods and variables of the Linen layers, and Flax's transformations of them."""

import copy
import dataclasses
import functools
import pickle

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import vqjax
from tests.jitted import random_variables
from vqjax import embeddings, heads, quantizers
from vqjax import nnx as layers
from vqjax.layer import Layer
from vqjax.ops.ngrams import XorHash

V, D = 101, 12

HEADS = {
  "DenseHead": {"use_bias": True, "z_loss": 0.1},
  "SampledSoftmaxHead": {"samples": 7},
  "CodebookHead": {"codes": 13, "token_bias": True, "commitment": 0.25},
  "LearnedCodebookHead": {"codes": 13, "candidates": 2},
  "ResidualCodebookHead": {"codes": 13, "rank": 3},
  "ProductHead": {"codes": 5, "subspaces": 4, "token_bias": True},
  "LearnedProductHead": {"codes": 5, "subspaces": 4},
  "DPQHead": {"quantizer": quantizers.SoftmaxQuantizer(5, 4)},
  "GroupedHead": {"use_bias": True, "order_init": vqjax.convert.in_order},
  "UnsharedGroupedHead": {},
  "AdaptiveHead": {"cutoffs": (20, 50), "factor": 2},
  "LowRankHead": {"rank": 3},
  "MixtureHead": {"components": 3},
  "PackedHead": {"row_groups": 3, "use_bias": True},
  "CertifiedHead": {"budget": 5},
  "RoutedHead": {"clusters": 10, "budget": 3},
  "ClassBasedHead": {"classes": 7},
  "HierarchicalHead": {},
}
EMBEDDINGS = {
  "DenseEmbedding": {},
  "CodebookEmbedding": {"codes": 13},
  "ProductEmbedding": {"codes": 5, "subspaces": 4},
  "Int8Embedding": {"group": 4},
  "LowRankEmbedding": {"rank": 3},
  "ScalarEmbedding": {"bits": 4},
  "PackedEmbedding": {"row_groups": 3},
  "DPQEmbedding": {"quantizer": quantizers.CentroidQuantizer(5, 4, commitment=0.25)},
  "ComposedEmbedding": {"inner": embeddings.DenseEmbedding(V, 6), "hidden": 8},
  "GuidedEmbedding": {"student": embeddings.LowRankEmbedding(V, D, 3)},
}


def public(package):
  kinds = (getattr(package, name) for name in package.__all__)
  return {k.__name__ for k in kinds if isinstance(k, type) and issubclass(k, Layer)}


HIDDEN = np.random.default_rng(2).standard_normal((3, 5, D), np.float32)
TOKENS = np.random.default_rng(3).integers(0, V, (3, 5))


def abstract(name):
  """A layer of shapes."""
  fields = (HEADS | EMBEDDINGS)[name]
  return nnx.eval_shape(lambda: getattr(layers, name)(V, D, **fields, rngs=nnx.Rngs(0)))


@functools.cache
def kept(name, seed):
  layer, given = abstract(name).layer, HIDDEN if name in HEADS else TOKENS
  return layers.from_linen(layer, jax.device_put(random_variables(layer, given, seed=seed)))


def made(name, seed=1):
  """A new layer with random parameters, which are made once."""
  return nnx.clone(kept(name, seed))


log_prob = nnx.jit(lambda head: head.log_prob(HIDDEN, TOKENS))


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_every_layer_has_an_nnx_class_and_every_class_a_case():
  abstract = {"Head", "Embedding", "Quantizer"}
  linen = (public(heads) | public(embeddings) | public(quantizers)) - abstract
  assert linen <= set(layers.__all__)
  assert (public(heads) | public(embeddings)) - abstract == HEADS.keys() | EMBEDDINGS.keys()


@pytest.mark.parametrize("name", HEADS | EMBEDDINGS)
def test_a_new_layer_has_the_variables_of_the_linen_layer(name):
  layer = abstract(name)
  given = np.zeros((1, D), np.float32) if name in HEADS else np.zeros(1, np.int32)
  expected = jax.eval_shape(lambda: layer.layer.init(jax.random.key(0), given))
  shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
  found = shapes(layer.linen_variables())
  assert found == shapes(dict(expected))
  kinds = {
    "params": nnx.Param,
    "codes": layers.Codes,
    "batch_stats": nnx.BatchStat,
  }
  for collection, tree in found.items():
    of = nnx.state(layer, kinds.get(collection, layers.LayerState))
    sizes = lambda tree: sorted(x.size for x in jax.tree.leaves(tree))
    if collection in kinds:
      assert sizes(of) == sizes(tree)


def check_methods(layer, **calls):
  """Methods are the programs of the Linen layer, operation by operation."""
  graph, state = nnx.split(layer)
  merged = lambda state: nnx.merge(graph, state)
  linen = lambda layer, name, args: layer.layer.apply(layer.linen_variables(), *args, method=name)
  for name, args in calls.items():
    own = jax.make_jaxpr(lambda state, n=name, a=args: getattr(merged(state), n)(*a))(state)
    wanted = jax.make_jaxpr(lambda state, n=name, a=args: linen(merged(state), n, a))(state)
    assert str(own) == str(wanted)


# The contract has all heads.
def test_the_methods_of_a_head_equal_those_of_the_linen_head():
  check_methods(
    abstract("CodebookHead"),
    __call__=(HIDDEN,),
    log_prob=(HIDDEN, TOKENS),
    loss_terms=(HIDDEN, TOKENS),
    top_k=(HIDDEN, 3),
    sample=(HIDDEN, jax.random.key(4), 0.7),
  )


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_the_methods_of_an_embedding_equal_those_of_the_linen_embedding(name):
  check_methods(abstract(name), __call__=(TOKENS,), table=(), loss_terms=(TOKENS,))


def test_fields_sizes_and_axes_are_those_of_the_linen_layer():
  head = abstract("CodebookHead")
  assert (head.vocab, head.codes) == (V, 13)
  assert head.size() == head.layer.size()
  assert head.logical_axes() == head.layer.logical_axes()
  with pytest.raises(AttributeError, match="absent"):
    head.absent  # noqa: B018


def test_a_field_that_is_a_function_is_the_given_one():
  zeros = jax.nn.initializers.zeros
  head = nnx.eval_shape(lambda: layers.DenseHead(V, D, weight_init=zeros, rngs=nnx.Rngs(0)))
  assert head.weight_init is zeros


def test_a_subclass_from_elsewhere_has_an_nnx_form():
  class Own(quantizers.SoftmaxQuantizer):
    """A quantiser of a user."""

  embedding = nnx.eval_shape(lambda: layers.DPQEmbedding(V, D, Own(5, 4), rngs=nnx.Rngs(0)))
  assert isinstance(embedding.quantizer, layers.SoftmaxQuantizer)
  assert type(embedding.quantizer.layer) is Own


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda tree: tree | {"codes": {}}, r"'codes/assignment' of shape \(101,\); got None"),
    (lambda tree: tree | {"params": {"codebook": np.ones((13, D))}}, "'params/token_bias'"),
    (lambda tree: tree | {"more": np.ones(3)}, r"'more' of shape None; got \(3,\)"),
    (
      lambda tree: tree | {"params": tree["params"] | {"codebook": np.ones((2, D))}},
      r"'params/codebook' of shape \(13, 12\); got \(2, 12\)",
    ),
  ],
)
def test_linen_variables_that_are_not_the_layers_are_refused(change, message):
  head = made("CodebookHead")
  with pytest.raises(ValueError, match=message):
    layers.from_linen(head.layer, change(head.linen_variables()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_computes_the_same(copied):
  head = made("DPQHead")
  assert_equal(log_prob(copied(head)), log_prob(head))


def test_a_field_with_the_name_of_a_variable_keeps_its_value():
  head = abstract("ProductHead")
  assert head.codes == 5
  assert head.codes_array.shape == (V, 4)


# Those with parameters alone, codes, a quantiser, state that changes, and draws.
@pytest.mark.parametrize(
  "name", ["DenseHead", "CodebookHead", "DPQHead", "LearnedCodebookHead", "SampledSoftmaxHead"]
)
def test_training_steps_lower_the_loss_and_leave_the_codes(name):
  head = made(name)
  optimizer = nnx.Optimizer(head, optax.adam(3e-2), wrt=nnx.Param)
  before = nnx.to_pure_dict(nnx.state(head, layers.Codes))

  @nnx.jit
  def step(head, optimizer, rngs):
    def loss(head, rngs):
      log_prob, terms = head.loss_terms(HIDDEN, TOKENS, rngs=rngs)
      return sum(terms.values(), -log_prob.mean())

    # By parts, as NNX's tree mode wants it, whose `nnx.grad` takes no integers.
    graph, params, rest = nnx.split(head, nnx.Param, ...)
    of_params = lambda params, rest, rngs: loss(nnx.merge(graph, params, rest), rngs)
    optimizer.update(head, nnx.grad(of_params)(params, rest, rngs))
    return -head.log_prob(HIDDEN, TOKENS).mean()

  rngs = nnx.Rngs(sample=1)
  losses = jax.device_get([step(head, optimizer, rngs) for _ in range(8)])
  assert losses[-1] < losses[0]
  assert_equal(nnx.to_pure_dict(nnx.state(head, layers.Codes)), before)


def test_training_updates_the_state_as_the_linen_layer_does():
  quantizer = quantizers.CentroidQuantizer(5, 4)

  @nnx.jit
  def steps():
    embedding = layers.DPQEmbedding(V, D, quantizer, rngs=nnx.Rngs(0))
    variables = embedding.linen_variables()
    state = [name for name in variables if name != "params"]
    _, linen = embedding.layer.apply(
      variables, TOKENS, deterministic=False, method="loss_terms", mutable=state
    )
    embedding.loss_terms(TOKENS)
    kept = embedding.linen_variables()
    embedding.loss_terms(TOKENS, deterministic=False)
    changed = {name: embedding.linen_variables()[name] for name in state}
    return variables, kept, changed, dict(linen)

  variables, kept, changed, linen = steps()
  assert_equal(kept, variables)
  assert_equal(changed, linen)
  mean = lambda tree: np.asarray(tree["batch_stats"]["quantizer"]["mean"])
  assert (mean(changed) != mean(variables)).any()


def test_state_that_changes_inside_of_a_gradient_is_kept():
  embedding = made("DPQEmbedding")
  before = np.asarray(embedding.quantizer.mean.get_value())

  @nnx.jit
  def step(embedding):
    loss = lambda layer: jnp.square(layer.loss_terms(TOKENS, deterministic=False)[0]).sum()
    return nnx.grad(loss)(embedding)

  step(embedding)
  assert (np.asarray(embedding.quantizer.mean.get_value()) != before).any()


def test_a_learned_codebook_counts_its_steps():
  @nnx.jit
  def steps(head):
    head.loss_terms(HIDDEN, TOKENS)
    before = head.steps.get_value()
    head.loss_terms(HIDDEN, TOKENS, rngs=nnx.Rngs(sample=0))
    return before

  head = made("LearnedCodebookHead")
  assert steps(head).item() == 0
  assert head.steps.get_value().item() == 1


@pytest.mark.parametrize("kind", ["layer", "embed", "param"])
def test_a_tied_head_shares_the_table_and_its_gradient(kind):
  make = {
    "layer": lambda: layers.DenseEmbedding(V, D, rngs=nnx.Rngs(0)),
    "embed": lambda: nnx.Embed(V, D, rngs=nnx.Rngs(0)),
    "param": lambda: nnx.Param(jax.random.normal(jax.random.key(0), (V, D))),
  }[kind]

  class Model(nnx.Module):
    def __init__(self):
      self.embed = make()
      self.head = layers.DenseHead(V, D, embedding=self.embed, rngs=nnx.Rngs(1))

    def loss(self):
      vectors = self.embed[TOKENS] if kind == "param" else self.embed(TOKENS)
      return -self.head.tied(self.embed).log_prob(vectors, TOKENS).mean()

  def dense(weight):
    given = {"params": {"weight": weight}}
    log_prob = vqjax.DenseHead(V, D).apply(given, weight[TOKENS], TOKENS, method="log_prob")
    return -log_prob.mean()

  @nnx.jit
  def both():
    model = Model()
    (weight,) = jax.tree.leaves(nnx.state(model, nnx.Param))
    return nnx.grad(lambda model: model.loss())(model), jax.grad(dense)(weight)

  gradient, expected = both()
  (found,) = jax.tree.leaves(gradient)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_tied_codebook_shares_the_embedding():
  @nnx.jit
  def both():
    embedding = layers.CodebookEmbedding(V, D, 13, rngs=nnx.Rngs(0))
    head = layers.CodebookHead(V, D, 13, embedding=embedding, rngs=nnx.Rngs(1))
    embedding.codebook.set_value(embedding.codebook.get_value() * 2)
    if flax.config.nnx_graph_mode:
      assert head.embedding is embedding
      assert len(jax.tree.leaves(nnx.state(head, nnx.Param))) == 1
    tied = head.tied(embedding)
    linen = head.layer.apply(tied.linen_variables(), HIDDEN, TOKENS, method="log_prob")
    return tied.log_prob(HIDDEN, TOKENS), linen

  assert_equal(*both())


def test_stacked_heads_are_scanned():
  @nnx.vmap(in_axes=0, out_axes=0)
  def create(rngs):
    return layers.CodebookHead(V, D, 13, rngs=rngs)

  @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
  def total(carry, head):
    log_prob = head.log_prob(HIDDEN, TOKENS)
    return carry + log_prob.sum(), log_prob

  @nnx.jit
  def both():
    stacked = create(nnx.Rngs(0).split(3))
    graph, state = nnx.split(stacked)
    heads = [nnx.merge(graph, jax.tree.map(lambda x, i=i: x[i], state)) for i in range(3)]
    alone = jnp.stack([head.log_prob(HIDDEN, TOKENS) for head in heads])
    return total(jnp.zeros(()), stacked)[1], alone

  found, expected = both()
  np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["ProductHead", "DPQHead"])
def test_orbax_restores_a_layer(name, tmp_path):
  head = made(name)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "head", nnx.to_pure_dict(nnx.state(head)))
    checkpointer.wait_until_finished()
    graph, state = nnx.split(made(name, seed=9))
    restored = checkpointer.restore(tmp_path / "head", nnx.to_pure_dict(state))
  nnx.replace_by_pure_dict(state, restored)
  assert_equal(log_prob(nnx.merge(graph, state)), log_prob(head))


def test_an_abstract_model_has_the_sharding_of_the_rules():
  mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
  rules = {"vocab": "model", "table_embed": "data"}
  make = lambda: layers.DenseHead(104, D, use_bias=True, axis_rules=rules, rngs=nnx.Rngs(0))
  _, state = nnx.get_abstract_model(make, mesh)
  specs = {path[-1]: leaf.get_value().sharding.spec for path, leaf in nnx.to_flat_state(state)}
  assert specs == {"weight": P("model", "data"), "bias": P("model")}
  with jax.set_mesh(mesh):
    head = nnx.jit(make)()
    odd = nnx.eval_shape(lambda: layers.DenseHead(V, D, vocab_axis="model", rngs=nnx.Rngs(0)))
  assert head.weight.get_value().sharding.spec == P("model", "data")
  assert not odd.weight.get_metadata().get("out_sharding")  # four devices do not divide 101 rows
  without = nnx.eval_shape(make)  # no mesh in context
  assert nnx.get_partition_spec(nnx.state(without))["weight"].get_value() == P("model", "data")


def test_a_table_of_ngrams_is_created_over_its_own_axes():
  hashed, axes = XorHash.qwen4(101, 3, heads=2, least=100), ("data", "model")
  table = embeddings.DenseEmbedding(hashed.rows + -hashed.rows % 8, D, vocab_axis=axes)
  with jax.set_mesh(jax.make_mesh((2, 4), axes, (AxisType.Auto,) * 2)):
    made = nnx.eval_shape(lambda: layers.NGramEmbedding(hashed, table, rngs=nnx.Rngs(0)))
    rules = {"vocab": "model", "ngrams": axes[::-1]}
    ruled = nnx.eval_shape(
      lambda: layers.NGramEmbedding(hashed, table, axis_rules=rules, rngs=nnx.Rngs(0))
    )
  assert made.table.weight.get_metadata()["out_sharding"] == (axes, None)
  assert ruled.table.weight.get_metadata()["out_sharding"] == (axes[::-1], None)


def test_an_optimizer_steps_on_explicit_axes():
  rules = {"vocab": "model", "table_embed": "data"}
  make = nnx.jit(
    lambda: layers.DenseHead(104, D, axis_rules=rules, vocab_axis="model", rngs=nnx.Rngs(0))
  )

  @nnx.jit
  def step(head, optimizer, hidden, tokens):
    loss = lambda head: -head.log_prob(hidden, tokens).mean()
    value, gradient = nnx.value_and_grad(loss)(head)
    optimizer.update(head, gradient)
    return value

  def losses(hidden, tokens):
    head = make()
    optimizer = nnx.Optimizer(head, optax.adam(0.1), wrt=nnx.Param)
    return [float(step(head, optimizer, hidden, tokens)) for _ in range(3)], head

  hidden, tokens = np.resize(HIDDEN, (8, D)), np.arange(8)
  expected, _ = losses(hidden, tokens)
  with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):
    found, head = losses(*(jax.device_put(x, P("data")) for x in (hidden, tokens)))
    assert jax.typeof(head.weight.get_value()).sharding.spec == P("model", "data")
  np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
  ("make", "error", "message"),
  [
    (lambda: layers.DenseHead(V, D), TypeError, "`rngs` of DenseHead must be an nnx.Rngs"),
    (lambda: layers.DenseHead(V, D, rngs=0), TypeError, "got int"),
    (lambda: layers.DenseHead(V, D, width=3, rngs=nnx.Rngs(0)), TypeError, "width"),
    (lambda: layers.DenseHead(V, D, vocab=3, rngs=nnx.Rngs(0)), TypeError, "vocab"),
    (lambda: layers.DenseHead(V, D, name="x", rngs=nnx.Rngs(0)), TypeError, "name"),
    (
      lambda: layers.DenseHead(V, D, embedding=nnx.Param(np.ones(V)), rngs=nnx.Rngs(0)),
      ValueError,
      r"`embedding` must be a table \[V, D\]",
    ),
    (lambda: setattr(made("DenseHead"), "vocab", 3), AttributeError, "`vocab` .* is a field"),
    (
      lambda: made("DenseHead").loss_terms(HIDDEN, TOKENS, rngs=0),
      TypeError,
      "`rngs` must be an nnx.Rngs",
    ),
    (lambda: layers.DenseHead(V, 0, rngs=nnx.Rngs(0)), ValueError, "`dim` of DenseHead"),
    (
      lambda: layers.DenseHead(V, D, embedding=nnx.Embed(V, 5, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)),
      ValueError,
      "`embedding` must have vocab 101 and dim 12; got vocab 101 and dim 5",
    ),
  ],
)
def test_wrong_calls_name_the_argument(make, error, message):
  with pytest.raises(error, match=message):
    make()


def test_help_has_the_constructor_and_no_example_of_linen():
  text = layers.CodebookHead.__doc__
  assert "token_bias: add" in text
  assert "axis_rules: " in text
  assert ".init(" not in text


def test_signatures_name_the_fields():
  parameters = layers.CodebookHead.__signature__.parameters
  names = {f.name for f in dataclasses.fields(vqjax.CodebookHead)} - {"parent", "name"}
  assert names | {"rngs", "axis_rules"} == set(parameters)


IDS = np.random.default_rng(0).zipf(1.4, 2000) % V


def test_a_layer_begins_with_a_text_as_the_linen_layer_does():
  fields = {"codes": 13}
  linen = heads.CodebookHead.from_tokens(IDS, V, D, **fields)
  head = layers.CodebookHead.from_tokens(IDS, V, D, **fields, rngs=nnx.Rngs(0))
  assert head.layer == linen
  expected = jax.jit(linen.init)(jax.random.key(0), HIDDEN)
  assert_equal(head.linen_variables(), expected)


def test_a_head_that_begins_with_a_text_shares_an_embedding_that_does():
  text = vqjax.assign.TextStats.of(IDS, V)
  embedding = layers.DenseEmbedding.from_tokens(text, V, D, rngs=nnx.Rngs(0))
  head = layers.DenseHead.from_tokens(text, V, D, embedding=embedding, rngs=nnx.Rngs(0))
  assert head.tied(embedding).embedding is embedding
  np.testing.assert_array_equal(embedding.weight.get_value(), text.contexts(D))
  np.testing.assert_array_equal(head.bias.get_value(), text.log_frequencies())
  counted = layers.DenseHead.from_counts(text.counts, V, D, rngs=nnx.Rngs(0))
  np.testing.assert_array_equal(counted.bias.get_value(), text.log_frequencies())
