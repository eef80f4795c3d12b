"""Experiments that compress the head of a trained dense model and fine-tune it."""

import dataclasses
import pathlib
from typing import Any

from vqjax.convert.mappings import KMeans, Mapping
from vqjax.convert.targets import ToCodebook
from vqjax.embeddings import CodebookEmbedding
from vqjax.heads import CodebookHead, Head
from vqjax.lab.config import Experiment, Train
from vqjax.lab.starting_points.distilled import Distilled, FromTeacher
from vqjax.lab.starting_points.starts import FromDense

__all__ = ["CODEBOOK", "FULL", "HEAD", "converted", "fine_tuned_codebook"]

FULL: tuple[str, ...] = ()
"""Scope of fine-tuning: all parameters."""

HEAD = ("head", "final_norm")
"""Scope of fine-tuning: the head and the final norm."""

CODEBOOK = ("head.codebook",)
"""Scope of fine-tuning: the codebook."""

BY_FREQUENCY = KMeans(power=1.0)
"""K-means on the output rows, weighted by count."""


def fine_tuned_codebook(
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
  """The experiment that converts a dense run to a codebook head and fine-tunes it.

  Example:

    experiment = compress(load("configs/lm_dense.py"), "runs/demo/dense", codes=512)
    fit(experiment, pathlib.Path("runs/demo/compressed"))

  Source: VQ-Logits, Section 3.3, Option A.

  Args:
    dense: the experiment of the dense run.
    folder: run folder of the dense run.
    codes: number of codes, K.
    mapping: assigns the tokens to codes.
    token_bias: the head has a bias for each token.
    tied: the input embedding is the codebook, c_M(i), and replaces the dense run's embedding.
    scope: prefixes of the fine-tuned parameters: `FULL`, `HEAD` or `CODEBOOK`.
    distillation: coefficient of the divergence from the dense model; 0: no teacher.
    temperature: temperature of the distillation.
    train: settings of the fine-tuning; None: a fifth of the dense run's steps at a third of its
      learning rate.
    name: name of the new run; None: the dense run's name and "-codebook".

  Raises:
    ValueError: the model has no embedding, or the dense head has a softcap, which a codebook head
      does not have.
  """
  if not hasattr(dense.model, "embedding"):
    raise ValueError(
      f"`dense` must be a run of a language model; got a {type(dense.model).__name__}, which has no"
      " embedding. Give the config of a decoder or an LSTM."
    )
  shape = dense.model.head.vocab, dense.model.embedding.dim, codes
  head = CodebookHead(
    *shape,
    token_bias=token_bias,
    embedding=CodebookEmbedding(*shape) if tied else None,
    dtype=dense.model.head.dtype,
  )
  if tied:
    # The codebook of a tied head is a parameter of the embedding, and only a bias is its own.
    owners = {"head": ("embedding", "head") if token_bias else ("embedding",)}
    owners["head.codebook"] = ("embedding.codebook",)
    scope = tuple(name for part in scope for name in owners.get(part, (part,)))
  return converted(
    dense,
    folder,
    head,
    ToCodebook(mapping),
    scope=scope,
    distillation=distillation,
    temperature=temperature,
    train=train,
    name=name or f"{dense.name}-codebook",
  )


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
  """The experiment that converts a dense run to any head and fine-tunes it.

  A tied head brings the embedding that it is tied to.

  Args:
    dense: the experiment of the dense run.
    folder: run folder of the dense run.
    head: the new head.
    target: makes the new head's variables, such as `convert.ToCodebook(...)`.
    name: name of the new run.
    scope: prefixes of the fine-tuned parameters; () fine-tunes all.
    distillation: coefficient of the divergence from the dense model; 0: no teacher.
    temperature: temperature of the distillation.
    train: settings of the fine-tuning; None: a fifth of the dense run's steps at a third of its
      learning rate.

  Raises:
    ValueError: the dense head has a softcap, and the new head has no such field.
  """
  softcap = getattr(dense.model.head, "softcap", None)
  if softcap is not None and not hasattr(head, "softcap"):
    raise ValueError(
      f"`head` must have a softcap, as the dense head has {softcap}; got a {type(head).__name__}"
      " without one. Use a ResidualCodebookHead or a ProductHead with conversion.converted."
    )
  train = train or _fine_tuning(dense.train)
  # A copy: an embedding object that student and teacher share would be one set of parameters.
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
