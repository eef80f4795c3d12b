"""Small decoders for the tests of generation, and generation by repeated full passes."""

import dataclasses
import functools

import jax
import numpy as np

from tests.fakes import FakeTokenizer
from tests.lm.checkpoints.families import V, random_variables, small

GEMMA = {"num_hidden_layers": 3, "sliding_window_pattern": 2, "sliding_window": 37}
PROMPTS = [
  [5, 3, 11],
  [7],
  [7 * t * t % V for t in range(45)],
  [(5 * t + 1) % V for t in range(20)],
]
"""Prompts of unequal lengths, of which one is longer than the window."""

LONGEST = 80
"""Length to which rows are padded for full passes."""


@functools.lru_cache
def family(name):
  """A decoder of a family and random variables: "gpt2", "llama", "gpt_oss" or "gemma"."""
  if name == "gpt_oss":
    return small(name, num_hidden_layers=2)
  if name != "gemma":
    return small(name)
  model, variables = small("gemma3_text", **GEMMA)
  return model.clone(attention=dataclasses.replace(model.attention, softcap=3.0)), variables


@functools.lru_cache
def with_head(head):
  """A small decoder with another head, and random variables for it."""
  model = family("llama")[0].clone(head=head, layers=1)
  return model, random_variables(model)


@functools.lru_cache
def full_pass(model):
  return jax.jit(model.apply)


def logits(model, variables, row):
  """Logits [T, V] after each token of a row, by one full pass."""
  tokens = np.full((1, LONGEST), -1, np.int32)
  tokens[0, : len(row)] = row
  return np.array(full_pass(model)(variables, tokens))[0, : len(row)]


def log_probs(model, variables, row):
  """Log-probabilities [T, V] after each token of a row, float64 at the end."""
  return log_softmax(logits(model, variables, row))


def log_softmax(logits):
  """Log-probabilities of logits over the last axis, float64."""
  shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def greedy(model, variables, prompt, count):
  """The most likely continuation, and the log-probability of each token."""
  row, scores = list(prompt), []
  for _ in range(count):
    last = log_probs(model, variables, row)[-1]
    row.append(int(last.argmax()))
    scores.append(last.max())
  return row[len(prompt) :], scores


class Letters(FakeTokenizer):
  """A tokenizer whose token n is the letter of code point 32 + n."""

  vocab = V

  def encode(self, text, *, special=True):
    """The token of each letter."""
    return [ord(letter) - 32 for letter in text]

  def decode(self, tokens):
    """The letter of each token."""
    return "".join(chr(32 + int(token)) for token in tokens)
