"""The experiment: the objects that a run consists of, loaded from a config file."""

import contextlib
import dataclasses
import difflib
import importlib.util
import inspect
import itertools
import math
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from vqjax.lab.config.experiment_tree import (
  NOT_IDENTITY,
  annotations,
  fields_of,
  join,
  rebuild,
  walk,
)
from vqjax.lab.config.identity import is_dtype
from vqjax.layer import wanted
from vqjax.lm.records import one_line, shown
from vqjax.ngrams import NGramEmbedding
from vqjax.ops.ngrams import CanonicalHash
from vqjax.sharding import MeshShape

__all__ = ["FROM_TOKENIZER", "Experiment", "Train", "load_config", "load_function", "with_vocab"]

T = TypeVar("T")

FROM_TOKENIZER = 0
"""The `vocab` of modules in a config file that `with_vocab` replaces by the tokenizer's."""

LAST = 2**31 - 1
"""The largest number of steps: they are counted in int32."""

MOST_WINDOWS = 2**20
"""The largest batch: above it the indices of a batch's tokens may not fit in int32."""

PLAIN = (bool, int, float, complex, str, bytes, list, tuple, dict, type, np.ndarray, np.generic)
"""Types of what is no part of an experiment."""

LONGEST_NAME = 128
"""Bytes of a name, which is part of the names of folders and files."""


def _check_kinds(path: str, node: Any) -> None:
  """Refuse fields of another type than their annotations say, as far as these are plain."""
  values, hints = fields_of(node), annotations(type(node))
  for field in dataclasses.fields(node):
    value, hint = values.get(field.name), hints.get(field.name)
    if field.name not in values:
      continue
    # Ranges are checked where they are known.
    kind = wanted(field, value, bounded=isinstance(value, int) and abs(value) >= 2**63)
    if kind is None and (dataclasses.is_dataclass(hint) or hint is nn.Module):
      kind = None if isinstance(value, hint) else f"a {hint.__name__}"
    if kind is None and hint == tuple[str, ...]:
      is_right = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
      kind = None if is_right else "a tuple of texts"
    if kind is not None:
      at = join(path, field.name)
      raise ValueError(f"`{at}` must be {kind}; got {shown(value)}. Correct it.")


@dataclasses.dataclass(frozen=True)
class Train:
  """Optimisation of a run, its evaluations and its checkpoints.

  The learning rate climbs linearly from 0 over `warmup` steps and then falls along a cosine to
  `final_fraction * learning_rate` at the last step.

  Attributes:
    steps: number of optimiser steps.
    batch: windows in one optimiser step, all micro-batches together.
    accumulate: micro-batches that one optimiser step is computed in; divides `batch`.
    learning_rate: highest learning rate, reached after the warm-up.
    final_fraction: learning rate of the last step, as a fraction of the highest.
    warmup: steps over which the learning rate climbs from 0; at most all steps of the run.
    weight_decay: decoupled weight decay, multiplied by the learning rate.
    clip: largest global norm of the gradient; a longer one is scaled down to it.
    beta1: decay of AdamW's mean of gradients, per step.
    beta2: decay of AdamW's mean of squared gradients, per step.
    trainable: dotted prefixes of the parameters that are trained, such as ("head", "final_norm");
      the others keep their initial values. (): all are trained.
    log_every: steps between two rows of training metrics.
    eval_every: steps between two evaluations on the validation split.
    save_every: steps between two checkpoints.
    keep: number of newest checkpoints that stay on disk.
    optimizer: another optimiser, such as `training.SGD(...)`, with a schedule of its own; None:
      AdamW.
    mesh: devices that share the work; not part of the identity of a run, so that a run may be
      resumed on another mesh.
    tracker: where metrics are written beside TensorBoard's events, by the extra of this name; not
      part of the identity either.

  Raises:
    ValueError: a number is out of its range, or `accumulate` does not divide `batch`.
  """

  steps: int = 1000
  batch: int = 16
  accumulate: int = 1
  learning_rate: float = 1e-3
  final_fraction: float = 0.1
  warmup: int = 100
  weight_decay: float = 0.1
  clip: float = 1.0
  beta1: float = 0.9
  beta2: float = 0.95
  trainable: tuple[str, ...] = ()
  log_every: int = 10
  eval_every: int = 500
  save_every: int = 500
  keep: int = 2
  optimizer: Any = None
  mesh: MeshShape = dataclasses.field(default=MeshShape(), metadata=NOT_IDENTITY)
  tracker: Literal["wandb", "mlflow"] | None = dataclasses.field(
    default=None, metadata=NOT_IDENTITY
  )

  def __post_init__(self):
    _check_kinds("train", self)
    if self.optimizer is not None and not hasattr(self.optimizer, "rule"):
      raise ValueError(
        f"`train.optimizer` must be an optimiser; got {shown(self.optimizer)}. Give one such as"
        " training.SGD(...), or None for AdamW."
      )
    if self.tracker not in (None, "wandb", "mlflow"):
      raise ValueError(
        f"`train.tracker` must be wandb, mlflow or None; got {shown(self.tracker)}. Correct it."
      )
    for field in dataclasses.fields(self):
      # Neither JSON nor JAX take all integers that Python and NumPy have.
      if field.type in (int, float):
        object.__setattr__(self, field.name, field.type(getattr(self, field.name)))
    counts = {"steps", "accumulate", "log_every", "eval_every", "save_every", "keep"}
    ranges = {
      f"in [1, {MOST_WINDOWS}]": ({"batch"}, lambda value: 1 <= value <= MOST_WINDOWS),
      f"in [1, {LAST}]": (counts, lambda value: 1 <= value <= LAST),
      "above 0": ({"learning_rate", "clip"}, lambda value: value > 0),
      "at least 0": ({"weight_decay"}, lambda value: value >= 0),
      f"in [0, {LAST}]": ({"warmup"}, lambda value: 0 <= value <= LAST),
      "in [0, 1)": ({"beta1", "beta2"}, lambda value: 0 <= value < 1),
      "in [0, 1]": ({"final_fraction"}, lambda value: 0 <= value <= 1),
    }
    for requirement, (names, holds) in ranges.items():
      for name in sorted(names):
        value = getattr(self, name)
        if not holds(value):
          raise ValueError(f"`train.{name}` must be {requirement}; got {value}. Correct it.")
    if self.batch % self.accumulate:
      raise ValueError(
        f"`train.accumulate` must divide batch {self.batch}; got {self.accumulate}. Choose a"
        " divisor, or another batch."
      )


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A run as objects: the model, its data, and how long it is trained.

  Attributes:
    name: the name in tables and of the run folder.
    model: an unbound Flax module; its `vocab` fields may be `FROM_TOKENIZER`.
    data: the source of the text, or `data.Prepared`, which needs no tokenizer.
    tokenizer: turns the text into tokens; None for prepared data.
    loader: cuts the tokens into batches.
    train: optimisation and bookkeeping.
    seed: seed of initialisation, dropout and the order of the data.
    init_from: initial parameters of a fresh run, such as `training.FromRun(...)`; None: the model's
      own initialisers.
    recluster: moves tokens between codes while a codebook is trained, such as
      `experiments.studies.vq_logits.recluster.Recluster`; None: the assignment is fixed.
  """

  name: str
  model: nn.Module
  data: Any
  tokenizer: Any
  loader: Any
  train: Train = Train()
  seed: int = 0
  init_from: Any = None
  recluster: Any = None

  def __post_init__(self):
    _check_kinds("", self)
    object.__setattr__(self, "seed", int(self.seed))
    if not 0 <= self.seed < 2**32:
      raise ValueError(f"`seed` must be in [0, 2^32); got {self.seed}. 0 is usual.")
    is_name = self.name.strip(".") and self.name.isprintable() and not {*self.name} & {*"/\\"}
    if not is_name or len(self.name.encode(errors="replace")) > LONGEST_NAME:
      raise ValueError(
        f"`name` must be a name for a folder: at most {LONGEST_NAME} printable bytes without a"
        f" slash, and not only dots; got {self.name!r}. Give the folder itself with --run."
      )
    for name in ("data", "tokenizer", "loader", "init_from", "recluster"):
      value = getattr(self, name)
      if isinstance(value, PLAIN):
        raise ValueError(
          f"`{name}` must be an object; got {shown(value)}. Give one of `vqjax.lab`, such as"
          " data.Text() and data.Windows()."
        )
    for path, node in walk(self):
      for name, value in fields_of(node).items():
        _check_number(join(path, name), value)
      _check_kinds(path, node)


def _check_number(path: str, value: Any) -> None:
  """Refuse numbers and number formats that no field of an experiment can mean."""
  for item in value if isinstance(value, (tuple, list)) else [value]:
    if isinstance(item, float) and not math.isfinite(item):
      raise ValueError(f"`{path}` must be a finite number; got {item}. Write one, such as 1e-3.")
  if is_dtype(value) and not jnp.issubdtype(jnp.dtype(value), jnp.floating):
    raise ValueError(
      f"`{path}` must be a floating-point format; got {jnp.dtype(value).name}. Write float32 or"
      " bfloat16."
    )


def with_vocab(experiment: Experiment, vocab: int) -> Experiment:
  """Return the experiment with `vocab` in place of the model's FROM_TOKENIZER.

  The table of an `NGramEmbedding` gets the rows of its hash.

  Raises:
    ValueError: a module has another vocabulary than the tokenizer.
  """
  changes: dict[int, dict[str, Any]] = {}
  nodes = list(walk(experiment.model, "model"))
  rows = {id(n.table): n.ngrams.rows for _, n in nodes if isinstance(n, NGramEmbedding)}
  # Canonical ids, which are fewer than the tokens.
  canonical = {id(n.hash) for _, n in nodes if isinstance(n, CanonicalHash)}
  for path, node in nodes:
    if id(node) in canonical:
      continue
    own = node.vocab if isinstance(node, CanonicalHash) else fields_of(node).get("vocab", vocab)
    if own == FROM_TOKENIZER:
      changes[id(node)] = {"vocab": rows.get(id(node), vocab)}
    elif own != vocab and id(node) not in rows:
      raise ValueError(
        f"`{path}.vocab` must be the tokenizer's {vocab} tokens; got {own}. Remove the override or"
        " the number in the config, or use another tokenizer."
      )
  return dataclasses.replace(experiment, model=rebuild(experiment.model, changes))


def load_config(path: str | pathlib.Path) -> Experiment:
  """Import a config file and return what its `experiment()` returns.

  Raises:
    FileNotFoundError: there is no such file; the message lists the configs of that folder.
    ValueError: the file defines no `experiment` function, or that returns something else; or an
      error of the file, with the line that it is in.
  """
  return load_function(path, "experiment", Experiment)


def load_function(path: str | pathlib.Path, function: str, kind: type[T]) -> T:
  """Import a Python file and return what its function returns; errors as of `load_config`.

  Args:
    path: the file.
    function: name of the function, which has no arguments.
    kind: class of what it returns.
  """
  path = pathlib.Path(path)
  if not path.is_file() or path.suffix != ".py":
    there = sorted(p.stem for p in path.parent.glob("*.py") if not p.stem.startswith("_"))
    near = [f"{path.parent / name}.py" for name in difflib.get_close_matches(path.stem, there, 1)]
    hint = f"Did you mean {near[0]}? " if near else ""
    raise FileNotFoundError(
      f"`config` must be a Python file; got {path}. {hint}The folder {path.parent} has"
      f" {', '.join(there) or 'no configs, or does not exist'}."
    )
  # As `import configs.vq_logits.ptb` names it, so that a config may import its neighbours: a file
  # of a package is a module of it.
  resolved = path.resolve()
  above = [folder for folder in resolved.parents if folder.name == "configs"]
  packages = [*itertools.takewhile(lambda at: (at / "__init__.py").is_file(), resolved.parents)]
  root = (above or packages or [resolved.parent])[-1].parent
  name = ".".join(resolved.relative_to(root).with_suffix("").parts)
  spec = importlib.util.spec_from_file_location(name, resolved)
  module = importlib.util.module_from_spec(spec)
  # And files that lie beside it, such as a head of one's own. Modules of a package have its name
  # before theirs: without it, experiments/bottleneck.py was a library that pandas looks for.
  folders = (root,) if packages else (root, resolved.parent)
  sys.path += [str(at) for at in folders if str(at) not in sys.path]
  # Dataclasses look up the module of their annotations here, while the file still executes.
  sys.modules[name] = module
  try:
    with errors_with_lines(path):
      spec.loader.exec_module(module)
  except BaseException:
    del sys.modules[name]
    raise
  if not callable(getattr(module, function, None)):
    raise ValueError(f"`config` must define a function {function}(); got none in {path}. Add it.")
  with errors_with_lines(path):
    made = getattr(module, function)()
  if not isinstance(made, kind):
    where = kind.__module__.split(".")[2]
    raise ValueError(
      f"{function}() of {path} must return a {where}.{kind.__name__}; got {made!r}. Return one."
    )
  return made


def _remedy(error: BaseException) -> str:
  """What to do about an error of Python: another name where a keyword argument is misspelt."""
  wrong = re.search(r"(\w+)(?:\.__init__)?\(\) got .* keyword argument '(\w+)'", str(error))
  if wrong and isinstance(error, TypeError):
    *_, (caller, _) = traceback.walk_tb(error.__traceback__)
    names = caller.f_globals | caller.f_locals
    modules = (vars(value) for value in names.values() if isinstance(value, types.ModuleType))
    called = next((each[wrong[1]] for each in (names, *modules) if wrong[1] in each), None)
    with contextlib.suppress(TypeError, ValueError):  # it has no signature
      if near := difflib.get_close_matches(wrong[2], inspect.signature(called).parameters, 1):
        return f"Did you mean {near[0]}?"
  return "Correct this line"


@contextlib.contextmanager
def errors_with_lines(path: pathlib.Path, line: int | None = 1) -> Iterator[None]:
  """Name the file and the line of an error in a config, or in a file that it imports.

  Args:
    path: the config.
    line: the line that is named where the error has none in these files; None: nothing is named.
  """
  try:
    yield
  except (MemoryError, KeyboardInterrupt):
    raise
  except BaseException as error:  # SystemExit too
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames]
    if isinstance(error, SyntaxError) and error.filename:
      places = [(error.filename, error.lineno)]
    own = [at for at in places if pathlib.Path(at[0]).is_relative_to(path.resolve().parent)]
    if not own and line is None:
      raise
    file, line = (own or [(str(path), line)])[-1]
    text = one_line(getattr(error, "msg", None) or error).rstrip(".")
    # What this library refuses says what to do; Python's own errors do not.
    is_ours = "vqjax" in pathlib.Path(places[-1][0]).parts
    if not (is_ours and (isinstance(error, ValueError) or text.startswith("`"))):
      text = f"{type(error).__name__}: {text}"[:400].removesuffix(": ") + f". {_remedy(error)}"
    text += "" if text.endswith("?") else "."
    raise ValueError(f"{file}, line {line}: {text}") from error
