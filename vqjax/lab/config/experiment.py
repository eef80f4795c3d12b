"""What does a run consist of, and how is a config file read?"""

import dataclasses
import difflib
import importlib.util
import pathlib
import sys
from types import ModuleType
from typing import Any

from flax import linen as nn

from vqjax.lab.config.tree import NOT_IDENTITY
from vqjax.sharding import MeshShape


@dataclasses.dataclass(frozen=True)
class Train:
  """How long a run optimises, how fast, and how often it reports.

  The learning rate climbs linearly from 0 over `warmup` steps and then falls along a cosine to
  `final_fraction * learning_rate` at the last step. The optimiser is AdamW, or what is given.

  Attributes:
    steps: optimiser steps in all.
    batch: windows in one optimiser step, all micro-batches together.
    accumulate: micro-batches that one optimiser step is computed in; divides `batch`.
    learning_rate: highest learning rate, reached after the warm-up.
    final_fraction: learning rate of the last step, as a fraction of the highest.
    warmup: steps over which the learning rate climbs from 0; all of them in a shorter run.
    weight_decay: decoupled weight decay, multiplied by the learning rate.
    clip: largest global norm of the gradient; a longer one is scaled down to it.
    beta1: decay of AdamW's mean of gradients, per step.
    beta2: decay of AdamW's mean of squared gradients, per step.
    trainable: dotted prefixes of the parameters that are trained, such as ("head", "final_norm"); the
      others stay as they are. (): all are trained.
    log_every: steps between two rows of training metrics.
    eval_every: steps between two evaluations on the validation split.
    save_every: steps between two checkpoints.
    keep: newest checkpoints that stay on disk.
    optimizer: another optimiser, such as `training.SGD(...)`, with a schedule of its own; None:
      AdamW.
    mesh: devices that share the work; no part of what a run is, so another one may resume it.

  Raises:
    ValueError: a number that no run can have; the message names it and the remedy.
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

  def __post_init__(self):
    for name in ("steps", "batch", "accumulate", "log_every", "eval_every", "save_every", "keep"):
      self._require(name, getattr(self, name) >= 1, "is below 1", "give a positive int")
    for name in ("learning_rate", "clip"):
      self._require(name, getattr(self, name) > 0, "is not positive", "give a number above 0")
    for name in ("weight_decay", "warmup"):
      self._require(name, getattr(self, name) >= 0, "is negative", "give 0 or more")
    for name in ("beta1", "beta2"):
      self._require(name, 0 <= getattr(self, name) < 1, "is outside [0, 1)", "0.9 is usual")
    in_range = 0 <= self.final_fraction <= 1
    self._require("final_fraction", in_range, "is outside [0, 1]", "0.1 is usual")
    divides = self.batch % self.accumulate == 0
    remedy = "choose a divisor, or another batch"
    self._require("accumulate", divides, f"does not divide batch {self.batch}", remedy)

  def _require(self, name: str, holds: bool, problem: str, remedy: str):
    if not holds:
      raise ValueError(f"train.{name} {getattr(self, name)} {problem}; {remedy}")


@dataclasses.dataclass(frozen=True)
class Experiment:
  """One run, as objects: what is trained, on which text, and for how long.

  Attributes:
    name: what tables and run folders call it.
    model: an unbound Flax module; its `vocab` fields may be `FROM_TOKENIZER`.
    data: the source of the text, or `data.Prepared`, which needs no tokenizer.
    tokenizer: turns the text into tokens, and says how many different ones there are; None beside
      data that are no text.
    loader: cuts the tokens into batches.
    train: optimisation and bookkeeping.
    seed: of initialisation, dropout and the order of the data.
    init_from: gives a fresh run its first parameters, a `training.start` object; None: the model's own.
    recluster: moves tokens between codes while a codebook is trained, a `training.Recluster`; None:
      each stays on its code.
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
    if not 0 <= self.seed < 2**32:
      raise ValueError(f"seed {self.seed} is outside [0, 2^32); give a number in it")


def load(path: str | pathlib.Path) -> Experiment:
  """The experiment that a config file defines: the file is imported and `experiment()` called.

  Raises:
    FileNotFoundError: no such file; the message lists the configs of that folder.
    AttributeError: the file defines no `experiment` function.
    TypeError: `experiment()` returns something else.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(_missing(path))
  make = getattr(_import(path), "experiment", None)
  if not callable(make):
    raise AttributeError(f"{path} has no function experiment(); define one that returns Experiment")
  made = make()
  if not isinstance(made, Experiment):
    raise TypeError(
      f"experiment() of {path} returned {made!r}; return a vqjax.lab.config.Experiment"
    )
  return made


def _import(path: pathlib.Path) -> ModuleType:
  """The file as a module named folder.stem, as `import` from the folder's parent would name it."""
  path = path.resolve()
  name = f"{path.parent.name}.{path.stem}"
  spec = importlib.util.spec_from_file_location(name, path)
  if spec is None or spec.loader is None:
    raise FileNotFoundError(f"{path} is not a Python file; configs end in .py")
  module = importlib.util.module_from_spec(spec)
  # Dataclasses look up the module of their annotations here, while the file still executes.
  before = sys.modules.get(name)
  sys.modules[name] = module
  if str(path.parent.parent) not in sys.path:
    sys.path.append(str(path.parent.parent))  # a config may import its neighbours
  try:
    spec.loader.exec_module(module)
  except BaseException:
    sys.modules.pop(name)
    if before is not None:
      sys.modules[name] = before
    raise
  return module


def _missing(path: pathlib.Path) -> str:
  if not path.parent.is_dir():
    return f"no config {path}: there is no folder {path.parent}; give configs/NAME.py"
  there = sorted(p.stem for p in path.parent.glob("*.py") if not p.stem.startswith("_"))
  if not there:
    return f"no config {path}: {path.parent} holds no configs; give another folder"
  near = difflib.get_close_matches(path.stem, there, 1)
  hint = f"did you mean {path.parent / near[0]}.py? " if near else ""
  return f"no config {path}; {hint}{path.parent} has: {', '.join(there)}"
