"""Output heads on a mesh: the vocabulary over one or two axes, the batch over the others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests import reference
from tests.jitted import random_variables, run
from vqjax import Head, sharding
from vqjax.lab.plan import collectives, hlo, loops
from vqjax.sharding import MeshShape, make_mesh


class Compiled:
  """A head with random variables, and its methods as programs.

  Attributes:
    head: the unbound module.
    variables: its variables, NumPy arrays: random parameters, and initial tables.
  """

  def __init__(self, head: Head, prepared=lambda head, variables: variables):
    self.head = head
    self.variables = jax.device_get(prepared(head, random_variables(head)))

  def __call__(self, function, *arrays):
    """The results of function(bound head, *arrays), which is one program, as NumPy arrays."""
    return run(self.head, self.variables, function, *arrays)

  @functools.cached_property
  def core(self):
    """(hidden, tokens, cotangent) -> logits, log_prob, its gradients, the 10 and the V best."""

    @jax.jit
    def core(variables, hidden, tokens, cotangent):
      run = lambda method, *a: self.head.apply(variables, *a, method=method)
      score = lambda params, hidden: self.head.apply(
        variables | {"params": params}, hidden, tokens, method="log_prob"
      )
      log_prob, pull = jax.vjp(score, variables["params"], hidden)
      best = [run("top_k", hidden, k) for k in (10, self.head.vocab)]
      return run("logits", hidden), log_prob, pull(cotangent), best

    return lambda *arrays: jax.device_get(core(self.variables, *arrays))


class ContractOnMeshes:
  """Claims about every head on eight devices; a part of `HeadContract`.

  Programs for meshes take seconds to compile: the first of `mesh_cases` is run on every mesh and
  with every option, the others on one mesh. By default they are the first of all cases.
  """

  mesh_cases: tuple = ()
  is_representative = False

  def spread(self, case, vocab, dim):
    axis = "model" if case == mesh_cases(type(self))[0] else ("fsdp", "model")
    return self.cases[case](vocab, dim).clone(vocab_axis=axis)

  @pytest.fixture
  def first_mesh_case(self):
    return mesh_cases(type(self))[0]

  @pytest.mark.slow
  def test_on_a_mesh_losses_gradients_and_the_best_are_those_of_one_device(self, mesh_case):
    # Explicit axes are made automatic, so that the first case stands for both kinds.
    explicit = mesh_case == mesh_cases(type(self))[0]
    # 101 is prime, and most codes and groups do not divide either.
    self.check_meshes(mesh_case, 101, (2, 2, 2), explicit=explicit)

  def check_meshes(self, case, vocab, *shapes, explicit=False):
    run = Compiled(self.spread(case, vocab, self.dim))
    head, variables = run.head, run.variables
    batch = (4, 5) if explicit else (3, 5)
    rng = np.random.default_rng(2)
    hidden = rng.standard_normal((*batch, self.dim), np.float32)
    cotangent = rng.standard_normal(batch, np.float32)
    tokens = rng.integers(0, vocab, batch).astype(np.int32)
    tokens[0, :2] = 0, vocab - 1
    tokens, cotangent = map(jnp.asarray, (tokens, cotangent))
    rest = {name: tree for name, tree in variables.items() if name != "params"}

    def everything(params, hidden):
      run = lambda p, h, *a, method: head.apply(rest | {"params": p}, h, *a, method=method)
      loss, pull = jax.vjp(lambda p, h: run(p, h, tokens, method="log_prob"), params, hidden)
      return loss, pull(cotangent), *run(params, hidden, 7, method="top_k")

    *expected, _ = jax.jit(everything)(variables["params"], hidden)
    logits = self.reference_logits(head, as_float64(variables), np.asarray(hidden, np.float64))
    for shape in shapes:
      if explicit:
        *found, best = self.on_explicit_axes(everything, variables["params"], hidden, shape)
      else:
        with jax.set_mesh(make_mesh(MeshShape(*shape))):
          *found, best = jax.device_get(jax.jit(everything)(variables["params"], hidden))
      # float32 sums of up to 104 terms of order one, in another order: some hundred roundings of
      # 6e-8 each.
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)
      # Tokens on one code tie, and any of them is as good.
      exact = np.take_along_axis(reference.log_softmax(logits), best, -1)
      np.testing.assert_allclose(found[-1], exact, atol=2e-5)
      assert all(len(set(row)) == 7 for row in best.reshape(-1, 7))

  def on_explicit_axes(self, everything, params, hidden, shape):
    """Results for tokens over `data` and parameters whose width is over `fsdp`, where it can be."""
    width = lambda x: "fsdp" if x.shape[-1] % shape[1] == 0 else None
    place = lambda x: P(*[None] * (x.ndim - 1), width(x)) if x.ndim else P()
    with jax.set_mesh(jax.make_mesh(shape, sharding.AXES)):
      params = jax.tree.map(lambda x: jax.device_put(x, place(x)), params)
      hidden = jax.device_put(hidden, P("data"))
      found = jax.jit(everything)(params, hidden)
      log_prob, (of_params, of_hidden), *best = found
      for result in (log_prob, of_hidden, *best):
        assert jax.typeof(result).sharding.spec == P("data", *[None] * (result.ndim - 1))
      kinds = lambda tree: jax.tree.map(lambda x: jax.typeof(x).sharding, tree)
      assert kinds(of_params) == kinds(params)
      return jax.device_get(found)

  @pytest.mark.slow
  def test_arguments_by_name_from_numpy_and_in_bfloat16(self, mesh_case, first_mesh_case):
    run = Compiled(self.spread(mesh_case, 101, self.dim))
    head, params = run.head, run.variables["params"]
    rest = {name: tree for name, tree in run.variables.items() if name != "params"}
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(4, 5, self.dim)).astype(np.float32)
    tokens, allowed = rng.integers(0, 101, (4, 5)), rng.random(101) < 0.5
    # What bfloat16 holds, so that only products and sums are rounded.
    hidden = hidden.astype(jnp.bfloat16).astype(np.float32)

    def loss(hidden, params):
      log_prob = head.apply(
        rest | {"params": params}, tokens=tokens, hidden=hidden, method="log_prob"
      )
      return log_prob.sum(), log_prob

    def draw(hidden, params):
      options = {"allowed": allowed, "key": jax.random.key(0), "method": "sample"}
      return head.apply(rest | {"params": params}, hidden=hidden, **options)

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    wide, expected = gradient(hidden, params)
    for axes in (AxisType.Explicit, AxisType.Auto)[: 2 if mesh_case == first_mesh_case else 1]:
      with jax.set_mesh(jax.make_mesh((2, 2, 2), sharding.AXES, (axes,) * 3)):
        found = jax.jit(lambda p: loss(hidden, p)[1])(params)
        np.testing.assert_allclose(found, expected, atol=2e-5)
        placed = jax.device_put(hidden, P("data"))
        narrow, _ = gradient(placed.astype(jnp.bfloat16), params)
        # Parameters too, whose rounding moves the scores.
        narrowest, _ = gradient(placed.astype(jnp.bfloat16), in_bfloat16(params))
        drawn = jax.jit(draw)(placed, params)
        if axes == AxisType.Explicit:
          assert jax.typeof(drawn).sharding.spec == P("data", None)
        narrow, narrowest, drawn = jax.device_get((narrow, narrowest, drawn))
      assert allowed[drawn].all()
      # Products of bfloat16 operands, whose relative error is at most 2^-8 each.
      scale = np.abs(wide).max()
      np.testing.assert_allclose(narrow.astype(np.float32), wide, atol=0.05 * scale)
      np.testing.assert_allclose(narrowest.astype(np.float32), wide, atol=0.1 * scale)

  @pytest.mark.slow
  def test_no_weight_and_no_logits_travel_across_the_vocabulary(self, first_mesh_case):
    rows, vocab, dim = 256, 1024, 64
    head, mesh = self.spread(first_mesh_case, vocab, dim), make_mesh(MeshShape(2, 2, 2))
    variables = jax.eval_shape(head.init, jax.random.key(0), jnp.zeros((1, dim)))
    places = sharding.shardings(head.logical_axes(), variables, mesh)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    variables = jax.tree.map(place, variables, places)
    batch = sharding.batch_sharding(mesh)
    hidden = jax.ShapeDtypeStruct((rows, dim), jnp.float32, sharding=batch)
    tokens = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=batch)
    run = lambda *args, **options: head.apply(*args, **options)

    def gradient(variables, hidden, tokens):
      rest = {name: tree for name, tree in variables.items() if name != "params"}
      loss = lambda p, h: run(rest | {"params": p}, h, tokens, method="log_prob").mean()
      return jax.grad(loss, (0, 1))(variables["params"], hidden)

    best = lambda v, h: run(v, h, 5, method="top_k")
    drawn = lambda v, h: run(v, h, jax.random.key(0), top_p=0.9, method="sample")
    decoding = [(best, (variables, hidden), batch), (drawn, (variables, hidden), batch)]
    training = (gradient, (variables, hidden, tokens), (places["params"], batch))
    # Representatives decode as the heads that they represent do.
    for function, args, outs in [training, *(decoding if self.is_representative else [])]:
      with jax.set_mesh(mesh):
        compiled = jax.jit(function, out_shardings=outs).lower(*args).compile()
      program = hlo.parse_hlo(compiled.as_text())
      sent = collectives.collectives(program, loops.runs(program), dict(mesh.shape))
      across = [x for x in sent if "model" in x.axes]
      assert any(x.kind == "all-reduce" for x in across)
      # A weight [V, D] or a device's logits would be 256 KiB; d_hidden is summed, not gathered.
      gathered = [x.bytes for x in across if x.kind != "all-reduce"]
      assert max(gathered, default=0) < 4 * vocab * dim / 16


def mesh_cases(contract) -> tuple:
  """The names of the cases of a test class that are compiled for meshes."""
  return getattr(contract, "mesh_cases", ()) or tuple(contract.cases)[:1]


def in_bfloat16(variables):
  """The variables, parameters in bfloat16."""
  return jax.tree.map(
    lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x, variables
  )


def as_float64(variables):
  """NumPy arrays: parameters in float64, integer tables as they are."""
  return jax.tree.map(
    lambda x: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x),
    variables,
  )
