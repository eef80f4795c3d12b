"""Readers of model files: tensors by name, memory-mapped, and a config.

Every reader returns a `ModelSource`. Nothing in a file is executed, and no file is unpickled.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import math
import pathlib
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from vqjax.convert.packed_table import PackedTable
from vqjax.lm import records
from vqjax.lm.models import Transformer
from vqjax.lm.sources.families import FAMILIES, decoder_of
from vqjax.lm.sources.gguf_header import Header, read_header
from vqjax.lm.sources.schema import Origin
from vqjax.tables import container, tensor_files
from vqjax.tables.tensor_files import DTYPES, RowShards, release
from vqjax.types import Dtype

__all__ = ["Tensor"]


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a file, which is read when it is called for.

  Attributes:
    shape: its shape.
    format: its number format, such as "BF16" or "Q4_K".
    nbytes: its bytes in the file.
    read: (slice of the first axis) -> these rows, as numbers; a view of the file where possible.
    checksum: CRC-32 of its bytes, after those of its name, format and shape; None: unknown.
    named: CRC-32 of its name, format and shape.
    table: the compressed table whose rows it has; None: it is not compressed.
  """

  shape: tuple[int, ...]
  format: str
  nbytes: int
  read: Callable[[slice], np.ndarray]
  checksum: int | None = None
  named: int = 0
  table: container.CompressedTable | PackedTable | None = None


@dataclasses.dataclass(frozen=True)
class ModelSource:
  """What a file or a folder holds.

  Attributes:
    path: the file or folder.
    kind: "safetensors", "gguf" or "llama2.c".
    config: the architecture, in the words of a Hugging Face config.json.
    tensors: the tensors by their names in the file.
    files: the files that hold them.
    metadata: further facts, such as the vocabulary of a GGUF.
    runtime: name of the form that the vocabulary tables take in memory, one of
      `runtime.RUNTIMES`.
    origin: where the config comes from, for messages.
  """

  path: pathlib.Path
  kind: str
  config: Mapping[str, Any]
  tensors: Mapping[str, Tensor]
  files: tuple[pathlib.Path, ...] = ()
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  runtime: str = container.UNPACKED
  origin: Origin = dataclasses.field(default_factory=Origin)

  def decoder(self, dtype: Dtype = np.float32) -> Transformer:
    """The decoder of the config, whose sizes are compared with the tensors first."""
    shapes = [tensor.shape for tensor in self.tensors.values()]
    return decoder_of(self.config, dtype, self.origin, shapes)


def open_source(path: str | pathlib.Path) -> ModelSource:
  """Open a folder of safetensors, a GGUF, or a .bin file of llama2.c.

  Raises:
    FileNotFoundError: there is no such file, or the folder has no weights.
    ValueError: the file is damaged or of another kind.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    for pattern, read in (("*.safetensors", _read_safetensors), ("*.gguf", _read_gguf)):
      if files := sorted(path.glob(pattern)):
        return _read_safetensors(path) if read is _read_safetensors else read(_only(path, files))
    names = sorted(records.one_line(file.name) for file in path.iterdir())
    there = ", ".join(names) or "nothing"
    raise FileNotFoundError(
      f"`path` must hold weights, *.safetensors or *.gguf; got {path} with {there}. PyTorch's *.bin"
      " files are pickles, which are not read: convert them with"
      " model.save_pretrained(folder, safe_serialization=True)."
    )
  if not path.is_file():
    raise FileNotFoundError(
      f"`path` must be a folder or a file of a model; got {path}, which does not exist. Download it"
      " first."
    )
  with open(path, "rb") as file:
    start = file.read(4)
  if start == b"GGUF":
    return _read_gguf(path)
  if path.suffix == ".safetensors":
    return _read_safetensors(path.parent, path)
  if path.suffix == ".bin" and start[:2] != b"PK" and start[:1] != b"\x80":
    return _read_llama2c(path)
  raise ValueError(
    f"`path` must be a folder with safetensors, a .gguf, or a .bin file of llama2.c; got {path}."
    " Files of PyTorch (.pt, .bin) are pickles, which are not read: save them as safetensors."
  )


def read_tensors(path: str | pathlib.Path) -> tuple[str | None, dict[str, Tensor]]:
  """The architecture and the tensors of any safetensors or GGUF, whether its model is known or not.

  Compressed tables are in place of their parts.

  Raises:
    FileNotFoundError: there is no such file, or the folder has none.
    ValueError: a file is damaged, or of another kind.
  """
  path = pathlib.Path(path)
  if path.is_dir() and not any(path.glob("*.safetensors")) and (files := [*path.glob("*.gguf")]):
    path = _only(path, files)
  if path.suffix == ".gguf":
    header, tensors = gguf_header(path), _gguf_tensors(path, gguf_header(path))[1]
    kind = header.metadata.get("general.architecture")
    return kind if isinstance(kind, str) else None, tensors
  files = tensor_files.weight_files(path)[0] if path.is_dir() else [path]
  if not files or not files[0].is_file():
    raise FileNotFoundError(
      f"`path` must be a folder or file of safetensors, or a GGUF; got {path}. Download it first."
    )
  tensors = _tensors_of(files)
  folder = path if path.is_dir() else path.parent
  if path.is_dir() and (folder / container.MANIFEST).is_file():
    tensors = _decompressed(folder, container.read_manifest(folder), tensors)
  config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
  kind = config.get("model_type")
  return kind if isinstance(kind, str) else None, tensors


def _only(path: pathlib.Path, files: list[pathlib.Path]) -> pathlib.Path:
  if len(files) > 1:
    names = ", ".join(file.name for file in files)
    raise ValueError(f"`path` must be one model; got {path} with {names}. Give one of the files.")
  return files[0]


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The object of a JSON file; ValueError names the file."""
  if not path.is_file():
    raise FileNotFoundError(
      f"`path` must have {path.name}; got {path.parent} without. Download it."
    )
  try:
    # An editor may have put a byte-order mark before it.
    read = json.loads(path.read_text("utf-8-sig"))
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} must be JSON; got {error}. Download it again.") from None
  if not isinstance(read, dict):
    raise ValueError(
      f"{path} must hold a JSON object; got {type(read).__name__}. Download it again."
    )
  return read


def _read_safetensors(folder: pathlib.Path, only: pathlib.Path | None = None) -> ModelSource:
  """A Hugging Face folder: config.json and one or more safetensors files."""
  if (folder / ADAPTER).is_file() and (only is None or only.stem == "adapter_model"):
    raise ValueError(
      f"`path` must be a whole model; got {folder} with {ADAPTER}, an adapter of PEFT, which is not"
      " applied here. Merge it into its model with merge_and_unload() and save that; or remove the"
      " adapter's files from a model that has it already."
    )
  config = read_json(folder / "config.json")
  files, expected = tensor_files.weight_files(folder, only)
  tensors = _tensors_of(files)
  # An index may name the head of a tied model, which is in no file.
  known = {*tensors, HEAD} if _is_tied(config) else tensors
  if absent := [name for name in expected if name not in known]:
    raise ValueError(
      f"{folder} must have the tensors of its index; got none named {_some(absent)}. Download the"
      " files again."
    )
  runtime = container.UNPACKED
  if (folder / container.MANIFEST).is_file():
    manifest = container.read_manifest(folder)
    runtime, tensors = manifest.runtime, _decompressed(folder, manifest, tensors)
  tensors = _joined_shards(folder, tensors)
  if config.get("model_type") == "qwen4_exp" and isinstance(config.get("text_config"), dict):
    # The decoder of a model that reads images, too.
    config = config["text_config"] | {"model_type": "qwen4_exp_text"}
  config, tensors = _as_tied(folder, config, tensors)
  origin = Origin(str(folder / "config.json"))
  return ModelSource(
    folder, "safetensors", config, tensors, tuple(files), runtime=runtime, origin=origin
  )


def _tensors_of(files: Iterable[pathlib.Path]) -> dict[str, Tensor]:
  """The tensors of a model's files."""
  tensors: dict[str, Tensor] = {}
  for file in files:
    for name, tensor in _safetensors(file).items():
      if name in tensors:
        raise ValueError(
          f"{file.parent} must hold each tensor once; got {name} in two files. Remove {file.name}"
          " or the other file."
        )
      tensors[name] = tensor
  return tensors


ADAPTER = "adapter_config.json"
"""The file that says of a folder that it changes another model."""


def _joined_shards(folder: pathlib.Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
  """The tensors with one in place of `NAME.shard_0.weight`, `NAME.shard_1.weight`, and so on."""
  found, shards = {}, {}
  for name, tensor in tensors.items():
    if match := re.fullmatch(r"(.+)\.shard_(\d+)\.weight", name):
      shards.setdefault(match[1], {})[int(match[2])] = tensor
    else:
      found[name] = tensor
  for name, own in shards.items():
    if max(own) >= len(own):
      missing = next(number for number in itertools.count() if number not in own)
      raise ValueError(
        f"{folder} must have all shards of {name}.weight; got {len(own)} without shard {missing}."
        " Download the files again."
      )
    parts = [own[number] for number in range(len(own))]
    shapes = sorted({part.shape for part in parts})
    if any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
      raise ValueError(
        f"{folder} must have shards of {name}.weight of one width; got {shapes}. Download the"
        " files again."
      )
    # Views of the files.
    rows = RowShards([part.read(slice(None)) for part in parts])
    nbytes = sum(part.nbytes for part in parts)
    found[f"{name}.weight"] = Tensor(rows.shape, parts[0].format, nbytes, rows.__getitem__)
  return found


HEAD = "lm_head.weight"


def _as_tied(
  folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
  """The config and the tensors, of a tied model as transformers reads it.

  A head without an embedding, of the two names that share memory, is the embedding. A head that
  differs from the embedding is a head of its own.
  """
  if HEAD not in tensors or not _is_tied(config):
    return config, tensors
  family = FAMILIES[config["model_type"]]
  name = next(rule.name for rule in family.rules if rule.path == "embedding/weight")
  table = next((n for n in (family.prefix + name, name) if n in tensors), None)
  if table is None:
    tensors = tensors | {family.prefix + name: tensors[HEAD]}
    del tensors[HEAD]
  elif not _are_equal(tensors[table], tensors[HEAD]):
    warnings.warn(
      f"{folder / 'config.json'} says `tie_word_embeddings`, but {HEAD} differs from {table}: it is"
      " a head of its own here, as in transformers.",
      stacklevel=2,
    )
    config = config | {"tie_word_embeddings": False}
  return config, tensors


def _is_tied(config: Mapping[str, Any]) -> bool:
  """Whether a config of a known family says that the head is the embedding."""
  family = FAMILIES.get(str(config.get("model_type")))
  if family is None:
    return False
  return config.get("tie_word_embeddings", family.schema.tie_word_embeddings) is True


def _are_equal(one: Tensor, other: Tensor) -> bool:
  """Whether two tables hold the same numbers."""
  if one.shape != other.shape:
    return False
  for first in range(0, one.shape[0] if one.shape else 0, ROWS):
    rows = [tensor.read(slice(first, first + ROWS)) for tensor in (one, other)]
    if one.format == other.format:
      rows = [np.ascontiguousarray(part).view(np.uint8) for part in rows]
    if not np.array_equal(*rows):
      return False
  return True


ROWS = 2**12
"""Rows that are compared at a time."""


def _decompressed(
  folder: pathlib.Path, manifest: container.Manifest, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
  """The tensors with compressed tables in place of their parts; rows are decoded when read."""
  is_packed = manifest.runtime == container.PACKED
  for name in manifest.tensors.values():
    prefix, where = name + container.SEPARATOR, f"{name} of {folder}"
    own = {part: tensors.pop(part) for part in list(tensors) if part.startswith(prefix)}
    for part, tensor in own.items():
      verify_tensor(part, tensor, folder)
    stored = {part.removeprefix(prefix): own[part].read(slice(None)) for part in own}
    try:
      table = (PackedTable.from_parts if is_packed else container.CompressedTable)(stored)
    except ValueError as error:
      raise ValueError(f"{where}: {error}") from None
    read = functools.partial(_table_rows, where, table)
    kind = "packed" if is_packed else "rANS"
    tensors[name] = Tensor(table.shape, kind, table.nbytes, read, table=table)
  return tensors


def _table_rows(where: str, table, rows: slice) -> np.ndarray:
  try:
    return table.rows(*rows.indices(table.shape[0])[:2])
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from None


def _safetensors(file: pathlib.Path) -> dict[str, Tensor]:
  tensors, _ = tensor_files.open_file(file, narrow=True)
  return {
    name: dataclasses.replace(_view(x.array, x.format), named=x.named, checksum=x.checksum)
    for name, x in tensors.items()
  }


def _view(view: np.ndarray, format: str) -> Tensor:
  # A number without axes has no rows.
  return Tensor(view.shape, format, view.nbytes, view.__getitem__ if view.ndim else lambda _: view)


def verify_tensor(name: str, tensor: Tensor, path: pathlib.Path) -> None:
  """Raise ValueError unless a tensor with a checksum has it."""
  if tensor.checksum is not None:
    view = tensor.read(slice(None))
    tensor_files.verify(view, name, path, tensor.named, tensor.checksum)
    release(view)


def check_not_compressed(source: ModelSource) -> None:
  """Raise ValueError for a model that has compressed tables."""
  coded = [n for n, t in source.tensors.items() if t.table is not None or container.SEPARATOR in n]
  if coded:
    raise ValueError(
      f"`model` must not be compressed already; got {source.path} with the table"
      f" {coded[0].partition(container.SEPARATOR)[0]} compressed. Give the model that it was made"
      " of."
    )


def import_checkpoints_extra(module: str) -> ModuleType:
  """Import a module of the `checkpoints` extra; the error says how to install it."""
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    package = error.name.partition(".")[0]
    raise ImportError(
      f"{package} must be installed to read this file. Run pip install 'vqjax[checkpoints]'."
    ) from None


def _read_gguf(path: pathlib.Path) -> ModelSource:
  """A GGUF: metadata, and tensors that may be quantised."""
  header = gguf_header(path)
  runtime, tensors = _gguf_tensors(path, header)
  config, origin = _gguf_config(path, header.metadata, tensors)
  _check_gguf_tokenizer(header.metadata, origin)
  return ModelSource(
    path, "gguf", config, tensors, (path,), header.metadata, runtime=runtime, origin=origin
  )


def _gguf_tensors(path: pathlib.Path, header: Header) -> tuple[str, dict[str, Tensor]]:
  """The form of the tables in memory, and the tensors, with tables in place of their parts."""
  gguf = import_checkpoints_extra("gguf")
  tensors = {}
  for name, entry in header.entries.items():
    kind = gguf.GGMLQuantizationType(entry.kind)
    bytes_ = header.data[entry.first : entry.first + entry.nbytes]
    read = functools.partial(_rows, gguf, bytes_, kind, entry.shape)
    tensors[name] = Tensor(entry.shape, kind.name, entry.nbytes, read)
  runtime = container.UNPACKED
  if TABLES_KEY in header.metadata:
    manifest, tensors = _gguf_tables(path, header.metadata[TABLES_KEY], tensors)
    runtime, tensors = manifest.runtime, _decompressed(path, manifest, tensors)
  return runtime, tensors


TABLES_KEY = "vqjax.tables"
"""Key of a GGUF's metadata whose text is about its tables, as `vqjax.json` of a folder is."""

PART_DTYPES = {"I8": np.uint8, "I16": np.uint16, "I32": np.int32, "F16": np.float16}
"""Types of tensors of a GGUF -> number formats of the parts of compressed tables."""


def _gguf_tables(
  path: pathlib.Path, text: Any, tensors: dict[str, Tensor]
) -> tuple[container.Manifest, dict[str, Tensor]]:
  """What a GGUF says of its compressed tables; its tensors, with parts of tables as stored."""
  try:
    read = json.loads(text)
    names, sums, runtime = read["tables"], read["crc32"], read["runtime"]
    written = read["format"], read["version"]
    parts = {name: tensor for name, tensor in tensors.items() if container.SEPARATOR in name}
    if parts.keys() != sums.keys():
      raise ValueError("other parts than it names")
    for name, tensor in parts.items():
      array = np.asarray(tensor.read(slice(None))).view(PART_DTYPES[tensor.format])
      if zlib.crc32(np.ascontiguousarray(array)) != sums[name]:
        raise ValueError(f"another checksum of {name}")
      tensors = tensors | {name: _view(array, tensor.format)}
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
    raise ValueError(
      f"{path} must have the compressed tables that it was written with; got {error}. It is"
      " damaged: copy it again."
    ) from None
  if written != (container.FORMAT, container.VERSION):
    raise ValueError(
      f"format and version of {path} must be {(container.FORMAT, container.VERSION)}; got"
      f" {written}. Read it with the version of vqjax that wrote it."
    )
  return container.Manifest(names, runtime), tensors


def gguf_header(path: pathlib.Path) -> Header:
  """The header of a GGUF, with the block types that the package gguf knows."""
  sizes = {
    int(kind): size for kind, size in import_checkpoints_extra("gguf").GGML_QUANT_SIZES.items()
  }
  try:
    return read_header(path, sizes)
  except ValueError as error:
    raise ValueError(
      f"{path} must be a whole GGUF; got {records.one_line(error)}. It is truncated or damaged:"
      " download it again."
    ) from None


DEQUANTISED = 2**16
"""Numbers that are dequantised at a time: they and their parts fit the cache of a core."""


def _rows(gguf, data: np.ndarray, kind, shape: tuple[int, ...], rows: slice) -> np.ndarray:
  """Rows of a tensor of a GGUF, as float32 or as a view of what is not quantised."""
  if kind.name in DTYPES:
    return data.view(DTYPES[kind.name]).reshape(shape)[rows]
  numbers, size = gguf.GGML_QUANT_SIZES[kind]
  data = data.reshape(*shape[:-1], shape[-1] // numbers * size)
  found = np.empty((len(data[rows]), *shape[1:]), np.float32)
  flat, blocks = found.reshape(-1), data[rows].reshape(-1, size)
  # As one row each time: the package takes 16 rows at a time, and most of its time for calls.
  step = max(1, DEQUANTISED // numbers)
  try:
    for first in range(0, len(blocks), step):
      some = gguf.dequantize(blocks[first : first + step].reshape(1, -1), kind)
      flat[first * numbers : first * numbers + some.size] = some[0]
    release(data[rows])
    return found
  except NotImplementedError:
    raise ValueError(
      f"the tensors of a GGUF must have a format that the package gguf reads; got {kind.name}."
      " Quantise the model to Q8_0, Q4_K_M or F16, or install a newer gguf."
    ) from None


GGUF_FAMILIES = {
  "llama": "llama",
  "qwen2": "qwen2",
  "qwen3": "qwen3",
  "qwen3moe": "qwen3_moe",
  "gpt-oss": "gpt_oss",
  "phi3": "phi3",
  "smollm3": "smollm3",
  "olmo2": "olmo2",
  "granite": "granite",
  "gemma2": "gemma2",
  "gemma3": "gemma3_text",
  "gpt2": "gpt2",
}
"""Architecture of a GGUF -> `model_type` of a Hugging Face config."""


GGUF_KEYS = {
  "gpt2": {
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_inner": "feed_forward_length",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
  },
  "llama": {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
  },
}
GGUF_KEYS |= dict.fromkeys(("qwen2", "qwen3", "phi3", "smollm3", "olmo2"), GGUF_KEYS["llama"])
GGUF_KEYS["olmo3"] = GGUF_KEYS["llama"] | {"sliding_window": "attention.sliding_window"}
GGUF_KEYS["mixtral"] = GGUF_KEYS["llama"] | {
  "num_local_experts": "expert_count",
  "num_experts_per_tok": "expert_used_count",
}
GGUF_KEYS["qwen3moe"] = GGUF_KEYS["mixtral"] | {
  "moe_intermediate_size": "expert_feed_forward_length"
}
GGUF_KEYS["gpt-oss"] = (
  GGUF_KEYS["mixtral"] | GGUF_KEYS["olmo3"] | {"intermediate_size": "expert_feed_forward_length"}
)
GGUF_KEYS["granite"] = GGUF_KEYS["llama"] | {
  "attention_multiplier": "attention.scale",
  "embedding_multiplier": "embedding_scale",
  "residual_multiplier": "residual_scale",
  "logits_scaling": "logit_scale",
}
GGUF_KEYS["gemma2"] = GGUF_KEYS["olmo3"] | {
  "attn_logit_softcapping": "attn_logit_softcapping",
  "final_logit_softcapping": "final_logit_softcapping",
}
GGUF_KEYS["gemma3"] = GGUF_KEYS["olmo3"] | {
  "sliding_window_pattern": "attention.sliding_window_pattern",
  "rope_local_base_freq": "rope.freq_base_swa",
  "final_logit_softcapping": "final_logit_softcapping",
}
"""Architecture -> keys of a config -> the same in the metadata, behind the architecture's name."""

GGUF_ROPE = {
  "rope_type": "rope.scaling.type",
  "factor": "rope.scaling.factor",
  "beta_fast": "rope.scaling.yarn_beta_fast",
  "beta_slow": "rope.scaling.yarn_beta_slow",
}
"""Members of `rope_scaling` -> the same in the metadata."""

GGUF_OPTIONAL = {"num_key_value_heads": None, "head_dim": None, "rope_theta": 1e4}
GGUF_OPTIONAL |= {"original_max_position_embeddings": None}
GGUF_OPTIONAL |= {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4}
GGUF_OPTIONAL |= {"final_logit_softcapping": None, "attn_logit_softcapping": None}
GGUF_OPTIONAL |= {"embedding_multiplier": 1.0, "residual_multiplier": 1.0}
GGUF_OPTIONAL |= {"attention_multiplier": 0.0}
"""Keys of a config that metadata may lack, and what llama.cpp takes for them."""

GGUF_NEUTRAL = {
  "attention.causal": (True,),
  "attention.scale": (0.0,),
  "attention.max_alibi_bias": (0.0,),
  "attention.clamp_kqv": (0.0,),
  "attention.sliding_window": (0,),
  "attn_logit_softcapping": (0.0,),
  "final_logit_softcapping": (0.0,),
  "logit_scale": (0.0, 1.0),
  "residual_scale": (0.0, 1.0),
  "embedding_scale": (0.0, 1.0),
  "expert_count": (0,),
  "expert_used_count": (0,),
  "nextn_predict_layers": (0,),
  "rope.scaling.alpha": (0.0, 1.0),
  "rope.scaling.attn_factor": (1.0,),
  "rope.scaling.yarn_attn_factor": (1.0,),
  "rope.scaling.yarn_ext_factor": (1.0, -1.0),
  "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys that are not implemented -> values with which they change nothing."""

GGUF_WIDTHS = ("rope.dimension_count", "attention.value_length", "rope.dimension_count_swa")
GGUF_WIDTHS += ("attention.key_length_swa", "attention.value_length_swa")
"""Keys that must be the width of a head: others are not implemented."""

GGUF_IGNORED = {"phi3": ("attention.sliding_window", "rope.scaling.attn_factor")}
GGUF_IGNORED |= {"gpt-oss": ("feed_forward_length",)}
"""Further keys: llama.cpp ignores the windows of Phi-3; the factor is read with its divisors.

gpt-oss has no layer of the width without experts.
"""

GGUF_HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type")
"""Keys of an architecture that llama.cpp does not compute logits with."""

GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Number of blocks of the models that divide scores by the model width over the heads."""

ROTATED = "rope.dimension_count"
"""Width of the part of a head that is turned."""

OLD_FACTOR = "rope.scale_linear"
"""The old name of `rope.scaling.factor`."""


def _gguf_config(
  path: pathlib.Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], Origin]:
  """The config in the words of Hugging Face, from the metadata of a GGUF, and where it is from."""
  arch = metadata.get("general.architecture")
  remedy = "Convert the model again, or download the file again."
  if not isinstance(arch, str) or arch not in GGUF_FAMILIES:
    return {"model_type": arch}, Origin(str(path), {"model_type": "general.architecture"}, remedy)
  kind = _gguf_kind(arch, metadata)
  words = GGUF_KEYS[kind] | {f"rope_scaling.{key}": own for key, own in GGUF_ROPE.items()}
  origin = Origin(str(path), {key: f"{arch}.{own}" for key, own in words.items()}, remedy)
  if "token_embd.weight" not in tensors:
    raise origin.error("the tensor token_embd.weight is missing")
  own = lambda key, default=None: metadata.get(f"{arch}.{key}", default)
  config = {
    "model_type": GGUF_FAMILIES.get(kind, kind),
    "vocab_size": (*tensors["token_embd.weight"].shape, 0)[0],
    "tie_word_embeddings": "output.weight" not in tensors,
  }
  if kind == "qwen3moe":
    config["norm_topk_prob"] = True  # which llama.cpp has in its code
  for key, name in GGUF_KEYS[kind].items():
    # None is refused where a key is needed, once the decoder is.
    config[key] = own(name, GGUF_OPTIONAL.get(key))
  _check_gguf_keys(arch, kind, metadata, origin)
  if arch == "gpt2":
    return config, origin
  dim, heads, width = (config[k] for k in ("hidden_size", "num_attention_heads", "head_dim"))
  if width is None and type(dim) is type(heads) is int and heads > 0:
    width = dim // heads
  if arch == "phi3" and type(own(ROTATED)) is type(width) is int and 0 < own(ROTATED) < width:
    config["partial_rotary_factor"] = own(ROTATED) / width
  for key in GGUF_WIDTHS:
    if key == ROTATED and "partial_rotary_factor" in config:
      continue
    if own(key, width) != width:
      raise origin.error(
        f"`{arch}.{key}` must be {width}, the width of a head; got {records.shown(own(key))}, which"
        " is not implemented"
      )
  # gpt-oss has a scaling by default.
  config["rope_scaling"] = _gguf_rope(own, tensors, origin, arch) or {"rope_type": "default"}
  if arch in GEMMA_27B:
    # llama.cpp has this number in its code: it is not in the metadata.
    is_large = own("block_count") == GEMMA_27B[arch]
    config["query_pre_attn_scalar"] = dim // heads if is_large else width
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
      if own(key) == 0:
        config[key] = None
  if arch == "granite" and config["attention_multiplier"] == 0:
    config["attention_multiplier"] = width**-0.5 if type(width) is int and width > 0 else 1.0
  return config, origin


def _gguf_kind(arch: str, metadata: Mapping[str, Any]) -> str:
  """The architecture, or the family that llama.cpp tells from it by a key."""
  if arch == "olmo2" and metadata.get("olmo2.attention.sliding_window"):
    return "olmo3"
  return "mixtral" if arch == "llama" and metadata.get("llama.expert_count") else arch


def _gguf_rope(
  own: Callable[..., Any], tensors: Mapping[str, Tensor], origin: Origin, arch: str
) -> dict[str, Any] | None:
  """`rope_scaling` of a config; the type is linear where a factor is given without one."""
  scaling = {key: own(name) for key, name in GGUF_ROPE.items() if own(name) is not None}
  scaling = {"factor": own(OLD_FACTOR)} | scaling if own(OLD_FACTOR) is not None else scaling
  # 0 means that there is none.
  has_factor = scaling.get("factor") not in (None, 0, 1)
  kind = scaling.setdefault("rope_type", "linear")
  names = {f"{length}_factor": f"rope_factors_{length}.weight" for length in ("short", "long")}
  if {*names.values()} <= tensors.keys():
    lists = {key: _vector(tensors[name], name, origin) for key, name in names.items()}
    # llama.cpp takes the factor of cosines and sines as it is, and 1 without one.
    magnitude = {"attention_factor": own("rope.scaling.attn_factor", 1.0)}
    return {"rope_type": "longrope"} | lists | magnitude
  if "rope_freqs.weight" in tensors:
    if has_factor and kind != "none":
      raise origin.error(
        "`rope_scaling.factor` must be left out beside the tensor rope_freqs.weight; got"
        f" {records.shown(scaling['factor'])}"
      )
    divisors = _vector(tensors["rope_freqs.weight"], "rope_freqs.weight", origin)
    return {"rope_type": "divisors", "divisors": divisors}
  if kind == "none" or (kind == "linear" and not has_factor):
    return None
  if kind == "yarn" and scaling.get("factor") in (None, 0):
    scaling["factor"] = 1.0
  return scaling


def _vector(tensor: Tensor, name: str, origin: Origin) -> list[float]:
  if len(tensor.shape) != 1:
    raise origin.error(f"{name} must be a vector; got shape {list(tensor.shape)}")
  return list(map(float, tensor.read(slice(None))))


def _check_gguf_keys(arch: str, kind: str, metadata: Mapping[str, Any], origin: Origin) -> None:
  """Raise ValueError for a key that is neither used nor harmless.

  That one flipped bit has made of a key which is used is neither, wherever it is: the reader would
  take a default in its place.
  """
  gguf = import_checkpoints_extra("gguf")
  used = {*GGUF_KEYS[kind].values(), *GGUF_HARMLESS, *GGUF_IGNORED.get(arch, ())}
  if arch != "gpt2":
    used |= {*GGUF_ROPE.values(), *GGUF_WIDTHS, OLD_FACTOR}
  known = {"general.architecture", "general.alignment", *(f"{arch}.{key}" for key in used)}
  known |= {key for key in vars(gguf.Keys.Tokenizer).values() if isinstance(key, str)}
  for key, value in metadata.items():
    if key in known:
      continue
    name = key.removeprefix(f"{arch}.")
    if name != key and value not in GGUF_NEUTRAL.get(name, ()):
      why = "not implemented" if name in GGUF_NEUTRAL else "not a key that is understood"
      raise origin.error(f"`{key}` is {why}; got {records.shown(value)}")
    near = [other for other in known - metadata.keys() if _is_one_bit_from(key, other)]
    if near:
      raise origin.error(f"`{key}` differs by one bit from `{near[0]}`, which is missing")


def _is_one_bit_from(one: str, other: str) -> bool:
  one, other = one.encode(), other.encode()
  return len(one) == len(other) and sum((a ^ b).bit_count() for a, b in zip(one, other)) == 1


def _check_gguf_tokenizer(metadata: Mapping[str, Any], origin: Origin) -> None:
  """Raise ValueError for a tokenizer whose parts have other types or lengths than its tokens."""
  own = lambda key: metadata.get(f"tokenizer.ggml.{key}")
  if own("tokens") is None:
    return
  # Sets of types: the lists have hundreds of thousands of entries.
  kinds = {"tokens": {str}, "scores": {float}, "token_type": {int}, "merges": {str}}
  for key, kind in kinds.items():
    values, name = own(key), f"`tokenizer.ggml.{key}`"
    if values is None:
      if (own("model"), key) in (("llama", "scores"), ("gpt2", "merges")):
        raise origin.error(f"{name} is missing, which the tokenizer {own('model')} needs")
      continue
    if not isinstance(values, list) or not {*map(type, values)} <= kind:
      of = {str: "texts", float: "numbers", int: "integers"}[next(iter(kind))]
      raise origin.error(f"{name} must be a list of {of}; got {records.shown(values)}")
    if key != "merges" and len(values) != len(own("tokens")):
      raise origin.error(
        f"{name} must have an entry for each of {len(own('tokens')):,} tokens; got {len(values):,}"
      )
  if not {*(own("token_type") or ())} <= {*range(7)}:
    raise origin.error("`tokenizer.ggml.token_type` must hold 0 to 6; got other numbers")
  if not np.isfinite(own("scores") or 0.0).all():
    raise origin.error("`tokenizer.ggml.scores` must be finite; got others")
  if any(pair.count(" ") != 1 for pair in own("merges") or ()):
    raise origin.error("`tokenizer.ggml.merges` must be pairs with one space; got others")
  wanted = {"model": str, "pre": str, "add_space_prefix": bool, "add_bos_token": bool}
  wanted |= {f"{key}_token_id": int for key in ("bos", "eos", "eot", "eom")}
  for key, kind in wanted.items():
    if own(key) is not None and type(own(key)) is not kind:
      what = {str: "a text", bool: "true or false", int: "an integer"}[kind]
      raise origin.error(f"`tokenizer.ggml.{key}` must be {what}; got {records.shown(own(key))}")


LLAMA2C_HEADER = struct.Struct("<7i")


def _read_llama2c(path: pathlib.Path) -> ModelSource:
  """A .bin file of llama2.c in its first format, float32 without a magic number.

  Its tensors have the names and the layouts of llama.cpp.
  """
  if (size := path.stat().st_size) < LLAMA2C_HEADER.size:
    raise ValueError(f"{path} must begin with 7 integers; it has {size} bytes. Copy it again.")
  data = np.memmap(path, np.uint8, "r")
  header = LLAMA2C_HEADER.unpack(data[: LLAMA2C_HEADER.size].tobytes())
  dim, inner, layers, heads, kv_heads, vocab, context = header
  tied, vocab = vocab > 0, abs(vocab)
  sizes = (dim, inner, layers, heads, kv_heads, vocab, context)
  if min(sizes) < 1 or max(sizes) > 2**24 or dim % heads or heads % kv_heads:
    raise ValueError(
      f"{path} must begin with dim, inner width, layers, heads, key-value heads, vocab and context;"
      f" got {header}. It is damaged or no file of llama2.c's first format: export it with"
      " --version 0."
    )
  width, kv_dim = dim // heads, kv_heads * (dim // heads)
  stacked = [
    ("attn_norm", (dim,)),
    ("attn_q", (dim, dim)),
    ("attn_k", (kv_dim, dim)),
    ("attn_v", (kv_dim, dim)),
    ("attn_output", (dim, dim)),
    ("ffn_norm", (dim,)),
    ("ffn_gate", (inner, dim)),
    ("ffn_down", (dim, inner)),
    ("ffn_up", (inner, dim)),
  ]
  expected = LLAMA2C_HEADER.size + 4 * (
    layers * sum(math.prod(shape) for _, shape in stacked)
    + (1 if tied else 2) * vocab * dim
    + dim
    + 2 * context * (width // 2)
  )
  # Before anything is made for each layer.
  if len(data) != expected:
    raise ValueError(
      f"{path} must have {expected:,} bytes for its sizes {header}; got {len(data):,}. It is"
      " truncated or damaged: copy it again."
    )
  shapes = {"token_embd.weight": (vocab, dim)}
  shapes |= {
    f"blk.{layer}.{name}.weight": shape for name, shape in stacked for layer in range(layers)
  }
  shapes |= {"output_norm.weight": (dim,), "angles": (2 * context, width // 2)}
  shapes |= {} if tied else {"output.weight": (vocab, dim)}
  numbers, tensors, first = data[LLAMA2C_HEADER.size :].view("<f4"), {}, 0
  for name, shape in shapes.items():
    last = first + int(np.prod(shape))
    tensors[name] = _view(numbers[first:last].reshape(shape), "F32")
    first = last
  config = {
    "model_type": "llama",
    "vocab_size": vocab,
    "hidden_size": dim,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "intermediate_size": inner,
    "max_position_embeddings": context,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": tied,
  }
  origin = Origin(str(path), remedy="Copy the file again.")
  return ModelSource(path, "llama2.c", config, tensors, (path,), origin=origin)


def _some(names: list[str], most: int = 5) -> str:
  """A few names, and how many there are."""
  shown = ", ".join(map(records.one_line, names[:most]))
  return shown if len(names) <= most else f"{shown}, ... ({len(names)} in all)"
