"""Command that prints the parity of pretrained models with other libraries as a table.

python -m tests.checkpoints.report                        random small models, and transformers
python -m tests.checkpoints.report --gemma FILE --text FILE     Gemma 3 270M, and llama.cpp
"""

import argparse
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from tests.checkpoints.families import CONFIGS, V
from vqjax import checkpoints

POSITIONS = 500


def reference(name: str, folder: pathlib.Path):
  """A random model of transformers in a folder of several files."""
  import torch
  import transformers

  config = transformers.AutoConfig.for_model(**CONFIGS[name])
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
  """Print the largest difference of logits for each family."""
  tokens = np.random.default_rng(0).integers(0, V, (2, POSITIONS))
  print("| family | positions | largest difference of logits | largest logit |\n|---|---|---|---|")
  for name in CONFIGS:
    with tempfile.TemporaryDirectory() as folder:
      expected = reference_logits(reference(name, pathlib.Path(folder)), tokens)
      model, variables, _ = checkpoints.load(folder)
      found = np.asarray(jax.jit(model.apply)(variables, jnp.asarray(tokens)))
    difference = np.abs(found - expected).max()
    print(f"| {name} | {POSITIONS} | {difference:.1e} | {np.abs(expected).max():.2f} |", flush=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
  """Log-probabilities in float64."""
  shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def with_llama_cpp(file: pathlib.Path, text: pathlib.Path, positions: int) -> None:
  """Print ids, divergence and nats of a GGUF here and in llama.cpp, on the start of a text."""
  model, variables, tokenizer = checkpoints.load(file)
  content = text.read_text("utf-8")
  ids = tokenizer.encode(content[: 8 * positions])[:positions]
  ours = np.asarray(jax.jit(model.apply)(variables, jnp.array([ids])))[0]
  nats = lambda logp: -logp[np.arange(len(ids) - 1), ids[1:]].mean()
  print(f"vqjax: {nats(log_softmax(ours)):.4f} nats a token at {len(ids)} positions", flush=True)
  import llama_cpp

  other = llama_cpp.Llama(str(file), n_ctx=positions, logits_all=True, verbose=False)
  lines = [line for line in content[:400_000].split("\n") if line.strip()][:10_000]
  equal = sum(
    other.tokenize(line.encode(), add_bos=True, special=False) == tokenizer.encode(line)
    for line in lines
  )
  print(f"ids: {equal} of {len(lines)} lines equal")
  other.eval(ids)
  theirs = np.array(other.scores[: len(ids)])
  p, q = log_softmax(theirs), log_softmax(ours)
  divergence = (np.exp(p) * (p - q)).sum(-1)
  print(f"llama.cpp: {nats(p):.4f} nats a token")
  print(f"KL(llama.cpp, vqjax): mean {divergence.mean():.2e}, largest {divergence.max():.2e}")


def main() -> None:
  """Run the command."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--gemma", type=pathlib.Path, help="a GGUF to compare with llama.cpp")
  parser.add_argument("--text", type=pathlib.Path, help="the text to compare on")
  parser.add_argument("--positions", type=int, default=900, help="tokens of the text")
  options = parser.parse_args()
  if options.gemma:
    with_llama_cpp(options.gemma, options.text, options.positions)
  else:
    random_models()


if __name__ == "__main__":
  main()
