"""With which variables does a run begin that converts a dense run, or maps its tokens first?

Each is an `Experiment.init_from`: called with the text, the model and its fresh variables.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from vqjax.assign.multiple import code_dtype
from vqjax.convert.mappings import Mapping, TokenStats, contexts
from vqjax.convert.orders import Ordering, as_codes, ordered
from vqjax.convert.targets import ToProduct
from vqjax.heads import Head, UnigramBias
from vqjax.lab.training.checkpoint import check_tokenizer, read_variables
from vqjax.lab.training.run import Text
from vqjax.ops.product import nearest_codes


def counts_of(text: Text, vocab: int) -> np.ndarray:
  """How often each token occurs in the training text, int64 [V]."""
  return np.bincount(np.asarray(text.splits["train"].tokens), minlength=vocab).astype(np.int64)


def merged(fresh: Any, given: Any) -> Any:
  """`fresh` with the arrays of `given` in their places, in their dtypes."""
  if not isinstance(given, dict):
    return np.asarray(given, np.asarray(fresh).dtype)
  unknown = given.keys() - fresh.keys()
  if unknown:
    raise ValueError(
      f"the model has no {', '.join(sorted(unknown))} to begin with, only"
      f" {', '.join(sorted(fresh))}; use the model that the conversion is for"
    )
  return fresh | {name: merged(fresh[name], value) for name, value in given.items()}


def from_scratch(text: Text, head: Head, variables: dict) -> TokenStats:
  """What is known before any training: the text, and the input embedding's initial vectors."""
  inputs = variables["params"].get("embedding", {}).get("weight")
  inputs = None if inputs is None else np.asarray(inputs)
  tokens = np.asarray(text.splits["train"].tokens)
  return TokenStats(tokens, counts_of(text, head.vocab), None, inputs)


def _check_has(name: str, variables: dict, head: Head, start: Any) -> None:
  place = "embedding" if _embedding(head) else "head"
  if name not in variables.get("codes", {}).get(place, {}):
    raise ValueError(
      f"{type(start).__name__} sets the {name} of a head that keeps its own, which this"
      f" {type(head).__name__} does not; set start to None, or change the head"
    )


def _of_head(variables: dict, head: Head) -> dict:
  """A head's variables, {collection: {...}}, where a model has them.

  What a tied head reads from its embedding is the embedding's; all else is the head's.
  """
  embedded = {"codebook", "assignment"} if _embedding(head) else set()
  found = {}
  for collection, tree in variables.items():
    places = {"embedding": tree.keys() & embedded, "head": tree.keys() - embedded}
    found[collection] = {
      place: {name: tree[name] for name in names} for place, names in places.items() if names
    }
  return found


def _embedding(head: Head) -> Any:
  """The embedding that a head is tied to, or None."""
  return getattr(head, "embedding", None)


def student_of(variables: dict[str, Any]) -> dict[str, Any]:
  """Those of the student, where a teacher's are beside them; else all."""
  if "student" not in variables["params"]:
    return variables
  return {name: tree["student"] for name, tree in variables.items() if "student" in tree}


@dataclasses.dataclass(frozen=True)
class Mapped:
  """From scratch, with codes from a mapping of the text: Option B of VQ-Logits, Section 3.3.

  A token bias begins so that the tokens of a code share its mass by their counts.

  Attributes:
    mapping: how tokens get their codes; embeddings are the input's initial ones.
  """

  mapping: Mapping

  def __call__(self, text: Text, model: nn.Module, variables: dict[str, Any]) -> dict[str, Any]:
    """The fresh variables with these codes; ValueError where the head has none of its own."""
    head = model.head
    _check_has("assignment", variables, head, self)
    known = from_scratch(text, head, variables)
    code = self.mapping(known, head.codes)
    new = {"codes": {"assignment": code}}
    if head.token_bias:
      new["params"] = {"token_bias": np.asarray(UnigramBias(known.counts, code)(None, code.shape))}
    return merged(dict(variables), _of_head(new, model.head))


@dataclasses.dataclass(frozen=True)
class MappedProduct:
  """From scratch, a product head with codes by the tokens' neighbours in the text.

  Attributes:
    clusters: k-means in each subspace of the embeddings `mappings.contexts`.
    seed: of the embeddings.
  """

  clusters: ToProduct = dataclasses.field(default_factory=ToProduct)
  seed: int = 0

  def __call__(self, text: Text, model: nn.Module, variables: dict[str, Any]) -> dict[str, Any]:
    """The fresh variables with these codes; ValueError where the head has none of its own."""
    head = model.head
    _check_has("codes", variables, head, self)
    tokens = np.asarray(text.splits["train"].tokens)
    known = TokenStats(tokens, counts_of(text, head.vocab), None, None)
    rows = contexts(known, head.dim, self.seed)
    _, codes = self.clusters.clustered(known._replace(output=rows), head)
    new = {"codes": {"codes": codes.astype(code_dtype(head.codes))}}
    return merged(dict(variables), _of_head(new, model.head))


@dataclasses.dataclass(frozen=True)
class Regrouped:
  """From scratch, with groups of a head that come from the text.

  Attributes:
    by: the order that is cut into the head's groups, such as `ByFrequency()`.
  """

  by: Ordering

  def __call__(self, text: Text, model: nn.Module, variables: dict[str, Any]) -> dict[str, Any]:
    """The fresh variables with this order; ValueError where the head keeps none."""
    known = from_scratch(text, model.head, variables)
    codes = as_codes(ordered(self.by, known, model.head))
    return merged(dict(variables), {"codes": {"head": codes}})


@dataclasses.dataclass(frozen=True)
class FromDense:
  """A trained dense run's body, and a compressed head made of its rows: Option A.

  Attributes:
    folder: the dense run's folder; its head is a `DenseHead`, tied or not.
    target: makes the new head's variables, such as `ToCodebook(...)`.
    best: take the checkpoint of lowest validation loss, not the newest.
  """

  folder: str
  target: Callable[[TokenStats, Head], dict]
  best: bool = False

  def __call__(self, text: Text, model: nn.Module, variables: dict[str, Any]) -> dict[str, Any]:
    """The converted variables.

    Raises:
      FileNotFoundError: the folder holds no checkpoint.
      ValueError: its tokenizer is another one, its head has no rows, or rows that are not finite.
    """
    check_tokenizer(self.folder, text)
    dense, step = read_variables(self.folder, self.best)
    replaced = {"head", "embedding"} if _embedding(model.head) else {"head"}
    body = {name: tree for name, tree in dense["params"].items() if name not in replaced}
    output = dense_rows(dense, f"checkpoint {step} of {self.folder}")
    inputs = dense["params"].get("embedding", {}).get("weight")
    tokens = np.asarray(text.splits["train"].tokens)
    known = TokenStats(tokens, counts_of(text, len(output)), output, inputs)
    new = self.target(known, model.head)
    changed = merged(dict(variables), {"params": body})
    return merged(changed, _of_head(new, model.head))


def dense_rows(variables: dict, where: str) -> np.ndarray:
  """The [V, D] rows that a dense model scores with; ValueError where it has none or broken ones."""
  head = variables["params"].get("head", {})
  rows = head.get("weight", variables["params"].get("embedding", {}).get("weight"))
  if rows is None or head.keys() - {"weight", "bias"}:
    raise ValueError(
      f"{where} has a head of {', '.join(sorted(head)) or 'nothing'}, not a dense one; compress a"
      " run of a DenseHead"
    )
  if "bias" in head:
    raise ValueError(
      f"{where} has a dense head with a bias, which no conversion keeps; train one without"
    )
  broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
  if len(broken):
    raise ValueError(
      f"{where}: row {broken[0]} of the dense head is not finite ({len(broken)} such rows); take"
      " an earlier checkpoint, or train again with a lower learning rate"
    )
  return np.asarray(rows)


@dataclasses.dataclass(frozen=True)
class Frozen:
  """A run that learned its codes, with these codes fixed: what ships.

  A `LearnedProductHead` becomes a `ProductHead`, a `LearnedCodebookHead` a `CodebookHead`; the
  student of a distilled run is taken without its teacher.

  Attributes:
    folder: the run that learned the codes.
    best: take the checkpoint of lowest validation loss, not the newest.
  """

  folder: str
  best: bool = False

  def __call__(self, text: Text, model: nn.Module, variables: dict[str, Any]) -> dict[str, Any]:
    """The learned variables, as the model's own; the distribution is the same.

    Raises:
      ValueError: the run learned no codes, or the model's head has no place for them.
    """
    check_tokenizer(self.folder, text)
    learned, _ = read_variables(self.folder, self.best)
    return merged(dict(variables), frozen(student_of(learned)))


@dataclasses.dataclass(frozen=True)
class FromStudent:
  """The student of a distilled run without its teacher: what ships.

  Attributes:
    folder: the run of a `Distilled` model.
    best: take the checkpoint of lowest validation loss, not the newest.
  """

  folder: str
  best: bool = False

  def __call__(self, text: Text, model: nn.Module, variables: dict[str, Any]) -> dict[str, Any]:
    """The student's variables, as the model's own.

    Raises:
      ValueError: the run has no teacher, or the model is another one than its student.
    """
    check_tokenizer(self.folder, text)
    both, step = read_variables(self.folder, self.best)
    if "student" not in both["params"]:
      raise ValueError(
        f"checkpoint {step} of {self.folder} has no student; begin with a run that was distilled"
      )
    return merged(dict(variables), student_of(both))


def frozen(learned: dict[str, Any]) -> dict[str, Any]:
  """A model's variables whose learned codes have become the codes of a fixed head, bit for bit.

  Raises:
    ValueError: the head learned no codes.
  """
  head = dict(learned["params"].get("head", {}))
  if "latent" in head:
    codes = np.asarray(jax.jit(nearest_codes)(head.pop("latent"), head["tables"]))
    table = {"codes": codes.astype(code_dtype(head["tables"].shape[1]))}
  elif "choice" in head:
    best = np.asarray(head.pop("choice")).argmax(axis=-1)[:, None]
    candidates = np.asarray(learned["codes"]["head"]["candidates"])
    table = {"assignment": np.take_along_axis(candidates, best, axis=-1)[:, 0].astype(np.int32)}
  else:
    raise ValueError(
      f"a head of {', '.join(sorted(head)) or 'nothing'} has learned no codes; freeze a run of a"
      " LearnedProductHead or a LearnedCodebookHead"
    )
  kept = {name: tree for name, tree in learned.items() if name not in ("codes", "schedule")}
  return {**kept, "params": {**learned["params"], "head": head}, "codes": {"head": table}}
