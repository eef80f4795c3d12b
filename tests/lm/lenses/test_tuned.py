"""Lenses read what the layers predict, and a fitted one is nearer to the last layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.jitted import results
from tests.lm.generation.reference import V, family, log_softmax, with_head
from vqjax import CodebookHead, GroupedHead
from vqjax.lm.generation import unstacked
from vqjax.lm.lenses import (
  Lens,
  least_squares_lens,
  lens_divergence,
  lens_readings,
  load_lens,
  residual_streams,
  save_lens,
)
from vqjax.sharding import MeshShape, make_mesh, shardings

D = 32
TOKENS = np.array([[(7 * t * t + 3 * row) % V for t in range(11)] for row in range(2)])

HEADS = {
  "codebook": lambda: CodebookHead(V, 32, codes=13, token_bias=True),
  "grouped": lambda: GroupedHead(V, 32),
}


def some_lens(model):
  """A lens whose translators are not those of the logit lens."""
  draw = lambda *shape: 0.1 * np.random.default_rng(2).standard_normal(shape, np.float32)
  return Lens(*map(jax.device_put, (draw(model.layers, D, D), draw(model.layers, D))))


def expected(model, variables, lens=None):
  """Log-probabilities [S, B, T, V], float64: models of fewer blocks, and translators by hand."""
  of_every_layer = lambda variables, lens: jnp.stack(every_logits(model, variables, lens))
  return log_softmax(results(of_every_layer, variables, lens))


def every_logits(model, variables, lens):
  found = []
  for count in range(model.layers + 1):
    params = dict(variables["params"])
    params["blocks"] = jax.tree.map(lambda x, count=count: x[:count], params["blocks"])
    local = None if model.window is None else model.is_local()[:count]
    cut = model.clone(layers=count, local=local)

    def logits(module, count=count, cut=cut):
      position = jnp.arange(TOKENS.shape[1])
      x = module.embedded(module.embedding(jnp.asarray(TOKENS)), position)
      if count:
        given = x, cut.layer_inputs(), module.angles(position), True
        x = module.through(range(count), *given)
      if lens is not None and count < model.layers:
        x = x + x @ lens.weight[count].T + lens.bias[count]
      return module.head.logits(module.final_norm(x))

    runner = cut if count else model
    given = {**variables, "params": params if count else variables["params"]}
    found.append(runner.apply(given, method=logits))
  return found


def check(found, log_p, k):
  """Compare readings with a computation from all log-probabilities."""
  p, log_q = np.exp(log_p), log_p[-1:]
  q = np.exp(log_q)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=3e-5)
  order = np.argsort(-log_p, axis=-1, kind="stable")[..., :k]
  close(found.log_probs, np.take_along_axis(log_p, order, -1))
  close(np.take_along_axis(log_p, found.tokens, -1), found.log_probs)
  close(found.entropy, -(p * log_p).sum(-1))
  close(found.kl, (q * (log_q - log_p)).sum(-1))
  close(found.total_variation, np.abs(q - p).sum(-1) / 2)
  best = np.take_along_axis(
    log_p, np.broadcast_to(log_q.argmax(-1), log_p.shape[:-1])[..., None], -1
  )
  np.testing.assert_array_equal(found.rank, 1 + (log_p > best + 1e-6).sum(-1))
  targets = np.broadcast_to(TOKENS[:, 1:], (len(log_p), *TOKENS[:, 1:].shape))
  close(
    found.target_log_prob[..., :-1],
    np.take_along_axis(log_p[:, :, :-1], targets[..., None], -1)[..., 0],
  )
  assert np.isnan(found.target_log_prob[..., -1]).all()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["gpt2", "gemma"])
def test_readings_are_those_of_the_distributions_of_every_layer(name):
  model, variables = family(name)
  check(lens_readings(model, variables, TOKENS, k=3), expected(model, variables), 3)
  lens = some_lens(model)
  # Rows of the memory of generation are read too.
  found = lens_readings(model, unstacked(variables), TOKENS, lens, k=3)
  check(found, expected(model, variables, lens), 3)


def test_some_blocks_have_the_readings_that_they_have_among_all():
  model, variables = family("llama")
  lens, blocks = some_lens(model), [1]
  some = lens_readings(model, variables, TOKENS, lens, blocks=blocks)
  every = lens_readings(model, variables, TOKENS, lens)
  chosen = np.array([*blocks, model.layers])
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[chosen], atol=1e-5), some, every)


@pytest.mark.parametrize("head", HEADS)
def test_lenses_read_through_any_head(head):
  model, variables = with_head(HEADS[head]())
  check(lens_readings(model, variables, TOKENS, k=2), expected(model, variables), 2)


def test_readings_are_the_same_where_the_vocabulary_is_sharded():
  model, variables = with_head(HEADS["codebook"]())
  alone = lens_readings(model, variables, TOKENS)
  model = model.clone(head=model.head.clone(vocab_axis="model"))
  mesh = make_mesh(MeshShape(model=2))
  with jax.set_mesh(mesh):
    variables = jax.device_put(variables, shardings(model.logical_axes(), variables, mesh))
    jax.tree.map(
      # Sums in another order, of numbers of up to 10.
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
      lens_readings(model, variables, TOKENS),
      alone,
    )


def test_the_divergence_and_its_gradient_are_those_of_dense_logits():
  model, variables = family("gpt2")
  lens = some_lens(model)

  def dense(lens, x):
    moved = x[:-1] + jnp.einsum("lbtd,led->lbte", x[:-1], lens.weight) + lens.bias[:, None, None]
    score = lambda m, x: jax.nn.log_softmax(m.head.logits(m.final_norm(x)))
    log_p = model.apply(variables, jnp.concatenate((moved, x[-1:])), method=score)
    return (jnp.exp(log_p[-1:]) * (log_p[-1:] - log_p[:-1])).sum(-1)

  def program(lens):
    x = residual_streams(model, variables, jnp.asarray(TOKENS))
    with_gradient = lambda f: (f(lens), jax.grad(lambda lens: f(lens).sum())(lens))
    ours = lambda lens: lens_divergence(model, variables, lens, x)
    return with_gradient(ours), with_gradient(lambda lens: dense(lens, x))

  (found, own), (wanted, other) = results(program, lens)
  np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), own, other)


def test_a_fitted_lens_is_nearer_to_the_last_layer_at_every_block():
  model, variables = family("llama")
  rows = np.random.default_rng(0).integers(0, V, (40, 30))
  x = np.asarray(jax.jit(lambda v, t: residual_streams(model, v, t))(variables, rows))
  flat = x.reshape(len(x), -1, model.dim)
  fitted = least_squares_lens([flat[:, :500], flat[:, 500:900]])
  held_out = flat[:, 900:]
  measure = jax.jit(lambda lens: lens_divergence(model, variables, lens, held_out).mean(-1))
  plain, better = jax.device_get((measure(Lens.identity(model)), measure(fitted)))
  assert (better < plain).all()
  step = optax.sgd(0.01)
  loss = lambda lens: lens_divergence(model, variables, lens, flat[:, :200]).mean()

  @jax.jit
  def update(lens, state):
    value, gradient = jax.value_and_grad(loss)(lens)
    change, state = step.update(gradient, state)
    return optax.apply_updates(lens, change), state, value

  lens, state, values = fitted, step.init(fitted), []
  for _ in range(5):
    lens, state, value = update(lens, state)
    values.append(float(value))
  assert values == sorted(values, reverse=True)


def test_a_file_returns_the_lens_and_refuses_another_model(tmp_path):
  model, variables = family("llama")
  lens, path = some_lens(model), tmp_path / "lens.safetensors"
  save_lens(lens, path, variables)
  jax.tree.map(np.testing.assert_array_equal, load_lens(path, model, variables), lens)
  variables = jax.device_get(variables)
  narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), variables)
  load_lens(path, model, narrow)
  blocks = jax.tree.map(lambda x: 0.5 * x, variables["params"]["blocks"])
  tuned = {**variables, "params": {**variables["params"], "blocks": blocks}}
  with pytest.raises(ValueError, match="`path` must be a lens of this model"):
    load_lens(path, model, tuned)
  norm = jax.tree.map(lambda x: x + 0.5, variables["params"]["final_norm"])
  other = {**variables, "params": {**variables["params"], "final_norm": norm}}
  with pytest.raises(ValueError, match="`path` must be a lens of this model"):
    load_lens(path, model, other)
  with pytest.raises(ValueError, match="translators of 2 blocks and width 32"):
    load_lens(path, model.clone(layers=2), variables)
  path.write_bytes(b"not a lens")
  with pytest.raises(ValueError, match="`path` must be a file of `save_lens`"):
    load_lens(path, model, variables)


def test_bad_input_is_named():
  model, variables = family("llama")
  short = dataclasses.replace(model, context=4)
  with pytest.raises(ValueError, match="at most context 4 columns; got 11"):
    lens_readings(short, variables, TOKENS)
  with pytest.raises(ValueError, match=f"in \\[0, vocab {V}\\)"):
    lens_readings(model, variables, TOKENS + V)
  with pytest.raises(ValueError, match="rows of at least one token"):
    lens_readings(model, variables, TOKENS[0])
  with pytest.raises(ValueError, match="`k` must be in"):
    lens_readings(model, variables, TOKENS, k=V + 1)
  with pytest.raises(ValueError, match=rf"`blocks` must be in \[0, {model.layers}\]"):
    lens_readings(model, variables, TOKENS, blocks=[0, model.layers + 1])
