"""Readers of model files: tensors by name, memory-mapped, and a config.

Every reader returns a `ModelSource`. Nothing in a file is executed, and no file is unpickled.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import pathlib
import struct
import zlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from vqjax.convert.packed_table import PackedTable
from vqjax.lm.checkpoints.gguf_header import Header, read_header
from vqjax.tables import container
from vqjax.tables.tensor_files import release

__all__ = ["Tensor"]

DTYPES = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U32": np.uint32,
  "U16": np.uint16,
  "U8": np.uint8,
  "BOOL": np.bool_,
}
"""Formats of safetensors that NumPy has."""

CHECKSUMS = "crc32"
"""Key of the checksums in the metadata of the files that `save` writes."""


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a file, which is read when it is called for.

  Attributes:
    shape: its shape.
    format: its number format, such as "BF16" or "Q4_K".
    nbytes: its bytes in the file.
    read: (slice of the first axis) -> these rows, as numbers; a view of the file where possible.
    checksum: CRC-32 of its bytes; None: unknown.
    table: the compressed table whose rows it has; None: it is not compressed.
  """

  shape: tuple[int, ...]
  format: str
  nbytes: int
  read: Callable[[slice], np.ndarray]
  checksum: int | None = None
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
  """

  path: pathlib.Path
  kind: str
  config: Mapping[str, Any]
  tensors: Mapping[str, Tensor]
  files: tuple[pathlib.Path, ...] = ()
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  runtime: str = container.UNPACKED


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
    there = ", ".join(sorted(file.name for file in path.iterdir())) or "nothing"
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
    return _read_safetensors(path.parent)
  if path.suffix == ".bin" and start[:2] != b"PK" and start[:1] != b"\x80":
    return _read_llama2c(path)
  raise ValueError(
    f"`path` must be a folder with safetensors, a .gguf, or a .bin file of llama2.c; got {path}."
    " Files of PyTorch (.pt, .bin) are pickles, which are not read: save them as safetensors."
  )


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
    read = json.loads(path.read_text("utf-8"))
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} must be JSON; got {error}. Download it again.") from None
  if not isinstance(read, dict):
    raise ValueError(
      f"{path} must hold a JSON object; got {type(read).__name__}. Download it again."
    )
  return read


def _read_safetensors(folder: pathlib.Path) -> ModelSource:
  """A Hugging Face folder: config.json and one or more safetensors files."""
  config = read_json(folder / "config.json")
  files = sorted(folder.glob("*.safetensors"))
  index, expected = folder / "model.safetensors.index.json", None
  if index.is_file():
    expected = read_json(index).get("weight_map", {})
    names = sorted(set(expected.values()))
    if absent := [name for name in names if not (folder / name).is_file()]:
      raise FileNotFoundError(
        f"{folder} must have the files of its index; got none of {', '.join(absent)}. Download them"
        " too."
      )
    files = [folder / name for name in names]
  tensors: dict[str, Tensor] = {}
  for file in files:
    for name, tensor in _safetensors(file).items():
      if name in tensors:
        raise ValueError(
          f"{folder} must hold each tensor once; got {name} in two files. Remove {file.name} or the"
          " other file."
        )
      tensors[name] = tensor
  if expected is not None and (absent := sorted(expected.keys() - tensors.keys())):
    raise ValueError(
      f"{folder} must have the tensors of its index; got none named {_some(absent)}. Download the"
      " files again."
    )
  runtime = container.UNPACKED
  if (folder / container.MANIFEST).is_file():
    manifest = container.read_manifest(folder)
    runtime, tensors = manifest.runtime, _decompressed(folder, manifest, tensors)
  return ModelSource(folder, "safetensors", config, tensors, tuple(files), runtime=runtime)


def _decompressed(
  folder: pathlib.Path, manifest: container.Manifest, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
  """The tensors with compressed tables in place of their parts; rows are decoded when read."""
  is_packed = manifest.runtime == container.PACKED
  for name in manifest.tensors.values():
    prefix, where = name + container.SEPARATOR, f"{name} of {folder}"
    own = {part: tensors.pop(part) for part in list(tensors) if part.startswith(prefix)}
    if is_packed:
      # Entropy-coded parts have checksums of their own.
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
  try:
    # The library checks the header against the length of the file; its arrays would be copies.
    with safetensors.safe_open(file, framework="numpy"):
      pass
  except Exception as error:  # the library raises nothing narrower
    raise ValueError(
      f"{file} must be a whole safetensors file; got {error}. It is truncated or damaged: download"
      " it again."
    ) from None
  data = np.memmap(file, np.uint8, "r")
  start = 8 + int.from_bytes(data[:8].tobytes(), "little")
  header = json.loads(data[8:start].tobytes())
  checksums = json.loads(header.pop("__metadata__", {}).get(CHECKSUMS, "{}"))
  tensors = {}
  for name, entry in header.items():
    if entry["dtype"] not in DTYPES:
      raise ValueError(
        f"{name} of {file} must have one of the formats {', '.join(DTYPES)}; got {entry['dtype']}."
        " Convert it."
      )
    first, last = entry["data_offsets"]
    view = data[start + first : start + last].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    tensors[name] = _view(view, entry["dtype"], checksums.get(name))
  return tensors


def _view(view: np.ndarray, format: str, checksum: int | None = None) -> Tensor:
  return Tensor(view.shape, format, view.nbytes, view.__getitem__, checksum)


def verify_tensor(name: str, tensor: Tensor, path: pathlib.Path) -> None:
  """Raise ValueError unless a tensor with a checksum has it."""
  if tensor.checksum is None:
    return
  view = tensor.read(slice(None))
  checksum = zlib.crc32(view.reshape(-1).view(np.uint8))
  release(view)
  if checksum != tensor.checksum:
    raise ValueError(
      f"{name} of {path} must have the checksum that it was saved with; got another one. The file"
      " is damaged: copy it again."
    )


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
  gguf, header = import_checkpoints_extra("gguf"), gguf_header(path)
  tensors = {}
  for name, entry in header.entries.items():
    kind = gguf.GGMLQuantizationType(entry.kind)
    bytes_ = header.data[entry.first : entry.first + entry.nbytes]
    read = functools.partial(_rows, gguf, bytes_, kind, entry.shape)
    tensors[name] = Tensor(entry.shape, kind.name, entry.nbytes, read)
  config = _gguf_config(path, header.metadata, tensors)
  return ModelSource(path, "gguf", config, tensors, (path,), header.metadata)


def gguf_header(path: pathlib.Path) -> Header:
  """The header of a GGUF, with the block types that the package gguf knows."""
  sizes = {
    int(kind): size for kind, size in import_checkpoints_extra("gguf").GGML_QUANT_SIZES.items()
  }
  try:
    return read_header(path, sizes)
  except ValueError as error:
    raise ValueError(
      f"{path} must be a whole GGUF; got {error}. It is truncated or damaged: download it again."
    ) from None


DEQUANTISED = 2**16
"""Numbers that are dequantised at a time: they and their parts fit the cache of a core."""


def _rows(gguf, data: np.ndarray, kind, shape: tuple[int, ...], rows: slice) -> np.ndarray:
  """Rows of a tensor of a GGUF, as float32 or as a view of what is not quantised."""
  if kind.name in ("F32", "F16", "F64", "BF16"):
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
  "qwen3": "qwen3",
  "gemma3": "gemma3_text",
  "gpt2": "gpt2",
}
"""Architecture of a GGUF -> `model_type` of a Hugging Face config."""


def _gguf_config(
  path: pathlib.Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
  """The config in the words of Hugging Face, from the metadata of a GGUF."""
  arch = metadata.get("general.architecture")
  if arch not in GGUF_FAMILIES:
    return {"model_type": arch}
  own = lambda key, default=None: metadata.get(f"{arch}.{key}", default)
  required = ["embedding_length", "block_count", "attention.head_count", "context_length"]
  if absent := [f"{arch}.{key}" for key in required if own(key) is None]:
    raise ValueError(
      f"{path} must have the metadata {', '.join(absent)}; it has none of them. Convert it again."
    )
  if "token_embd.weight" not in tensors:
    raise ValueError(
      f"{path} must have the tensor token_embd.weight; it has none. Convert it again."
    )
  heads, dim = own("attention.head_count"), own("embedding_length")
  head_dim = own("attention.key_length", dim // heads)
  config = {
    "model_type": GGUF_FAMILIES[arch],
    "vocab_size": tensors["token_embd.weight"].shape[0],
    "tie_word_embeddings": "output.weight" not in tensors,
  }
  if arch == "gpt2":
    return config | {
      "n_embd": dim,
      "n_layer": own("block_count"),
      "n_head": heads,
      "n_inner": own("feed_forward_length"),
      "n_positions": own("context_length"),
      "layer_norm_epsilon": own("attention.layer_norm_epsilon", 1e-5),
    }
  config |= {
    "hidden_size": dim,
    "num_hidden_layers": own("block_count"),
    "num_attention_heads": heads,
    "num_key_value_heads": own("attention.head_count_kv", heads),
    "head_dim": head_dim,
    "intermediate_size": own("feed_forward_length"),
    "max_position_embeddings": own("context_length"),
    "rms_norm_eps": own("attention.layer_norm_rms_epsilon", 1e-6),
    "rope_theta": own("rope.freq_base", 1e6 if arch == "gemma3" else 1e4),
    "rope_scaling": None,
  }
  kind = own("rope.scaling.type", "none")
  if "rope_freqs.weight" in tensors:
    divisors = tensors["rope_freqs.weight"].read(slice(None))
    config["rope_scaling"] = {"rope_type": "divisors", "divisors": tuple(map(float, divisors))}
  elif kind != "none" and own("rope.scaling.factor", 0.0) > 0:
    config["rope_scaling"] = {
      "rope_type": kind,
      "factor": own("rope.scaling.factor"),
      "original_max_position_embeddings": own("rope.scaling.original_context_length"),
    }
  if arch == "gemma3":
    # llama.cpp has these three numbers in its code: they are not in the metadata.
    config |= {
      "sliding_window": own("attention.sliding_window"),
      "rope_local_base_freq": own("rope.freq_base_swa", 1e4),
      "query_pre_attn_scalar": dim // heads if own("block_count") == 62 else head_dim,
      "final_logit_softcapping": own("final_logit_softcapping"),
    }
  return config


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
  shapes = {"token_embd.weight": (vocab, dim)}
  shapes |= {
    f"blk.{layer}.{name}.weight": shape for name, shape in stacked for layer in range(layers)
  }
  shapes |= {"output_norm.weight": (dim,), "angles": (2 * context, width // 2)}
  shapes |= {} if tied else {"output.weight": (vocab, dim)}
  expected = LLAMA2C_HEADER.size + 4 * sum(int(np.prod(shape)) for shape in shapes.values())
  if len(data) != expected:
    raise ValueError(
      f"{path} must have {expected:,} bytes for its sizes {header}; got {len(data):,}. It is"
      " truncated or damaged: copy it again."
    )
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
  return ModelSource(path, "llama2.c", config, tensors, (path,))


def _some(names: list[str], most: int = 5) -> str:
  """A few names, and how many there are."""
  shown = ", ".join(names[:most])
  return shown if len(names) <= most else f"{shown}, ... ({len(names)} in all)"
