"""Decoders, budgets and rows that the texts of the VQ-Logits study share.

The rows of a text differ only in the head. A head with codes is made of the trained full softmax,
the row "dense", and then fine-tuned; other heads are trained from scratch for as many steps in all.
A study has a small decoder that two cores train; `paper()` of its file has the decoder and the
schedule of the paper (Tables 4 and 5).
"""

import dataclasses
import pathlib
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Int

from experiments.studies.vq_logits.recluster import Recluster
from vqjax import CodebookHead, DenseEmbedding, DenseHead, Head, assign, convert, heads
from vqjax.lab import starting_points
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Source, TokenizerRecipe, Windows, encode_split, fit_tokenizer
from vqjax.lab.study import Row
from vqjax.lab.training import FromRun, read_run_variables
from vqjax.lm.models import Transformer

V = FROM_TOKENIZER


def small(data: Source, tokenizer: TokenizerRecipe, steps: int) -> Experiment:
  """A decoder of width 128 with two layers, on batches of 1,024 tokens, in float32."""
  shape, dtype, initial = (V, 128), jnp.float32, nn.initializers.normal(0.02)
  model = Transformer(
    embedding=DenseEmbedding(*shape, weight_init=initial, dtype=dtype),
    head=DenseHead(*shape, dtype=dtype),
    dim=128,
    layers=2,
    heads=4,
    context=64,
    dropout=0.1,
    dtype=dtype,
  )
  train = Train(batch=16, learning_rate=3e-3, warmup=100, weight_decay=0.1, keep=1, log_every=10)
  return Experiment("base", model, data, tokenizer, Windows(), _lasting(train, steps))


def small_tuning(base: Experiment, steps: int) -> Train:
  """The fine-tuning of the small decoder."""
  return _lasting(dataclasses.replace(base.train, learning_rate=1.5e-3), steps)


def paper_tuning(base: Experiment) -> Train:
  """The fine-tuning of the paper's decoders, that of Table 4's second column."""
  steps = min(50_000, base.train.steps // 5)
  return dataclasses.replace(base.train, learning_rate=5e-5, warmup=1000, steps=steps)


def _lasting(train: Train, steps: int) -> Train:
  """The training with so many steps, evaluated at its end."""
  return dataclasses.replace(train, steps=steps, eval_every=steps, save_every=max(1, steps // 4))


def main_rows(
  base: Experiment,
  tuning: Train,
  codes: tuple[int, ...],
  cutoffs: tuple[int, int],
  rank: int,
) -> dict[str, Row]:
  """The rows of the paper's Tables 1, 9 and 10.

  Args:
    base: the experiment of the full softmax.
    tuning: the fine-tuning.
    codes: the sizes of the codebooks, K.
    cutoffs: cutoffs of the adaptive softmax.
    rank: rank of the low-rank head.
  """
  dim, dtype = base.model.dim, base.model.dtype
  begun = {"train": tuning, "init_from": lambda base, run: FromRun(run("dense").folder)}
  adaptive = heads.AdaptiveHead(V, dim, cutoffs, dtype=dtype)
  as_paper = convert.ToCodebook(convert.KMeans())
  rows = {
    "dense": Row(label="Full softmax, before fine-tuning"),
    "full": Row(begun, "Full softmax"),
    "full-scratch": scratch(base, tuning, "Full softmax, from scratch", base.model.head),
    "adaptive": scratch(base, tuning, "Adaptive softmax", adaptive),
    "low-rank": scratch(base, tuning, f"Low-rank ({rank})", heads.LowRankHead(V, dim, rank)),
  }
  for k in codes:
    head = CodebookHead(V, dim, k, dtype=dtype)
    rows[f"vq-{k}"] = converted(tuning, f"VQ-Logits (K={k})", head, as_paper)
  return rows


def repeated(rows: dict[str, Row], names: Collection[str]) -> dict[str, Row]:
  """The rows, of which those that are named have all seeds of the study, and the others one."""
  return {n: row if n in names else dataclasses.replace(row, seeds=1) for n, row in rows.items()}


def scratch(base: Experiment, tuning: Train, label: str, head: Head, init_from: Any = None) -> Row:
  """A head trained from scratch for the steps of the full softmax and the fine-tuning."""
  steps = base.train.steps + tuning.steps
  train = dataclasses.replace(base.train, steps=steps, eval_every=steps, save_every=steps)
  return Row({"model.head": head, "train": train, "init_from": init_from}, label)


def converted(
  tuning: Train,
  label: str,
  head: Head,
  target: Any,
  recluster: Recluster | None = None,
  **options: Any,
) -> Row:
  """A head computed from the trained full softmax, then fine-tuned.

  Args:
    tuning: the fine-tuning.
    label: name in tables.
    head: the head.
    target: makes its variables, such as `convert.ToCodebook(...)`.
    recluster: moves tokens between codes during the fine-tuning.
    options: further arguments of `starting_points.converted`.
  """

  def made(base: Experiment, run: Any) -> Experiment:
    dense, folder = run("dense")
    of_head = {"name": base.name, "train": tuning, **options}
    one = starting_points.converted(dense, folder, head, target, **of_head)
    return dataclasses.replace(one, recluster=recluster)

  return Row(made, label)


def floors(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """The lowest test perplexities that the codes of a run allow.

  Returns:
    {"floors": {"uniform", "bias"}}, without and with a token bias; None for a head whose tokens do
    not share the scores of fixed codes.
  """
  if not isinstance(experiment.model.head, CodebookHead):
    return {"floors": None}
  assignment = read_assignment(folder)
  tokenizer = fit_tokenizer(experiment.data, experiment.tokenizer)
  test = encode_split(experiment.data, tokenizer, "test")
  counts = np.bincount(np.asarray(test.tokens), minlength=len(assignment))
  floor = lambda bias: assign.floor(assignment, counts, token_bias=bias).perplexity
  return {"floors": {"uniform": floor(False), "bias": floor(True)}}


def read_assignment(folder: pathlib.Path) -> Int[np.ndarray, "V"]:
  """The code of each token in the newest checkpoint of a run with a codebook."""
  variables = starting_points.student_of(read_run_variables(folder)[0])
  return variables["codes"]["head"]["assignment"]
