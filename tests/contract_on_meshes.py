"""What must every head do on a mesh, its vocabulary over one axis and the batch over others?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from experiments import collectives, hlo, loops
from vqjax import sharding
from vqjax.sharding import MeshShape, make_mesh


class ContractOnMeshes:
  """Claims about every head on eight devices; a part of `HeadContract`.

  `mesh_cases` names the cases that are compiled for meshes, which takes time: by default the first.
  """

  mesh_cases: tuple = ()

  def spread(self, case, vocab, dim):
    return self.cases[case](vocab, dim).clone(vocab_axis="model")

  # 101 is prime and 8 devices divide 104; the codes and groups of most cases are ragged in both.
  @pytest.mark.parametrize(("shape", "vocab"), [((2, 2, 2), 101), ((1, 1, 8), 104)])
  def test_losses_gradients_and_the_best_are_those_of_one_device(self, mesh_case, shape, vocab):
    self.check_mesh(mesh_case, shape, vocab)

  @pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (1, 1, 8)])
  def test_one_axis_alone_changes_nothing(self, mesh_case, shape):
    if mesh_case == mesh_cases(type(self))[0]:
      self.check_mesh(mesh_case, shape, 101)

  def check_mesh(self, case, shape, vocab):
    head = self.spread(case, vocab, self.dim)
    hidden = jax.random.normal(jax.random.key(2), (3, 5, self.dim))
    variables = perturbed(head.init(jax.random.key(1), hidden))
    tokens = jax.random.randint(jax.random.key(3), (3, 5), 0, vocab)
    tokens = tokens.at[0, :2].set(jnp.array([0, vocab - 1]))
    cotangent = jax.random.normal(jax.random.key(4), tokens.shape)
    rest = {name: tree for name, tree in variables.items() if name != "params"}

    def found(params, hidden):
      run = lambda p, h, *a, method: head.apply(rest | {"params": p}, h, *a, method=method)
      loss, pull = jax.vjp(lambda p, h: run(p, h, tokens, method="log_prob"), params, hidden)
      return (loss, pull(cotangent)), run(params, hidden, 7, method="top_k")

    one = jax.jit(found)(variables["params"], hidden)
    with jax.set_mesh(make_mesh(MeshShape(*shape))):
      ours = jax.device_get(jax.jit(found)(variables["params"], hidden))
    # float32 sums of up to 104 terms of order one, in another order: some hundred roundings of
    # 6e-8 each.
    same = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5)
    jax.tree.map(same, (ours[0], ours[1][0]), (one[0], one[1][0]))
    # Tokens on one code tie: any of them is as good.
    logits = head.apply(variables, hidden, method="logits")
    best = [
      np.take_along_axis(logits, np.asarray(tokens), -1) for tokens in (ours[1][1], one[1][1])
    ]
    same(*best)
    assert all(len(set(row)) == 7 for row in ours[1][1].reshape(-1, 7))

  def test_draws_on_a_mesh_follow_the_distribution(self, mesh_case):
    head = self.spread(mesh_case, self.vocab, self.dim)
    variables = perturbed(head.init(jax.random.key(1), jnp.zeros((1, self.dim))))
    row = jax.random.normal(jax.random.key(2), (self.dim,))
    options = [{}, {"temperature": 0.5}, {"top_k": 7}, {"top_p": 0.6}]
    if mesh_case != mesh_cases(type(self))[0]:
      options = options[:1]
    else:
      options.append({"allowed": jnp.arange(self.vocab) % 3 == 1})
    with jax.set_mesh(make_mesh(MeshShape(2, 2, 2))):
      for some in options:
        self.check_draws(head, variables, row, **some)

  def test_no_weight_and_no_logits_travel_across_the_vocabulary(self, mesh_case):
    if mesh_case != mesh_cases(type(self))[0]:
      return
    rows, vocab, dim = 256, 1024, 64
    head, mesh = self.spread(mesh_case, vocab, dim), make_mesh(MeshShape(2, 2, 2))
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
    for function, args, outs in [
      (gradient, (variables, hidden, tokens), (places["params"], batch)),
      (best, (variables, hidden), batch),
      (drawn, (variables, hidden), batch),
    ]:
      with jax.set_mesh(mesh):
        compiled = jax.jit(function, out_shardings=outs).lower(*args).compile()
      program = hlo.parse(compiled.as_text())
      sent = collectives.collectives(program, loops.runs(program), dict(mesh.shape))
      across = [x for x in sent if "model" in x.axes]
      assert any(x.kind == "all-reduce" for x in across)
      # A weight [V, D] or a device's logits would be 256 KiB; d_hidden is summed, not gathered.
      gathered = [x.bytes for x in across if x.kind != "all-reduce"]
      assert max(gathered, default=0) < 4 * vocab * dim / 16

  def test_a_mesh_without_the_axis_is_refused_and_none_is_one_device(self, mesh_case):
    head = self.spread(mesh_case, self.vocab, self.dim)
    hidden, tokens = jnp.ones((2, self.dim)), jnp.zeros((2,), jnp.int32)
    variables = head.init(jax.random.key(0), hidden)
    alone = self.cases[mesh_case](self.vocab, self.dim)
    np.testing.assert_array_equal(
      head.apply(variables, hidden, tokens, method="log_prob"),
      alone.apply(variables, hidden, tokens, method="log_prob"),
    )
    message = "vocab_axis 'model' is no axis of the mesh, which has rows, columns"
    other = jax.make_mesh((4, 2), ("rows", "columns"), (AxisType.Auto,) * 2)
    with jax.set_mesh(other), pytest.raises(ValueError, match=message):
      head.apply(variables, hidden, tokens, method="log_prob")
    with jax.set_mesh(other), pytest.raises(ValueError, match=message):
      head.apply(variables, hidden, 1, method="top_k")

  def test_inside_of_a_shard_map_over_the_batch_each_device_does_its_rows(self, mesh_case):
    head = self.cases[mesh_case](self.vocab, self.dim)
    hidden = jax.random.normal(jax.random.key(2), (16, self.dim))
    variables = perturbed(head.init(jax.random.key(1), hidden))
    tokens = jax.random.randint(jax.random.key(3), (16,), 0, self.vocab)
    run = lambda *args, **options: head.apply(variables, *args, **options)

    def parts(hidden, tokens):
      mine = jax.nn.one_hot(tokens, self.vocab, dtype=bool)
      return (
        run(hidden, tokens, method="log_prob"),
        run(hidden, 7, method="top_k")[0],
        run(hidden, jax.random.key(0), top_p=0.9, allowed=mine, method="sample"),
        run(hidden, jax.random.key(0), method="sample"),
      )

    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    spread = jax.shard_map(parts, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    log_prob, best, forced, drawn = jax.jit(spread)(hidden, tokens)
    np.testing.assert_allclose(log_prob, run(hidden, tokens, method="log_prob"), atol=1e-5)
    np.testing.assert_allclose(best, run(hidden, 7, method="top_k")[0], atol=1e-5)
    np.testing.assert_array_equal(forced, tokens)
    assert ((drawn >= 0) & (drawn < self.vocab)).all()


def mesh_cases(contract) -> tuple:
  """The names of the cases of a test class that are compiled for meshes."""
  return contract.mesh_cases or tuple(contract.cases)[:1]


def perturbed(variables):
  """The variables with every parameter moved off its initial value, zeros and ones included."""
  leaves, tree = jax.tree.flatten(variables["params"])
  keys = jax.random.split(jax.random.key(9), len(leaves))
  moved = [x + 0.3 * jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves)]
  return variables | {"params": jax.tree.unflatten(tree, moved)}
