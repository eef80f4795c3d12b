"""Lenses of several models: how far each block is from what the model predicts.

python -m experiments.tuned_lens
python -m experiments.tuned_lens --model gemma-3-270m-q4_k_m.gguf --steps 0
python -m experiments.tuned_lens --show docs/results/lens.json

Without a model it trains small decoders on docstrings, with an untied, a tied, a codebook and a
grouped head, and takes stories260K from $VQJAX_DATA. The text of a pretrained model is that of
experiments.gemma_compression, all eight domains in turn; the last sixteenth is held out. The
results are added to docs/results/lens.json.
"""

import argparse
import json
import pathlib

from experiments import gemma_compression
from vqjax.commands.models import load_model
from vqjax.lab import exits
from vqjax.lab.config import load_config, override
from vqjax.lab.training import fit
from vqjax.lab.training.provenance import provenance
from vqjax.lm.lenses.fitting import LensJob, fit_lens
from vqjax.lm.texts import data_path
from vqjax.outputs import write_text

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/lens.json"

CONFIGS = {
  "docstrings, untied": "lm_dense",
  "docstrings, tied": "lm_tied",
  "docstrings, codebook": "lm_codebook",
  "docstrings, grouped": "lm_grouped",
}
"""Runs of ours, of four blocks."""

CHANGES = ("model.layers=4",)

PIECE = 2**10
"""Characters of a domain before the next one's."""


def main() -> int:
  """Run the command."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--model", metavar="FILE", help="a pretrained model")
  parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/lens"))
  parser.add_argument("--steps", type=int, default=250, help="steps of descent")
  parser.add_argument("--batch", type=int, default=256, help="positions of a step")
  parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="results in JSON")
  parser.add_argument("--show", type=pathlib.Path, metavar="FILE", help="print the tables")
  options = parser.parse_args()
  if options.show:
    print(shown(json.loads(options.show.read_text("utf-8"))))
    return 0
  options.work.mkdir(parents=True, exist_ok=True)
  if options.model:
    jobs = [(pathlib.Path(options.model).stem, options.model, None)]
  else:
    for config in CONFIGS.values():
      fit(override(load_config(ROOT / f"configs/{config}.py"), CHANGES), options.work / config)
    jobs = [("stories260K", "stories260K/stories260K.bin", None)]
    jobs += [(name, str(options.work / config), config) for name, config in CONFIGS.items()]
  for name, model, config in jobs:
    measure_lens(options, name, model, config)
  print(shown(json.loads(options.out.read_text("utf-8"))))
  return 0


def measure_lens(options, name: str, model: str, config: str | None) -> None:
  """Fit a lens on a model and add its divergences to the results."""
  if config is None:
    loaded, text = load_model(model), mixed()
    if name == "stories260K":
      stories = data_path("tinystories/gpt2_tokens_test.decoded.txt").read_text("utf-8")
      text = stories[: 2**19].replace("<|endoftext|>", "\n")
  else:
    path = ROOT / f"configs/{config}.py"
    loaded = load_model(model, str(path), CHANGES)
    text = "\n".join(load_config(path).data.documents("valid"))
  out = options.work / f"{name}.safetensors"
  out.unlink(missing_ok=True)
  job = LensJob(data_path(model), text, out, steps=options.steps, batch=options.batch)
  found = fit_lens(job, loaded, lambda line: print(f"{name}: {line}", flush=True))
  settings = {key: getattr(job, key) for key in ("positions", "steps", "batch", "window", "rate")}
  known = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
  known[name] = {**found, "settings": settings, **provenance()}
  write_text(options.out, json.dumps(known, indent=1) + "\n")


def mixed() -> str:
  """Pieces of all domains in turn for the fit, and at the end what is held out."""
  sides = [gemma_compression.split(name) for name in gemma_compression.DOMAINS]
  piece = lambda side, first: "\n".join(both[side][first : first + PIECE] for both in sides)
  return "\n".join([*(piece(0, number * PIECE) for number in range(16)), piece(1, 0)])


def shown(results) -> str:
  """The results before some blocks as a table in Markdown: logit lens, tuned lens."""
  line = lambda *cells: f"| {' | '.join(map(str, cells))} |"
  columns = "model", "blocks", "before the first", "before the middle", "before the last"
  rows = [line(*columns), f"|---|{'---:|' * (len(columns) - 1)}"]
  for name, result in results.items():
    blocks = len(result["logit"])
    pairs = (
      f"{result['logit'][at]:.3f}, {result['tuned'][at]:.3f}" for at in (0, blocks // 2, blocks - 1)
    )
    rows.append(line(name, blocks, *pairs))
  return "\n".join(rows)


if __name__ == "__main__":
  exits.run_main(main)
