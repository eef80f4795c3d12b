"""Training of Medusa's blocks on text: hidden vectors are kept on the disk once, and resumed."""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

from vqjax.heads import Head
from vqjax.lm.drafting import Medusa, MedusaBlocks, medusa_loss, medusa_ranks, save_medusa
from vqjax.lm.drafting.eagle import frequent_head
from vqjax.lm.drafting.eagle_training import (
  check_drafter_file,
  check_least,
  hidden_vectors,
  rounds_of,
  spread_rows,
  timed,
)
from vqjax.lm.generation import DraftTree
from vqjax.lm.generation.kv_cache import Variables, unstacked
from vqjax.lm.jobs import ProgressBars, job_identity, open_work
from vqjax.lm.lenses.fitting import descend, kept_states
from vqjax.lm.lenses.tuned import model_mark
from vqjax.lm.models import Transformer
from vqjax.lm.texts import encode_text, text_windows

__all__ = ["MedusaTraining", "frequent_output", "medusa_of_rows"]

SHARE = 16
"""One window is held out for so many that are trained on."""

DISCOUNT = 0.8
"""Factor of the loss from one block to the next; that of Cai et al., 2024."""

CANDIDATES = 10
"""Ranks of a block that a tree is chosen from."""

AT_ONCE = 256
"""Positions whose ranks are computed at a time."""


class Output(NamedTuple):
  """The output layer of the blocks.

  Attributes:
    head: the layer; None: the model's head, which is not trained.
    variables: those of `head`.
    tokens: the model's token for each of the head; None: it has the model's vocabulary.
  """

  head: Head | None = None
  variables: Variables | None = None
  tokens: Int[np.ndarray, "U"] | None = None


class _States(NamedTuple):
  """Text and the final hidden vectors of a model at each of its tokens.

  Attributes:
    tokens: rows of tokens.
    hidden: the hidden vectors.
  """

  tokens: Int[np.ndarray, "R T"]
  hidden: Float[np.ndarray, "R T D"]

  def positions(self, count: int) -> int:
    """Number of positions that have text before them and `count` + 1 tokens behind them."""
    return len(self.tokens) * max(0, self.tokens.shape[1] - 2 - count)

  def at(
    self, positions: Int[np.ndarray, "N"], count: int
  ) -> tuple[Float[np.ndarray, "N D"], Int[np.ndarray, "N K"]]:
    """Hidden vectors at some positions, and the tokens 2, ..., `count` + 1 places after each."""
    row, column = np.divmod(positions, self.tokens.shape[1] - 2 - count)
    later = column[:, None] + 3 + np.arange(count)
    return np.asarray(self.hidden[row, column + 1]), self.tokens[row[:, None], later]


def _kept_hidden_states(
  work: pathlib.Path,
  model: Transformer,
  variables: Variables,
  rows: Int[np.ndarray, "R T"],
  progress: Callable[[float], None],
) -> _States:
  """The final hidden vectors of rows of text, in a file that an interrupted call goes on with.

  Args:
    work: folder of the file.
    model: the decoder.
    variables: its unstacked variables.
    rows: the text.
    progress: is called with the part that is done.
  """

  of_row = lambda row: hidden_vectors(variables, row[None], model=model)
  kept_1ND = kept_states(work, of_row, (1, rows.size, model.dim), rows, progress)
  return _States(rows, kept_1ND.reshape(*rows.shape, model.dim))


def frequent_output(
  model: Transformer, variables: Variables, tokens: Int[np.ndarray, "..."], size: int
) -> Output:
  """A dense head of the rows of a text's most frequent tokens.

  Raises:
    ValueError: the scores of the model's head are not products with rows.
  """
  count = np.bincount(np.ravel(tokens), minlength=model.head.vocab)
  kept = np.sort(np.argsort(-count, kind="stable")[:size]).astype(np.int32)
  return Output(*frequent_head(model, variables, kept), kept)


@dataclasses.dataclass(frozen=True)
class MedusaTraining:
  """How blocks are trained.

  Attributes:
    blocks: number of blocks.
    steps: steps of AdamW; its rate rises for a twentieth of them, and then falls as a cosine.
    batch: positions of a step.
    rate: highest learning rate.
    size: draft tokens of the tree.
  """

  blocks: int = 4
  steps: int = 1000
  batch: int = 2**8
  rate: float = 1e-3
  size: int = 24

  def __post_init__(self):
    for name in ("blocks", "steps", "batch", "size"):
      check_least(name, getattr(self, name), 1)
    if not self.rate > 0:
      raise ValueError(f"`--rate` must be positive; got {self.rate}. 0.001 is usual.")


def _train_medusa(
  work: pathlib.Path,
  model: Transformer,
  variables: Variables,
  states: _States,
  output: Output,
  settings: MedusaTraining,
  progress: Callable[[float], None],
  say: Callable[[str], None],
) -> Medusa:
  """Blocks, and the output layer if it is their own, trained on text; the model stays as it is.

  Args:
    work: folder of the state that an interrupted call goes on with.
    model: the decoder.
    variables: its unstacked variables.
    states: the text.
    output: what the training of the output layer begins with.
    settings: how to train.
    progress: is called with the part that is done.
    say: prints a line.
  """
  count = settings.blocks
  number = np.arange(model.head.vocab, dtype=np.int32)
  if output.tokens is not None:
    number = np.full(model.head.vocab, -1, np.int32)
    number[output.tokens] = np.arange(len(output.tokens))
  own = {} if output.head is None else output.variables
  frozen = {name: tree for name, tree in own.items() if name != "params"}
  trained = MedusaBlocks.identity(model.dim, count), own.get("params", {})
  warm_up = max(1, settings.steps // 20)
  rate = optax.warmup_cosine_decay_schedule(
    0, settings.rate, warm_up, max(settings.steps, warm_up + 1)
  )
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))

  @jax.jit
  def gradient(trained, variables, hidden_ND, target_NK):
    def loss(trained):
      blocks, params = trained
      given = {"params": params, **frozen} if output.head is not None else None
      loss_K = medusa_loss(model, variables, blocks, hidden_ND, target_NK, output.head, given)
      return (DISCOUNT ** jnp.arange(count) * loss_K).sum(), loss_K[0]

    (_, first), found = jax.value_and_grad(loss, has_aux=True)(trained)
    return first, found

  def of_step(trained, step):
    rng = np.random.default_rng((0, step))
    at = np.sort(rng.integers(0, states.positions(count), settings.batch))
    hidden_ND, target_NK = states.at(at, count)
    given = variables if output.head is None else {}
    loss, found = gradient(trained, given, hidden_ND, number[target_NK])
    return float(loss), found

  steps = settings.steps
  blocks, params = descend(work / "blocks.npz", trained, optimizer, of_step, steps, progress, say)
  blocks = jax.tree.map(jnp.asarray, blocks)
  if output.head is None:
    return Medusa(blocks)
  own = {"params": jax.tree.map(jnp.asarray, params), **frozen}
  return Medusa(blocks, output.head, own, tokens=output.tokens)


def _ranks(
  drafter: Medusa, model: Transformer, variables: Variables, states: _States
) -> Int[np.ndarray, "N K"]:
  """The rank that each block gives to the token that follows, at all positions of a text.

  -1 where the token is not among the `CANDIDATES` best.
  """
  count = len(drafter.blocks.weight)

  @jax.jit
  def ranked(variables, blocks, own, hidden_ND, target_NK):
    given = dataclasses.replace(drafter, blocks=blocks, variables=own)
    return medusa_ranks(given, model, variables, hidden_ND, target_NK, CANDIDATES)

  found, total = [], states.positions(count)
  for first in range(0, total, AT_ONCE):
    # The last part is repeated up to the size of the others, so that one program serves all.
    at = np.minimum(np.arange(first, first + AT_ONCE), total - 1)
    hidden_ND, target_NK = states.at(at, count)
    given = variables, drafter.blocks, drafter.variables, hidden_ND, target_NK
    found.append(np.asarray(ranked(*given))[: total - first])
  return np.concatenate(found)


def _with_best_tree(
  drafter: Medusa, model: Transformer, variables: Variables, held_out: _States, size: int
) -> tuple[Medusa, dict[str, Any]]:
  """The drafter with the best tree of `size` tokens for half of the held-out rows.

  Also what the other half says: "accuracy", the part of the tokens that each block ranks first;
  "among", the part that it has among `CANDIDATES`; "chain" and "tree", tokens a pass of the
  likeliest tokens alone and of the tree; "size", the draft tokens of the tree; and "positions".
  """
  half = lambda first: _States(held_out.tokens[first::2], held_out.hidden[first::2])
  known_NK = _ranks(drafter, model, variables, half(0))
  if not (known_NK[:, 0] >= 0).any():
    raise ValueError(
      f"the first block must have some of {len(known_NK)} held-out tokens among its {CANDIDATES}"
      " best; got none. Train for more steps, on a longer text."
    )
  tree = DraftTree.best(known_NK, size)
  rank_NK = _ranks(drafter, model, variables, half(1))
  figures = {
    "accuracy": (rank_NK == 0).mean(axis=0).tolist(),
    "among": (rank_NK >= 0).mean(axis=0).tolist(),
    "chain": DraftTree.chain(rank_NK.shape[1]).tokens_per_pass(rank_NK),
    "tree": tree.tokens_per_pass(rank_NK),
    "size": tree.size,
    "positions": len(rank_NK),
  }
  return dataclasses.replace(drafter, tree=tree), figures


def medusa_of_rows(
  work: pathlib.Path,
  model: Transformer,
  variables: Variables,
  rows: Int[np.ndarray, "R T"],
  output: Output,
  settings: MedusaTraining,
  bar: Callable[[str], Callable[[float], None]],
  say: Callable[[str], None],
) -> tuple[Medusa, dict[str, Any]]:
  """A drafter trained on rows of text, and the figures of `_with_best_tree` on the last of them.

  Args:
    work: folder of what an interrupted call goes on with.
    model: the decoder.
    variables: its unstacked variables.
    rows: the text; the last `SHARE`-th of the rows is held out.
    output: what the training of the output layer begins with.
    settings: how to train.
    bar: makes a bar of progress from its title.
    say: prints a line.

  Raises:
    ValueError: there are fewer than three rows, or they are too short.
  """
  least = settings.blocks + 3
  if len(rows) < 3 or rows.shape[1] < least:
    raise ValueError(
      f"`rows` must be at least three of {least} tokens, for {settings.blocks} blocks; got"
      f" {len(rows)} of {rows.shape[1]}. Give a longer text, or train fewer blocks."
    )
  held_out = max(2, len(rows) // SHARE)
  states = _kept_hidden_states(work, model, variables, rows, bar("hidden vectors"))
  parts = slice(None, -held_out), slice(-held_out, None)
  train, test = (_States(states.tokens[part], states.hidden[part]) for part in parts)
  given = work, model, variables, train, output, settings, bar("training"), say
  drafter = _train_medusa(*given)
  return _with_best_tree(drafter, model, variables, test, settings.size)


@dataclasses.dataclass(frozen=True)
class MedusaJob:
  """A call of `fit_medusa`.

  Attributes:
    model: path of the model.
    text: the text; its end is held out.
    out: the file to be written.
    positions: positions of the text that are used.
    window: tokens of a window of text.
    vocab: number of the text's most frequent tokens that are drafted; None: those of the model.
    settings: how to train.
  """

  model: pathlib.Path
  text: str
  out: pathlib.Path
  positions: int = 2**16
  window: int = 128
  vocab: int | None = 4096
  settings: MedusaTraining = MedusaTraining()

  def __post_init__(self):
    for name in ("positions", "vocab"):
      check_least(name, getattr(self, name), 1)
    check_least("window", self.window, self.settings.blocks + 3)
    check_drafter_file(self.out)


def fit_medusa(job: MedusaJob, loaded: Any, say: Callable[[str], None]) -> dict[str, Any]:
  """Train a drafter, write it, and return its figures.

  They are those of `_with_best_tree`, and "rounds", `rounds_of` the drafter on this device.

  Args:
    job: what to do.
    loaded: the model, its variables and its tokenizer.
    say: prints a line.

  Raises:
    ValueError: the text is too short, or the model's head has no rows to be chosen from.
  """
  model, variables, tokenizer = loaded
  variables = unstacked(variables)
  begin, tokens = encode_text(tokenizer, job.text)
  rows = text_windows({"text": tokens}, begin, min(job.window, model.context)).tokens
  rows = spread_rows(rows, job.positions)
  output = Output()
  if job.vocab is not None and job.vocab < model.head.vocab:
    output = frequent_output(model, variables, rows, job.vocab)
  work = job.out.with_name(f".{job.out.name}.partial")
  with open_work(work, job_identity(job, model_mark(variables))), ProgressBars() as bars:
    given = work, model, variables, rows, output, job.settings
    drafter, figures = medusa_of_rows(*given, bars, say)
    drafter = timed(drafter, model, variables, rows[-1].tolist())
  save_medusa(drafter, job.out, variables)
  shutil.rmtree(work)
  return figures | {"rounds": rounds_of(drafter)}
