"""Block types have the bytes of llama.cpp, and fitted values have less error in a metric."""

import ctypes
import functools
import pathlib

import numpy as np
import pytest

from tests.jitted import apply
from vqjax.lm import checkpoints
from vqjax.lm.compression.calibration import collect
from vqjax.tables import gguf_types, grids

gguf = pytest.importorskip("gguf", reason="the extra `checkpoints` is not installed")

ROWS, DIM = 37, 512


@functools.lru_cache
def rows():
  """Rows with heavy tails, a row of zeros, a block of zeros and a row of one value."""
  drawn = 0.03 * np.random.default_rng(0).standard_t(4, (ROWS, DIM)).astype(np.float32)
  drawn[3], drawn[5, :32], drawn[7] = 0, 0, 0.25
  return drawn


@functools.lru_cache
def metric(dim=DIM):
  """A second moment with strong correlations between neighbours."""
  draw = np.random.default_rng(1)
  states = draw.normal(size=(dim, 3 * dim)) * np.exp(draw.normal(size=(dim, 1)))
  states[1:] += states[:-1].copy()
  return states @ states.T / states.shape[1]


@functools.lru_cache
def fitted(name):
  return gguf_types.encode_blocks(name, rows(), metric())


def dequantised(name, packed):
  return gguf.dequantize(packed, gguf.GGMLQuantizationType[name]).astype(np.float64)


def error(name, packed):
  wrong = dequantised(name, packed) - rows()
  return np.einsum("rd,de,re->r", wrong, metric(), wrong)


def llama_cpp_quantised(name, numbers):
  """The bytes of llama.cpp's own quantiser."""
  package = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
  library = ctypes.CDLL(str(pathlib.Path(package.__file__).parent / "lib" / "libggml-base.so"))
  quantise = library.ggml_quantize_chunk
  quantise.restype = ctypes.c_size_t
  pointer, integer = ctypes.c_void_p, ctypes.c_int64
  quantise.argtypes = [ctypes.c_int, pointer, pointer, integer, integer, integer, pointer]
  kind = gguf.GGMLQuantizationType[name]
  block, size = gguf.GGML_QUANT_SIZES[kind]
  packed = np.zeros((len(numbers), numbers.shape[1] // block * size), np.uint8)
  quantise(
    int(kind), numbers.ctypes.data, packed.ctypes.data, 0, len(numbers), numbers.shape[1], None
  )
  return packed


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0"])
def test_rounded_bytes_are_those_of_the_package_gguf(name):
  expected = gguf.quantize(rows(), gguf.GGMLQuantizationType[name])
  np.testing.assert_array_equal(gguf_types.encode_blocks(name, rows()), expected)


@pytest.mark.parametrize("name", gguf_types.TYPES)
def test_rounded_bytes_are_those_of_llama_cpp(name):
  found, expected = gguf_types.encode_blocks(name, rows()), llama_cpp_quantised(name, rows())
  # Sums of squares in another order decide otherwise between scales that are equally good, such as
  # those of the row of one value, which is 1/37 of all.
  assert (found == expected).mean() > {"Q6_K": 0.97, "IQ4_NL": 0.99}.get(name, 0.9999)


@pytest.mark.parametrize("name", gguf_types.TYPES)
def test_blocks_have_the_size_and_the_accuracy_of_their_type(name):
  packed = gguf_types.encode_blocks(name, rows())
  block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
  assert packed.shape == (ROWS, DIM // block * size)
  levels = gguf_types.TYPES[name].grid.levels
  group = gguf_types.TYPES[name].grid.group
  largest = np.abs(rows().reshape(ROWS, -1, group)).max(-1, keepdims=True)
  wrong = np.abs(dequantised(name, packed) - rows()).reshape(ROWS, -1, group)
  # Half of the widest gap of the levels, and as much again for scales that were searched.
  gap = np.diff(levels).max() / -levels[0]
  assert (wrong <= 1.01 * gap * largest + 1e-6).all()


@pytest.mark.parametrize("name", gguf_types.TYPES)
def test_fitted_values_have_less_error_and_not_more_in_any_row(name):
  found, plain = error(name, fitted(name)), error(name, gguf_types.encode_blocks(name, rows()))
  assert fitted(name).shape == gguf_types.encode_blocks(name, rows()).shape
  # float32 sums of squares decide between rows that are nearly exact.
  assert (found <= plain * (1 + 1e-3) + 1e-9).all()
  assert found.sum() < 0.5 * plain.sum()


def test_a_row_of_zeros_stays_zero():
  for name in gguf_types.TYPES:
    assert not dequantised(name, fitted(name))[3].any()


def test_single_changes_do_not_raise_the_error():
  small = rows()[:, :96]
  errors = []
  for passes in (0, 1, 2):
    found = grids.fit_grid(small, gguf_types.TYPES["Q4_0"].grid, metric(96), passes=passes)
    wrong = found.values() - small
    errors.append(np.einsum("rd,de,re->r", wrong, metric(96), wrong))
  assert (errors[1] <= errors[0] * (1 + 1e-4) + 1e-9).all()
  assert (errors[2] <= errors[1] * (1 + 1e-4) + 1e-9).all()


def test_no_single_level_could_be_better_after_many_changes():
  small = rows()[:5, :32]
  grid = gguf_types.TYPES["Q4_0"].grid
  found = grids.fit_grid(small, grid, metric(32), passes=20)
  wrong = found.values().astype(np.float64) - small
  base = np.einsum("rd,de,re->r", wrong, metric(32), wrong)
  for column in range(32):
    for level in grid.levels:
      other = wrong.copy()
      other[:, column] = found.scale[:, 0] * level - small[:, column]
      changed = np.einsum("rd,de,re->r", other, metric(32), other)
      assert (changed >= base * (1 - 1e-4) - 1e-9).all()


def test_whole_rows_share_a_scale_in_a_grid_of_one_group():
  grid = grids.LevelGrid(tuple(range(-127, 128)), 96, "float32", (0.97, 1.0), signed=False)
  found = grids.fit_grid(rows()[:, :96], grid, metric(96), passes=0)
  assert found.scale.shape == (ROWS, 1)
  assert (found.scale >= 0).all()
  plain = np.abs(rows()[:, :96]).max(1, keepdims=True) / 127
  wrong = found.values() - rows()[:, :96]
  rounded = np.rint(rows()[:, :96] / np.where(plain, plain, 1)) * plain - rows()[:, :96]
  cost = lambda e: np.einsum("rd,de,re->", e, metric(96), e)
  assert cost(wrong) < cost(rounded)


def test_impossible_arguments_are_refused():
  with pytest.raises(ValueError, match=r"`kind` must be one of Q4_0.*got 'Q3_K'"):
    gguf_types.encode_blocks("Q3_K", rows())
  with pytest.raises(
    ValueError, match=r"multiple of 256; got width 64. The types for this width: Q4"
  ):
    gguf_types.encode_blocks("Q6_K", rows()[:, :64])
  broken = rows().copy()
  broken[4, 9] = np.nan
  with pytest.raises(ValueError, match="`rows` must be finite; row 4"):
    gguf_types.encode_blocks("Q8_0", broken)
  with pytest.raises(ValueError, match=r"shape \[512, 512\].*got \[96, 96\]"):
    gguf_types.encode_blocks("Q8_0", rows(), metric(96))
  with pytest.raises(ValueError, match="positive definite"):
    gguf_types.encode_blocks("Q8_0", rows(), -np.eye(DIM))


@pytest.mark.slow
def test_a_trained_model_diverges_less_with_fitted_tables(real_data):
  model, variables, tokenizer = checkpoints.load(real_data / "stories260K" / "stories260K.bin")
  content = (real_data / "tinystories" / "gpt2_tokens_val.decoded.txt").read_text("utf-8")
  stories = [tokenizer.encode(story)[:128] for story in content[:300_000].split("<|endoftext|>")]
  stories = np.asarray([story for story in stories if len(story) == 128], np.int32)
  fitted_to, held_out = stories[:24], stories[24:40]
  counts = np.bincount(fitted_to.ravel(), minlength=model.head.vocab)
  moments = collect(model, variables, fitted_to, counts, hidden_tokens=3000, expected_tokens=0)
  table = np.asarray(variables["params"]["embedding"]["weight"])

  def log_probs(rows):
    params = variables["params"] | {"embedding": {"weight": rows}}
    logits = np.asarray(apply(model, {"params": params}, held_out), np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

  before = log_probs(table)
  for name in ("Q4_0", "IQ4_NL", "Q5_0"):
    kl = []
    for metric in (None, moments.metric()):
      rows = dequantised(name, gguf_types.encode_blocks(name, table, metric)).astype(np.float32)
      kl.append((np.exp(before) * (before - log_probs(rows))).sum(-1).mean())
    assert 0 < kl[1] < 0.7 * kl[0]
