"""Command that prints the nats a token and a byte of a text.

vqjax score gemma-3-270m-q4_k_m.gguf --text article.txt
vqjax score runs/demo/codebook --text article.txt --json
vqjax score stories260K.bin --text stories.txt --separator '<|endoftext|>'
"""

import argparse
import json
import math
import pathlib

from vqjax.commands.console import flag, new_parser, option, run
from vqjax.commands.models import add_arguments, chosen_model
from vqjax.lm.generation import score
from vqjax.lm.texts import check_separator, data_path, read_text, split_documents

__all__ = []


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call or a damaged model."""
  parser = new_parser(
    "score",
    "Print the negative log-probability of a text under a pretrained model or that of a run. A text"
    " that is longer than the context is read in overlapping windows.",
  )
  add_arguments(parser)
  option(parser, "--text", "file of text in UTF-8", pathlib.Path, required=True)
  option(
    parser,
    "--separator",
    r"text between documents, which are scored each by itself, such as '<|endoftext|>' or '\n'",
    metavar="TEXT",
  )
  option(
    parser,
    "--stride",
    "tokens by which a window starts after the one before (default: half the context)",
    int,
  )
  flag(parser, "--json", "print JSON")
  return run(parser, arguments, _score)


def _score(options: argparse.Namespace) -> None:
  text = read_text(data_path(str(options.text), kind="text"))
  check_separator(options.separator, "--separator")
  documents = [text]
  if options.separator is not None:
    documents = [*split_documents(text, options.separator)]
  model, variables, tokenizer = chosen_model(options)
  encoded = [list(tokenizer.encode(document)) for document in documents]
  scored = [(each, tokens) for each, tokens in zip(documents, encoded) if len(tokens) > 1]
  if not scored:
    raise ValueError(
      f"`--text` must have a token to predict; got {sum(map(len, encoded))} tokens in"
      f" {options.text}. Give a longer text."
    )
  scores = score(model, variables, [tokens for _, tokens in scored], stride=options.stride)
  nats = -float(sum(row.sum(dtype=float) for row in scores))
  predicted = sum(map(len, scores))
  # The first token is not predicted; it is that of BOS in most models, which stands for no byte.
  size = sum(
    len(each.encode()) - len(tokenizer.decode(tokens[:1]).encode()) for each, tokens in scored
  )
  result = {
    **({} if options.separator is None else {"documents": len(scored)}),
    "tokens": predicted,
    "bytes": size,
    "nats_per_token": nats / predicted,
    "nats_per_byte": nats / size,
    "perplexity": math.exp(min(nats / predicted, 700)),
  }
  if options.json:
    print(json.dumps(result, indent=2))
    return
  of = "" if options.separator is None else f" in {len(scored):,} documents"
  print(
    f"{result['nats_per_token']:.4f} nats/token, {result['nats_per_byte']:.4f} nats/byte,"
    f" perplexity {result['perplexity']:.2f} over {predicted:,} tokens, {size:,} bytes{of}"
  )
