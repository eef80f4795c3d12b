"""Command that continues prompts.

vqjax generate gemma-3-270m-q4_k_m.gguf --prompt "The capital of France is" --temperature 0
vqjax generate runs/demo/codebook --prompt "Once upon a time"
vqjax generate large.gguf --draft small.gguf --prompt "Once upon a time"
vqjax generate large.gguf --draft drafter.safetensors --prompt "Once upon a time"
"""

import argparse
import dataclasses
import json
import time

import jax

from vqjax.commands.console import flag, new_parser, option, run
from vqjax.commands.models import add_arguments, chosen_model, load_model
from vqjax.lm.checkpoints import Loaded
from vqjax.lm.drafting import Medusa, load_drafter
from vqjax.lm.generation import Draft, Drafter, Sampling, generate, stream
from vqjax.lm.records import without_control
from vqjax.lm.texts import data_path

__all__ = []


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call or a damaged model."""
  parser = new_parser(
    "generate",
    "Continue prompts with a pretrained model or with that of a run. The text of a single prompt is"
    " printed while it is generated.",
  )
  add_arguments(parser)
  repeated = {"action": "append", "metavar": "TEXT"}
  option(
    parser, "--prompt", "text to continue; may be given several times", required=True, **repeated
  )
  option(parser, "--max-tokens", "most tokens of a text", int, 128)
  option(parser, "--temperature", "0 takes the best token", float, 0.8)
  option(parser, "--top-k", "only the K best tokens", int, metavar="K")
  option(parser, "--top-p", "only the best tokens of mass P", float, metavar="P")
  option(
    parser, "--min-p", "only tokens at least P times as likely as the best", float, metavar="P"
  )
  option(
    parser, "--repetition-penalty", "divisor of the scores of tokens that occurred", float, 1.0
  )
  option(parser, "--stop", "text before which to stop; may be repeated", default=[], **repeated)
  # Of 32 bits without a sign, one more than other integers.
  text = "source of randomness (default: %(default)s)"
  parser.add_argument("--seed", type=int, default=0, metavar="N", help=text)
  option(
    parser,
    "--draft",
    "what drafts tokens for the model to verify: a drafter of `vqjax draft`, or a pretrained model"
    " with the same tokenizer",
    metavar="MODEL",
  )
  option(
    parser,
    "--draft-length",
    "most draft tokens at a time (default: that of the drafter, or 4)",
    int,
  )
  flag(parser, "--json", "print JSON with log-probabilities")
  return run(parser, arguments, _generate)


def _generate(options: argparse.Namespace) -> None:
  sampling = Sampling(
    temperature=options.temperature,
    top_k=options.top_k,
    top_p=options.top_p,
    min_p=options.min_p,
    repetition_penalty=options.repetition_penalty,
  )
  if not 0 <= options.seed < 2**32:
    raise ValueError(f"`--seed` must be in [0, 2^32); got {options.seed}. 0 is the default.")
  loaded = chosen_model(options)
  model, variables, tokenizer = loaded
  drafter = None if options.draft is None else _drafter(options, loaded)
  given = model, variables, options.prompt, jax.random.key(options.seed), sampling
  settings = {"max_tokens": options.max_tokens, "tokenizer": tokenizer, "drafter": drafter}
  settings["stop"] = [*tokenizer.eos, *options.stop]
  if not options.json and len(options.prompt) == 1:
    # Arguments are checked before the prompt is printed.
    streamed = stream(*given, **settings)
    print(without_control(options.prompt[0]), end="", flush=True)
    for pieces in streamed:
      print(without_control(pieces[0]), end="", flush=True)
    print()
    return
  start = time.perf_counter()
  result = generate(*given, **settings, log_probs=options.json)
  seconds = time.perf_counter() - start
  if not options.json:
    texts = map("".join, zip(options.prompt, result.texts))
    print("\n\n".join(map(without_control, texts)))
    return
  rows = [
    {
      "prompt": prompt,
      "text": text,
      "tokens": result.tokens[row, :length].tolist(),
      "log_probs": result.log_probs[row, :length].tolist(),
    }
    for row, (prompt, text, length) in enumerate(zip(options.prompt, result.texts, result.lengths))
  ]
  print(json.dumps({"seconds": seconds, "continuations": rows}, indent=2))


def _drafter(options: argparse.Namespace, loaded: Loaded) -> Drafter:
  path = data_path(options.draft, kind="--draft")
  if path.is_file() and path.suffix == ".safetensors":
    drafter = load_drafter(path, loaded.model, loaded.variables)
  else:
    draft = load_model(options.draft, dtype=options.dtype)
    drafter = Draft(draft.model, draft.variables)
  if options.draft_length is None:
    return drafter
  if isinstance(drafter, Medusa):
    raise ValueError(
      f"`--draft-length` must be left out with Medusa's blocks; got {options.draft_length}. Their"
      " tree is drafted whole: train one of fewer tokens, with `vqjax draft --medusa --size`."
    )
  return dataclasses.replace(drafter, length=options.draft_length)
