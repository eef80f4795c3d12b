"""Tests of the configs of the VQ-Logits paper against its sizes and schedules."""

import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest

from configs.vq_logits.base import HEADS
from vqjax.lab.config import config_hash, load_config, override

CONFIGS = pathlib.Path(__file__).parents[4] / "configs"
PAPER = {
  "wikitext103": (267_735, 768, 12, 512, 65_536, (1024, 2048, 4096)),
  "c4": (32_000, 768, 12, 1024, 131_072, (512, 1024, 2048)),
  "ptb": (10_000, 512, 6, 256, 16_384, (256, 512, 1024)),
}
"""Corpus -> vocabulary, width, layers, context, tokens of a batch, sizes of the codebook."""


def made(corpus, *arguments):
  return importlib.import_module(f"configs.vq_logits.{corpus}").experiment(*arguments)


def parameters(model):
  """Part -> number of parameters, from shapes alone."""
  tokens = jnp.zeros((1, 2), jnp.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
  vocabulary = {name: count(shapes.pop(name)) for name in ("embedding", "head")}
  return vocabulary | {"core": count(shapes)}


@pytest.mark.parametrize("corpus", PAPER)
def test_decoders_and_batches_have_the_papers_sizes(corpus):
  vocab, dim, layers, context, batch_tokens, _ = PAPER[corpus]
  experiment = made(corpus)
  norms_and_biases = 13 * dim
  core = layers * (12 * dim**2 + norms_and_biases) + 2 * dim + context * dim
  sizes = {"embedding": vocab * dim, "head": vocab * dim, "core": core}
  assert parameters(experiment.model) == sizes
  # 12 layers of 12·768² weights: the paper prints 80 M.
  assert corpus == "ptb" or abs(core - 84.9e6) < 0.012 * 84.9e6
  assert experiment.train.batch * experiment.model.context == batch_tokens
  assert experiment.model.heads == dim // 64


@pytest.mark.parametrize("corpus", PAPER)
def test_files_load_and_their_data_can_be_overridden(corpus):
  loaded = load_config(CONFIGS / f"vq_logits/{corpus}.py")
  assert config_hash(loaded) == config_hash(made(corpus))
  path = "data.source.path" if corpus == "c4" else "data.path"
  assert config_hash(override(loaded, [f"{path}=elsewhere"])) != config_hash(loaded)


@pytest.mark.parametrize("head", HEADS)
def test_configs_take_another_vocabulary(head):
  assert made("c4", head, 8009).tokenizer.vocab == 8009
  assert made("wikitext103", head, 8009).model.head.vocab == 8009
