"""Weights of safetensors that are narrow integers or floats with scales, read as float32.

The tensors of a quantised weight, such as `weight_packed` and `weight_scale`, become one `Tensor`,
which is dequantised a few rows at a time when it is read. Activations are not quantised: the model
computes with the numbers that the weights stand for. What is in the files decides for each weight
how it is read; the config says only what it may be.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from vqjax.lm.records import one_line, shown
from vqjax.lm.sources.readers import Tensor
from vqjax.tables.tensor_files import release

__all__ = []

METHODS = ("compressed-tensors", "fp8", "mxfp4")
"""Names of `quant_method` that are read."""

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
FORMATS += ("mixed-precision", None)
"""Names of formats of compressed-tensors that are read."""

PARTS = ("weight_packed", "weight_scale", "weight_scale_inv", "weight_shape", "weight_zero_point")
PARTS += ("weight_g_idx", "input_scale", "input_zero_point", "activation_scale", "blocks", "scales")
"""Ends of the names of the tensors that stand for a weight, and for the range of activations."""

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])
"""The numbers of four bits with two of exponent and one of mantissa."""


def dequantised(
  path: pathlib.Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
  """The tensors of a folder, with a dequantised weight in place of its parts.

  Raises:
    ValueError: the config names a method or a format that is not read, or parts of a weight are
      missing or contradict each other.
  """
  settings = config.get("quantization_config") or config.get("compression_config")
  if not settings:
    return dict(tensors)
  problem = lambda text: ValueError(
    f"{path}: {one_line(text)}. Give the original weights, or a GGUF."
  )
  try:
    bits, block = _checked(settings)
    found, parts = {}, {}
    for name, tensor in tensors.items():
      stem, part = name.rpartition("_" if settings["quant_method"] == "mxfp4" else ".")[::2]
      if part in PARTS:
        parts.setdefault(stem, {})[part] = tensor
      else:
        found[name] = tensor
    for stem, own in parts.items():
      if "blocks" in own or "scales" in own:
        found[stem] = _mxfp4(stem, own)
      elif own.keys() & {"weight_packed", "weight_scale", "weight_scale_inv"}:
        name = f"{stem}.weight"
        found[name] = _scaled(name, own | {"weight": found.get(name)}, bits, block)
  except ValueError as error:
    raise problem(str(error)) from None
  return found


def _checked(settings: Any) -> tuple[list[int], tuple[int, int] | None]:
  """The numbers of bits of integers, and the rows and columns of a block, that a config names."""
  if not isinstance(settings, dict):
    raise ValueError(f"`quantization_config` must be a JSON object; got {shown(settings)}")
  method = settings.get("quant_method")
  if method not in METHODS:
    raise ValueError(
      f"`quantization_config.quant_method` must be one of {', '.join(METHODS)}; got {shown(method)}"
    )
  blocks = [settings.get("weight_block_size")]
  if method != "compressed-tensors":
    if settings.get("fmt") not in (None, "e4m3"):
      raise ValueError(f"`quantization_config.fmt` must be e4m3; got {shown(settings['fmt'])}")
    return [], _one_block(blocks)
  groups = settings.get("config_groups") or {}
  if not isinstance(groups, dict) or not all(isinstance(one, dict) for one in groups.values()):
    raise ValueError(f"`config_groups` must be a JSON object of objects; got {shown(groups)}")
  formats = [settings.get("format"), *(group.get("format") for group in groups.values())]
  formats.append((settings.get("sparsity_config") or {}).get("format"))
  if unknown := [name for name in formats if name not in FORMATS]:
    known = ", ".join(FORMATS[:5])
    raise ValueError(f"a format of compressed-tensors must be one of {known}; got {unknown[0]!r}")
  if settings.get("transform_config"):
    raise ValueError("`transform_config` must be empty: rotated weights are not read")
  weights = [group.get("weights") or {} for group in groups.values()]
  bits = sorted({own.get("num_bits") for own in weights} - {None})
  if wrong := [number for number in bits if number not in (4, 8)]:
    raise ValueError(f"`num_bits` must be 4 or 8; got {shown(wrong[0])}")
  return bits, _one_block([own.get("block_structure") for own in weights])


def _one_block(blocks: list[Any]) -> tuple[int, int] | None:
  """The only size of blocks among those that are not None."""
  different = {tuple(block) if isinstance(block, list) else block for block in blocks} - {None}
  is_size = lambda x: type(x) is tuple and len(x) == 2 and all(type(n) is int and n > 0 for n in x)
  if len(different) > 1 or not all(map(is_size, different)):
    raise ValueError(f"blocks must be of one size, two integers; got {shown(sorted(different))}")
  return next(iter(different), None)


def _scaled(
  name: str, parts: Mapping[str, Tensor | None], bits: list[int], block: tuple[int, int] | None
) -> Tensor:
  """A weight [rows, columns] of integers, packed or not, or of 8-bit floats, with scales."""
  packed, weight, zero = (
    parts.get(part) for part in ("weight_packed", "weight", "weight_zero_point")
  )
  scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
  if scale is None:
    raise ValueError(f"{name} must have scales; got none")
  if packed is not None:
    shape, size = _packed_shape(name, packed, parts.get("weight_shape"), bits)
    kind, codes = f"INT{size}", lambda rows: _unpacked(packed.read(rows), size, shape[1])
  elif weight is not None and weight.format in ("I8", "F8_E4M3") and len(weight.shape) == 2:
    shape, codes = weight.shape, weight.read
    kind, size = ("INT8", 8) if weight.format == "I8" else ("FP8", None)
  else:
    got = "none" if weight is None else f"{weight.format} of shape {list(weight.shape)}"
    raise ValueError(f"{name} must be a matrix of quantised numbers beside its scales; got {got}")
  scales = np.asarray(scale.read(slice(None)), np.float32)
  if scales.ndim < 2:
    scales = scales.reshape(-1, 1)
  if scales.ndim > 2:
    raise ValueError(f"{name} must have scales of two axes; got {list(scales.shape)}")
  row_block, column_block = (
    _entries(name, length, count, of)
    for length, count, of in zip(shape, scales.shape, block or (None, None), strict=True)
  )
  group = np.arange(shape[1]) // column_block
  if (order := parts.get("weight_g_idx")) is not None:
    own = np.asarray(order.read(slice(None)))
    if own.shape != (shape[1],) or own.max() >= scales.shape[1]:
      raise ValueError(f"{name} must have a group for each column; got others")
    group = own if own.min() >= 0 else group  # -1: columns are in order
  zeros = np.zeros((1, 1), np.float32)
  if zero is not None:
    zeros = zero.read(slice(None))
    if zero.format == "I32":
      zeros = _unpacked(np.ascontiguousarray(zeros.T), size or 8, scales.shape[0]).T
    zeros = zeros.astype(np.float32)
    if zeros.shape != scales.shape:
      raise ValueError(f"{name} must have zero points as it has scales; got {list(zeros.shape)}")

  def read(rows: slice) -> np.ndarray:
    first, last, _ = rows.indices(shape[0])
    numbers = np.empty((max(0, last - first), shape[1]), np.float32)
    step = max(1, NUMBERS // shape[1])
    for start in range(first, last, step):
      some = slice(start, min(start + step, last))
      of = np.arange(some.start, some.stop) // row_block
      part = codes(some).astype(np.float32)
      if zero is not None:
        part -= zeros[of][:, group]
      np.multiply(part, scales[of][:, group], out=numbers[start - first : some.stop - first])
    return numbers

  nbytes = sum(part.nbytes for part in parts.values() if part is not None)
  return Tensor(tuple(shape), kind, nbytes, read)


NUMBERS = 2**18
"""Numbers that are dequantised at a time."""


def _packed_shape(
  name: str, packed: Tensor, stored: Tensor | None, bits: list[int]
) -> tuple[tuple[int, int], int]:
  """Rows and columns of a weight in words of 32 bits, and the bits of a number."""
  if stored is None or stored.shape != (2,) or packed.format != "I32" or len(packed.shape) != 2:
    raise ValueError(f"{name} must have words of 32 bits and a shape; got others")
  rows, columns = (int(length) for length in stored.read(slice(None)))
  for size in bits:
    if columns > 0 and packed.shape == (rows, -(-columns // (32 // size))):
      return (rows, columns), size
  raise ValueError(
    f"{name} of shape {[rows, columns]} must have words for it, by the config with"
    f" {' or '.join(map(str, bits)) or 'no'} bits; got {list(packed.shape)}"
  )


def _unpacked(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
  """Signed integers of words of 32 bits, the first of each in the lowest bits."""
  codes = np.ascontiguousarray(words).view(np.uint8)
  if bits == 4:
    codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(words), -1)
  return codes[:, :columns].astype(np.int16) - 2 ** (bits - 1)


def _entries(name: str, length: int, count: int, block: int | None) -> int:
  """Rows or columns that share a scale, where there are so many scales."""
  if block is not None and count == -(-length // block):
    return block
  if count < 1 or length % count:
    raise ValueError(f"{name} must have scales for {length} rows or columns; got {count}")
  return length // count


def _mxfp4(name: str, parts: Mapping[str, Tensor]) -> Tensor:
  """The matrices [E, D, F] of experts, of blocks [E, F, D / 32, 16] of pairs of four bits."""
  blocks, scales = parts.get("blocks"), parts.get("scales")
  sizes = [0 if part is None else math.prod(part.shape) for part in (blocks, scales)]
  if 0 in sizes or len(scales.shape) != 3 or sizes[0] != 16 * sizes[1]:
    raise ValueError(f"{name} must have blocks of 32 numbers and a scale for each; got others")
  if {blocks.format, scales.format} != {"U8"}:
    raise ValueError(f"{name} must have blocks and scales of bytes; got {blocks.format}")
  count, width, groups = scales.shape

  def read(rows: slice) -> np.ndarray:
    exponent, pairs = scales.read(rows), blocks.read(rows)
    pairs = pairs.reshape(*exponent.shape, 16)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*exponent.shape, 32)
    numbers = np.ldexp(FP4[codes], exponent.astype(np.int32)[..., None] - 127)
    release(pairs)
    return numbers.reshape(len(exponent), width, 32 * groups).swapaxes(1, 2)

  nbytes = blocks.nbytes + scales.nbytes
  return Tensor((count, 32 * groups, width), "MXFP4", nbytes, read)
