"""Training of drafters on a model's hidden vectors, which are kept on the disk once."""

import dataclasses
import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from vqjax.lm.drafting import Eagle, Medusa, save_eagle
from vqjax.lm.drafting.eagle import frequent_head, initial_params, unrolled
from vqjax.lm.generation import GREEDY, UNFILTERED, Drafter, RoundTimes, TreeDraft, generate
from vqjax.lm.generation.decoding import SMALLEST_BUCKET
from vqjax.lm.generation.draft_trees import is_whole
from vqjax.lm.generation.kv_cache import Variables, prefill, unstacked
from vqjax.lm.jobs import ProgressBars, job_identity, open_work
from vqjax.lm.lenses import fitting
from vqjax.lm.lenses.tuned import model_mark
from vqjax.lm.models import Transformer
from vqjax.lm.texts import encode_text, text_windows
from vqjax.ops.distillation import divergence_from_last
from vqjax.outputs import check_output

__all__ = ["EagleTraining", "drafter_of_rows", "spread_rows", "timed"]

SHARE = 32
"""One window is held out for so many that the drafter is trained on."""

DECAY = 0.8
"""Weight of a prediction in the loss over that of the one before it, as in EAGLE-3."""

TIMED_TOKENS = 48
"""Tokens that are generated to measure the cost of a round."""


def check_least(name: str, value: int | None, least: int) -> None:
  """Raise ValueError for an option that is not an integer or below its least value."""
  if value is not None and (not is_whole(value) or value < least):
    raise ValueError(f"`--{name}` must be an integer of at least {least}; got {value}. Change it.")


def check_drafter_file(out: pathlib.Path) -> None:
  """Raise ValueError unless `--out` is a new file that `vqjax generate` knows as a drafter's."""
  check_output(out, "--out", folder=False)
  if out.suffix != ".safetensors":
    raise ValueError(
      f"`--out` must end in .safetensors; got {out}. By its end `vqjax generate --draft` tells a"
      " drafter from a model."
    )


@dataclasses.dataclass(frozen=True)
class EagleTraining:
  """How a drafter is trained.

  Attributes:
    steps: steps of training.
    batch: windows of a step.
    depth: predictions deep that the drafter is trained, each from its own before.
    length: most tokens that are drafted in a round.
    vocab: number of the text's most frequent tokens that are drafted; None: all tokens.
    rate: largest learning rate.
  """

  steps: int = 2000
  batch: int = 4
  depth: int = 3
  length: int = 3
  vocab: int | None = None
  rate: float = 2e-3

  def __post_init__(self):
    for name in ("steps", "batch", "depth", "length", "vocab"):
      check_least(name, getattr(self, name), 1)
    if not self.rate > 0:
      raise ValueError(f"`--rate` must be positive; got {self.rate}. 0.002 is usual.")


@dataclasses.dataclass(frozen=True)
class DrafterJob:
  """A call of `train_drafter`.

  Attributes:
    model: path of the model.
    text: the text; its end is held out.
    out: the file to be written.
    settings: how the drafter is trained.
    positions: positions of the text on which it is trained.
    window: tokens of a window.
  """

  model: pathlib.Path
  text: str
  out: pathlib.Path
  settings: EagleTraining = EagleTraining()
  positions: int = 2**17
  window: int = 128

  def __post_init__(self):
    check_least("positions", self.positions, 1)
    check_least("window", self.window, self.settings.depth + 1)
    check_drafter_file(self.out)


def train_drafter(job: DrafterJob, loaded: Any, say: Callable[[str], None]) -> dict[str, Any]:
  """Train an `Eagle`, write it, and return how near it is to the model on held-out text.

  The loss is the KL divergence from the model's predictions on the text, of predictions that are
  `depth` deep as in drafting, in tiles of the vocabulary. With fewer tokens than the model has,
  both distributions are those among them.

  Args:
    job: what to do.
    loaded: the model, its variables and its tokenizer.
    say: prints a line.

  Returns:
    "agreement" and "kl" of each depth, on held-out text: the part of positions at which the best
    tokens are equal, and nats a token; "positions", the number of held-out ones; and "rounds",
    `rounds_of` the drafter on this device.

  Raises:
    ValueError: the text is too short.
  """
  model, variables, tokenizer = loaded
  work = job.out.with_name(f".{job.out.name}.partial")
  begin, tokens = encode_text(tokenizer, job.text)
  rows = text_windows({"text": tokens}, begin, min(job.window, model.context)).tokens
  with open_work(work, job_identity(job, model_mark(variables))), ProgressBars() as bars:
    chosen = spread_rows(rows, job.positions)
    counts = np.bincount(tokens, minlength=model.head.vocab)
    eagle, found = drafter_of_rows(work, model, variables, chosen, counts, job.settings, bars, say)
    eagle = timed(eagle, model, variables, chosen[-1].tolist())
  save_eagle(job.out, eagle, variables)
  shutil.rmtree(work)
  return found | {"rounds": rounds_of(eagle)}


def spread_rows(rows: Int[np.ndarray, "N T"], positions: int) -> Int[np.ndarray, "W T"]:
  """Windows spread over a text of `positions` tokens in all, and then its end.

  Raises:
    ValueError: there are fewer than two windows.
  """
  if len(rows) < 2:
    raise ValueError(
      f"`--text` must have at least two windows of {rows.shape[1]} tokens; got {len(rows)}. Give a"
      " longer text, or a smaller `--window`."
    )
  needed = min(max(1, -(-positions // rows.shape[1])), len(rows) * SHARE // (SHARE + 1))
  held_out = min(max(1, needed // SHARE), len(rows) - 1)
  needed = min(max(1, needed), len(rows) - held_out)
  # Spread over the text, which may be of several sources.
  chosen = np.linspace(0, len(rows) - held_out - 1, needed).astype(int)
  return np.concatenate((rows[chosen], rows[-held_out:]))


def drafter_of_rows(
  work: pathlib.Path,
  model: Transformer,
  variables: Variables,
  rows: Int[np.ndarray, "W T"],
  counts: Int[np.ndarray, "V"],
  settings: EagleTraining,
  bars: Callable[[str], Callable[[float], None]],
  say: Callable[[str], None],
) -> tuple[Eagle, dict[str, Any]]:
  """A drafter that is trained on windows of text, of which the last are held out, and its figures.

  Args:
    work: folder of the kept hidden vectors and of the state of the training.
    model: the decoder.
    variables: its variables.
    rows: the windows, such as `spread_rows` chooses them.
    counts: occurrences of each token.
    settings: how the drafter is trained.
    bars: makes bars of progress.
    say: prints a line.
  """
  held_out = max(1, len(rows) // (SHARE + 1))
  own = unstacked(variables)
  states = lambda row: hidden_vectors(own, row[None], model=model)
  shape = 1, rows.size, model.dim
  kept = fitting.kept_states(work, states, shape, rows, bars("hidden vectors"))
  kept = kept.reshape(*rows.shape, model.dim)
  frequent, head = None, (None, None)
  if settings.vocab is not None and settings.vocab < model.head.vocab:
    frequent = np.sort(np.argsort(-counts, kind="stable")[: settings.vocab]).astype(np.int32)
    head = frequent_head(model, variables, frequent)
  params = initial_params(model, variables, jax.random.key(0))
  given = Eagle(params, *head, tokens=frequent, length=settings.length)
  train, test = (rows[:-held_out], kept[:-held_out]), (rows[-held_out:], kept[-held_out:])
  eagle = _trained(settings, work, model, variables, given, train, bars("training"), say)
  found = _held_out(settings, model, variables, eagle, test)
  return eagle, found | {"positions": test[0].size}


def timed(
  drafter: Drafter,
  model: Transformer,
  variables: Variables,
  prompt: Sequence[int],
) -> Drafter:
  """The drafter with the times of its rounds on this device, batch 1.

  A tree is drafted whole or not at all, so that all of its time counts as the cost of its tokens.
  """
  given = drafter, model, variables, prompt
  return dataclasses.replace(
    drafter, **_times(*given, GREEDY)._asdict(), drawn=_times(*given, UNFILTERED)
  )


def rounds_of(drafter: Drafter) -> dict[str, dict[str, float]]:
  """Cost and overhead of the rounds of a drafter, by how tokens are chosen."""
  ways = {"greedy": GREEDY, "drawn": UNFILTERED}
  return {name: drafter.times(sampling)._asdict() for name, sampling in ways.items()}


def _times(drafter, model, variables, prompt, sampling):
  """The times of rounds with the options of sampling."""
  # Neither a long prompt nor a copy of the blocks in each call is part of a round.
  longest = min(SMALLEST_BUCKET, max(1, model.context - TIMED_TOKENS))
  prompt, variables = list(prompt)[:longest], unstacked(variables)
  tokens = min(TIMED_TOKENS, model.context - len(prompt))
  if isinstance(drafter, Medusa | TreeDraft):
    ways = {drafter.tree.size: dataclasses.replace(drafter, cost=0)}
  else:
    ways = {
      length: dataclasses.replace(drafter, length=length, cost=0)
      for length in sorted({drafter.length, max(1, drafter.length // 2)})
    }
  lengths = list(ways)
  each: dict[int, list[float]] = {length: [] for length in (0, *lengths)}
  for number in range(4):
    for length, times in each.items():
      own = ways.get(length)
      begun = time.perf_counter()
      given = model, variables, [prompt], jax.random.key(0), sampling
      result = generate(*given, max_tokens=tokens, log_probs=False, drafter=own)
      passes = tokens if own is None else int(result.passes[0])
      if number:  # the first call compiles
        times.append((time.perf_counter() - begun) / passes)
  ratio = {length: min(times) / min(each[0]) for length, times in each.items()}
  cost = (ratio[lengths[-1]] - (ratio[lengths[0]] if len(lengths) > 1 else 1)) / (
    lengths[-1] - (lengths[0] if len(lengths) > 1 else 0)
  )
  cost = float(np.clip(cost, 1e-3, 0.99))
  overhead = max(0.0, ratio[lengths[-1]] - 1 - cost * lengths[-1])
  return RoundTimes(cost, overhead)


def _losses(model, variables, eagle, params, tokens_BT, hidden_BTD, depth):
  """KL [K, B, T] of predictions, 0 where they are not defined."""
  vector_KBTD = unrolled(model, variables, params, tokens_BT, hidden_BTD, depth)
  both = jnp.concatenate((vector_KBTD, hidden_BTD.astype(vector_KBTD.dtype)[None]))
  score = lambda head: head.over_blocks(divergence_from_last, both)
  if eagle.head is None:
    kl_KBT = model.apply(variables, method=lambda m: score(m.head))
  else:
    kl_KBT = eagle.head.apply(eagle.variables, method=score)
  return jnp.where(_is_defined(kl_KBT.shape), kl_KBT, 0), vector_KBTD


def _is_defined(shape):
  depth, _, length = shape
  return (jnp.arange(length) >= jnp.arange(depth)[:, None])[:, None]


def _trained(job, work, model, variables, eagle, train, progress, say):
  """The drafter after all steps."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, job.rate, max(1, job.steps // 20), max(2, job.steps), job.rate / 20
  )
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))

  def loss(params, variables, own, tokens_BT, hidden_BTD):
    given = dataclasses.replace(eagle, variables=own)
    kl_KBT, _ = _losses(model, variables, given, params, tokens_BT, hidden_BTD, job.depth)
    weight_K11 = (DECAY ** jnp.arange(job.depth))[:, None, None]
    counted = jnp.broadcast_to(_is_defined(kl_KBT.shape) * weight_K11, kl_KBT.shape)
    return (kl_KBT * counted).sum() / counted.sum()

  found = jax.jit(jax.value_and_grad(loss))

  def gradient(params, step):
    at = _batch(len(train[0]), job.batch, step)
    given = variables, eagle.variables, *(np.asarray(x[at]) for x in train)
    value, changes = found(params, *given)
    return float(value), changes

  path = work / "state.npz"
  params = fitting.descend(path, eagle.params, optimizer, gradient, job.steps, progress, say)
  return dataclasses.replace(eagle, params=params)


def _batch(count, size, step):
  """Windows of a step: all of them once in each pass over the text."""
  size = min(size, count)
  of_pass = count // size
  order = np.random.default_rng((0, step // of_pass)).permutation(count)
  first = step % of_pass * size
  return np.sort(order[first : first + size])


def _held_out(job, model, variables, eagle, test):
  """Means on held-out windows, by depth."""

  @jax.jit
  def measured(params, variables, own, tokens_BT, hidden_BTD):
    given = dataclasses.replace(eagle, variables=own)
    kl_KBT, vector_KBTD = _losses(model, variables, given, params, tokens_BT, hidden_BTD, job.depth)
    best = lambda head, vectors: head.top_k(vectors, 1)[1][..., 0]
    of_model = lambda vectors: model.apply(variables, method=lambda m: best(m.head, vectors))
    if eagle.head is None:
      drafted_KBT = of_model(vector_KBTD)
    else:
      drafted_KBT = eagle.head.apply(own, vector_KBTD, method=best)
      drafted_KBT = jnp.asarray(eagle.tokens)[drafted_KBT]
    agrees_KBT = (drafted_KBT == of_model(hidden_BTD)) & _is_defined(kl_KBT.shape)
    count_K = jnp.broadcast_to(_is_defined(kl_KBT.shape), kl_KBT.shape).sum((1, 2))
    return kl_KBT.sum((1, 2)) / count_K, agrees_KBT.sum((1, 2)) / count_K

  found = [
    measured(eagle.params, variables, eagle.variables, tokens[None], np.asarray(hidden)[None])
    for tokens, hidden in zip(*test)
  ]
  kl_K, agreement_K = (np.mean([np.asarray(x) for x in each], axis=0) for each in zip(*found))
  return {"kl": kl_K.tolist(), "agreement": agreement_K.tolist()}


@functools.partial(jax.jit, static_argnames="model")
def hidden_vectors(
  variables: Variables, tokens_BT: Int[Array, "B T"], *, model: Transformer
) -> Float[Array, "B T D"]:
  """The final hidden vectors [B, T, D] of a model with unstacked variables."""
  length_B = jnp.full(tokens_BT.shape[:1], tokens_BT.shape[1])
  return prefill(model, variables, tokens_BT, length_B, 1, all_positions=True)[0]
