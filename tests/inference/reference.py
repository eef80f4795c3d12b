"""Small decoders for the tests of generation, and generation by repeated full passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.checkpoints.families import V, random_variables, small

GEMMA = {"num_hidden_layers": 3, "sliding_window_pattern": 2, "sliding_window": 37}
PROMPTS = [[5, 3, 11], [7], [(7 * t * t) % V for t in range(45)], [(5 * t + 1) % V for t in range(20)]]
"""Prompts of unequal lengths, of which one is longer than the window."""

LONGEST = 80
"""Length to which rows are padded for full passes."""


@functools.lru_cache
def family(name):
  """A decoder of a family and random variables: "gpt2", "llama" or "gemma"."""
  if name != "gemma":
    return small(name)
  model, variables = small("gemma3_text", **GEMMA)
  attention = model.attention.__class__(**{**vars(model.attention), "softcap": 3.0})
  return model.clone(attention=attention), variables


def with_head(head):
  """A small decoder with another head, and random variables for it."""
  model = family("llama")[0].clone(head=head)
  return model, random_variables(model)


@functools.lru_cache
def _logits(model):
  return jax.jit(model.apply)


def log_probs(model, variables, row):
  """Log-probabilities [T, V] after each token of a row, by one full pass, float64 at the end."""
  tokens = np.zeros((1, LONGEST), np.int32)
  tokens[0, : len(row)] = row
  logits = np.asarray(_logits(model)(variables, tokens))[0, : len(row)].astype(np.float64)
  return logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - (
    logits.max(-1, keepdims=True)
  )


def greedy(model, variables, prompt, count):
  """The most likely continuation, and the log-probability of each token."""
  row, scores = list(prompt), []
  for _ in range(count):
    last = log_probs(model, variables, row)[-1]
    row.append(int(last.argmax()))
    scores.append(last.max())
  return row[len(prompt) :], scores
