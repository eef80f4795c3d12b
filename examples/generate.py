"""Continuations of prompts by a pretrained model.

python examples/generate.py                      # stories260K below $VQJAX_DATA
python examples/generate.py gemma-3-270m-q4_k_m.gguf "The capital of France is"
"""

import os
import pathlib
import sys

import jax

from vqjax.lm import checkpoints, generation

STORIES = "stories260K", "stories260K.bin"


def main(path: str | None = None, prompt: str = "Once upon a time"):
  path = path or pathlib.Path(os.environ.get("VQJAX_DATA", "."), *STORIES)
  if not pathlib.Path(path).exists():
    print(f"skipped: no {path}; give a model, or set VQJAX_DATA to the folder that holds one")
    return
  model, variables, tokenizer = checkpoints.load(path)
  # The blocks' parameters in arrays of their own: converted here once, instead of in each call.
  variables = generation.unstacked(variables)

  # Greedy, in pieces while it is generated.
  settings = {"max_tokens": 40, "tokenizer": tokenizer}
  print(prompt, end="")
  for pieces in generation.stream(
    model, variables, [prompt], jax.random.key(0), generation.GREEDY, **settings
  ):
    print(pieces[0], end="", flush=True)
  print("\n")

  # Two draws at once, up to the end of the sentence.
  sampling = generation.Sampling(temperature=0.8, top_p=0.9)
  drawn = generation.generate(
    *(model, variables, [prompt, prompt + ", the"], jax.random.key(1), sampling),
    stop=[*tokenizer.eos, "."],
    **settings,
  )
  for text, length, scores in zip(drawn.texts, drawn.lengths, drawn.log_probs):
    print(f"{text!r}: {length} tokens, {-scores.sum() / length:.2f} nats each")


if __name__ == "__main__":
  main(*sys.argv[1:3])
