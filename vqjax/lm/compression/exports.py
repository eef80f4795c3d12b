"""Exports for other runtimes: GGUF, and safetensors in the layout of compressed-tensors."""

from __future__ import annotations

import contextlib
import json
import pathlib
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Int, Int32, Num

from vqjax.lm import checkpoints
from vqjax.lm.checkpoints.loading import ShardedFiles, variable_sources
from vqjax.lm.models import Transformer
from vqjax.lm.sources.families import family_of
from vqjax.lm.sources.readers import (
  ModelSource,
  Tensor,
  check_not_compressed,
  gguf_header,
  import_checkpoints_extra,
  open_source,
  verify_tensor,
)
from vqjax.outputs import check_output, copied_file, copy_file, new_output
from vqjax.tables.gguf_types import block_type, encode_blocks
from vqjax.tables.grids import LevelGrid, fit_grid
from vqjax.tables.moments import Moments

__all__ = ["ROWS", "export_compressed_tensors", "export_gguf", "rewrite_gguf"]

ROWS = 2**13
"""Rows of a table that are read, rounded and written at a time."""


class _Tables:
  """The vocabulary tables of a model: their tensors, and the metric of each."""

  def __init__(self, source: ModelSource, moments: Moments | None):
    model = source.decoder()
    found = variable_sources(source, model)
    self.is_tied = model.head.embedding is not None
    self.tensors: dict[str, Tensor] = {}
    self.metrics: dict[str, np.ndarray | None] = {}
    names = ["embedding"] if self.is_tied else ["embedding", "head"]
    own = {} if moments is None else moments.of_tables(names)
    for part in names:
      ((name, tensor),) = found[part, "weight"].tensors
      if moments is not None:
        moments.check(*tensor.shape)
      self.tensors[name] = tensor
      self.metrics[name] = own[part].metric() if part in own else None


def _blocks(tensor: Tensor) -> Iterator[np.ndarray]:
  for first in range(0, tensor.shape[0], ROWS):
    yield np.asarray(tensor.read(slice(first, first + ROWS)), np.float32)


def export_gguf(
  path: str | pathlib.Path,
  out: str | pathlib.Path,
  kind: str,
  *,
  head_kind: str | None = None,
  moments: Moments | None = None,
) -> dict[str, int]:
  """Write a GGUF again with its vocabulary tables in another block type.

  All other tensors and the metadata are copied byte for byte. The table is read, rounded and
  written a block of rows at a time.

  Args:
    path: a GGUF.
    out: the file that is written; it is whole or not there.
    kind: block type of `token_embd.weight`, one of `gguf_types.TYPES`.
    head_kind: block type of `output.weight`; None: `kind`. A tied model has none.
    moments: the values are fitted in the metric of these moments; None: each number is rounded as
      llama.cpp does.

  Returns:
    The bytes of each table.

  Raises:
    ValueError: the model is not a GGUF, the type does not suit the width of the table, or the
      moments are those of another model.
    FileExistsError: `out` exists.
  """
  check_output(out, folder=False)
  source = gguf_source(path, kind, head_kind)
  tables = _Tables(source, moments)
  kinds = dict.fromkeys(tables.tensors, kind)
  if "output.weight" in kinds:
    kinds["output.weight"] = head_kind or kind
  sizes = {}
  for name, tensor in tables.tensors.items():
    of = block_type(kinds[name], tensor.shape[1])
    sizes[name] = tensor.shape[0] * (tensor.shape[1] // of.block * of.bytes)
  numbers = import_checkpoints_extra("gguf").GGMLQuantizationType

  def blocks(name: str) -> Iterator[bytes]:
    for rows in _blocks(tables.tensors[name]):
      yield encode_blocks(kinds[name], rows, tables.metrics[name])

  replaced = {
    name: [NewTensor(name, tensor.shape, int(numbers[kinds[name]]), sizes[name], blocks(name))]
    for name, tensor in tables.tensors.items()
  }
  with new_output(out, folder=False) as partial:
    rewrite_gguf(source.path, partial, replaced)
  return sizes


def stored_tables(source: ModelSource, model: Transformer) -> dict[str, tuple[str, Tensor]]:
  """The full names and the tensors of a model's tables in its files."""
  found, prefix = variable_sources(source, model), family_of(source.config).prefix
  tables = {}
  for part in ("embedding", "head") if model.head.embedding is None else ("embedding",):
    ((name, tensor),) = found[part, "weight"].tensors
    full = prefix + name if prefix + name in source.tensors else name
    # Numbers with scales have a format of their own.
    if full not in source.tensors or source.tensors[full].format != tensor.format:
      raise ValueError(
        f"`model` must have plain tables; got {source.path}, where {name} is quantised. Give the"
        " original model."
      )
    tables[part] = full, tensor
  return tables


class NewTensor(NamedTuple):
  """A tensor that is written into a GGUF.

  Attributes:
    name: its name.
    shape: its shape, the row's width last.
    kind: number of its block type.
    nbytes: its bytes.
    chunks: the bytes, in order.
  """

  name: str
  shape: tuple[int, ...]
  kind: int
  nbytes: int
  chunks: Iterable[bytes | np.ndarray]


def rewrite_gguf(
  path: pathlib.Path,
  out: pathlib.Path,
  replaced: Mapping[str, Sequence[NewTensor]],
  metadata: Mapping[str, Any] | None = None,
) -> None:
  """Write a GGUF again with other tensors in place of some; all else is copied byte for byte.

  Args:
    path: the GGUF.
    out: the new file, which does not exist.
    replaced: name of a tensor -> those in its place.
    metadata: other values of keys, of the types that they have; None: without the key. New keys
      have texts.
  """
  header = gguf_header(path)
  keys = {key: header.data[span] for key, span in header.spans.items()}
  for key, value in (metadata or {}).items():
    keys[key] = b"" if value is None else header.with_value(key, value)
  count = sum(len(key) > 0 for key in keys.values())

  def copied(name, entry):
    chunk = header.data[entry.first : entry.first + entry.nbytes]
    return [NewTensor(name, entry.shape, entry.kind, entry.nbytes, [chunk])]

  tensors = [
    new for name, entry in header.entries.items() for new in replaced.get(name, copied(name, entry))
  ]
  with open(out, "xb") as file:
    file.write(header.data[:8])
    file.write(struct.pack("<QQ", len(tensors), count))
    for key in keys.values():
      file.write(key)
    offset = 0
    for tensor in tensors:
      name, rank = tensor.name.encode(), len(tensor.shape)
      file.write(struct.pack(f"<Q{len(name)}sI", len(name), name, rank))
      file.write(struct.pack(f"<{rank}QIQ", *reversed(tensor.shape), tensor.kind, offset))
      offset += -(-tensor.nbytes // header.alignment) * header.alignment
    for tensor in tensors:
      _pad(file, header.alignment)
      for chunk in tensor.chunks:
        file.write(chunk)
    _pad(file, header.alignment)


def gguf_source(path: str | pathlib.Path, kind: str, head_kind: str | None = None) -> ModelSource:
  """A GGUF whose tables can be in these block types.

  Raises:
    ValueError: the model is not a GGUF, or a type does not suit the width of its tables.
  """
  source = open_source(path)
  check_not_compressed(source)
  if source.kind != "gguf":
    remedy = "Convert the model first, with llama.cpp's convert_hf_to_gguf.py."
    if source.kind != "safetensors":
      remedy = "Export int8 or int4 instead."
    raise ValueError(f"`path` must be a GGUF; got {path}, which is {source.kind}. {remedy}")
  for name in {kind, head_kind or kind}:
    block_type(name, source.decoder().dim)
  return source


def _pad(file: BinaryIO, alignment: int) -> None:
  file.write(bytes(-file.tell() % alignment))


WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
"""Ends of the names of files that are not copied."""

FORMAT = "pack-quantized"
"""Format of compressed-tensors that is written."""

WIDTHS = {8: tuple(range(-127, 128)), 4: tuple(range(-8, 8))}
"""Bits of a number in compressed-tensors' layout -> its levels."""


FACTORS = {8: (0.94, 0.97, 1.0), 4: (0.7, 0.77, 0.84, 0.9, 0.96, 1.02, 1.08, 8 / 7)}
"""Bits of a number -> scales that are tried, as `LevelGrid.factors`."""


def export_compressed_tensors(
  path: str | pathlib.Path,
  out: str | pathlib.Path,
  bits: int,
  *,
  group: int | None = None,
  moments: Moments | None = None,
) -> dict[str, int]:
  """Write a folder whose vocabulary tables are integers in compressed-tensors' packed layout.

  Each table becomes `weight_packed`, `weight_scale` and `weight_shape`, and config.json says so in
  its `quantization_config`, with format "pack-quantized". The other tensors are as they are in the
  model; those of a GGUF become bfloat16.

  Args:
    path: a folder of safetensors, a GGUF, or a file of llama2.c.
    out: the folder that is written; it is whole or not there.
    bits: 8 or 4.
    group: columns that share a scale; None: whole rows for 8 bits, 32 columns for 4.
    moments: the values are fitted in the metric of these moments; None: in that of the identity.

  Returns:
    The bytes of each table.

  Raises:
    ValueError: bits or group do not suit the table, or the moments are those of another model.
    FileExistsError: `out` exists.
  """
  check_output(out, folder=True)
  source, width = integer_source(path, bits, group)
  with contextlib.ExitStack() as stack:
    if source.kind != "safetensors":
      folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
      model, variables, tokenizer = checkpoints.load(path, dtype=ml_dtypes.bfloat16)
      checkpoints.save(folder, model, variables, tokenizer)
      del variables
      source = open_source(folder)
    tables = _Tables(source, moments)
    return _write_folder(source, pathlib.Path(out), tables, bits, *width)


def integer_source(
  path: str | pathlib.Path, bits: int, group: int | None = None
) -> tuple[ModelSource, tuple[int, int]]:
  """A model whose tables can be integers of so many bits; columns that share a scale, and all.

  Raises:
    ValueError: bits or group do not suit the width of the tables, or they are quantised already.
  """
  if bits not in WIDTHS:
    raise ValueError(f"`bits` must be 8 or 4; got {bits}. Others are not written.")
  source = open_source(path)
  check_not_compressed(source)
  for file in _further_files(source):
    copied_file(file)
  if source.config.get("quantization_config"):
    raise ValueError(f"`path` must not be quantised already; got {path}. Give the original model.")
  dim = source.decoder().dim
  width = (dim if bits == 8 else 32) if group is None else group
  if width < 1 or dim % width or (dim * bits) % 32:
    raise ValueError(
      f"`group` must divide the width of the table, {dim}, whose rows must fill words of 32 bits;"
      f" got {width} with {bits} bits. Give a divisor such as 32."
    )
  return source, (width, dim)


def _write_folder(
  source: ModelSource, out: pathlib.Path, tables: _Tables, bits: int, group: int, dim: int
) -> dict[str, int]:
  family = family_of(source.config)
  full = {family.prefix + name: name for name in tables.tensors}
  full |= {name: name for name in tables.tensors}
  sizes, modules = {}, []

  def replaced(name: str, tensor: Tensor) -> dict[str, np.ndarray] | None:
    if name not in full:
      return {} if tables.is_tied and name == "lm_head.weight" else None
    stem = name.removesuffix(".weight")
    modules.append(stem)
    written = _compressed_tensors(tensor, bits, group, tables.metrics[full[name]])
    sizes[name] = sum(array.nbytes for array in written.values())
    return {f"{stem}.{end}": array for end, array in written.items()}

  with new_output(out, folder=True) as partial:
    copy_folder(source, partial, replaced)
    config = dict(source.config) | {"quantization_config": _quantization(modules, bits, group, dim)}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
  return sizes


def _further_files(source: ModelSource) -> list[pathlib.Path]:
  """The files of a folder that are copied with its weights."""
  is_index = lambda file: file.name.endswith(".safetensors.index.json")
  files = source.path.iterdir() if source.path.is_dir() else ()
  return [f for f in files if f.is_file() and f.suffix not in WEIGHTS and not is_index(f)]


def copy_folder(
  source: ModelSource,
  folder: pathlib.Path,
  replaced: Callable[[str, Tensor], Mapping[str, np.ndarray] | None],
) -> None:
  """Write a folder of safetensors again with other tensors in place of some.

  Args:
    source: the folder that is read, a tensor at a time.
    folder: a folder that does not exist.
    replaced: name and tensor -> the arrays in its place by their names; None: it is copied.
  """
  folder.mkdir()
  for file in _further_files(source):
    copy_file(file, folder / file.name)
  files = ShardedFiles(folder, 5 * 10**9)
  for name, tensor in source.tensors.items():
    verify_tensor(name, tensor, source.path)
    arrays = replaced(name, tensor)
    if arrays is None:
      arrays = {name: np.asarray(tensor.read(slice(None)), order="C")}
    for full, array in arrays.items():
      files.add(full, array)
  files.finish()


def _compressed_tensors(
  tensor: Tensor, bits: int, group: int, metric: Num[np.ndarray, "D D"] | None = None
) -> dict[str, np.ndarray]:
  """A table as the tensors of compressed-tensors' format "pack-quantized"."""
  vocab, dim = tensor.shape
  format = {"BF16": "bfloat16", "F16": "float16"}.get(tensor.format, "float32")
  grid = LevelGrid(WIDTHS[bits], group, format, FACTORS[bits], signed=False)
  metric = np.eye(dim) if metric is None else metric
  # Many columns with 8 bits need no changes after the feedback, which has the least error already.
  passes = 2 if group <= 128 else 0
  packed = np.empty((vocab, dim * bits // 32), np.int32)
  scale = np.empty((vocab, dim // group), getattr(ml_dtypes, format, None) or format)
  first = 0
  for rows in _blocks(tensor):
    found = fit_grid(rows, grid, metric, passes=passes)
    packed[first : first + len(rows)] = _int32_words(found.level, bits)
    scale[first : first + len(rows)] = found.scale
    first += len(rows)
  shape = np.asarray([vocab, dim], np.int64)
  return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}


def _int32_words(level: Int[np.ndarray, "R D"], bits: int) -> Int32[np.ndarray, "R n"]:
  """Levels in words of 32 bits, the first ones in the lowest bits, 2^(bits-1) added."""
  code = (level + 2 ** (bits - 1)).astype(np.uint8)
  if bits == 4:
    code = code[:, ::2] | code[:, 1::2] << 4
  return np.ascontiguousarray(code).view("<i4")


def _quantization(modules: list[str], bits: int, group: int, dim: int) -> dict:
  """`quantization_config` of a config.json."""
  weights = {
    "num_bits": bits,
    "type": "int",
    "symmetric": True,
    "strategy": "channel" if group == dim else "group",
    "group_size": None if group == dim else group,
    "dynamic": False,
  }
  scheme = {
    # Some runtimes make an embedding without the names of the modules around it.
    "targets": [f"re:.*{module.rpartition('.')[2]}$" for module in modules],
    "weights": weights,
    "input_activations": None,
    "output_activations": None,
    "format": FORMAT,
  }
  return {
    "quant_method": "compressed-tensors",
    # transformers has no embedding that stays packed: it unpacks the tables when it loads them.
    "dequantize": True,
    "format": FORMAT,
    "quantization_status": "compressed",
    "config_groups": {"group_0": scheme},
    "ignore": [],
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
  }
