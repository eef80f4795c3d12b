"""How does one ask for a run that compresses the head of a trained dense model?"""

import dataclasses
import pathlib
from typing import Any

from vqjax.convert.mappings import KMeans, Mapping
from vqjax.convert.targets import ToCodebook
from vqjax.embeddings import CodebookEmbedding
from vqjax.heads import CodebookHead, Head
from vqjax.lab.config import Experiment, Train
from vqjax.lab.conversion.distilled import Distilled, FromTeacher
from vqjax.lab.conversion.starts import FromDense

FULL: tuple[str, ...] = ()
"""Scope of fine-tuning: everything."""

HEAD = ("head", "final_norm")
"""Scope: the head, and the norm in front of it."""

CODEBOOK = ("head.codebook",)
"""Scope: the codebook alone."""

BY_FREQUENCY = KMeans(power=1.0)
"""Tokens are clustered by their output rows, each as heavy as it is frequent."""


def compress(
  dense: Experiment,
  folder: str | pathlib.Path,
  *,
  codes: int = 1024,
  mapping: Mapping = BY_FREQUENCY,
  token_bias: bool = True,
  tied: bool = False,
  scope: tuple[str, ...] = FULL,
  distillation: float = 0.0,
  temperature: float = 1.0,
  train: Train | None = None,
  name: str | None = None,
) -> Experiment:
  """The experiment that turns a dense run into a codebook run and fine-tunes it (Option A).

    experiment = compress(load("configs/lm_dense.py"), "runs/demo/dense", codes=512)
    fit(experiment, pathlib.Path("runs/demo/compressed"))

  Args:
    dense: the experiment of the dense run.
    folder: its run folder.
    codes: size of the codebook, K.
    mapping: how the tokens get their codes.
    token_bias: give each token a score of its own.
    tied: the codebook is the input embedding too, c_M(i), in place of the dense run's.
    scope: which parameters are fine-tuned: `FULL`, `HEAD` or `CODEBOOK`.
    distillation: coefficient of the divergence from the dense model; 0: no teacher.
    temperature: of the distillation.
    train: of the fine-tuning; None: a fifth of the dense run's steps at a third of its rate.
    name: of the new run; None: the dense run's and "-codebook".

  Raises:
    ValueError: the dense head caps its scores, which a codebook head does not.
  """
  shape = dense.model.head.vocab, dense.model.embedding.dim, codes
  head = CodebookHead(
    *shape,
    token_bias=token_bias,
    embedding=CodebookEmbedding(*shape) if tied else None,
    dtype=dense.model.head.dtype,
  )
  return converted(
    *(dense, folder, head, ToCodebook(mapping)),
    scope=_where_tied(scope, token_bias) if tied else scope,
    distillation=distillation,
    temperature=temperature,
    train=train,
    name=name or f"{dense.name}-codebook",
  )


def _where_tied(scope: tuple[str, ...], token_bias: bool) -> tuple[str, ...]:
  """The same scope of a model whose codebook is its embedding: a bias may be left of its head."""
  places = {"head": ("embedding", "head") if token_bias else ("embedding",)}
  places["head.codebook"] = ("embedding.codebook",)
  return tuple(name for part in scope for name in places.get(part, (part,)))


def converted(
  dense: Experiment,
  folder: str | pathlib.Path,
  head: Head,
  target: Any,
  *,
  name: str,
  scope: tuple[str, ...] = FULL,
  distillation: float = 0.0,
  temperature: float = 1.0,
  train: Train | None = None,
) -> Experiment:
  """As `compress`, for any head and the target that gives it its variables.

  A tied head brings the embedding that it is tied to.

  Raises:
    ValueError: the dense head caps its scores, and this head does not.
  """
  _check_cap(dense.model.head, head)
  train = train or _fine_tuning(dense.train)
  # A copy of the embedding: shared with the teacher it would be one set of parameters.
  embedding = getattr(head, "embedding", None) or dense.model.embedding.clone()
  student = dense.model.clone(head=head, embedding=embedding)
  start: Any = FromDense(str(folder), target)
  model = student
  if distillation:
    model = Distilled(student, dense.model, distillation, temperature)
    start = FromTeacher(str(folder), start)
    scope = tuple(f"student.{part}" for part in scope) or ("student",)
  return dataclasses.replace(
    dense,
    name=name,
    model=model,
    train=dataclasses.replace(train, trainable=scope),
    init_from=start,
  )


def _check_cap(dense: Head, head: Head) -> None:
  softcap = getattr(dense, "softcap", None)
  if softcap is not None and not hasattr(head, "softcap"):
    raise ValueError(
      f"the dense head has softcap {softcap}, and a {type(head).__name__} none; convert.converted"
      " takes a head that has one, such as a ResidualCodebookHead or a ProductHead"
    )


def _fine_tuning(train: Train) -> Train:
  steps = max(1, train.steps // 5)
  return dataclasses.replace(
    train,
    steps=steps,
    learning_rate=train.learning_rate / 3,
    warmup=min(train.warmup, steps // 5),
    eval_every=min(train.eval_every, steps),
    save_every=min(train.save_every, steps),
  )
