"""Command that continues prompts.

vqjax generate gemma-3-270m-q4_k_m.gguf --prompt "The capital of France is" --temperature 0
vqjax generate runs/demo/codebook --config configs/lm_codebook.py --prompt "Once upon a time"
vqjax generate large.gguf --draft small.gguf --prompt "Once upon a time"
vqjax generate large.gguf --draft drafter.safetensors --prompt "Once upon a time"
"""

import argparse
import dataclasses
import json
import time

import jax

from vqjax.commands.console import configure_warnings, exit_code
from vqjax.commands.models import add_arguments, load_model
from vqjax.lm.checkpoints import Loaded
from vqjax.lm.drafting import Medusa, load_drafter
from vqjax.lm.generation import Draft, Drafter, Sampling, generate, stream
from vqjax.lm.texts import data_path

__all__ = []


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call or a damaged model."""
  options = _parser().parse_intermixed_args(arguments)
  configure_warnings()
  return exit_code(lambda: _generate(options), show_traceback=options.traceback)


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
  loaded = load_model(options.model, options.config, options.overrides, options.dtype)
  model, variables, tokenizer = loaded
  drafter = None if options.draft is None else _drafter(options, loaded)
  given = model, variables, options.prompt, jax.random.key(options.seed), sampling
  settings = {"max_tokens": options.max_tokens, "tokenizer": tokenizer, "drafter": drafter}
  settings["stop"] = [*tokenizer.eos, *options.stop]
  if not options.json and len(options.prompt) == 1:
    # Arguments are checked before the prompt is printed.
    streamed = stream(*given, **settings)
    print(options.prompt[0], end="", flush=True)
    for pieces in streamed:
      print(pieces[0], end="", flush=True)
    print()
    return
  start = time.perf_counter()
  result = generate(*given, **settings, log_probs=options.json)
  seconds = time.perf_counter() - start
  if not options.json:
    print("\n\n".join(map("".join, zip(options.prompt, result.texts))))
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


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="vqjax generate",
    description="Continue prompts with a pretrained model or with that of a run. The text of a"
    " single prompt is printed while it is generated.",
  )
  add_arguments(parser)
  parser.add_argument(
    "--prompt", action="append", required=True, help="text to continue; may be given several times"
  )
  parser.add_argument(
    "--max-tokens", type=int, default=128, help="most tokens of a text (default: %(default)s)"
  )
  parser.add_argument(
    "--temperature", type=float, default=0.8, help="0 takes the best token (default: %(default)g)"
  )
  parser.add_argument("--top-k", type=int, metavar="K", help="only the K best tokens")
  parser.add_argument("--top-p", type=float, metavar="P", help="only the best tokens of mass P")
  parser.add_argument(
    "--min-p", type=float, metavar="P", help="only tokens at least P times as likely as the best"
  )
  parser.add_argument(
    "--repetition-penalty",
    type=float,
    default=1.0,
    metavar="X",
    help="divisor of the scores of tokens that have occurred (default: %(default)g)",
  )
  parser.add_argument(
    "--stop", action="append", default=[], help="string before which a text ends; may be repeated"
  )
  parser.add_argument(
    "--seed", type=int, default=0, help="source of randomness (default: %(default)s)"
  )
  parser.add_argument(
    "--draft",
    metavar="MODEL",
    help="what drafts tokens for the model to verify: a drafter of `vqjax draft`, or a pretrained"
    " model with the same tokenizer",
  )
  parser.add_argument(
    "--draft-length",
    type=int,
    metavar="N",
    help="most draft tokens at a time (default: that of the drafter, or 4)",
  )
  parser.add_argument("--json", action="store_true", help="print JSON with log-probabilities")
  return parser
