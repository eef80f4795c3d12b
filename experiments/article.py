"""Sizes and costs of the output heads of known models, beside those of an article on output heads.

python -m experiments.article             print the tables and rewrite docs/results/article.md
python -m experiments.article --measure   first ask XLA for the memory of losses, a minute or two

Everything but the memory of losses follows from `MODELS`. A number of the article counts as wrong
if it differs from the computed one by more than half a unit of its last digit and by more than 3 %.
"""

import argparse
import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pandas as pd
from rich.console import Console

from experiments.bench import losses, measure
from experiments.studies import study_page
from vqjax.lab import chips, exits
from vqjax.lab.report import units
from vqjax.lab.report.frames import markdown, show_frame
from vqjax.lab.training.provenance import provenance
from vqjax.lm import records

PAGE = study_page.DOCS / "results" / "article.md"
RESULTS = PAGE.with_suffix(".json")

CONTEXT = 4096
"""Tokens of a training sequence, and tokens in the cache of a decoding step."""
MICRO_BATCH = 4096
"""Tokens of the article's micro-batch."""
DEVICES = 8
"""Devices of its tensor parallelism."""
BF16, F32 = 2, 4


@dataclasses.dataclass(frozen=True)
class Model:
  """The configuration of a decoder.

  Attributes:
    vocab: rows of the table, V, as released: some are padding.
    dim: width of the hidden vectors, D.
    layers: number of layers.
    heads: heads of the queries.
    kv_heads: heads of the keys and values.
    mlp: width of the MLP.
    tied: whether inputs and outputs share one table.
    source: folder of config.json on huggingface.co, or the paper.
    head_dim: width of a head; None: dim / heads.
    gated: whether the MLP has a third matrix.
    experts: MLPs of a layer.
    active: MLPs that a token uses.
    norms: vectors [D] of a layer's norms.
    norm_bias: whether norms have an offset too, and matrices a bias.
    qk_norm: whether queries and keys have a norm each.
    positions: rows of a table of positions.
    window: tokens that a local layer attends to; None: no layer is local.
    global_layers: layers without the window.
  """

  vocab: int
  dim: int
  layers: int
  heads: int
  kv_heads: int
  mlp: int
  tied: bool
  source: str
  head_dim: int | None = None
  gated: bool = True
  experts: int = 1
  active: int = 1
  norms: int = 2
  norm_bias: bool = False
  qk_norm: bool = False
  positions: int = 0
  window: int | None = None
  global_layers: int = 0

  @property
  def table(self) -> int:
    """Parameters of one table, V·D."""
    return self.vocab * self.dim

  @property
  def width(self) -> int:
    """Width of a head."""
    return self.head_dim or self.dim // self.heads

  @property
  def attention(self) -> int:
    """Weights of a layer's four projections."""
    return self.dim * self.width * 2 * (self.heads + self.kv_heads)

  def layer(self, experts: int) -> int:
    """Weights of a layer's matrices with some of its MLPs."""
    router = self.dim * self.experts if self.experts > 1 else 0
    return self.attention + experts * (2 + self.gated) * self.dim * self.mlp + router

  @property
  def parameters(self) -> int:
    """All parameters."""
    of_norms = (1 + self.norm_bias) * self.dim
    biases = 0
    if self.norm_bias:
      biases = self.width * (self.heads + 2 * self.kv_heads) + self.mlp + 2 * self.dim
    small = self.norms * of_norms + biases + 2 * self.width * self.qk_norm
    tables = (1 if self.tied else 2) * self.table + self.positions * self.dim
    return tables + of_norms + self.layers * (self.layer(self.experts) + small)

  @property
  def body_flops(self) -> int:
    """Operations of the layers' matrices for a token."""
    return 2 * self.layers * self.layer(self.active)

  @property
  def head_flops(self) -> int:
    """Operations of the output head for a token."""
    return 2 * self.table

  def attended(self, context: int) -> int:
    """Positions that all layers together attend to, for the last token of a context.

    A model with a table of positions attends to no more than it has.
    """
    context = min(context, self.positions or context)
    local = self.layers - self.global_layers if self.window else 0
    return (self.layers - local) * context + local * min(context, self.window or 0)

  def attention_flops(self, positions: float) -> float:
    """Operations of scores and mixtures with some positions of all layers together."""
    return 4 * self.heads * self.width * positions

  @property
  def decoding_share(self) -> float:
    """The head's part of the operations of a decoding step with `CONTEXT` tokens in the cache."""
    other = self.body_flops + self.attention_flops(self.attended(CONTEXT))
    return self.head_flops / (self.head_flops + other)

  @property
  def training_share(self) -> float:
    """The head's part of the operations of a training step on sequences of `CONTEXT` tokens."""
    mean = sum(map(self.attended, range(1, CONTEXT + 1))) / CONTEXT
    other = self.body_flops + self.attention_flops(mean)
    return self.head_flops / (self.head_flops + other)

  @property
  def head_bytes(self) -> int:
    """Bytes of the output table in bfloat16."""
    return BF16 * self.table

  @property
  def decoded_bytes(self) -> int:
    """Bytes that one sequence's decoding step reads: active weights, one table, and the cache.

    Of an untied input table it reads a row, which is not counted.
    """
    weights = self.layers * self.layer(self.active) + self.table
    cache = 2 * self.kv_heads * self.width * self.attended(CONTEXT)
    return BF16 * (weights + cache)


_LLAMA_3 = {"vocab": 128_256, "kv_heads": 8}
_MISTRAL = {"vocab": 32_000, "dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "mlp": 14_336}
_QWEN_3 = {"vocab": 151_936, "kv_heads": 8, "head_dim": 128, "qk_norm": True}
_GEMMA_3 = {"norms": 4, "qk_norm": True, "tied": True}

# fmt: off
MODELS: Mapping[str, Model] = {
  "GPT-2": Model(50_257, 768, 12, 12, 12, 3072, True, "openai-community/gpt2",
                 gated=False, norm_bias=True, positions=1024),
  "GPT-3 175B": Model(50_257, 12_288, 96, 96, 96, 49_152, True, "arXiv 2005.14165, Table 2.1",
                      gated=False, norm_bias=True, positions=2048),
  "PaLM 540B": Model(256_000, 18_432, 118, 48, 1, 73_728, True, "arXiv 2204.02311, Table 1",
                     head_dim=256, norms=1),
  "Llama 2 7B": Model(32_000, 4096, 32, 32, 32, 11_008, False, "meta-llama/Llama-2-7b-hf"),
  "Llama 3.2 1B": Model(dim=2048, layers=16, heads=32, mlp=8192, tied=True,
                        source="meta-llama/Llama-3.2-1B", **_LLAMA_3),
  "Llama 3 8B": Model(dim=4096, layers=32, heads=32, mlp=14_336, tied=False,
                      source="meta-llama/Meta-Llama-3-8B", **_LLAMA_3),
  "Llama 3 70B": Model(dim=8192, layers=80, heads=64, mlp=28_672, tied=False,
                       source="meta-llama/Meta-Llama-3-70B", **_LLAMA_3),
  "Llama 3.1 405B": Model(dim=16_384, layers=126, heads=128, mlp=53_248, tied=False,
                          source="meta-llama/Llama-3.1-405B", **_LLAMA_3),
  "Mistral 7B": Model(tied=False, source="mistralai/Mistral-7B-v0.1", window=4096, **_MISTRAL),
  "Mixtral 8x7B": Model(tied=False, source="mistralai/Mixtral-8x7B-v0.1", experts=8, active=2,
                        **_MISTRAL),
  "Gemma 2B": Model(256_000, 2048, 18, 8, 1, 16_384, True, "google/gemma-2b", head_dim=256),
  "Gemma 7B": Model(256_000, 3072, 28, 16, 16, 24_576, True, "google/gemma-7b", head_dim=256),
  "Qwen 3 0.6B": Model(dim=1024, layers=28, heads=16, mlp=3072, tied=True,
                       source="Qwen/Qwen3-0.6B", **_QWEN_3),
  "Qwen 3 8B": Model(dim=4096, layers=36, heads=32, mlp=12_288, tied=False,
                     source="Qwen/Qwen3-8B", **_QWEN_3),
  "Qwen 3 32B": Model(dim=5120, layers=64, heads=64, mlp=25_600, tied=False,
                      source="Qwen/Qwen3-32B", **_QWEN_3),
  "Gemma 3 270M": Model(262_144, 640, 18, 4, 1, 2048, source="google/gemma-3-270m", head_dim=256,
                        window=512, global_layers=3, **_GEMMA_3),
  "Gemma 3 1B": Model(262_144, 1152, 26, 4, 1, 6912, source="google/gemma-3-1b-pt", head_dim=256,
                      window=512, global_layers=4, **_GEMMA_3),
  "Gemma 3 4B": Model(262_208, 2560, 34, 8, 4, 10_240, source="google/gemma-3-4b-pt", head_dim=256,
                      window=1024, global_layers=5, **_GEMMA_3),
  "Gemma 3 27B": Model(262_208, 5376, 62, 32, 16, 21_504, source="google/gemma-3-27b-pt",
                       head_dim=128, window=1024, global_layers=10, **_GEMMA_3),
}
# fmt: on
"""Decoders that the article names, then Llama 3, Qwen 3 and Gemma 3; of the last the text model."""


SHOWN = (
  "GPT-2",
  "GPT-3 175B",
  "Llama 3.2 1B",
  "Llama 3 8B",
  "Llama 3.1 405B",
  "Mixtral 8x7B",
  "Gemma 7B",
  "Qwen 3 0.6B",
  "Gemma 3 270M",
  "Gemma 3 4B",
)
"""The models of the page: the ends of each range of its claims, and a size between them."""


@dataclasses.dataclass(frozen=True)
class Claim:
  """A number of the article.

  Attributes:
    about: the quantity.
    printed: the article's text; None: it stands in a formula that the text does not have.
    value: the computed number in the unit of the text.
    basis: what was computed.
  """

  about: str
  printed: str | None
  value: float
  basis: str

  @property
  def holds(self) -> bool:
    """Whether the computed number is the article's to its last digit, or within 3 %."""
    if self.printed is None:
      return True
    digits = re.search(r"[\d,]*\.?\d+", self.printed)[0].replace(",", "")
    unit = 10.0 ** -len(digits.partition(".")[2])
    return abs(self.value - float(digits)) <= max(unit / 2, 0.03 * abs(self.value))


def claims() -> list[Claim]:
  """The article's numbers that follow from configurations."""
  m = MODELS
  made = []
  tying = {
    "GPT-2": ("124 M", "77.2 M", "38.6 M", "31.1 %", "10 layers"),
    "Llama 2 7B": ("6.7 G", "262 M", "131 M", "1.9 %", "1 layer"),
    "Llama 3 8B": ("8.0 G", "1,049 M", "524 M", "6.5 %", "3 layers"),
    "Llama 3 70B": ("70 G", "2,097 M", "1,049 M", "1.5 %", "1 layer"),
    "Llama 3.1 405B": ("405 G", "4,194 M", "2,097 M", "0.5 %", "0.5 layers"),
  }
  for name, (everything, untied, saved, share, layers) in tying.items():
    model = m[name]
    part = 100 * model.table / model.parameters
    scale = 1e6 if everything.endswith("M") else 1e9
    made += [
      Claim(f"{name}: parameters", everything, model.parameters / scale, "as released"),
      Claim(f"{name}: two tables", untied, 2 * model.table / 1e6, "2·V·D"),
      Claim(f"{name}: one table", saved, model.table / 1e6, "V·D"),
      Claim(f"{name}: one table of all parameters", share, part, "V·D / parameters"),
      Claim(
        f"{name}: layers of the size of one table",
        layers,
        model.table / model.layer(model.experts),
        "V·D / matrices of a layer",
      ),
    ]
  large, chip = m["Llama 3 70B"], chips.GPUS["H100"]
  qkv = 2 * 3 * large.dim**2
  shared_qkv = 2 * large.dim * large.width * (large.heads + 2 * large.kv_heads)
  logits = MICRO_BATCH * large.vocab
  intensity = large.head_flops / large.head_bytes
  other = large.decoded_bytes - large.head_bytes
  palm = m["PaLM 540B"]
  made += [
    Claim("Llama 3 tables over Llama 2 tables", "4-fold", m["Llama 3 8B"].table
          / m["Llama 2 7B"].table, "D = 4,096"),
    Claim("Llama 3 70B: table in bfloat16", "2.1 GB", large.head_bytes / 1e9, "2·V·D bytes"),
    Claim("Llama 3 70B: all weights in bfloat16", "140 GB", BF16 * large.parameters / 1e9, ""),
    Claim("Adam's moments of a billion parameters", "6 GB", 2 * F32,
          "two float32 numbers; with a float32 copy of the weights 12 GB"),
    Claim("head of a token, D = 8,192", "2.1 GFLOP", large.head_flops / 1e9, "2·V·D"),
    Claim("QKV of a token and layer, D = 8,192", "400 GFLOP", qkv / 1e9,
          f"6·D²; of 80 layers {80 * qkv / 1e9:.0f}; with Llama 3's 8 key heads"
          f" {shared_qkv / 1e9:.2f} and {80 * shared_qkv / 1e9:.1f}"),
    Claim("head over QKV of a layer", "0.5 %", 100 * large.head_flops / qkv,
          f"2·V·D / 6·D²; of 80 layers {100 * large.head_flops / (80 * qkv):.1f} %"),
    Claim("operations of the head a byte, one token", "1.0", intensity, "bfloat16"),
    Claim("operations of the head a byte, 128 tokens", "128", _intensity(large, 128),
          "2·B·V·D / bytes of table, vectors and logits in bfloat16"),
    Claim("H100: operations a byte over the head's", "295",
          chip.flops / chip.bandwidth / intensity, "989 TFLOP/s, 3.35 TB/s"),
    Claim("H100: load of the head's table, ms", None, 1e3 * large.head_bytes / chip.bandwidth,
          "2·V·D bytes / 3.35 TB/s"),
    Claim("rows of a device of 8", "16,000", large.vocab / DEVICES, "V / 8"),
    Claim("its part of the table, MB", None, large.head_bytes / DEVICES / 1e6, "2·V·D / 8 bytes"),
    Claim("all-gather of a token's logits, KB", None, _gathered(large) / 1e3,
          "7/8 of 2·V bytes, received by each of 8 devices"),
    Claim("logits of a token in bfloat16", "256 KB", BF16 * large.vocab / 1e3, "2·V bytes"),
    Claim("logits of 4,096 tokens, materialised", "2 GB", F32 * logits / 1e9, "float32"),
    Claim("the same logits, before 8 chunks", "1 GB", BF16 * logits / 1e9,
          "bfloat16: half of the number above"),
    Claim("a chunk of them", "128 MB", BF16 * logits / 8 / 1e6, "bfloat16"),
    Claim("Llama 3 70B: head's share of a decoding step's operations", "1 %",
          100 * large.decoding_share, f"{CONTEXT:,} tokens in the cache"),
    Claim("Llama 3 70B: head's share of a decoding step's bytes", "5 to 8 %",
          100 * large.head_bytes / (large.head_bytes + other),
          f"bfloat16, without the input table, with a cache of {CONTEXT:,} tokens"),
    Claim("PaLM 540B: table of all parameters, \"less than\"", "0.5 %",
          100 * palm.table / palm.parameters, "V·D / parameters"),
  ]  # fmt: skip
  return made


def _intensity(model: Model, batch: int) -> float:
  """Operations of the head over the bytes that it reads and writes for a batch of tokens."""
  numbers = model.table + batch * (model.dim + model.vocab)
  return batch * model.head_flops / (BF16 * numbers)


def _gathered(model: Model) -> float:
  """Bytes that each of `DEVICES` devices receives where all get all logits of a token."""
  return (DEVICES - 1) / DEVICES * BF16 * model.vocab


def models_table() -> pd.DataFrame:
  """What the head of each model costs, of all parameters, operations and bytes."""
  rows = []
  for name, model in MODELS.items():
    # Two all-reduces of a vector in each layer send a value around the ring twice, a gather once.
    layers = 2 * (DEVICES - 1) / DEVICES * 2 * model.layers * model.dim * BF16
    rows.append({
      "model": name,
      "V": f"{model.vocab:,}",
      "D": f"{model.dim:,}",
      "parameters, G": f"{model.parameters / 1e9:.3g}",
      "tables": "1" if model.tied else "2",
      "one table, %": f"{100 * model.table / model.parameters:.1f}",
      "training, %": f"{100 * model.training_share:.1f}",
      "decoding, %": f"{100 * model.head_bytes / model.decoded_bytes:.1f}",
      "logits, MiB": f"{F32 * MICRO_BATCH * model.vocab / 2**20:,.0f}",
      "gathered, %": f"{100 * _gathered(model) / layers:.1f}",
    })  # fmt: skip
  return pd.DataFrame(rows)


def wrong_claims() -> pd.DataFrame:
  """The article's numbers that differ from the computed ones."""
  return pd.DataFrame(
    {
      "quantity": claim.about,
      "article": claim.printed,
      "computed": f"{claim.value:,.4g}" if claim.value < 1000 else f"{claim.value:,.0f}",
      "of": claim.basis or None,
    }
    for claim in claims()
    if not claim.holds
  )


MEASURED = ("Llama 3 8B", "Gemma 3 270M")
"""Models of which XLA compiles the loss."""

LOSSES = {
  "materialised": losses.materialised_loss,
  "token chunks of 512, recomputed": losses.chunked_loss(512),
  "tiles, `linear_log_prob`": losses.tiled_loss(),
}


def measured_memory() -> dict[str, Any]:
  """XLA's account of the memory of a loss and its gradient; nothing is allocated."""
  rows = []
  for name in MEASURED:
    model = MODELS[name]
    arguments = (
      jax.ShapeDtypeStruct((MICRO_BATCH, model.dim), jnp.float32),
      jax.ShapeDtypeStruct((model.vocab, model.dim), jnp.float32),
      jax.ShapeDtypeStruct((MICRO_BATCH,), jnp.int32),
    )
    for title, loss in LOSSES.items():
      for kind, function in (("loss", loss), ("loss and gradient", losses.gradient(loss))):
        compiled = jax.jit(function).lower(*arguments).compile()
        temporaries = measure.temp_bytes(compiled)
        rows.append({"model": name, "program": title, "of": kind, "bytes": temporaries})
        print(f"{name}, {title}, {kind}: {units.size(temporaries)}", flush=True)
  return {"tokens": MICRO_BATCH, "rows": rows, "provenance": provenance()}


def memory_table(result: Mapping[str, Any]) -> pd.DataFrame:
  """Temporaries of each loss, with and without its gradient."""
  table: dict[tuple, dict[str, Any]] = {}
  for row in result["rows"]:
    model = MODELS[row["model"]]
    key = row["model"], row["program"]
    shown = table.setdefault(key, {"model": key[0], "program": key[1]})
    shown[f"{row['of']}, MiB"] = f"{row['bytes'] / 2**20:,.1f}"
    logits = F32 * result["tokens"] * model.vocab
    shown[f"{row['of']}, of the logits"] = f"{row['bytes'] / logits:.2f}×"
  return pd.DataFrame(table.values())


def article_tables(result: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
  """The tables of the page by their markers."""
  return {
    "claims": wrong_claims(),
    "models": models_table(),
    "memory": memory_table(result),
  }


def update(path: pathlib.Path, result: Mapping[str, Any]) -> bool:
  """Rewrite the page's tables and the CSV files; return whether the page changed."""
  made_by = result["provenance"]
  origin = (
    f"XLA of jaxlib {made_by['versions']['jaxlib']} for {made_by['device']}, float32,"
    f" {result['tokens']:,} tokens; {made_by['date'][:10]}, commit {made_by['commit']}."
  )
  tables = article_tables(result)
  for name in ("models", "claims"):
    study_page.save_table(path.with_name(f"article-{name}.csv"), tables[name])
  tables["models"] = tables["models"][tables["models"]["model"].isin(SHOWN)].drop(columns="tables")
  blocks = {name: markdown(table) for name, table in tables.items()}
  count = sum(claim.printed is not None for claim in claims())
  blocks["claims"] = (
    f"{len(tables['claims'])} of the {count} numbers of an article on output heads are wrong by"
    " more than half a unit of the last digit and by more than 3 % ([all](article-claims.csv))."
  )
  blocks["memory"] += f"\n\n{origin}"
  return study_page.update_page(path, blocks)


def main() -> int:
  """Print the tables and rewrite the page."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--measure", action="store_true", help="compile the losses again")
  options = parser.parse_args()
  if options.measure:
    records.write(RESULTS, measured_memory())
  result = json.loads(RESULTS.read_text("utf-8"))
  for name, table in article_tables(result).items():
    show_frame(Console(), name, table)
  update(PAGE, result)
  return 0


if __name__ == "__main__":
  exits.run_main(main)
