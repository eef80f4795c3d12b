"""Command that counts the documents and tokens of a config's corpus.

vqjax corpus configs/vq_logits/ptb.py
"""

import argparse
import time

from vqjax.commands.console import option
from vqjax.commands.run_folders import SEPARATOR, config_parser, with_config
from vqjax.lab.config import Experiment
from vqjax.lab.data import Filtered, encode_split, fit_tokenizer
from vqjax.lab.data.source import SPLITS

__all__ = []

EXAMPLES = """\
examples:
  vqjax corpus configs/vq_logits/c4.py data.fraction=0.001 tokenizer.vocab=8000
  vqjax corpus configs/vq_logits/ptb.py
  vqjax corpus configs/lm_dense.py data.path=stories.txt --separator '<|endoftext|>'

The command fits the tokenizer and encodes the text where the cache lacks them, so that training on
the same config starts at once. It is trained with the same --separator."""


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return its exit code: 2 for a wrong call."""
  description = "Count a corpus: the documents that its filters drop, and its tokens."
  parser = config_parser("corpus", description, EXAMPLES)
  option(parser, "--separator", SEPARATOR, metavar="TEXT")
  return with_config(parser, arguments, _print_counts)


def _print_counts(experiment: Experiment, options: argparse.Namespace) -> None:
  """Print the report of the filters, the vocabulary, and the size of each split."""
  del options
  source = experiment.data
  if experiment.tokenizer is None:
    raise ValueError(
      f"`data` must be documents; got {type(source).__name__}, whose splits are not text. Give a"
      " config with a tokenizer."
    )
  if isinstance(source, Filtered):
    for split in SPLITS:
      print(f"{split}: {source.report(split)}", flush=True)
  start = time.perf_counter()
  tokenizer = fit_tokenizer(source, experiment.tokenizer)
  print(f"vocabulary {tokenizer.vocab:,} ({time.perf_counter() - start:.1f} s)", flush=True)
  for split in SPLITS:
    start = time.perf_counter()
    encoded = encode_split(source, tokenizer, split)
    tokens, seconds = len(encoded.tokens), time.perf_counter() - start
    print(
      f"{split}: {encoded.documents:,} documents, {tokens:,} tokens,"
      f" {encoded.text_bytes / max(1, tokens):.3f} bytes a token ({seconds:.1f} s)",
      flush=True,
    )
