"""Stories that a trained language model writes, and a judge's grades of them."""

import functools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from experiments.studies.grouped.judge import Judge, mean_grades
from vqjax.convert import part_of
from vqjax.lab.config import Experiment
from vqjax.lab.data import fit_tokenizer
from vqjax.lab.starting_points import Distilled
from vqjax.lab.training import read_run_variables
from vqjax.lab.training.run_folder import load_text
from vqjax.lm.models import LanguageModel
from vqjax.lm.tokenizers import Tokenizer


def graded(
  experiment: Experiment, folder: pathlib.Path, settings: Mapping[str, Any], judge: Judge
) -> dict[str, Any]:
  """Mean grades of a model's completions of test stories.

  Args:
    experiment: the trained run; of a distilled model, the student writes.
    folder: its run folder.
    settings: "stories", "tokens" and "temperature".
    judge: grades the stories.
  """
  tokenizer = fit_tokenizer(experiment.data, experiment.tokenizer)
  model, variables = load_text(experiment).experiment.model, read_run_variables(folder)[0]
  if isinstance(model, Distilled):
    model, variables = model.student, part_of(variables, "student")
  prompts = beginnings(experiment.data.documents("test"), tokenizer, settings["stories"])
  completions = complete(
    model,
    variables,
    prompts,
    jax.random.key(0),
    tokens=settings["tokens"],
    temperature=settings["temperature"],
    eos=tokenizer.eos[0],
  )
  texts = [(tokenizer.decode(a), tokenizer.decode(b)) for a, b in zip(prompts, completions)]
  return {"result": {}, **mean_grades(judge, texts), "first": texts[0]}


def beginnings(documents: Iterable[str], tokenizer: Tokenizer, count: int) -> list[list[int]]:
  """Tokens of the first half, in whole words, of each of the first `count` stories.

  The text is halved, not its tokens, so that models with different tokenizers get the same
  beginnings. A story of a single word is skipped.

  Raises:
    ValueError: there are fewer than `count` stories.
  """
  prompts: list[list[int]] = []
  for document in documents:
    document = document.strip()
    half = document[: len(document) // 2 + 1]
    # The blank belongs to the word behind it: a byte-pair tokenizer has the two as one token.
    match = re.match(r"(.+)\s", half, re.DOTALL) or re.match(r"(\S+)\s", document)
    if match:
      prompts.append(tokenizer.encode(match[1].rstrip(), special=False))
    if len(prompts) == count:
      return prompts
  raise ValueError(f"`count` must be in [1, {len(prompts)}], the number of stories; got {count}.")


def complete(
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
  """Completions of prompts, without the prompts, up to the first `eos` token.

  Each token is sampled from the head's exact distribution given the last `context` tokens, for
  which the whole window is computed again. The result is a function of the key.

  Args:
    model: a model with `hidden`, `context` and a head with `sample`.
    variables: the model's variables, such as `training.read_variables` returns.
    prompts: at least one token each; of a long prompt the last `context` tokens count.
    key: source of randomness.
    tokens: most tokens of a completion.
    eos: the token that ends a story.
    temperature: divides the logits; 0 takes the most likely token.
    top_k: sample from the k most likely tokens; None: from all.

  Raises:
    ValueError: `prompts` or `tokens` is empty, a token is outside the vocabulary, or the model's
      scores are not finite.
  """
  if tokens < 1:
    raise ValueError(f"`tokens` must be at least 1; got {tokens}.")
  if not prompts:
    raise ValueError("`prompts` must have at least one prompt; got none.")
  for number, prompt in enumerate(prompts):
    if not len(prompt) or min(prompt) < 0 or max(prompt) >= model.head.vocab:
      got = f"{min(prompt)} to {max(prompt)}" if len(prompt) else "none"
      raise ValueError(
        f"`prompts` must have at least one token each, in [0, {model.head.vocab}); got {got} in"
        f" prompt {number}."
      )
  # Where no row fills the context, what lies beyond the rows is not computed.
  width = min(model.context, max(map(len, prompts)) + tokens)
  # A recurrent state is that of the last training batch.
  variables = {name: tree for name, tree in variables.items() if name != "carry"}

  def sample(model, window_BT, length_B, key):
    # No position attends to later ones, so the padding does not matter.
    hidden_BTD = model.hidden(window_BT)
    last_BD = jnp.take_along_axis(hidden_BTD, (length_B - 1)[:, None, None], axis=1)[:, 0]
    return model.head.sample(last_BD, key, temperature, top_k)

  step = jax.jit(functools.partial(model.apply, method=sample))
  completions: list[list[int]] = [[] for _ in prompts]
  for index in range(tokens):
    ends = [[*prompt, *row][-width:] for prompt, row in zip(prompts, completions, strict=True)]
    window_BT = np.array([end + [0] * (width - len(end)) for end in ends], np.int32)
    length_B = np.array([len(end) for end in ends], np.int32)
    token_B = np.asarray(step(variables, window_BT, length_B, jax.random.fold_in(key, index)))
    if token_B.min() < 0:
      raise ValueError(
        f"`variables` must give finite scores; got NaN after prompt {int(token_B.argmin())}. Use a"
        " run that did not diverge."
      )
    for row, token in zip(completions, token_B.tolist(), strict=True):
      row.append(token)
    if all(eos in row for row in completions):
      break
  return [row[: row.index(eos)] if eos in row else row for row in completions]
