"""Fitting of a tuned lens on text: streams are kept on the disk once, and a call is resumed."""

import dataclasses
import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from vqjax.lm import records
from vqjax.lm.jobs import ProgressBars, job_identity, open_work
from vqjax.lm.lenses import Lens, least_squares_lens, lens_divergence, residual_streams, save_lens
from vqjax.lm.lenses.tuned import model_mark
from vqjax.lm.models import Transformer
from vqjax.lm.texts import encode_text, text_windows
from vqjax.outputs import atomic_file, check_output

__all__ = ["LensJob", "fit_lens"]

SHARE = 16
"""One position is held out for so many that the lens is fitted on."""

EVERY = 60.0
"""Seconds after which the state of the fit is kept."""


@dataclasses.dataclass(frozen=True)
class LensJob:
  """A call of `fit_lens`.

  Attributes:
    model: path of the model.
    text: the text; its end is held out.
    out: the file to be written.
    positions: positions of the text on which the lens is fitted.
    steps: steps of descent on the divergence.
    batch: positions of a step.
    window: tokens of a window of text.
    identity: begin with the logit lens, not with the least-squares lens.
    rate: learning rate of the first step, which falls linearly to 0.
  """

  model: pathlib.Path
  text: str
  out: pathlib.Path
  positions: int = 2**14
  steps: int = 250
  batch: int = 2**8
  window: int = 256
  identity: bool = False
  rate: float = 0.1

  def __post_init__(self):
    for name, least in (("positions", 1), ("steps", 0), ("batch", 1), ("window", 2)):
      if getattr(self, name) < least:
        raise ValueError(
          f"`--{name}` must be at least {least}; got {getattr(self, name)}. Raise it."
        )
    if not self.rate > 0:
      raise ValueError(f"`--rate` must be positive; got {self.rate}. 0.1 is usual.")
    check_output(self.out, "--out", folder=False)


def fit_lens(job: LensJob, loaded: Any, say: Callable[[str], None]) -> dict[str, Any]:
  """Fit a lens, write it, and return the held-out divergences of every layer.

  Descent is that of Belrose et al., 2023: SGD with Nesterov's momentum 0.9, gradients of norm at
  most 1, weight decay 0.001 of the translators' differences from the identity.

  Args:
    job: what to do.
    loaded: the model, its variables and its tokenizer.
    say: prints a line.

  Returns:
    "logit" and "tuned": KL from the model's prediction before each block, in nats a token;
    "positions", the number of held-out positions; "bytes", those of their text; and "fitted", the
    number of the other positions.

  Raises:
    ValueError: the text is too short.
  """
  model, variables, tokenizer = loaded
  work = job.out.with_name(f".{job.out.name}.partial")
  begin, tokens = encode_text(tokenizer, job.text)
  rows = text_windows({"text": tokens}, begin, min(job.window, model.context)).tokens
  per_window = rows.shape[1] - 1
  if len(rows) < 2:
    raise ValueError(
      f"`--fit` must have at least two windows of {rows.shape[1]} tokens; got {len(tokens)} tokens."
      " Give a longer text, or a smaller `--window`."
    )
  # Of a text that is too short for all positions the same share is held out.
  needed = min(-(-job.positions // per_window), len(rows) * SHARE // (SHARE + 1))
  held_out = min(max(1, needed // SHARE), len(rows) - 1)
  needed = min(max(1, needed), len(rows) - held_out)
  rows = np.concatenate((rows[:needed], rows[-held_out:]))
  with open_work(work, job_identity(job, model_mark(variables))), ProgressBars() as bars:
    # The first position of a window has no text before it.
    streams = lambda row: _streams(variables, row[None], model=model)[:, 0, 1:]
    shape = model.layers + 1, len(rows) * per_window, model.dim
    kept = kept_states(work, streams, shape, rows, bars("streams"))
    train, test = kept[:, : (len(rows) - held_out) * per_window], kept[:, -held_out * per_window :]
    lens = Lens.identity(model) if job.identity else least_squares_lens(_parts(train, 2**10))
    if job.steps:
      lens = _descend(job, work, model, variables, lens, train, bars("divergence"), say)
    measured = {}
    for name, each in (("logit", None), ("tuned", lens)):
      bar, total = bars(f"held-out text, {name} lens"), np.zeros(model.layers)
      for number, part in enumerate(_parts(test, 64)):
        found = _divergence(variables, each, part, model=model)
        total += np.asarray(found, np.float64).sum(axis=1)
        bar((number + 1) * 64 / test.shape[1])
      measured[name] = (total / test.shape[1]).tolist()
  save_lens(lens, job.out, variables)
  shutil.rmtree(work)
  decoded = lambda row: len(tokenizer.decode(row.tolist()).encode())
  size = sum(decoded(row) - decoded(row[:1]) for row in rows[-held_out:])
  return {**measured, "positions": test.shape[1], "bytes": size, "fitted": train.shape[1]}


def kept_states(
  work: pathlib.Path,
  states: Callable[[jax.Array], Float[Array, "S T D"]],
  shape: tuple[int, int, int],
  rows: Int[np.ndarray, "W T"],
  progress: Callable[[float], None],
) -> Float[np.ndarray, "S N D"]:
  """States of a model on windows of text, in a file; a call that was interrupted goes on.

  Args:
    work: folder of the file.
    states: the states of a window.
    shape: the shape of those of all windows, one after another.
    rows: the windows.
    progress: called with the part that is done.
  """
  path, record = work / "streams.npy", work / "streams.json"
  done = 0
  if record.exists() and path.exists():
    done = records.read(record, _Done)["windows"]
  mode = "r+" if done else "w+"
  kept = np.lib.format.open_memmap(path, mode=mode, dtype=np.float32, shape=shape)
  saved = time.monotonic()
  for number in range(done, len(rows)):
    found = states(jnp.asarray(rows[number]))
    width = found.shape[1]
    kept[:, number * width : (number + 1) * width] = np.asarray(found, np.float32)
    progress((number + 1) / len(rows))
    if time.monotonic() - saved > EVERY or number + 1 == len(rows):
      kept.flush()
      records.write(record, {"windows": number + 1})
      saved = time.monotonic()
  return kept


@dataclasses.dataclass
class _Done:
  windows: int


def _parts(x_SND: np.ndarray, size: int) -> Iterator[np.ndarray]:
  return (x_SND[:, first : first + size] for first in range(0, x_SND.shape[1], size))


def _descend(job, work, model, variables, lens, train, progress, say):
  """The lens after all steps of descent; the loss is KL, the mean of all blocks."""
  rate = optax.linear_schedule(job.rate, 0.0, job.steps)
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.add_decayed_weights(1e-3),
    optax.sgd(rate, momentum=0.9, nesterov=True),
  )

  # Loss and gradient of a few positions at a time, so that blocks of the vocabulary are large.
  @jax.jit
  def gradient(lens, variables, x_SND):
    loss = lambda lens: lens_divergence(model, variables, lens, x_SND).sum()
    return jax.value_and_grad(loss)(lens)

  def mean_gradient(lens, step):
    at = np.random.default_rng((0, step)).permutation(train.shape[1])[: job.batch]
    at.sort()
    batch = np.asarray(train[:, at])
    total, loss = None, 0.0
    for part in _parts(batch, 64):
      value, found = gradient(lens, variables, part)
      loss += float(value)
      total = found if total is None else jax.tree.map(jnp.add, total, found)
    mean = jax.tree.map(lambda x: x / batch.shape[1], total)
    return loss / batch.shape[1] / model.layers, mean

  return descend(work / "state.npz", lens, optimizer, mean_gradient, job.steps, progress, say)


def descend(
  path: pathlib.Path,
  trained: Any,
  optimizer: optax.GradientTransformation,
  gradient: Callable[[Any, int], tuple[float, Any]],
  steps: int,
  progress: Callable[[float], None],
  say: Callable[[str], None],
) -> Any:
  """What is trained, after all steps; an interrupted call goes on with its last kept step.

  Args:
    path: the file of the kept state, with the ending .npz.
    trained: a tree of arrays to begin with.
    optimizer: the optimiser.
    gradient: gradient(trained, step) is the loss of a step in nats, and the gradient.
    steps: number of steps.
    progress: is called with the part that is done.
    say: prints a line.
  """
  state, first = (trained, optimizer.init(trained)), 0
  structure = jax.tree.structure(state)
  if path.exists():
    with np.load(path) as file:
      leaves = [file[f"arr_{number}"] for number in range(structure.num_leaves)]
      state, first = jax.tree.unflatten(structure, leaves), int(file["step"])
    say(f"going on with step {first} of {steps}")

  @jax.jit
  def update(state, found):
    trained, own = state
    change, own = optimizer.update(found, own, trained)
    return optax.apply_updates(trained, change), own

  saved = time.monotonic()
  for step in range(first, steps):
    loss, found = gradient(state[0], step)
    state = update(state, found)
    progress((step + 1) / steps)
    if step % 10 == 0 or step + 1 == steps:
      say(f"step {step + 1}: {loss:.4f} nats")
    if time.monotonic() - saved > EVERY:
      saved = time.monotonic()
      with atomic_file(path) as out:
        np.savez(out, *map(np.asarray, jax.tree.leaves(state)), step=step + 1)
  return state[0]


@functools.partial(jax.jit, static_argnames="model")
def _streams(variables, tokens_BT, *, model: Transformer):
  return residual_streams(model, variables, tokens_BT)


@functools.partial(jax.jit, static_argnames="model")
def _divergence(variables, lens, x_SND, *, model: Transformer):
  return lens_divergence(model, variables, lens, x_SND)
