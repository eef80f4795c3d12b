"""How does a language model go on with the beginnings of stories?"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from vqjax.lab.data.tokenizers import Encoder
from vqjax.models import LanguageModel


def beginnings(documents: Iterable[str], encoder: Encoder, count: int) -> list[list[int]]:
  """The tokens of the first half, in whole words, of each of the first `count` stories.

  The halves are of the text, so models with different tokenizers are given the same beginnings. A
  story of a single word has no beginning and is passed over.

  Raises:
    ValueError: there are fewer than `count` stories.
  """
  if count < 1:
    raise ValueError(f"count {count} takes no story; give at least 1")
  found: list[list[int]] = []
  for document in documents:
    half = _first_half(document)
    if half:
      found.append(encoder.encode(half).tolist()[:-1])
    if len(found) == count:
      return found
  raise ValueError(f"there are {len(found)} stories to begin with and not {count}; ask for fewer")


def _first_half(document: str) -> str:
  """Words up to the middle, at least one; nothing where there is only one."""
  document = document.strip()
  half = document[: len(document) // 2 + 1]
  # The blank belongs to the word behind it: a byte-pair tokenizer has the two as one token.
  match = re.match(r"(.+)\s", half, re.DOTALL) or re.match(r"(\S+)\s", document)
  return match[1].rstrip() if match else ""


def texts(
  encoder: Encoder, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[tuple[str, str]]:
  """Beginning and completion of each story as text."""
  return [(encoder.decode(a), encoder.decode(b)) for a, b in zip(prompts, completions, strict=True)]


def write(
  model: LanguageModel,
  variables: dict[str, Any],
  prompts: Sequence[Sequence[int]],
  key: PRNGKeyArray,
  *,
  tokens: int,
  eos: int,
  temperature: float = 1.0,
  top_k: int | None = None,
) -> list[list[int]]:
  """At most `tokens` tokens after each prompt, without it, up to the first `eos`, left out too.

  Every token is drawn from the head's exact distribution after the last `context` tokens; the whole
  window is computed anew for each. The same key writes the same.

  Args:
    model: has `hidden` and a head with `sample`.
    variables: what `model.apply` takes, such as `training.saved.read_variables` returns.
    prompts: at least one token each, of any length; of a long one the last `context` count.
    key: source of randomness.
    tokens: most tokens of a completion.
    eos: the token that ends a story.
    temperature: divides the logits; 0 takes the likeliest token.
    top_k: draw from the k likeliest tokens; None: from all.

  Raises:
    ValueError: there is no prompt, one has no token or one outside the vocabulary; `tokens` is
      below 1; or the model's scores are no numbers.
  """
  _check(prompts, tokens, model.head.vocab)
  # Of rows that never fill the context, what lies beyond them is not computed.
  window_BT, length_B = _windows(prompts, min(model.context, max(map(len, prompts)) + tokens))
  # What a model remembers is of the last batch that it was trained on.
  variables = {name: part for name, part in variables.items() if name != "carry"}

  def draw(model, window_BT, length_B, key):
    # No position sees those behind it, so what fills a row up does not matter.
    hidden_BTD = model.hidden(window_BT)
    last_BD = jnp.take_along_axis(hidden_BTD, (length_B - 1)[:, None, None], axis=1)[:, 0]
    return model.head.sample(last_BD, key, temperature, top_k)

  step = lambda variables, *state: model.apply(variables, *state, method=draw)
  run = jax.jit(lambda variables, *state: _run(step, variables, *state, tokens=tokens, eos=eos))
  written_BN = np.asarray(run(variables, window_BT, length_B, key))
  found = [row[: row.index(eos)] if eos in row else row for row in written_BN.tolist()]
  for number, row in enumerate(found):
    if min(row, default=0) < 0:
      raise ValueError(
        f"after prompt {number} the model's scores are no numbers; give the variables of a run that"
        " did not diverge"
      )
  return found


def _run(step, variables, window_BT, length_B, key, *, tokens: int, eos: int) -> Int[Array, "B N"]:
  """Tokens drawn one after another, until every row has ended."""
  row_B, width = jnp.arange(len(window_BT)), window_BT.shape[1]

  def unended(state):
    index, _, _, written_BN = state
    return (index < tokens) & ~(written_BN == eos).any(axis=1).all()

  def append(state):
    index, window_BT, length_B, written_BN = state
    token_B = step(variables, window_BT, length_B, jax.random.fold_in(key, index))
    # A full window loses its oldest token.
    full_B1 = (length_B == width)[:, None]
    window_BT = jnp.where(full_B1, jnp.roll(window_BT, -1, axis=1), window_BT)
    window_BT = window_BT.at[row_B, jnp.minimum(length_B, width - 1)].set(token_B)
    length_B = jnp.minimum(length_B + 1, width)
    return index + 1, window_BT, length_B, written_BN.at[:, index].set(token_B)

  nothing_BN = jnp.full((len(window_BT), tokens), -1, jnp.int32)
  return lax.while_loop(unended, append, (0, window_BT, length_B, nothing_BN))[-1]


def _check(prompts: Sequence[Sequence[int]], tokens: int, vocab: int) -> None:
  if tokens < 1:
    raise ValueError(f"tokens {tokens} writes nothing; give at least 1")
  if not prompts:
    raise ValueError("there is no prompt to go on with; give at least one")
  for number, prompt in enumerate(prompts):
    wrong = [token for token in prompt if not 0 <= token < vocab]
    if not len(prompt) or wrong:
      reason = f"has token {wrong[0]} in a vocabulary of {vocab}" if wrong else "has no token"
      raise ValueError(f"prompt {number} {reason}; give at least one of 0 to {vocab - 1}")


def _windows(prompts: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
  """The ends of the prompts from the left of rows [B, width], filled up with 0, and lengths."""
  ends = [list(prompt)[-width:] for prompt in prompts]
  rows = [end + [0] * (width - len(end)) for end in ends]
  return np.array(rows, np.int32), np.array([len(end) for end in ends], np.int32)
