"""Quantised folders are read as the numbers that their weights stand for."""

import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tests.lm.checkpoints.families import small
from vqjax.lm import checkpoints
from vqjax.lm.compression.exports import stored_tables
from vqjax.lm.compression.folders import TensorJob, compress_tensors
from vqjax.lm.sources import readers
from vqjax.lm.sources.quantised import dequantised
from vqjax.tables.tensor_files import save_file

FLOAT8 = ml_dtypes.float8_e4m3fn
BLOCK = 10, 24
"""Rows and columns of a block, which divide no weight."""


def words(codes, bits):
  """Signed integers in words of 32 bits, the first ones in the lowest bits."""
  count = 32 // bits
  codes = np.pad(codes + 2 ** (bits - 1), ((0, 0), (0, -codes.shape[1] % count)))
  shifted = codes.reshape(len(codes), -1, count).astype(np.uint32) << bits * np.arange(count)
  return shifted.sum(-1).astype(np.uint32).view(np.int32)


def spread(scale, shape, rows, columns):
  """A scale for each number, of one for each block."""
  return scale.repeat(rows, axis=0).repeat(columns, axis=1)[: shape[0], : shape[1]]


def packed(rng, shape, bits=4, group=8, has_zeros=False, has_order=False):
  codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape)
  scale = rng.random((shape[0], shape[1] // group)).astype(np.float32)
  parts = {"weight_packed": words(codes, bits), "weight_shape": np.array(shape)}
  of = np.arange(shape[1]) // group
  if has_order:
    of = rng.permutation(of)
    parts["weight_g_idx"] = of.astype(np.int32)
  zeros = np.zeros_like(scale, int)
  if has_zeros:
    zeros = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), scale.shape)
    parts["weight_zero_point"] = np.ascontiguousarray(words(zeros.T, bits).T)
  return parts | {"weight_scale": scale}, (codes - zeros[:, of]) * scale[:, of]


def integers(rng, shape):
  codes, scale = rng.integers(-127, 128, shape), rng.random((shape[0], 1)).astype(np.float32)
  return {"weight": codes.astype(np.int8), "weight_scale": scale}, codes * scale


def floats(rng, shape, scales=(1,), name="weight_scale"):
  numbers = rng.standard_normal(shape).astype(FLOAT8)
  scale = rng.random(scales).astype(np.float32)
  return {"weight": numbers, name: scale}, numbers.astype(np.float32) * scale


def blocks(rng, shape, name="weight_scale", dtype=np.float32):
  numbers = rng.standard_normal(shape).astype(FLOAT8)
  scale = rng.random([-(-n // size) for n, size in zip(shape, BLOCK)]).astype(dtype)
  of = numbers.astype(np.float32) * spread(scale.astype(np.float32), shape, *BLOCK)
  return {"weight": numbers, name: scale}, of


COMPRESSED = {
  "q_proj": packed,
  "k_proj": lambda *given: packed(*given, has_zeros=True),
  "v_proj": lambda *given: packed(*given, has_order=True),
  "o_proj": lambda *given: packed(*given, bits=8, group=given[1][1]),
  "gate_proj": integers,
  "up_proj": lambda *given: floats(*given, (given[1][0], 1)),
  "down_proj": blocks,
}
FP8 = dict.fromkeys(COMPRESSED, lambda *given: blocks(*given, "weight_scale_inv"))
FP8 |= {
  "o_proj": lambda *given: floats(*given, (), "weight_scale_inv"),
  # Powers of two, as DeepSeek V3.1 has them.
  "up_proj": lambda *given: blocks(*given, "weight_scale_inv", ml_dtypes.float8_e8m0fnu),
}

GROUPS = [
  {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8},
  {"num_bits": 8, "type": "int", "strategy": "channel"},
  {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(BLOCK)},
]
METHODS = {
  "compressed-tensors": {
    "format": "mixed-precision",
    "config_groups": {
      f"group_{n}": {"weights": own, "format": format, "targets": ["Linear"]}
      for n, (own, format) in enumerate(
        zip(GROUPS, ("pack-quantized", "int-quantized", "float-quantized"))
      )
    },
  },
  "fp8": {"weight_block_size": list(BLOCK), "fmt": "e4m3", "activation_scheme": "dynamic"},
}


def written(folder, tensors, config):
  folder.mkdir()
  save_file(tensors, folder / "model.safetensors")
  (folder / "config.json").write_text(json.dumps(config))
  return folder


@pytest.fixture(scope="module", params=METHODS)
def folders(request, tmp_path_factory):
  """A quantised folder, and one of the numbers that its weights stand for."""
  folder = tmp_path_factory.mktemp(request.param)
  model, variables = small("qwen3")
  checkpoints.save(folder / "saved", model, variables)
  config = json.loads((folder / "saved" / "config.json").read_text())
  rng, narrow, wide = np.random.default_rng(0), {}, {}
  kinds = COMPRESSED if request.param == "compressed-tensors" else FP8
  for name, array in safetensors.numpy.load_file(folder / "saved" / "model.safetensors").items():
    stem = name.removesuffix(".weight")
    parts, wide[name] = {"weight": array}, array
    if (kind := kinds.get(stem.rpartition(".")[2])) is not None:
      parts, numbers = kind(rng, array.shape)
      wide[name] = numbers.astype(np.float32)
    narrow |= {f"{stem}.{part}": value for part, value in parts.items()}
  settings = {"quant_method": request.param} | METHODS[request.param]
  narrow_config = config | {"quantization_config": settings}
  return written(folder / "narrow", narrow, narrow_config), written(folder / "wide", wide, config)


def assert_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_numbers_are_integers_and_floats_times_their_scales(folders):
  narrow, wide = folders
  found, expected = (checkpoints.load(folder) for folder in folders)
  assert found.model == expected.model
  # Each is a product of two float32 numbers.
  assert_equal(found.variables, expected.variables)
  sizes = [checkpoints.inspect(folder) for folder in (narrow, wide)]
  assert sizes[0].params == sizes[1].params
  assert sizes[0].bytes < sizes[1].bytes


def test_its_table_is_compressed_and_all_else_copied(folders, tmp_path):
  narrow, _ = folders
  job = TensorJob(narrow, tmp_path / "out", 0.5, {"model.embed_tokens.weight": None})
  compress_tensors(job, lambda line: None)
  found, expected = (checkpoints.load(folder).variables["params"] for folder in (job.out, narrow))
  assert not np.array_equal(found["embedding"].pop("weight"), expected["embedding"].pop("weight"))
  assert_equal(found, expected)


def test_a_table_that_is_quantised_is_not_compressed_again(tmp_path):
  model, variables = small("qwen3", num_hidden_layers=1)
  checkpoints.save(tmp_path / "saved", model, jax.tree.map(np.asarray, variables))
  tensors = safetensors.numpy.load_file(tmp_path / "saved" / "model.safetensors")
  name = "model.embed_tokens"
  parts, _ = integers(np.random.default_rng(0), tensors.pop(f"{name}.weight").shape)
  tensors |= {f"{name}.{part}": array for part, array in parts.items()}
  config = json.loads((tmp_path / "saved" / "config.json").read_text())
  config["quantization_config"] = {"quant_method": "compressed-tensors"} | METHODS[
    "compressed-tensors"
  ]
  source = readers.open_source(written(tmp_path / "narrow", tensors, config))
  with pytest.raises(ValueError, match=r"where .*embed_tokens.* is quantised. Give the original"):
    stored_tables(source, model)


def test_blocks_of_four_bits_are_those_of_gpt_oss(tmp_path):
  model, variables = small("gpt_oss", intermediate_size=64)
  checkpoints.save(tmp_path / "saved", model, jax.tree.map(np.asarray, variables))
  config = json.loads((tmp_path / "saved" / "config.json").read_text())
  rng, narrow, wide = np.random.default_rng(0), {}, {}
  for name, array in safetensors.numpy.load_file(tmp_path / "saved" / "model.safetensors").items():
    if not name.endswith("_proj") or "experts" not in name:
      narrow[name] = wide[name] = array
      continue
    count, inner, width = array.shape
    codes = rng.integers(0, 16, (count, width, inner // 32, 32))
    exponents = rng.integers(120, 130, codes.shape[:-1])
    # A sign, two bits of an exponent with the bias 1, and one of a mantissa.
    sign, exponent, half = codes >> 3, codes >> 1 & 3, codes & 1
    size = np.where(exponent, 2.0 ** (exponent - 1) * (1 + half / 2), half / 2)
    numbers = (-1.0) ** sign * size * 2.0 ** (exponents[..., None] - 127)
    wide[name] = numbers.reshape(count, width, inner).swapaxes(1, 2).astype(np.float32)
    narrow[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    narrow[f"{name}_scales"] = exponents.astype(np.uint8)
  settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
  found = written(tmp_path / "narrow", narrow, config | {"quantization_config": settings})
  expected = written(tmp_path / "wide", wide, config)
  assert_equal(*(checkpoints.load(folder).variables for folder in (found, expected)))


def test_floats_without_scales_are_refused(tmp_path):
  model, variables = small("llama", num_hidden_layers=1)
  checkpoints.save(tmp_path / "saved", model, jax.tree.map(np.asarray, variables))
  tensors = safetensors.numpy.load_file(tmp_path / "saved" / "model.safetensors")
  tensors = {n: x.astype(FLOAT8) if "_proj" in n else x for n, x in tensors.items()}
  config = json.loads((tmp_path / "saved" / "config.json").read_text())
  folder = written(tmp_path / "narrow", tensors, config)
  with pytest.raises(ValueError, match=r"a format of floating-point numbers.*; got F8_E4M3"):
    checkpoints.load(folder)


def test_blocks_of_four_bits_are_those_of_transformers():
  torch = pytest.importorskip("torch", reason="`make parity` installs PyTorch")
  mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
  rng, tensors = np.random.default_rng(0), {}
  for name, shape in {"blocks": (3, 5, 2, 16), "scales": (3, 5, 2)}.items():
    array = rng.integers(*((0, 256) if name == "blocks" else (110, 140)), shape).astype(np.uint8)
    tensors[name] = readers.Tensor(shape, "U8", array.nbytes, array.__getitem__)
  config = {"quantization_config": {"quant_method": "mxfp4"}}
  given = {f"down_proj_{name}": tensor for name, tensor in tensors.items()}
  found = dequantised(pathlib.Path("folder"), config, given)["down_proj"].read(slice(None))
  parts = (torch.tensor(tensors[name].read(slice(None))) for name in ("blocks", "scales"))
  expected = mxfp4.convert_moe_packed_tensors(*parts, dtype=torch.float32)
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
  ("settings", "problem"),
  [
    ({"quant_method": "gptq"}, "quant_method` must be one of compressed-tensors, .* got 'gptq'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "`quantization_config.fmt` must be e4m3; got 'e5m2'"),
    (
      {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
      "must be one of pack-quantized, .* got 'nvfp4-pack-quantized'",
    ),
    (
      {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 3}}},
      },
      "`num_bits` must be 4 or 8; got 3",
    ),
    ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "rotated weights are"),
    ("fp8", "`quantization_config` must be a JSON object; got 'fp8'"),
    ({}, r"has layers.0.mlp.*_scale.*, which the config does not ask for"),
  ],
)
def test_what_is_not_read_is_refused_by_its_name(settings, problem, folders):
  narrow, _ = folders
  file = narrow / "config.json"
  config = file.read_text()
  file.write_text(json.dumps(json.loads(config) | {"quantization_config": settings}))
  with pytest.raises(ValueError, match=problem):
    checkpoints.load(narrow)
  file.write_text(config)
