"""Generation with a cache equals repeated full passes, and stops where it should."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract import strict_modes
from tests.lm.checkpoints.families import LONGROPE, small
from tests.lm.generation.reference import (
  PROMPTS,
  Letters,
  V,
  family,
  full_pass,
  greedy,
  log_probs,
  logits,
  with_head,
)
from vqjax import AdaptiveHead, CodebookHead, GroupedHead, ProductHead
from vqjax.lm import checkpoints
from vqjax.lm.generation import GREEDY, Draft, Sampling, generate, score, stream, unstacked
from vqjax.sharding import MeshShape, make_mesh, shardings

KEY = jax.random.key(0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma", "gpt_oss"])
def test_greedy_tokens_and_log_probs_are_those_of_full_passes(name):
  model, variables = family(name)
  with strict_modes():
    result = generate(model, variables, PROMPTS, KEY, GREEDY, max_tokens=30)
  for row, prompt in enumerate(PROMPTS):
    tokens, scores = greedy(model, variables, prompt, 30)
    assert result.tokens[row].tolist() == tokens
    np.testing.assert_allclose(result.log_probs[row], scores, atol=1e-5)


def test_a_text_that_becomes_long_has_the_angles_of_a_full_pass():
  context = {"original_max_position_embeddings": 24}
  changes = {"rope_scaling": LONGROPE | context, "num_hidden_layers": 2} | context
  model, variables = small("phi3", **changes)
  result = generate(model, variables, PROMPTS, KEY, GREEDY, max_tokens=23)
  for row, (prompt, found) in enumerate(zip(PROMPTS, result.tokens)):
    for number in (0, 4, 5, 22):  # 5 and 22 follow the first long text of a row
      last = log_probs(model, variables, [*prompt, *found[:number]])[-1]
      assert found[number] == last.argmax()
      np.testing.assert_allclose(result.log_probs[row, number], last.max(), atol=1e-5)
  for found, row in zip(score(model, variables, PROMPTS), PROMPTS):
    full = log_probs(model, variables, row)[np.arange(len(row) - 1), row[1:]]
    np.testing.assert_allclose(found, full, atol=1e-5)
  alone = np.array(full_pass(model)(variables, np.array([PROMPTS[3]])))[0]  # without padding
  np.testing.assert_allclose(logits(model, variables, PROMPTS[3]), alone, atol=1e-5)
  with pytest.raises(ValueError, match=r"`drafter` must be None .* 24 tokens"):
    generate(model, variables, PROMPTS, KEY, max_tokens=23, drafter=Draft(model, variables))


HEADS = {
  "codebook": lambda: CodebookHead(V, 32, codes=13, token_bias=True),
  "grouped": lambda: GroupedHead(V, 32),
  "product": lambda: ProductHead(V, 32, codes=8, subspaces=4),
  "adaptive": lambda: AdaptiveHead(V, 32, cutoffs=(20, 50)),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", HEADS)
def test_any_head_generates_and_its_log_probs_are_those_of_a_full_pass(name):
  model, variables = with_head(HEADS[name]())
  result = generate(model, variables, PROMPTS[:2], KEY, Sampling(top_p=0.9), max_tokens=11)
  for prompt, tokens, scores in zip(PROMPTS, result.tokens, result.log_probs):
    full = log_probs(model, variables, [*prompt, *tokens])[len(prompt) - 1 : -1]
    np.testing.assert_allclose(scores, full[np.arange(11), tokens], atol=1e-5)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", HEADS)
def test_a_head_in_place_of_the_loaded_one_generates_what_full_passes_do(name, tmp_path):
  checkpoints.save(tmp_path / "model", *family("llama"))
  model, variables, _ = checkpoints.load(tmp_path / "model", head=HEADS[name]())
  # A fresh head is nearly uniform.
  larger = jax.tree.map(lambda x: 3 * np.asarray(x), variables["params"]["head"])
  variables |= {"params": variables["params"] | {"head": larger}}
  result = generate(model, variables, PROMPTS[1:3], KEY, GREEDY, max_tokens=11)
  for row, prompt in enumerate(PROMPTS[1:3]):
    tokens, scores = greedy(model, variables, prompt, 11)
    assert result.tokens[row].tolist() == tokens
    np.testing.assert_allclose(result.log_probs[row], scores, atol=1e-5)


def test_a_single_row_in_bfloat16_has_the_log_probs_of_a_full_pass():
  model, variables = family("llama")
  half = jax.tree.map(lambda x: jax.device_put(np.asarray(x, jnp.bfloat16)), variables)
  model = model.clone(
    dtype=jnp.bfloat16, head=model.head.clone(dtype=jnp.bfloat16, parent=None), parent=None
  )
  result = generate(model, half, PROMPTS[2:3], KEY, GREEDY, max_tokens=11)
  tokens = result.tokens[0]
  full = log_probs(model, half, [*PROMPTS[2], *tokens])[len(PROMPTS[2]) - 1 : -1]
  # Numbers of 8 bits, rounded in another order: a product with one vector is summed in float32.
  np.testing.assert_allclose(result.log_probs[0], full[np.arange(11), tokens], atol=0.1)


def test_a_row_does_not_depend_on_the_others_nor_on_the_form_of_the_variables():
  model, variables = family("gemma")
  together = generate(model, variables, PROMPTS, KEY, GREEDY, max_tokens=30)
  alone = generate(model, unstacked(variables), PROMPTS[2:3], KEY, GREEDY, max_tokens=30)
  assert (alone.tokens[0] == together.tokens[2]).all()


def test_a_row_ends_with_its_stop_token_and_the_others_go_on():
  model, variables = family("llama")
  free = generate(model, variables, PROMPTS, KEY, GREEDY, max_tokens=30)
  stop = int(free.tokens[0, 4])
  result = generate(model, variables, PROMPTS, KEY, GREEDY, max_tokens=30, stop=[stop])
  for row, tokens in enumerate(free.tokens.tolist()):
    length = tokens.index(stop) + 1 if stop in tokens else 30
    assert result.lengths[row] == length
    assert result.tokens[row].tolist() == tokens[:length] + [-1] * (30 - length)
    assert (result.log_probs[row, length:] == 0).all()
  assert result.lengths.min() <= 5


def test_text_ends_before_a_stop_string_and_a_stream_has_the_same_text():
  model, variables = family("llama")
  settings = {"max_tokens": 30, "tokenizer": Letters()}
  free = generate(model, variables, PROMPTS, KEY, Sampling(0.9), **settings)
  assert [Letters().decode(row) for row in free.tokens] == free.texts
  stops = [free.texts[0][6:9], free.texts[3][20:22]]
  cut = lambda text: min((text[: text.index(s)] for s in stops if s in text), key=len, default=text)
  given = model, variables, PROMPTS, KEY, Sampling(0.9)
  result = generate(*given, **settings, stop=stops)
  assert result.texts == [cut(text) for text in free.texts]
  assert len(result.texts[0]) == 6
  assert result.lengths[0] == 9  # the token that completes the stop string is the last
  pieces = list(stream(*given, **settings, stop=stops, chunk=8))  # a chunk ends with a text
  assert ["".join(parts) for parts in zip(*pieces)] == result.texts
  assert len(pieces) == 1 + -(-29 // 8)


def test_generation_on_a_mesh_is_that_on_one_device():
  model, variables = family("gemma")
  alone = generate(model, variables, PROMPTS, KEY, GREEDY, max_tokens=30)
  mesh = make_mesh(MeshShape(data=2, fsdp=2, model=2))
  tied = model.embedding.clone(vocab_axis="model", parent=None)
  sharded = model.clone(
    embedding=tied, head=model.head.clone(vocab_axis="model", embedding=tied, parent=None)
  )
  placed = jax.device_put(variables, shardings(sharded.logical_axes(), variables, mesh))
  with jax.set_mesh(mesh):
    result = generate(sharded, placed, PROMPTS, KEY, GREEDY, max_tokens=30)
  assert (result.tokens == alone.tokens).all()
  np.testing.assert_allclose(result.log_probs, alone.log_probs, atol=1e-5)


def test_tokens_are_drawn_among_the_allowed_ones_of_each_row():
  model, variables = family("llama")
  allowed = np.arange(V) % 4 == np.arange(4)[:, None]
  result = generate(model, variables, PROMPTS, KEY, max_tokens=30, allowed=allowed)
  assert (result.tokens % 4 == np.arange(4)[:, None]).all()


class Padded(Letters):
  """Letters of which the first 61 rows of the table have one, and token 5 controls the model."""

  vocab, eos = 61, (7,)

  def encode(self, text, *, special=True):
    """The token of each letter, and of "<end>"."""
    return [5] if text == "<end>" else [5, 1] if text == "<end>!" else super().encode(text)

  def decode(self, tokens):
    """The letter of each token but 5."""
    return super().decode([token for token in tokens if token != 5])

  def piece(self, token):
    """The letter of a token, and "" for padding."""
    return "<end>" if token == 5 else super().decode([token]) if token < 61 else ""


@pytest.mark.parametrize("allowed", [None, np.arange(V) % 4 == np.arange(4)[:, None]])
def test_rows_of_a_padded_table_are_never_drawn(allowed):
  model, variables = family("llama")
  given = model, variables, PROMPTS, KEY, Sampling(temperature=9.0)
  settings = {"max_tokens": 60, "stop": [], "allowed": allowed}
  assert generate(*given, **settings).tokens.max() > 61
  tokens = generate(*given, **settings, tokenizer=Padded()).tokens
  assert tokens.max() == 60
  if allowed is not None:
    assert (tokens % 4 == np.arange(4)[:, None]).all()


def test_a_stop_string_that_is_a_control_token_is_its_id():
  model, variables = family("llama")
  given = model, variables, PROMPTS[1:2], KEY, Sampling(temperature=9.0)
  settings = {"max_tokens": 200, "tokenizer": Padded()}
  free = generate(*given, **settings, stop=[])
  length = free.tokens[0].tolist().index(5) + 1
  stopped = generate(*given, **settings, stop=["<end>"])
  assert stopped.lengths[0] == length
  assert stopped.texts[0] == Padded().decode(free.tokens[0, :length])
  with pytest.raises(ValueError, match=r"`stop` must .* occur in a text; got '<end>!'"):
    generate(*given, **settings, stop=["<end>!"])


BAD = {
  "no prompt": ({"prompts": []}, ["prompts", "[]"]),
  "a bare string": ({"prompts": "text"}, ["prompts", "'text'"]),
  "an empty prompt": ({"prompts": [[1], []]}, ["number 1", "BOS"]),
  "a token beyond the vocabulary": ({"prompts": [[1, V]]}, [f"1 to {V}"]),
  "text without a tokenizer": ({"prompts": ["a"]}, ["'a'", "tokenizer"]),
  "a prompt beyond the context": ({"prompts": [[1] * 650]}, ["650", "context 640", "at most 0"]),
  "too many tokens": ({"max_tokens": 640}, ["640", "at most 638"]),
  "no tokens": ({"max_tokens": 0}, ["max_tokens", "0"]),
  "nothing allowed": ({"allowed": np.zeros(V, bool)}, ["allowed", "none"]),
  "a mask of another size": ({"allowed": np.ones(V + 1, bool)}, ["allowed", str(V + 1)]),
  "a stop string without a tokenizer": ({"stop": ["x"]}, ["stop", "'x'"]),
  "another tokenizer": ({"tokenizer": type("Large", (Letters,), {"vocab": 999})()}, ["999"]),
}


@pytest.mark.parametrize("change", BAD)
def test_a_wrong_argument_is_named_with_its_value(change):
  model, variables = family("llama")
  arguments, parts = BAD[change]
  with pytest.raises(ValueError, match="must") as error:
    generate(model, variables, **{"prompts": [[1, 2]], "key": KEY, "max_tokens": 2} | arguments)
  assert all(part in str(error.value) for part in parts)


def test_a_model_that_diverged_is_an_error():
  model, variables = family("llama")
  broken = jax.tree.map(lambda x: np.full_like(x, np.nan), variables)
  with pytest.raises(ValueError, match="finite"):
    generate(model, broken, PROMPTS, KEY, GREEDY, max_tokens=30)


def test_options_outside_their_range_are_refused():
  for option, value in itertools.chain(
    itertools.product(["min_p"], [0, 1.5]), itertools.product(["repetition_penalty"], [0, np.inf])
  ):
    with pytest.raises(ValueError, match=f"`{option}` must"):
      Sampling(**{option: value})
