"""Trained dense heads, compressed after their training to a fraction of their bytes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.studies.measure import held_out_scores
from vqjax import compression
from vqjax.checkpoints import table_file
from vqjax.convert import part_of, with_part
from vqjax.heads import DenseHead
from vqjax.lab.config import Experiment
from vqjax.lab.training import read_variables
from vqjax.lab.training.run import EncodedText, load_text
from vqjax.lab.training.step import carried

Method = Callable[[np.ndarray, np.ndarray, compression.Moments, int], tuple[nn.Module, dict, int]]
"""(weight, bias, moments, bytes) -> the head of inference, its variables, its bytes."""


HIDDEN_STATES = 2**17
"""Hidden states whose second moment is taken."""


def half(values: np.ndarray) -> np.ndarray:
  """Values rounded to float16, in float32."""
  return np.asarray(values, np.float16).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class InFile:
  """A table in an entropy-coded file, and biases in float16, with the smallest step that fits.

  Attributes:
    within: part of the bytes that may be left.
  """

  within: float = 0.002

  def __call__(
    self, weight: np.ndarray, bias: np.ndarray, moments: compression.Moments, size: int
  ) -> tuple[nn.Module, dict, int]:
    """The dense head of the rows that the file has; see `Method`."""
    vocab, dim = weight.shape
    step, best = 0.1, None
    for _ in range(12):
      quantized = compression.quantize(weight, moments, step)
      used = sum(part.nbytes for part in table_file.encode(quantized).values()) + 2 * vocab
      if used <= size and (best is None or used > best[1]):
        best = quantized, used
        if used >= (1 - self.within) * size:
          break
      # A bit less for each number where the step doubles; a little under the size.
      step *= 2 ** (8 * (used - (1 - self.within / 2) * size) / (vocab * dim))
    if best is None:
      raise ValueError(
        f"`size` must be above the bytes of the coarsest file; got {size}. Give more."
      )
    params = {"weight": best[0].table(), "bias": half(bias)}
    return DenseHead(vocab, dim, use_bias=True), {"params": params}, best[1]


@dataclasses.dataclass(frozen=True)
class InMemory:
  """A `QuantizedHead`, whose parameters are float16.

  Attributes:
    classes: number of classes of tokens.
  """

  classes: int = 16

  def __call__(
    self, weight: np.ndarray, bias: np.ndarray, moments: compression.Moments, size: int
  ) -> tuple[nn.Module, dict, int]:
    """The packed head; see `Method`."""
    vocab, dim = weight.shape
    # Tokens that are not in the order of their counts have ranks of 2 bytes.
    ranks = 0 if (np.diff(moments.counts) <= 0).all() else 2 * vocab
    units = compression.units_of(size, vocab, dim, self.classes, 2 * vocab + ranks)
    packed = compression.pack(weight, moments, units, classes=self.classes)
    head, variables = packed.head(bias)
    variables["params"] = jax.tree.map(half, variables["params"])
    return head, variables, head.clone(param_dtype=jnp.float16).size().state_bytes


def moments_of(
  model: nn.Module, variables: Mapping[str, Any], text: EncodedText
) -> compression.Moments:
  """Moments of the training split: of its first hidden states, and counts of all of it."""
  run, split = text.experiment, text.splits["train"]

  @jax.jit
  def second(variables, batch):
    mutable = ["carry"] if "carry" in variables else []
    hidden, carry = model.apply(
      carried(variables, batch), batch["inputs"], method="hidden", mutable=mutable
    )
    hidden_ND = hidden.reshape(-1, hidden.shape[-1]) * (batch["targets"] >= 0).reshape(-1, 1)
    return hidden_ND.T @ hidden_ND, (batch["targets"] >= 0).sum(), dict(carry)

  total, tokens, variables = 0.0, 0, dict(variables)
  for batch in run.loader.whole(split, batch=run.train.batch, context=model.context):
    moment, count, carry = second(variables, batch)
    variables |= carry
    total, tokens = total + np.asarray(moment, np.float64), tokens + int(count)
    if tokens >= HIDDEN_STATES:
      break
  counts = np.bincount(np.asarray(split.tokens), minlength=model.head.vocab)
  return compression.Moments(total / tokens, counts, tokens)


def measure(experiment: Experiment, folder: str, method: Method, divisor: int) -> dict[str, Any]:
  """Scores of a trained model whose dense head is compressed to a part of its bytes.

  Args:
    experiment: the experiment of the run, whose head is a `DenseHead` with biases.
    folder: its run folder.
    method: the compression.
    divisor: what the bytes of the dense head are divided by.
  """
  text = load_text(experiment)
  model = text.experiment.model
  variables, _ = read_variables(folder)
  params = part_of(variables, "head")["params"]
  weight, bias = np.asarray(params["weight"]), np.asarray(params["bias"])
  moments = moments_of(model, variables, text)
  head, filled, used = method(weight, bias, moments, model.head.size().state_bytes // divisor)
  result: dict[str, Any] = held_out_scores(
    model.clone(head=head), with_part(variables, "head", filled), text
  )
  result["head"] = {"class": type(head).__name__, "state_bytes": used}
  result["seed"] = experiment.seed
  return {"result": result}
