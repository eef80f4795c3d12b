"""Benchmark of Gemma 3 270M beside llama.cpp and transformers: generation, and loading."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import generation, measure
from vqjax.lab.training.provenance import device
from vqjax.lm import checkpoints, tokenizers
from vqjax.lm.generation import GREEDY, generate, unstacked

CACHE = pathlib.Path(os.environ.get("VQJAX_CACHE") or pathlib.Path.home() / ".cache" / "vqjax")
FILE = "gemma-3-270m-q4_k_m.gguf"
PROMPT = "Once upon a time, in a small village by the sea, there lived a girl"
CONTEXT = 128
DTYPES = "float32", "bfloat16"

Way = Callable[[int, int], tuple[float, list[int]]]
"""(rows of a batch, tokens) -> seconds, and the tokens of the last row."""


class GemmaSizes(NamedTuple):
  """Tokens of a continuation, rows of the batches, and rounds."""

  tokens: int
  batches: tuple[int, ...]
  rounds: int


GEMMA = GemmaSizes(tokens=24, batches=(1, 8), rounds=3)
QUICK = GemmaSizes(tokens=3, batches=(2,), rounds=1)


def loading(quick: bool) -> Iterator[dict[str, Any]]:
  """Time loading beside reading the files, and measure its memory."""
  with _folders() as (folder, _):
    yield {"formats": _loading(weights(), folder, 1 if quick else 5)}


def generating(quick: bool) -> Iterator[dict[str, Any]]:
  """Time greedy generation, prompts included, of the libraries that are installed."""
  sizes = QUICK if quick else GEMMA
  figures: dict[str, Any] = {"sizes": sizes._asdict(), "prompt": PROMPT, "skipped": {}}
  with _folders() as (folder, tokenizer):
    prompt, ways = tokenizer.encode(PROMPT), {}
    for dtype in DTYPES:
      ways |= _library(folder / dtype, prompt, jnp.dtype(dtype))
    for peer, module, make in (
      ("llama.cpp", "llama_cpp", _llama_cpp),
      ("transformers", "transformers", _transformers),
    ):
      try:
        importlib.import_module(module)
        ways |= make(folder, prompt)
      except ModuleNotFoundError as error:
        figures["skipped"][peer] = f"{error.name} is not installed"
        measure.say(f"{peer} is left out: {error.name} is not installed")
    for batch in sizes.batches:
      figures[f"batch {batch}"] = _compared(ways, batch, sizes)
      yield figures


def weights() -> pathlib.Path:
  """The file of the model."""
  if not (file := CACHE / FILE).is_file():
    raise measure.Unavailable(f"no {file}: `make gemma` fetches it")
  return file


@contextlib.contextmanager
def _folders() -> Iterator[tuple[pathlib.Path, tokenizers.Tokenizer]]:
  """A temporary folder with the model as safetensors of each dtype, and the tokenizer."""
  model, variables, tokenizer = checkpoints.load(weights())
  with tempfile.TemporaryDirectory() as name:
    for dtype in DTYPES:
      folder = pathlib.Path(name) / dtype
      checkpoints.save(folder, model, variables, tokenizer, dtype=jnp.dtype(dtype))
    del variables
    yield pathlib.Path(name), tokenizer


def _compared(ways: dict[str, Way], batch: int, sizes: GemmaSizes) -> dict[str, dict[str, float]]:
  """Tokens a second of each way, and tokens that agree with the first one's."""
  times: dict[str, list[float]] = {name: [] for name in ways}
  rows = {}
  for number in range(sizes.rounds + 1):
    for name, way in ways.items():
      seconds, rows[name] = way(batch, sizes.tokens)
      if number:  # the first round compiles
        times[name].append(seconds)
  first = next(iter(rows.values()))
  figures = {
    name: {
      "tokens_per_second": batch * sizes.tokens / statistics.median(times[name]),
      "equal_tokens": sum(a == b for a, b in zip(rows[name], first)),
    }
    for name in ways
  }
  measure.show_rows(
    f"Gemma 3 270M, greedy, batch {batch}, a prompt of {len(PROMPT.split())} words and"
    f" {sizes.tokens} tokens, {device()}",
    ("", "tokens/s", "tokens of the first row"),
    [
      [name, f"{row['tokens_per_second']:.4g}", f"{row['equal_tokens']} of {sizes.tokens}"]
      for name, row in figures.items()
    ],
  )
  return figures


def _library(folder: pathlib.Path, prompt: list[int], dtype: Any) -> dict[str, Way]:
  """`generate`, and in float32 its bare step."""
  model, variables, _ = checkpoints.load(folder, dtype=dtype)
  variables = unstacked(variables)

  def library(batch: int, tokens: int) -> tuple[float, list[int]]:
    start = time.perf_counter()
    given = model, variables, [prompt] * batch, jax.random.key(0), GREEDY
    found = generate(*given, max_tokens=tokens, stop=(), log_probs=False)
    return time.perf_counter() - start, found.tokens[-1].tolist()

  ways = {f"vqjax, {dtype.name}": library}
  if dtype == jnp.float32:
    ways["bare step, float32"] = functools.partial(generation.bare, model, variables, prompt)
  return ways


def _llama_cpp(folder: pathlib.Path, prompt: list[int]) -> dict[str, Way]:
  """llama.cpp with the file itself and with its numbers in wider formats."""
  import llama_cpp

  paths = {"Q4_K_M": weights()}
  for kind in ("BF16", "F32"):
    paths[kind] = folder / f"{kind}.gguf"
    write_gguf(paths["Q4_K_M"], paths[kind], kind)
  quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
  llama_cpp.llama_log_set(quiet, None)
  llama_cpp.llama_backend_init()
  keep = [quiet]  # the library calls it later

  def way(path: pathlib.Path) -> Way:
    model = llama_cpp.llama_model_load_from_file(
      str(path).encode(), llama_cpp.llama_model_default_params()
    )
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    @functools.lru_cache
    def context(batch: int):
      params = llama_cpp.llama_context_default_params()
      params.n_ctx, params.n_seq_max = CONTEXT * batch, batch
      params.n_threads = params.n_threads_batch = os.cpu_count()
      return llama_cpp.llama_init_from_model(model, params)

    def call(batch: int, tokens: int) -> tuple[float, list[int]]:
      own, given = context(batch), llama_cpp.llama_batch_init(len(prompt) * batch, 0, 1)
      llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(own), True)

      def decode(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """The best token after each entry (token, position, row, is_last) that is the last."""
        given.n_tokens = len(entries)
        for at, (token, position, row, is_last) in enumerate(entries):
          given.token[at], given.pos[at], given.logits[at] = token, position, is_last
          given.n_seq_id[at], given.seq_id[at][0] = 1, row
        if llama_cpp.llama_decode(own, given):
          raise RuntimeError("llama_decode failed")
        logits = (
          llama_cpp.llama_get_logits_ith(own, at) for at, entry in enumerate(entries) if entry[3]
        )
        return [int(np.ctypeslib.as_array(row, (vocab,)).argmax()) for row in logits]

      start, last = time.perf_counter(), len(prompt) - 1
      best = decode(
        [(t, at, row, at == last) for row in range(batch) for at, t in enumerate(prompt)]
      )
      found = [best[-1]]
      for position in range(len(prompt), last + tokens):
        best = decode([(token, position, row, True) for row, token in enumerate(best)])
        found.append(best[-1])
      seconds = time.perf_counter() - start
      llama_cpp.llama_batch_free(given)
      return seconds, found

    return lambda *sizes, keep=keep: call(*sizes)

  return {f"llama.cpp, {kind}": way(path) for kind, path in paths.items()}


def _transformers(folder: pathlib.Path, prompt: list[int]) -> dict[str, Way]:
  """transformers on PyTorch's CPU backend."""
  import torch
  import transformers

  torch.set_num_threads(os.cpu_count())

  def way(dtype: str) -> Way:
    model = transformers.AutoModelForCausalLM.from_pretrained(
      folder / dtype, dtype=getattr(torch, dtype)
    ).eval()

    def call(batch: int, tokens: int) -> tuple[float, list[int]]:
      given = torch.tensor([prompt] * batch)
      length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
      start = time.perf_counter()
      with torch.inference_mode():
        found = model.generate(
          given, attention_mask=torch.ones_like(given), do_sample=False, **length
        )
      return time.perf_counter() - start, found[-1, len(prompt) :].tolist()

    return call

  return {f"transformers, {dtype}": way(dtype) for dtype in DTYPES}


def _loading(file: pathlib.Path, folder: pathlib.Path, rounds: int) -> dict[str, dict[str, float]]:
  """Seconds of reading and of loading, and the memory of loading over that of the model."""
  cases = {
    "float32": (folder / "float32", jnp.float32),
    "bfloat16": (folder / "bfloat16", jnp.bfloat16),
    "Q4_K_M as bfloat16": (file, jnp.bfloat16),
  }
  figures = {}
  for name, (path, dtype) in cases.items():
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    held: dict[str, int] = {}

    def load(path=path, dtype=dtype, held=held):
      loaded = checkpoints.load(path, dtype=dtype)
      held["bytes"] = sum(x.nbytes for x in jax.tree.leaves(loaded.variables))

    ways = {"read": functools.partial(_read, files), "load": load}
    times: dict[str, list[float]] = {}
    memory = []
    load()  # compiles, and imports
    for _ in range(rounds):
      for is_cold in (True, False):
        for way, call in ways.items():
          if is_cold:
            _evict(files)
          cost = measure.process_cost(call)
          times.setdefault(f"{way}, {'cold' if is_cold else 'warm'}", []).append(cost["seconds"])
          if way == "load":
            memory.append(cost["memory_bytes"])
    figures[name] = {way: statistics.median(each) for way, each in times.items()}
    figures[name]["bytes"] = held["bytes"]
    if None not in memory:
      figures[name]["memory_ratio"] = statistics.median(memory) / held["bytes"]
  ratio = lambda row: f"{row['memory_ratio']:.2f}" if "memory_ratio" in row else measure.MISSING
  columns = [f"{way}, {state}" for state in ("cold", "warm") for way in ("read", "load")]
  measure.show_rows(
    f"loading of Gemma 3 270M, seconds, {device()}; cold: not in the cache of the system",
    ("", *columns, "memory"),
    [[name, *(f"{row[key]:.2f}" for key in columns), ratio(row)] for name, row in figures.items()],
  )
  return figures


def _read(files: list[pathlib.Path]) -> None:
  memory = bytearray(2**24)
  for path in files:
    with open(path, "rb", buffering=0) as file:
      while file.readinto(memory):
        pass


def _evict(files: list[pathlib.Path]) -> None:
  """Drop files from the system's cache, where it has a call for it."""
  for path in files:
    with open(path, "rb") as file:
      os.fsync(file.fileno())
      if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_gguf(file: pathlib.Path, to: pathlib.Path, kind: str) -> None:
  """Write a GGUF with the numbers of another one in the format `kind`, F32 or BF16."""
  import gguf

  reader = gguf.GGUFReader(file)
  writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
  for name, field in reader.fields.items():
    if not name.startswith("GGUF.") and name != "general.architecture":
      form = field.types[0]
      of = field.types[-1] if form == gguf.GGUFValueType.ARRAY else None
      file_type = gguf.LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"]
      value = int(file_type) if name == "general.file_type" else field.contents()
      writer.add_key_value(name, value, form, of)
  for tensor in reader.tensors:
    shape = [int(length) for length in reversed(tensor.shape)]
    numbers = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    numbers = np.ascontiguousarray(numbers, np.float32)
    # llama.cpp keeps vectors in float32 in every format.
    if kind == "F32" or len(shape) == 1:
      writer.add_tensor(tensor.name, numbers)
    else:
      form = gguf.GGMLQuantizationType[kind]
      writer.add_tensor(tensor.name, gguf.quantize(numbers, form), raw_dtype=form)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
