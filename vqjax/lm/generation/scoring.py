"""Log-probabilities of given text."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jaxtyping import Float

from vqjax.lm.generation.decoding import Prompts, check_decoder, encoded, padded
from vqjax.lm.generation.kv_cache import Variables
from vqjax.lm.models import Transformer
from vqjax.lm.tokenizers.reading import Tokenizer

__all__ = ["score"]


def score(
  model: Transformer,
  variables: Variables,
  texts: Prompts,
  *,
  tokenizer: Tokenizer | None = None,
  stride: int | None = None,
  batch: int = 8,
) -> list[Float[np.ndarray, "T"]]:
  """The log-probability, in nats, of each token of each text but its first.

  A text that is longer than the context is read in overlapping windows: each token is predicted
  from at least context - stride tokens before it, or all.

  Args:
    model: the decoder, with any head.
    variables: its variables as `model.init` and `checkpoints.load` return them.
    texts: at least one token each.
    tokenizer: encodes the texts; None: they are tokens.
    stride: tokens by which a window starts after the one before, in [1, context]; None: half the
      context.
    batch: windows that are computed at a time.

  Raises:
    ValueError: a text is empty or has a token outside the vocabulary, or `stride` or `batch` is
      out of range.
  """
  check_decoder(model)
  stride = max(1, model.context // 2) if stride is None else stride
  if not 1 <= stride <= model.context:
    raise ValueError(
      f"`stride` must be in [1, context {model.context}]; got {stride}. Half the context is usual."
    )
  if batch < 1:
    raise ValueError(f"`batch` must be at least 1; got {batch}. 8 is usual.")
  rows = encoded(texts, model.head.vocab, tokenizer, name="texts")
  scores = [np.zeros(len(row) - 1, np.float32) for row in rows]
  windows = []
  for number, row in enumerate(rows):
    for start in range(0, max(1, len(row) - 1 - model.context + stride), stride):
      windows.append((number, start, row[start : start + model.context + 1]))
  # Of similar lengths together: they are padded to the longest of their batch.
  windows.sort(key=lambda window: len(window[2]))
  for first in range(0, len(windows), batch):
    some = windows[first : first + batch]
    # The last batch is filled up, so that its size needs no program of its own.
    filled = [tokens for _, _, tokens in some] + [[0, 0]] * (min(batch, len(windows)) - len(some))
    tokens_BT, length_B = padded([tokens[:-1] or [0] for tokens in filled], model.context)
    targets_BT = np.zeros_like(tokens_BT)
    # Negative tokens are padding, which makes no text longer: some angles depend on the length.
    tokens_BT[np.arange(tokens_BT.shape[1]) >= length_B[:, None]] = -1
    for row, tokens in enumerate(filled):
      targets_BT[row, : len(tokens) - 1] = tokens[1:]
    log_prob_BT = np.asarray(_log_prob(variables, tokens_BT, targets_BT, model=model))
    for row, (number, start, tokens) in enumerate(some):
      # Targets that an earlier window has predicted from more tokens are left out.
      seen = 0 if start == 0 else model.context - stride
      own = log_prob_BT[row, seen : len(tokens) - 1]
      scores[number][start + seen : start + seen + len(own)] = own
  return scores


@functools.partial(jax.jit, static_argnames="model")
def _log_prob(variables, tokens_BT, targets_BT, *, model: Transformer):
  return model.apply(variables, tokens_BT, targets_BT, method="log_prob")
