"""Command that prints the parity of pretrained models with other libraries.

python -m tests.lm.checkpoints.report > docs/results/parity.csv    random small models, transformers
python -m tests.lm.checkpoints.report --gemma FILE --text FILE     Gemma 3 270M, and llama.cpp
"""

import argparse
import copy
import csv
import itertools
import math
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.gemma import write_gguf
from tests.lm.checkpoints.families import CONFIGS, V
from vqjax.lm import checkpoints
from vqjax.ops import narrow

POSITIONS = 500
PRODUCT = narrow.dot_general


def reference(name: str, folder: pathlib.Path):
  """A random model of transformers in a folder of several files."""
  import torch
  import transformers

  # Some configs of transformers write into what they are given.
  config = transformers.AutoConfig.for_model(**copy.deepcopy(CONFIGS[name]))
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
  model.save_pretrained(folder, max_shard_size="20KB")
  return model


def reference_logits(model, tokens: np.ndarray) -> np.ndarray:
  """The logits of a model of transformers, float32."""
  import torch

  with torch.no_grad():
    return model(torch.tensor(tokens)).logits.float().numpy()


def random_models() -> None:
  """Print differences of logits and divergences of random tokens for each family, as CSV."""
  tokens = np.random.default_rng(0).integers(0, V, (2, POSITIONS))
  out = csv.writer(sys.stdout, lineterminator="\n")
  columns = "family", "largest difference of logits", "largest logit"
  out.writerow([*columns, "mean KL(transformers, vqjax)"])
  for name in CONFIGS:
    with tempfile.TemporaryDirectory() as folder:
      expected = reference_logits(reference(name, pathlib.Path(folder)), tokens)
      model, variables, _ = checkpoints.load(folder)
      found = np.asarray(jax.jit(model.apply)(variables, jnp.asarray(tokens)))
    p, q = log_softmax(expected), log_softmax(found)
    largest, divergence = np.abs(expected).max(), (np.exp(p) * (p - q)).sum(-1).mean()
    difference = np.abs(found - expected).max()
    out.writerow([name, f"{difference:.1e}", f"{largest:.2f}", f"{divergence:.1e}"])


def log_softmax(logits: np.ndarray) -> np.ndarray:
  """Log-probabilities in float64."""
  shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def with_llama_cpp(file: pathlib.Path, text: pathlib.Path, positions: int) -> dict[str, float]:
  """Ids, divergence and nats of a GGUF here and in llama.cpp, on the start of a text."""
  import llama_cpp

  model, variables, tokenizer = checkpoints.load(file)
  content = text.read_text("utf-8")
  ids = tokenizer.encode(content[: 8 * positions])[:positions]
  q = log_softmax(np.asarray(jax.jit(model.apply)(variables, jnp.array([ids])))[0])
  nats = lambda logp: float(-logp[np.arange(len(ids) - 1), ids[1:]].mean())
  found = {"positions": len(ids), "nats, vqjax": nats(q)}
  # llama.cpp rounds the inputs of products with quantised weights to 8 bits, and those with float32
  # not at all: its F32 copy compares the models, the same file their arithmetic too. How much such
  # a rounding moves a model is measured here as well.
  with mock.patch.object(narrow, "dot_general", of_rounded_inputs):
    rounded = log_softmax(
      np.asarray(jax.jit(lambda *a: model.apply(*a))(variables, jnp.array([ids])))[0]
    )
  found["mean KL(vqjax, vqjax with 8-bit inputs)"] = float(
    (np.exp(q) * (q - rounded)).sum(-1).mean()
  )
  with tempfile.TemporaryDirectory() as folder:
    wide = pathlib.Path(folder) / "wide.gguf"
    write_gguf(file, wide, "F32")
    for name, path in {"its F32 copy": wide, "the same file": file}.items():
      other = llama_cpp.Llama(str(path), n_ctx=positions, logits_all=True, verbose=False)
      other.eval(ids)
      p = log_softmax(np.array(other.scores[: len(ids)]))
      found[f"nats, llama.cpp with {name}"] = nats(p)
      found[f"mean KL(llama.cpp with {name}, vqjax)"] = float((np.exp(p) * (p - q)).sum(-1).mean())
  lines = list(mixed_lines(10_000))
  equal = sum(
    tokenizer.encode(line) == other.tokenize(line.encode(), add_bos=True, special=False)
    for line in lines
  )
  return found | {"lines": len(lines), "lines with equal ids": equal}


def of_rounded_inputs(inputs, weight, dimensions, *rest, **options):
  """A product of inputs that are rounded to 8 bits as llama.cpp does beside a Q4_K_M weight.

  Rows that 256 divides have K-quants and a scale for 256 inputs (Q8_K), others one for 32 (Q8_0).
  """
  of_inputs = dimensions[0][0]
  assert tuple(of_inputs) == tuple(range(inputs.ndim - len(of_inputs), inputs.ndim))
  width = math.prod(inputs.shape[axis] for axis in of_inputs)
  block = 32 if width % 256 else 256
  blocks = inputs.reshape(*inputs.shape[: -len(of_inputs)], -1, block)
  scale = jnp.abs(blocks).max(axis=-1, keepdims=True) / 127
  if block == 32:
    scale = scale.astype(jnp.float16).astype(jnp.float32)
  near = jnp.round(blocks / jnp.where(scale > 0, scale, 1.0)) * scale
  return PRODUCT(near.reshape(inputs.shape), weight, dimensions, *rest, **options)


def mixed_lines(count: int) -> Iterator[str]:
  """Lines of words, numbers, runs of spaces, other scripts and code, the same at each call."""
  draw = random.Random(0)
  words = ["the", "of", "Gemma", "naïve", "東京", "日本語", "привет", "مرحبا", "🙂👍🏽", "e\u0301"]
  words += ["1234567", "3.14", "don't", "I'LL", "x_y", "!=", "\t"]
  joins = [" ", " ", " ", "  ", "   ", "\n", "", ", ", "\r\n", " \n "]
  for _ in range(count):
    picked = draw.choices(words, k=draw.randint(1, 12))
    yield "".join(itertools.chain(*((word, draw.choice(joins)) for word in picked)))


def main() -> None:
  """Run the command."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--gemma", type=pathlib.Path, help="a GGUF to compare with llama.cpp")
  parser.add_argument("--text", type=pathlib.Path, help="the text to compare on")
  parser.add_argument("--positions", type=int, default=900, help="tokens of the text")
  options = parser.parse_args()
  if options.gemma:
    for name, number in with_llama_cpp(options.gemma, options.text, options.positions).items():
      print(f"{name}: {number:.6g}")
  else:
    random_models()


if __name__ == "__main__":
  main()
