"""What is left of a config's corpus after its filters, and how many tokens is that?"""

import argparse
import sys
import time

from vqjax.lab.config import Experiment
from vqjax.lab.console import add_config, with_config
from vqjax.lab.data import Filtered, encode_split, fit_encoder
from vqjax.lab.data.source import SPLITS

USAGE = """\
examples:
  python -m experiments.corpus configs/vq_c4.py data.fraction=0.001 tokenizer.vocab=8000
  python -m experiments.corpus configs/vq_ptb.py

The tokenizer is fitted and the text encoded if the cache does not hold them; training on the same
config then starts at once."""


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code: 2 for a wrong call."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.corpus",
    description="Count a corpus: what its filters drop, and its tokens.",
    epilog=USAGE,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    add_help=False,
  )
  add_config(parser)
  return with_config(parser, arguments, lambda experiment, _: count(experiment))


def count(experiment: Experiment) -> None:
  """Prints the filters' report on each split, the vocabulary, and each split's size."""
  source = experiment.data
  if isinstance(source, Filtered):
    for split in SPLITS:
      print(f"{split}: {source.report(split)}", flush=True)
  start = time.perf_counter()
  encoder = fit_encoder(source, experiment.tokenizer)
  print(f"vocabulary {encoder.vocab:,} ({time.perf_counter() - start:.1f} s)", flush=True)
  for split in SPLITS:
    start = time.perf_counter()
    found = encode_split(source, encoder, split)
    tokens, seconds = len(found.tokens), time.perf_counter() - start
    print(
      f"{split}: {found.documents:,} documents, {tokens:,} tokens,"
      f" {found.text_bytes / max(1, tokens):.3f} bytes a token ({seconds:.1f} s)",
      flush=True,
    )


if __name__ == "__main__":
  sys.exit(main())
