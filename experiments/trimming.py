"""Gemma 3 270M without the tokens that English texts do not use.

python -m experiments.trimming --model gemma-3-270m-q4_k_m.gguf
python -m experiments.trimming --show docs/results/trimming.json

Texts are those of $VQJAX_DATA. The first nine tenths of each are counted, the rest is measured.
"""

import argparse
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from vqjax.lab import exits
from vqjax.lab.training.provenance import provenance
from vqjax.lm import records
from vqjax.lm.compression.trimming import trim
from vqjax.lm.texts import data_path, read_text

TEXTS = "wikitext-2/valid.txt", "tinystories/stories_val_yuninxia.txt", "ag_news/test.csv"


def main() -> int:
  """Run the experiment, or print the table of a result."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  what = parser.add_mutually_exclusive_group(required=True)
  what.add_argument("--model", help="Gemma 3 270M: a GGUF or a folder")
  what.add_argument("--show", type=pathlib.Path, metavar="JSON", help="print the table of results")
  parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("runs/trimming.json"))
  parser.add_argument("--keep-tokens", type=int, default=32_768, metavar="N")
  parser.add_argument("--scored", type=int, default=9000, help="characters that are scored")
  options = parser.parse_args()
  if options.show:
    print(shown(json.loads(options.show.read_text("utf-8"))))
    return 0
  settings = {"texts": TEXTS, "keep_tokens": options.keep_tokens, "scored": options.scored}
  made_by = provenance()
  texts = [read_text(data_path(name, kind="text")) for name in TEXTS]
  with tempfile.TemporaryDirectory() as folder:
    path, out = data_path(options.model, kind="--model"), pathlib.Path(folder) / "model"
    report = trim(path, out, options.keep_tokens, texts, scored=options.scored)
  result = dataclasses.asdict(report) | {"settings": settings, "provenance": made_by}
  records.write(options.json, result)
  print(shown(result))
  return 0


def shown(result: Mapping[str, Any]) -> str:
  """The result as a table in Markdown."""
  of = result.__getitem__
  rows = {
    "Gemma 3 270M": ("before", "after"),
    "tokens of the vocabulary": (
      f"{of('vocab'):,}",
      f"{of('kept'):,}, of which {of('required'):,} are special or bytes",
    ),
    "vocabulary table": (
      f"{of('table_bytes') / 1e6:.1f} MB",
      f"{of('table_bytes_after') / 1e6:.1f} MB",
    ),
    "tokens of the held-out text": (
      f"{of('tokens'):,}",
      f"{of('tokens_after'):,}; {100 * of('coverage'):.1f} % were kept,"
      f" {100 * of('spelled'):.2f} % are bytes",
    ),
    "lines that decoding restores": (
      f"{of('restored'):,} of {of('lines'):,}",
      f"{of('restored_after'):,} of {of('lines'):,}",
    ),
    "nats a byte": (f"{of('nats_per_byte'):.4f}", f"{of('nats_per_byte_after'):.4f}"),
  }
  head, *lines = (f"| {' | '.join([name, *cells])} |" for name, cells in rows.items())
  return "\n".join([head, "|---|---|---|", *lines])


if __name__ == "__main__":
  exits.run_main(main)
