"""Blocks between memories of n-grams are one scan, which computes what single blocks do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jitted import initial_variables, random_variables, results
from vqjax import DenseEmbedding, DenseHead
from vqjax.lm.generation import generate, score
from vqjax.lm.models import RMSNorm, Rotary, Transformer
from vqjax.lm.models.streams import Streams
from vqjax.ngrams import NGramEmbedding, NGramMemory
from vqjax.ops.ngrams import XorHash

VOCAB, END, D = 31, 3, 8
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, 13)).astype(np.int32)


def decoder(blocks=(1, 4), **changes):
  """A decoder of five blocks, with memories before some."""
  streams = changes["streams"].count if "streams" in changes else 1
  memories = []
  for layer in range(len(blocks)):
    ngrams = XorHash.qwen4(VOCAB, END, layer=layer, heads=2, least=50)
    lookup = NGramEmbedding(ngrams, DenseEmbedding(ngrams.rows, 4))
    memories.append(NGramMemory(lookup, D, streams=streams))
  fields = {"layers": 5, "heads": 2, "context": 16, "memory_blocks": blocks}
  layers = DenseEmbedding(VOCAB, D), DenseHead(VOCAB, D)
  return Transformer(*layers, D, memories=tuple(memories), **(fields | changes))


def unrolled(model, variables, tokens):
  """The hidden vectors by one block after another, each applied to its own parameters."""

  def forward(module):
    x, position = module.embedding(tokens), jnp.arange(tokens.shape[1])
    x, memories = module.embedded(x, position), list(module.memories)
    for number in range(module.layers):
      of_block = lambda tree, n=number: jax.tree.map(lambda leaf: leaf[n], tree)
      if number in module.memory_blocks:
        x = x + memories.pop(0)(x, tokens)
      given = x, of_block(module.layer_inputs()), module.angles(position), True
      own = {"params": of_block(variables["params"]["blocks"])}
      x, _ = module.block().apply(own, *given)
    return module.final(x)

  return model.apply(variables, method=forward)


CASES = {
  "two memories": {},
  "before the first block, and one after another": {"blocks": (0, 1, 2)},
  "local blocks, computed again": {"window": 4, "remat": True},
  "turned by two tables": {
    "window": 4,
    "norm": RMSNorm(),
    "rotary": Rotary(),
    "local_rotary": Rotary(base=100.0),
    "local": (True, True, False, False, True),
  },
  "streams": {"streams": Streams(2, rank=4), "pre_norms": False, "rotary": Rotary()},
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("case", CASES)
def test_runs_of_blocks_have_the_values_and_gradients_of_single_blocks(case):
  model = decoder(**CASES[case])
  variables, weight = random_variables(model, TOKENS), np.cos(np.arange(13 * D)).reshape(13, D)

  def both(variables):
    found = lambda v: (weight * model.apply(v, TOKENS, method="hidden")).sum()
    expected = lambda v: (weight * unrolled(model, v, TOKENS)).sum()
    return [jax.value_and_grad(f)(variables) for f in (found, expected)]

  found, expected = results(both, variables)
  # Each number is a sum of at most a few hundred products, in float32.
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=3e-5 * np.abs(b).max())
  jax.tree.map(close, found, expected)


def test_blocks_begin_and_are_stored_as_those_of_the_decoder_without_memories():
  model = decoder()
  found = initial_variables(model, TOKENS)["params"]
  alone = initial_variables(model.clone(memories=(), memory_blocks=()), TOKENS)["params"]
  jax.tree.map(np.testing.assert_array_equal, found["blocks"], alone["blocks"])
  assert found.keys() - alone.keys() == {"memories_0", "memories_1"}


def test_each_block_drops_other_numbers():
  model = decoder(dropout=0.5)
  zeros = jax.tree.map(np.zeros_like, random_variables(model, TOKENS)["params"])
  zeros["final_norm"]["scale"] += 1

  def kept(params, bias):
    # The output of one block is 1, and dropout zeros entries of it.
    blocks = {**params["blocks"], "mlp_out": {**params["blocks"]["mlp_out"], "bias": bias}}
    given = {"params": {**params, "blocks": blocks}}, TOKENS, False
    return model.apply(*given, rngs={"dropout": jax.random.key(0)}, method="hidden") > 0

  ones = np.eye(5, dtype=np.float32)[..., None] * np.ones(D, np.float32)
  masks = results(jax.vmap(kept, in_axes=(None, 0)), zeros, ones)
  # Two independent masks agree in half of 312 numbers, with a standard deviation of 0.03.
  alike = np.array([[np.mean(a == b) for a in masks] for b in masks])
  assert np.abs(alike[~np.eye(5, dtype=bool)] - 0.5).max() < 0.15


def test_cached_decoding_has_the_log_probabilities_of_whole_texts():
  model = decoder(window=4)
  variables = random_variables(model, TOKENS)
  prompts = [TOKENS[0, :2].tolist(), TOKENS[1, :7].tolist()]
  made = generate(model, variables, prompts, jax.random.key(0), max_tokens=6)
  texts = [[*prompt, *own.tolist()] for prompt, own in zip(prompts, made.tokens)]
  for prompt, own, whole in zip(prompts, made.log_probs, score(model, variables, texts)):
    np.testing.assert_allclose(own, whole[len(prompt) - 1 :], atol=1e-4)
