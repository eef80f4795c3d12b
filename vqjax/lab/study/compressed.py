"""Trained models whose vocabulary table is compressed after their training."""

import abc
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import vqjax
from vqjax import tables
from vqjax.convert import part_of, with_part
from vqjax.embeddings import DenseEmbedding, Embedding
from vqjax.heads import DenseHead
from vqjax.lab.config import Experiment
from vqjax.lab.config.experiment_tree import NOT_IDENTITY
from vqjax.lab.config.identity import describe
from vqjax.lab.starting_points import Distilled, student_of
from vqjax.lab.training import evaluate, make_scorer, read_run_variables
from vqjax.lab.training.checkpoint import check_tokenizer
from vqjax.lab.training.distributed import is_main
from vqjax.lab.training.run_folder import EncodedText, load_text
from vqjax.lab.training.step import carried

__all__ = ["Compressed", "Derived", "FromCompressed", "held_out_scores", "moments_of"]

HIDDEN_STATES = 2**17
"""Hidden states whose second moment is taken."""

INPUTS_EVERY = 8
"""Every so many batches of these the second moment of a tied table's input vectors is taken too."""


@dataclasses.dataclass(frozen=True)
class Derived(abc.ABC):
  """A row whose models are made of the trained ones of another row, and trained no more.

  Attributes:
    of: name of the other row.
    label: name in tables; "": that of the row.
  """

  of: str
  label: str = dataclasses.field(default="", kw_only=True)

  @abc.abstractmethod
  def settings(self) -> dict[str, Any]:
    """Return what its results depend on, beside the run, as values that JSON has."""

  @abc.abstractmethod
  def measure(self, experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
    """Measure a model that is made of a run of the other row.

    Args:
      experiment: the experiment of the run.
      folder: its run folder.

    Returns:
      {"result": {"test": {"nats_per_token": ...}, ...}, ...}: what a run's result has of scores and
      sizes; without a finite test loss the row failed.
    """

  def check(self, experiment: Experiment) -> None:
    """Raise ValueError where no model can be made of runs of an experiment, before any is run."""
    del experiment
    self.settings()


@dataclasses.dataclass(frozen=True)
class Compressed(Derived):
  """A row whose models are the trained ones of another row, their table compressed.

  The head of the other row is a `DenseHead`, tied or not; of a distilled row that of the student.

  Attributes:
    of: name of the other row.
    bytes: largest size, as of `vqjax.compress`: a number, or a fraction of the table's bytes; None:
      that of the method.
    method: method of `vqjax.compress`, such as `vqjax.Int8()`; None: integers that are coded.
    label: name in tables; "": that of the row.
  """

  bytes: float | None = 1 / 16
  method: Callable | None = None

  def settings(self) -> dict[str, Any]:
    """The size and the method, which may be no lambda."""
    return {"bytes": self.bytes, "method": describe(self.method)}

  def check(self, experiment: Experiment) -> None:
    """Raise ValueError where the head is none of a table, or the method a lambda."""
    super().check(experiment)
    head = getattr(experiment.model, "head", None)
    if not isinstance(head, DenseHead):
      raise ValueError(
        f"`of` must be a row whose head is a DenseHead; got {self.of!r}. Name another."
      )

  def measure(self, experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
    """Scores and bytes of a trained model with a compressed table."""
    text = load_text(experiment)
    variables, _ = read_run_variables(folder)
    model, variables, small = _with_compressed_table(
      text.experiment.model, variables, text, self.bytes, self.method
    )
    head: DenseHead = model.head
    result: dict[str, Any] = held_out_scores(model, variables, text)
    is_tied = head.embedding is not None
    inputs = 0 if is_tied else model.embedding.inference_size().state_bytes
    result["head"] = {
      "class": type(head).__name__,
      "state_bytes": small.report.bytes,
      "tied": is_tied,
    }
    result["embedding"] = {"shipped_bytes": inputs}
    result["seed"] = experiment.seed
    return {"result": result}


@dataclasses.dataclass(frozen=True)
class FromCompressed:
  """Begins a run with the variables of another one, whose table is compressed.

  All else then learns around the rows that the file decodes to, with a `Train(trainable=...)` that
  names all parameters but the table: a quarter to a half of what the compression costs is
  regained. The head of the other run is a `DenseHead`, tied or not.

  Attributes:
    folder: run folder of the other run.
    bytes: largest size, as of `Compressed`.
    stored: the tied embedding of the other run where it holds no floats, such as an
      `Int8Embedding(trained=True)`; this run's is a `DenseEmbedding`.
    file: file that the compressed table is written to; "": none.
  """

  folder: str
  bytes: float
  stored: Embedding | None = None
  file: str = dataclasses.field(default="", metadata=NOT_IDENTITY)

  def __call__(self, text: EncodedText, model: nn.Module, variables: Any) -> dict[str, Any]:
    """The other run's variables, with the rows that the compressed table decodes to."""
    del variables
    check_tokenizer(self.folder, text)
    trained, _ = read_run_variables(self.folder)
    if self.stored is not None:
      stored = self.stored.clone(vocab=model.head.vocab)
      model = model.clone(embedding=stored, head=model.head.clone(embedding=stored))
    _, variables, small = _with_compressed_table(model, trained, text, self.bytes)
    if self.file and is_main():
      small.save(self.file)
    return variables


def _with_compressed_table(
  model: nn.Module,
  variables: Mapping[str, Any],
  text: EncodedText,
  size: float | None,
  method: Callable | None = None,
) -> tuple[nn.Module, dict[str, Any], vqjax.SmallTable]:
  """A trained model with the rows of its compressed table, as floats.

  Args:
    model: the model, whose head is a `DenseHead`; of a distilled one its student is taken.
    variables: its variables.
    text: the text whose training split says what errors cost.
    size: `bytes` of `vqjax.compress`.
    method: its `method`.

  Returns:
    The model, with a `DenseEmbedding` where a tied one was stored otherwise; its variables; the
    compressed table.
  """
  if isinstance(model, Distilled):
    model, variables = model.student, student_of(variables)
  model, variables = _with_floats(model, variables)
  head: DenseHead = model.head
  owner = "head" if head.embedding is None else "embedding"
  params = part_of(variables, owner)["params"]
  small = vqjax.compress(
    params["weight"],
    bytes=size,
    method=method,
    moments=moments_of(model, variables, text),
    bias=part_of(variables, "head").get("params", {}).get("bias"),
    seed=text.experiment.seed,
  )
  rows = small.rows(np.arange(head.vocab)).astype(params["weight"].dtype)
  return model, with_part(variables, owner, {"params": {**params, "weight": rows}}), small


def held_out_scores(
  model: nn.Module, variables: Mapping[str, Any], text: EncodedText
) -> dict[str, dict[str, Any]]:
  """Scores of the validation and the test split by a model with given variables."""
  run, scorer, scores = text.experiment, make_scorer(model), {}
  for name in ("valid", "test"):
    split = text.splits[name]
    batches = run.loader.whole(split, batch=run.train.batch, context=model.context)
    scores[name] = evaluate(scorer, variables, batches, run.loader.text_bytes(split)).numbers()
  return scores


def moments_of(model: nn.Module, variables: Mapping[str, Any], text: EncodedText) -> tables.Moments:
  """Moments of the training split: of its first hidden states, and counts of all of it.

  For a tied table also those of its input vectors, of a part of these batches.
  """
  run, split = text.experiment, text.splits["train"]
  is_tied = model.head.embedding is not None

  @jax.jit
  def second(variables, batch):
    mutable = ["carry"] if "carry" in variables else []
    hidden, carry = model.apply(
      carried(variables, batch), batch["inputs"], method="hidden", mutable=mutable
    )
    hidden_ND = hidden.reshape(-1, hidden.shape[-1]) * (batch["targets"] >= 0).reshape(-1, 1)
    return hidden_ND.T @ hidden_ND, (batch["targets"] >= 0).sum(), dict(carry)

  @jax.jit
  def second_of_inputs(variables, batch, key):
    variables = carried(variables, batch)
    apply = lambda method, *args: model.apply(variables, *args, method=method)
    vectors_BTD = apply(lambda m, tokens: m.embedding(tokens), batch["inputs"])
    body = lambda m, vectors: m.body_of_tokens(batch["inputs"], vectors, True)[0]
    hidden_BTD = apply(body, vectors_BTD)
    drawn_BT = apply(lambda m, hidden: m.head.sample(hidden, key), hidden_BTD)
    counted_BT = batch["targets"] >= 0

    def log_prob(vectors):
      of_drawn = lambda m, v: m.head.log_prob(body(m, v), drawn_BT)
      return jnp.where(counted_BT, apply(of_drawn, vectors), 0).sum()

    gradient_ND = jax.grad(log_prob)(vectors_BTD).reshape(-1, vectors_BTD.shape[-1])
    gradient_ND *= counted_BT.reshape(-1, 1)
    return gradient_ND.T @ gradient_ND, counted_BT.sum()

  hidden, inputs, variables = _Mean(), _Mean(), dict(variables)
  batches = run.loader.whole(split, batch=run.train.batch, context=model.context)
  for number, batch in enumerate(batches):
    if is_tied and number % INPUTS_EVERY == 0:
      key = jax.random.fold_in(jax.random.key(run.seed), number)
      inputs.add(*second_of_inputs(variables, batch, key))
    moment, count, carry = second(variables, batch)
    variables |= carry
    hidden.add(moment, count)
    if hidden.count >= HIDDEN_STATES:
      break
  counts = np.bincount(np.asarray(split.tokens), minlength=model.head.vocab)
  of_inputs = inputs.value if is_tied else None
  return tables.Moments(hidden.value, counts, hidden.count, of_inputs)


class _Mean:
  """A mean in float64."""

  def __init__(self):
    self.total, self.count = 0.0, 0

  def add(self, total: jax.Array, count: jax.Array) -> None:
    self.total, self.count = self.total + np.asarray(total, np.float64), self.count + int(count)

  @property
  def value(self) -> np.ndarray:
    return self.total / self.count


def _with_floats(model: nn.Module, variables: Mapping[str, Any]) -> tuple[nn.Module, Mapping]:
  """The model with a `DenseEmbedding` in place of a tied embedding that is stored otherwise."""
  stored = model.head.embedding
  if stored is None or isinstance(stored, DenseEmbedding):
    return model, variables
  rows = stored.clone(parent=None).apply(part_of(variables, "embedding"), method="table")
  dense = DenseEmbedding(stored.vocab, stored.dim)
  model = model.clone(embedding=dense, head=model.head.clone(embedding=dense))
  return model, with_part(variables, "embedding", {"params": {"weight": np.asarray(rows)}})
