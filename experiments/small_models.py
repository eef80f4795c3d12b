"""stories260K and a GPT-2 that is trained here, through `vqjax compress`.

python -m experiments.small_models
python -m experiments.small_models --steps 100 --work runs/quick

The GPT-2 has the vocabulary of GPT-2 and a small body; it is trained on WikiText-2 and TinyStories.
Both models are compressed with text of both, of which the last fifth is held out. A second call
trains no model and compresses nothing again; the results are docs/results/compression-small.json.
"""

import argparse
import json
import pathlib
import shutil

import jax
import numpy as np
import optax

from vqjax.commands import compress
from vqjax.lab import exits
from vqjax.lab.training.provenance import provenance
from vqjax.lm import checkpoints, records, tokenizers
from vqjax.lm.sources.families import decoder_of
from vqjax.lm.texts import data_path, read_text
from vqjax.tables.container import MANIFEST

CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
BATCH = 4
TEXTS = ("wikitext-2/valid.txt", "tinystories/gpt2_tokens_val.decoded.txt")
TRAINED = ("wikitext-2/test.txt", "tinystories/gpt2_tokens_test.decoded.txt")
BOUNDS = (0.01, 0.05)


def train_gpt2(folder: pathlib.Path, steps: int) -> None:
  """Train the GPT-2 and write its folder."""
  model = decoder_of(CONFIG)
  tokens = np.zeros((1, model.context), np.int32)
  init = lambda key: model.init(key, tokens, tokens, method="log_prob")["params"]
  params = jax.jit(init)(jax.random.key(0))
  partial = folder.with_name(folder.name + ".partial")
  shutil.rmtree(partial, ignore_errors=True)
  # A tokenizer is read from the folder of a model.
  checkpoints.save(partial, model, {"params": params})
  for name in ("vocab.json", "merges.txt"):
    shutil.copyfile(data_path("tokenizers/gpt2") / name, partial / name)
  tokenizer = tokenizers.load_tokenizer(partial)
  pieces = [np.asarray(tokenizer.encode(read_text(data_path(path))), np.int32) for path in TRAINED]
  length = model.context + 1
  rows = np.concatenate([p[: len(p) // length * length].reshape(-1, length) for p in pieces])
  schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 20 + 1, steps)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.98))

  def loss(params, tokens):
    found = model.apply({"params": params}, tokens[:, :-1], tokens[:, 1:], method="log_prob")
    return -found.mean()

  @jax.jit
  def step(params, state, tokens):
    value, gradient = jax.value_and_grad(loss)(params, tokens)
    change, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, change), state, value

  state = optimizer.init(params)
  draw = np.random.default_rng(0)
  for number in range(steps):
    params, state, value = step(params, state, rows[draw.integers(0, len(rows), BATCH)])
    if number % 25 == 0 or number == steps - 1:
      print(f"step {number}: {value:.3f} nats", flush=True)
  shutil.rmtree(partial)
  checkpoints.save(partial, model, {"params": params}, tokenizer)
  partial.rename(folder)


def main() -> int:
  """Run the experiment, or go on with it."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/small_models"))
  parser.add_argument("--json", type=pathlib.Path, help="results (default: WORK/results.json)")
  parser.add_argument("--steps", type=int, default=600, help="steps of training")
  options = parser.parse_args()
  options.work.mkdir(parents=True, exist_ok=True)
  gpt2 = options.work / "gpt2"
  if not gpt2.is_dir():
    train_gpt2(gpt2, options.steps)
  models = {"stories260K": data_path("stories260K/stories260K.bin"), "GPT-2, trained here": gpt2}
  rows = []
  for number, (name, path) in enumerate(models.items()):
    for bound in BOUNDS:
      out = options.work / f"{number}-{bound:g}"
      call = [str(path), "--kl", str(bound), "--out", str(out), "--window", "128"]
      texts = [str(data_path(text)) for text in TEXTS]
      code = 0 if out.is_dir() else compress.main([*call, "--text", *texts])
      if code:
        return code
      made = json.loads((out / MANIFEST).read_text("utf-8"))
      report, (table,) = made["report"], made["tables"].values()
      held = {key: value for key, value in report["held_out"].items() if key != "domains"}
      row = {"model": name, "bound": bound, "shape": table["shape"], "bytes": table["bytes"]}
      rows.append(row | held | {key: report[key] for key in ("seconds", "peak_bytes")})
  result = {"rows": rows, "steps": options.steps, "provenance": provenance()}
  records.write(options.json or options.work / "results.json", result)
  print(shown(result))
  return 0


def shown(result) -> str:
  """The results as a table in Markdown."""
  line = lambda *cells: f"| {' | '.join(map(str, cells))} |"
  columns = "`--kl`", "bytes", "bits a number", "KL", "same best token, %", "nats, before"
  lines = [line("model", "table", *columns), f"|---|---|{'---:|' * len(columns)}"]
  for row in result["rows"]:
    vocab, dim = row["shape"]
    sizes = f"{row['bound']:g}", f"{row['bytes']:,}", f"{8 * row['bytes'] / (vocab * dim):.2f}"
    nats = f"{row['nats']:.4f}, {row['nats_before']:.4f}"
    found = f"{row['kl']:.4f}", f"{100 * row['top1']:.1f}", nats
    lines.append(line(row["model"], f"{vocab:,}×{dim}", *sizes, *found))
  return "\n".join(lines)


if __name__ == "__main__":
  exits.run_main(main)
