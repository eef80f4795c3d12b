"""The n-gram memories of `qwen4_exp` checkpoints, whose tables may be compressed ones."""

# The decoder around them is not run here. It lacks what this library's decoder does not have:
# residual streams that are mixed by hyper-connections, gated delta rules in place of attention
# (`linear_attention`), an index that chooses blocks of keys (`indexed_attention`), and an expert
# that all tokens share.

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from vqjax.convert.trained_variables import Variables
from vqjax.embeddings import DenseEmbedding
from vqjax.lm.records import shown
from vqjax.lm.sources.readers import read_json
from vqjax.ngrams import NGramEmbedding, NGramMemory
from vqjax.ops.ngrams import XorHash
from vqjax.tables import SmallTable
from vqjax.tables.tensor_files import open_file, open_rows

__all__ = ["Memory", "load_memories"]

TABLE = "ple_embedding.ngram_embedding"
"""Name of a table in its layer; it may be in shards."""

KEYS = (
  "vocab_size", "eos_token_id", "hidden_size", "hc_count", "ple_layer_ids", "ple_conv_kernel_size",
  "ngram_size", "heads_per_ngram", "ngram_vocab_size_base", "seed", "rms_norm_eps",
)  # fmt: skip
"""What is read of a config."""


class Memory(NamedTuple):
  """A memory and its variables.

  Attributes:
    layer: what the memory computes.
    variables: its variables, as NumPy arrays.
  """

  layer: NGramMemory
  variables: Variables


def load_memories(
  folder: str | pathlib.Path,
  tables: Mapping[int, SmallTable | str | pathlib.Path] | None = None,
) -> dict[int, Memory]:
  """The n-gram memories of a folder of `qwen4_exp` by the number of their layer, from 0.

  Example:

    layer, variables = load_memories("model", {1: "layer1.safetensors"})[1]
    added, cache = layer.apply(variables, streams, tokens, cache, method="step")

  Args:
    folder: config.json and safetensors of transformers.
    tables: by layer the table that is read instead of the folder's, such as `vqjax compress
      FOLDER:TENSOR --pages` writes: it stays in its file. The others are read into memory.

  Raises:
    FileNotFoundError: the folder has no config.json.
    ValueError: the config lacks a key, the tensors are those of another config, or a table is that
      of another layer.
  """
  folder, tables = pathlib.Path(folder), dict(tables or {})
  config = read_json(folder / "config.json")
  config = config.get("text_config", config)
  if missing := [key for key in KEYS if config.get(key) is None]:
    raise ValueError(
      f"{folder / 'config.json'} must be that of qwen4_exp with n-gram memories; it lacks"
      f" {', '.join(missing)}. Give the folder of such a model."
    )
  files = sorted(folder.glob("*.safetensors"))
  tensors = {name: x.array for file in files for name, x in open_file(file)[0].items()}
  layers = [number - 1 for number in sorted(config["ple_layer_ids"])]
  if unknown := sorted(set(tables) - set(layers)):
    raise ValueError(
      f"`tables` must be those of the layers {layers}; got one of layer {unknown[0]}. Layers are"
      " counted from 0."
    )
  return {
    layer: _memory(folder, config, tensors, layer, number, tables.get(layer))
    for number, layer in enumerate(layers)
  }


def _memory(folder, config, tensors, layer, number, table):
  prefix = _prefix(folder, tensors, layer)
  of = _hash(folder, config, tensors, prefix, number)
  dense = open_rows(folder, prefix + TABLE + ".weight")
  if table is None:
    embedding = DenseEmbedding(*dense.shape, param_dtype=jnp.dtype(dense.dtype).type)
    own = {"params": {"weight": dense[:]}}
  else:
    small = table if isinstance(table, SmallTable) else SmallTable.load(table)
    if small.shape != dense.shape:
      raise ValueError(
        f"the table of layer {layer} must be {dense.shape}, as in {folder}; got {small.shape}. Give"
        " that of this layer."
      )
    embedding, own = small.to_embedding()
  memory = NGramMemory(
    NGramEmbedding(of, embedding),
    config["hidden_size"],
    streams=config["hc_count"],
    kernel=config["ple_conv_kernel_size"],
    epsilon=config["rms_norm_eps"],
  )
  array = lambda name: tensors[f"{prefix}{name}.weight"].astype(np.float32)
  params: dict[str, Any] = {
    "key": array("key_proj").T,
    "value": array("value_proj").T,
    # transformers adds 1 to what is stored.
    "key_scale": 1 + array("norm_key"),
    "query_scale": 1 + array("norm_query"),
    "convolved_scale": 1 + array("norm_conv"),
    "filters": array("conv1d")[:, 0].T,
  }
  variables = {"params": params}
  for collection, tree in own.items():
    variables.setdefault(collection, {})["lookup"] = {"table": tree}
  return Memory(memory, variables)


def _prefix(folder, tensors, layer):
  """What the names of the tensors of a layer's memory begin with."""
  pattern = re.compile(rf"(.*\blayers\.{layer}\.ple\.)key_proj\.weight")
  for name in tensors:
    if match := pattern.fullmatch(name):
      return match[1]
  raise ValueError(
    f"{folder} must have the memory of layer {layer}; it has no tensor layers.{layer}.ple."
    "key_proj.weight. Download the other files."
  )


def _hash(folder, config, tensors, prefix, number):
  """The hash of the config, which must be that of the tensors beside it."""
  end = config["eos_token_id"]
  of = XorHash.qwen4(
    config["vocab_size"],
    end[0] if isinstance(end, list) else end,
    layer=number,
    order=config["ngram_size"],
    heads=config["heads_per_ngram"],
    least=config["ngram_vocab_size_base"],
    seed=config["seed"],
  )
  stored = {"layer_multipliers": of.multipliers, "ngram_heads_vocab_sizes": of.sizes}
  for name, expected in stored.items():
    found = tensors.get(f"{prefix}ple_embedding.{name}")
    if found is not None and tuple(found.tolist()) != expected:
      raise ValueError(
        f"{folder} must have the {name} of its config, {shown(expected)}; got"
        f" {shown(found.tolist())}. Use the config.json of these tensors."
      )
  return of
