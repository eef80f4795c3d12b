"""A drafter on hidden vectors drafts what its training computes, and knows its model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.jitted import results
from tests.lm.generation.test_speculation import (
  CONTEXT,
  GREEDY,
  KEY,
  MAP,
  NEW,
  PROMPTS,
  D,
  V,
  decoder,
  drafter,
  eagle_params,
  generate,
  plain,
  target,
)
from vqjax import DenseHead
from vqjax.lm.drafting import Eagle, load_eagle, save_eagle
from vqjax.lm.drafting.eagle import FORMAT, PROMPT_WEIGHT, TESTED_POSITIONS, frequent_head, unrolled
from vqjax.lm.generation import RoundTimes, Sampling, speculation
from vqjax.lm.generation.speculation import PRIOR


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["eagle, fewer tokens", "eagle"])
def test_rounds_are_those_that_unrolled_predictions_imply(name):
  """All caches, roll-backs and hidden vectors of the rounds against full passes over the text."""
  model, variables = target()
  eagle = drafter(name)
  result = generate(*target(), PROMPTS, KEY, GREEDY, max_tokens=NEW, drafter=eagle)
  assert (result.tokens == plain().tokens).all()
  texts = [prompt + row for prompt, row in zip(PROMPTS, plain().tokens.tolist())]
  rows = np.array([text + [0] * (CONTEXT - len(text)) for text in texts])

  def drafted(variables, params, rows):
    hidden = model.apply(variables, rows, method="hidden")
    vectors = unrolled(model, variables, params, rows, hidden, depth=eagle.length)
    if eagle.head is None:
      return model.apply(variables, vectors, method=lambda m, x: m.head(x)).argmax(-1)
    return jnp.array(MAP)[eagle.head.apply(eagle.variables, vectors).argmax(-1)]

  drafts = results(drafted, variables, eagle.params, rows)
  for prompt, text, row, passes in zip(PROMPTS, texts, np.moveaxis(drafts, 0, 1), result.passes):
    # The pass over the prompt gives one token, and each round one more than it accepts.
    latest, rounds = len(prompt), 1
    while latest < len(text) - 1:
      accepted = 0
      while accepted < eagle.length:
        at = latest + accepted
        if at + 1 >= len(text) or row[accepted, at] != text[at + 1]:
          break
        accepted += 1
      latest, rounds = latest + accepted + 1, rounds + 1
    assert passes == rounds
  assert (result.passes < NEW).any()


@pytest.fixture
def begun(monkeypatch):
  """The counts of accepted and verified tokens with which each call begins, and its lengths."""
  counts, lengths, begin, advance = [], [], speculation.begin, speculation.advance

  def at_begin(*args, **options):
    state, length = begin(*args, **options)
    counts.append((float(state.accepted), float(state.verified)))
    return state, length

  def at_advance(*args, program):
    lengths.append(program.length)
    return advance(*args, program=program)

  monkeypatch.setattr(speculation, "begin", at_begin)
  monkeypatch.setattr(speculation, "advance", at_advance)
  return counts, lengths


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8)])
def test_a_drafter_of_fewer_tokens_is_tested_on_the_end_of_the_prompts(begun, sampling, rows):
  """What its acceptance begins with against full passes over the prompts."""
  (model, variables), prompts = target(), PROMPTS[-rows:]
  eagle = dataclasses.replace(drafter("eagle, fewer tokens"), cost=0.1)
  generate(model, variables, prompts, KEY, sampling, max_tokens=2, drafter=eagle)
  rows_BT = np.array([prompt + [0] * (17 - len(prompt)) for prompt in prompts])

  def agreement(variables, params, rows_BT):
    hidden = model.apply(variables, rows_BT, method="hidden")
    predicted = unrolled(model, variables, params, rows_BT, hidden, depth=1)[0]
    p, q = (eagle.head.apply(eagle.variables, x) for x in (hidden, predicted))
    if sampling.is_greedy:
      return p.argmax(-1) == q.argmax(-1)
    return jnp.minimum(jax.nn.softmax(p / 0.8), jax.nn.softmax(q / 0.8)).sum(-1)

  agreed = count = 0
  for prompt, found in zip(prompts, results(agreement, variables, eagle.params, rows_BT)):
    tested = range(max(1, len(prompt) - TESTED_POSITIONS // rows), len(prompt))
    known = sum(prompt[at] in MAP for at in tested) / max(1, len(tested))
    agreed += known * sum(float(found[at]) for at in tested)
    count += len(tested)
  expected = agreed * PROMPT_WEIGHT + PRIOR[0], count * PROMPT_WEIGHT + PRIOR[1]
  np.testing.assert_allclose(begun[0], [expected], rtol=1e-5)
  # Nothing is tested where the length does not depend on it, or nothing can be.
  for other, prompt in ((drafter("eagle, fewer tokens"), prompts[0]), (eagle, [3])):
    generate(model, variables, [prompt], KEY, sampling, max_tokens=2, drafter=other)
    assert begun[0][-1] == PRIOR


def test_many_prompts_weigh_no_more_than_one(begun):
  eagle = dataclasses.replace(drafter("eagle, fewer tokens"), cost=0.1)
  rows = TESTED_POSITIONS + 8
  generate(*target(), [[3, 1]] * rows, KEY, GREEDY, max_tokens=2, drafter=eagle)
  np.testing.assert_allclose(begun[0][0][1], PRIOR[1] + PROMPT_WEIGHT * TESTED_POSITIONS)


def test_a_drafter_of_nan_drafts_no_more(begun):
  eagle = drafter("eagle, fewer tokens")
  params = jax.tree.map(lambda x: np.full_like(x, np.nan), eagle.params)
  eagle = dataclasses.replace(eagle, params=params, cost=0.1, overhead=0.2)
  sampling = Sampling(0.8)
  result = generate(*target(), PROMPTS[:1], KEY, sampling, max_tokens=NEW, drafter=eagle)
  assert begun[1][-1] == 0
  assert (result.tokens >= 0).all()


@pytest.mark.programs(60)  # a model is known by a number of each of its arrays, whose sizes differ
def test_a_drafter_is_read_as_it_was_written_and_refused_elsewhere(tmp_path):
  path, (model, variables) = tmp_path / "drafter.safetensors", target()
  head = frequent_head(model, variables, MAP)
  times = {"cost": 0.25, "overhead": 0.5, "drawn": RoundTimes(0.5, 2.0)}
  eagle = Eagle(eagle_params(), *head, tokens=MAP, length=2, **times)
  save_eagle(path, eagle, variables)
  read = load_eagle(path, model, variables)
  assert jax.tree.all(jax.tree.map(np.array_equal, read.params, eagle.params))
  assert jax.tree.all(jax.tree.map(np.array_equal, read.variables, eagle.variables))
  assert (read.tokens == np.array(MAP)).all()
  assert (read.length, read.times(GREEDY), read.times(Sampling())) == (2, (0.25, 0.5), (0.5, 2.0))
  np.testing.assert_array_equal(
    read.variables["params"]["weight"], np.asarray(variables["params"]["head"]["weight"])[MAP]
  )
  with pytest.raises(ValueError, match=r"drafter of this model; got .*another"):
    load_eagle(
      path,
      *decoder(
        2, DenseHead(V, D), seed=9, **{"norm": model.norm, "rotary": model.rotary, "window": 5}
      ),
    )
  with pytest.raises(ValueError, match=r"must have the model's head.* got a DenseHead"):
    save_eagle(path, Eagle(eagle_params(), *frequent_head(model, variables, range(V))), variables)
  # A file from before rounds of draws were timed.
  with safe_open(path, "np") as file:
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
  save_file(tensors, path, {FORMAT: '{"length": 2, "cost": 0.25, "overhead": 0.5}'})
  assert load_eagle(path, model, variables).times(Sampling()) == (0.25, 0.5)
  path.write_bytes(b"none")
  with pytest.raises(ValueError, match=r"vqjax draft.*none|vqjax draft"):
    load_eagle(path, model, variables)
