"""Initial variables of runs, from a trained run or from statistics of the text.

Each class is an `Experiment.init_from`: it is called with the text, the model and its freshly
initialised variables, and returns the variables that the run begins with.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import linen as nn

from vqjax.assign import TextStats
from vqjax.convert.grouped import Ordering, as_codes, token_order
from vqjax.convert.mappings import Mapping, TokenStats
from vqjax.convert.targets import unigram_bias
from vqjax.convert.trained_variables import Variables, merged, part_of
from vqjax.heads import Head
from vqjax.lab.training.checkpoint import check_tokenizer, read_run_variables
from vqjax.lab.training.run_folder import EncodedText
from vqjax.layer import VocabularyLayer
from vqjax.lm import checkpoints
from vqjax.lm.texts import data_path
from vqjax.variables import known_values

__all__ = [
  "Checkpoint",
  "FromDense",
  "FromText",
  "FromVectors",
  "Mapped",
  "Regrouped",
  "Unigrams",
  "student_of",
]


def token_stats(
  text: EncodedText,
  vocab: int,
  *,
  output: np.ndarray | None = None,
  inputs: np.ndarray | None = None,
) -> TokenStats:
  """Statistics of the training text, with vectors of the tokens if there are any."""
  tokens = np.asarray(text.splits["train"].tokens)
  counts = np.bincount(tokens, minlength=vocab).astype(np.int64)
  return TokenStats(tokens, counts, output, inputs)


def _initial_stats(text: EncodedText, head: Head, variables: Variables) -> TokenStats:
  """Statistics of the text and the initial vectors of the input embedding."""
  inputs = variables["params"].get("embedding", {}).get("weight")
  inputs = None if inputs is None else np.asarray(inputs)
  return token_stats(text, head.vocab, inputs=inputs)


def _check_has(name: str, variables: Variables, head: Head, start: Any) -> None:
  owner = "embedding" if _is_tied(head) else "head"
  if name not in variables.get("codes", {}).get(owner, {}):
    raise ValueError(
      f"`head` must have {name} of its own for {type(start).__name__}; got a"
      f" {type(head).__name__}. Set init_from to None, or use another head."
    )


def _is_tied(head: Head) -> bool:
  return getattr(head, "embedding", None) is not None


def _of_head(variables: Variables, head: Head) -> Variables:
  """A head's variables, {collection: {...}}, at their paths in a model.

  The weight, the codebook and the assignment of a tied head are variables of its embedding.
  """
  embedded = {"weight", "codebook", "assignment"} if _is_tied(head) else set()
  by_owner = {}
  for collection, tree in variables.items():
    names = {"embedding": tree.keys() & embedded, "head": tree.keys() - embedded}
    by_owner[collection] = {
      owner: {name: tree[name] for name in own} for owner, own in names.items() if own
    }
  return by_owner


@dataclasses.dataclass(frozen=True)
class Mapped:
  """Codes from a mapping of the text, without training (VQ-Logits, Section 3.3, B).

  If the head has a token bias, the tokens of a code share its probability as their counts do.

  Attributes:
    mapping: assigns the tokens to codes; it clusters the initial vectors of the input embedding.
  """

  mapping: Mapping

  def __call__(self, text: EncodedText, model: nn.Module, variables: Variables) -> Variables:
    """The fresh variables with these codes; ValueError if the head has no assignment."""
    head = model.head
    _check_has("assignment", variables, head, self)
    stats = _initial_stats(text, head, variables)
    code = self.mapping(stats, head.codes)
    new = {"codes": {"assignment": code}}
    if head.token_bias:
      new["params"] = {"token_bias": unigram_bias(stats, code)}
    return merged(dict(variables), _of_head(new, head))


@dataclasses.dataclass(frozen=True)
class FromText:
  """A head and an embedding that begin with what the training text tells.

  They begin as `from_tokens` makes them: codes by exchange, groups by clusters of
  contexts, rows that are vectors of contexts, biases of the tokens' frequencies. A head has a bias
  where its own fields say so, and a grouped head an order where `order_init` is
  `convert.in_order`.
  """

  def __call__(self, text: EncodedText, model: nn.Module, variables: Variables) -> Variables:
    """The variables with these layers; ValueError if the text gives neither anything."""
    stats = TextStats.of(text.splits["train"].tokens, model.head.vocab)
    parts = {name: getattr(model, name, None) for name in ("head", "embedding")}
    layers = {
      name: part.clone(parent=None)
      for name, part in parts.items()
      if isinstance(part, VocabularyLayer)
    }
    begun = {name: layer.started_from(stats) for name, layer in layers.items()}
    if all(begun[name] is layer for name, layer in layers.items()):
      raise ValueError(
        f"`head` or `embedding` must have rows, codes or a bias that the text can give; got a"
        f" {type(model.head).__name__} and no layer with them. Set init_from=None, or use others."
      )
    started = dict(variables)
    for name, layer in begun.items():
      own = {part: x for part, x in layer.declare().items() if part != "embedding"}
      for collection, tree in known_values(own).items():
        started = merged(started, {collection: {name: tree}})
    return started


@dataclasses.dataclass(frozen=True)
class FromVectors:
  """A fresh head that begins with given vectors of the tokens.

  Heads that begin with the same vectors have the same statistics of the text: a dense head with
  `ToDense()`, a product head with `ToProduct()`.

  Attributes:
    vectors: (statistics of the text, width) -> [V, width], such as `convert.ContextVectors()`.
    target: makes the head's variables of the vectors, as of the rows of a trained head.
  """

  vectors: Callable[[TokenStats, int], np.ndarray]
  target: Callable[[TokenStats, Head], dict]

  def __call__(self, text: EncodedText, model: nn.Module, variables: Variables) -> Variables:
    """The fresh variables with this head; TypeError if the target makes another class."""
    head = model.head
    stats = token_stats(text, head.vocab)
    new = self.target(stats._replace(output=self.vectors(stats, head.dim)), head)
    return merged(dict(variables), _of_head(new, head))


@dataclasses.dataclass(frozen=True)
class Unigrams:
  """A head whose bias begins at the text's unigram log-probabilities.

  Attributes:
    smoothing: added to the count of each token.
    start: `Experiment.init_from` of everything else, such as `FromVectors(...)`; None: freshly
      initialised.
  """

  smoothing: float = 0.1
  start: Callable[..., dict] | None = None

  def __call__(self, text: EncodedText, model: nn.Module, variables: Variables) -> Variables:
    """The variables with this bias; ValueError if the head has no bias."""
    if self.start is not None:
      variables = self.start(text, model, variables)
    names = {"bias", "token_bias"} & variables["params"].get("head", {}).keys()
    if not names:
      raise ValueError(
        f"`head` must have a bias for {type(self).__name__}; got a {type(model.head).__name__}"
        " without one. Set use_bias=True or token_bias=True, or init_from=None."
      )
    counts = token_stats(text, model.head.vocab).counts + self.smoothing
    bias = np.log(counts / counts.sum())
    return merged(dict(variables), {"params": {"head": dict.fromkeys(names, bias)}})


@dataclasses.dataclass(frozen=True)
class Regrouped:
  """A fresh grouped head whose groups come from the text.

  Attributes:
    by: the order of the tokens that is cut into groups, such as `ByFrequency()`.
  """

  by: Ordering

  def __call__(self, text: EncodedText, model: nn.Module, variables: Variables) -> Variables:
    """The fresh variables with this order; ValueError if the head has no order."""
    order = token_order(self.by, _initial_stats(text, model.head, variables), model.head)
    return merged(dict(variables), {"codes": {"head": as_codes(order)}})


@dataclasses.dataclass(frozen=True)
class FromDense:
  """The body of a trained dense run with a compressed head made of its rows.

  Source: VQ-Logits, Section 3.3, Option A.

  Attributes:
    folder: run folder of the dense run; its head is a `DenseHead`, tied or not.
    target: makes the new head's variables, such as `ToCodebook(...)`.
    best: read the checkpoint of the lowest validation loss; False: the newest.
  """

  folder: str
  target: Callable[[TokenStats, Head], dict]
  best: bool = False

  def __call__(self, text: EncodedText, model: nn.Module, variables: Variables) -> Variables:
    """The converted variables.

    Raises:
      FileNotFoundError: the folder has no checkpoint.
      ValueError: the run has another tokenizer, its head has no rows, or the rows are not finite.
    """
    check_tokenizer(self.folder, text)
    dense, step = read_run_variables(self.folder, self.best)
    output = dense_rows(dense, f"checkpoint {step} of {self.folder}")
    inputs = dense["params"].get("embedding", {}).get("weight")
    stats = token_stats(text, len(output), output=output, inputs=inputs)
    stats = stats._replace(bias=dense["params"].get("head", {}).get("bias"))
    replaced = {"head", "embedding"} if _is_tied(model.head) else {"head"}
    kept = {name: tree for name, tree in dense["params"].items() if name not in replaced}
    converted = merged(dict(variables), {"params": kept})
    return merged(converted, _of_head(self.target(stats, model.head), model.head))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """The body of a pretrained model; a dense head and embedding are its own too.

  Make the model with `checkpoints.decoder(path, head=...)` and give the experiment the tokenizer
  `data.CheckpointTokenizer(path)`.

  Attributes:
    path: a folder of safetensors, a GGUF, or a .bin file of llama2.c, here or under $VQJAX_DATA.
    target: makes another head's variables of the rows of the pretrained one, such as
      `ToCodebook(...)`; None: such a head is freshly initialised.
  """

  path: str
  target: Callable[[TokenStats, Head], dict] | None = None

  def __call__(self, text: EncodedText, model: nn.Module, variables: Variables) -> Variables:
    """The fresh variables with those of the pretrained model.

    Raises:
      ValueError: the model's body or vocabulary is not that of the pretrained one.
    """
    path = data_path(self.path, kind="init_from.path")
    own = checkpoints.decoder(path)
    if own.head.vocab != model.head.vocab:
      raise ValueError(
        f"`model.head` must have the {own.head.vocab} tokens of {self.path}; got"
        f" {model.head.vocab}. Use the tokenizer data.CheckpointTokenizer({self.path!r})."
      )
    started = merged(dict(variables), checkpoints.read_variables(path, model))
    if self.target is None:
      return started
    dense = checkpoints.read_variables(path, model.clone(head=own.head, embedding=own.embedding))
    output = dense_rows(dense, self.path)
    stats = token_stats(
      text, len(output), output=output, inputs=np.asarray(dense["params"]["embedding"]["weight"])
    )
    return merged(started, _of_head(self.target(stats, model.head), model.head))


def dense_rows(variables: Variables, source: str) -> np.ndarray:
  """The rows [V, D] of a model's dense head, or of the embedding that it is tied to.

  Args:
    variables: the model's variables.
    source: where they come from, for the message of an error.

  Raises:
    ValueError: the head is not dense, or has rows that are not finite.
  """
  head = variables["params"].get("head", {})
  rows = head.get("weight", variables["params"].get("embedding", {}).get("weight"))
  if rows is None or head.keys() - {"weight", "bias"}:
    raise ValueError(
      f"the head of {source} must be dense; got one with {', '.join(sorted(head)) or 'nothing'}."
      " Convert a run of a DenseHead."
    )
  broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
  if len(broken):
    raise ValueError(
      f"the rows of the dense head of {source} must be finite; got nan or infinity in row"
      f" {broken[0]} ({len(broken)} such rows). Use an earlier checkpoint, or train again with a"
      " lower learning rate."
    )
  return np.asarray(rows)


def student_of(variables: Variables) -> Variables:
  """The student's variables of a `Distilled` model; all those of another model."""
  return part_of(variables, "student") if "student" in variables["params"] else variables
