"""Gemma 3 270M with its table in block types of GGUF, rounded as llama.cpp does and fitted.

python -m experiments.gguf_types --model gemma-3-270m-q4_k_m.gguf --work runs/gemma
python -m experiments.gguf_types --model gemma-3-270m-q4_k_m.gguf --types Q4_0 --tokens 2000

The table is tied: inputs and outputs both use the one of the type. Held-out text and moments are
those of `experiments.gemma_compression`, in its folder. An interrupted call goes on where it was.
"""

import argparse
import dataclasses
import pathlib
import time
from typing import Any

import gguf
import numpy as np

from experiments.gemma_compression import DOMAINS, WINDOW, read_domains, spread_windows
from vqjax.lab import exits
from vqjax.lab.training.provenance import provenance
from vqjax.lm import checkpoints, records
from vqjax.lm.compression.exports import ROWS
from vqjax.lm.compression.folders import read_moments
from vqjax.lm.compression.judging import Reference, summary, with_tables
from vqjax.lm.texts import data_path
from vqjax.tables import gguf_types

TYPES = ("Q8_0", "Q5_0", "IQ4_NL", "Q4_0")
"""Types for rows of 640 columns, which blocks of 256 do not divide."""


@dataclasses.dataclass
class _Row:
  """The table in a type."""

  type: str
  way: str
  tokens_wanted: int
  bytes: int
  seconds: float
  found: dict[str, Any]


def main() -> int:
  """Run the experiment, or go on with it."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--model", required=True, help="Gemma 3 270M: a GGUF or a folder")
  parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/gemma"))
  parser.add_argument("--json", type=pathlib.Path, help="results (default: WORK/gguf_types.json)")
  parser.add_argument("--tokens", type=int, default=20320, help="held-out tokens of all domains")
  parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
  options = parser.parse_args()
  moments = read_moments(options.work / "moments.safetensors")
  model, variables, tokenizer = checkpoints.load(data_path(options.model, kind="--model"))
  held_out = read_domains(tokenizer, model.head.vocab, options.work / "texts.npz").held_out
  known = [number for number, name in enumerate(held_out.names) if name in DOMAINS]
  is_known = np.isin(held_out.domain, known)
  held_out = dataclasses.replace(
    held_out, tokens=held_out.tokens[is_known], domain=held_out.domain[is_known]
  )
  some = spread_windows(held_out, max(1, options.tokens // (len(DOMAINS) * (WINDOW - 2))))
  table = np.asarray(variables["params"]["embedding"]["weight"])
  path = options.work / "gguf_types.jsonl"
  done = records.read_json_rows(path, _Row)
  reference = None
  for name in options.types:
    for way, metric in (("rounded", None), ("fitted", moments.metric())):
      key = name, way, options.tokens
      if key in [(row["type"], row["way"], row["tokens_wanted"]) for row in done.rows]:
        continue
      begun = time.monotonic()
      other, size = np.empty_like(table), 0
      for first in range(0, len(table), ROWS):
        packed = gguf_types.encode_blocks(name, table[first : first + ROWS], metric)
        other[first : first + ROWS] = gguf.dequantize(packed, gguf.GGMLQuantizationType[name])
        size += packed.nbytes
      seconds = time.monotonic() - begun
      reference = reference or Reference(model, variables, some)
      (found,) = reference.compare([with_tables(variables, {"embedding": other})])
      row = _Row(name, way, options.tokens, size, seconds, summary(found, some))
      sealed = records.sealed(dataclasses.asdict(row), done.checksums[-1] if done.checksums else "")
      with open(path, "a", encoding="utf-8") as out:
        out.write(records.dumps(sealed))
      done.rows.append(sealed)
      done.checksums.append(sealed[records.CHECKSUM])
      print(f"{name} {way}: {size:,} bytes, KL {row.found['kl']:.5f}, {seconds:.0f} s", flush=True)
  rows = [row for row in done.rows if row["tokens_wanted"] == options.tokens]
  fields = [field.name for field in dataclasses.fields(_Row)]
  result = {
    "rows": [{name: row[name] for name in fields} for row in rows],
    "provenance": provenance(),
  }
  records.write(options.json or options.work / "gguf_types.json", result)
  return 0


if __name__ == "__main__":
  exits.run_main(main)
