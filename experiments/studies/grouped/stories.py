"""Stories that a trained language model writes, and a judge's grades of them.

The instrument is that of TinyStories (Eldan and Li, 2023): a judge reads the beginning of a story
and a model's completion, assesses the completion in words, and then grades it.
"""

import itertools
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import pandas as pd
import pydantic

from vqjax.convert import part_of
from vqjax.lab.config import Experiment
from vqjax.lab.data import fit_tokenizer
from vqjax.lab.starting_points import Distilled
from vqjax.lab.training import read_run_variables
from vqjax.lab.training.run_folder import load_text
from vqjax.lm.generation import generate

QUESTION = pathlib.Path(__file__).with_name("question.txt").read_text("utf-8")
"""What a judge is asked, with STORY in place of the story."""

AGES = {"3 or under": 2.5, "4-5": 4.5, "6-7": 6.5, "8-9": 8.5, "10-12": 11, "13-16": 14.5}
"""Age groups that a judge chooses from, in years, and their middles.

TinyStories does not say how ages are computed from groups. The first spans two years here.
"""

GRADE = pydantic.Field(ge=0, le=10)


class Assessment(pydantic.BaseModel):
  """A judge's answer, in this order: the words come before the grades."""

  assessment: str
  grammar: float = GRADE
  creativity: float = GRADE
  consistency: float = GRADE
  plot: float = GRADE
  age_group: Literal[*AGES]

  def grades(self) -> dict[str, float]:
    """The grades from 0 to 10, and the middle of the age group in years."""
    return self.model_dump(exclude={"assessment", "age_group"}) | {"age": AGES[self.age_group]}


def assessed(url: str, model: str, stories: Iterable[tuple[str, str]]) -> list[dict[str, float]]:
  """The grades of pairs of beginning and completion, without those that the judge did not give.

  Args:
    url: the address of an OpenAI-compatible endpoint, such as "http://127.0.0.1:8000/v1", whose
      answers can follow a JSON schema. The key is that in $OPENAI_API_KEY, if any.
    model: the endpoint's name of the model.
    stories: the stories.
  """
  import openai  # takes seconds, and only the judge needs it

  # A redirection would send the stories to another host.
  http_client = openai.DefaultHttpxClient(follow_redirects=False)
  key = os.environ.get("OPENAI_API_KEY") or "none"
  client = openai.OpenAI(base_url=url, api_key=key, timeout=60, http_client=http_client)
  grades = []
  for beginning, completion in stories:
    content = QUESTION.replace("STORY", f"{beginning}***{completion}", 1)
    message = {"role": "user", "content": content}
    try:
      answer = client.chat.completions.parse(
        model=model, messages=[message], temperature=0, response_format=Assessment
      )
    except (openai.LengthFinishReasonError, pydantic.ValidationError):
      continue
    parsed = answer.choices[0].message.parsed
    grades += [] if parsed is None else [parsed.grades()]
  return grades


def graded(
  experiment: Experiment, folder: pathlib.Path, settings: Mapping[str, Any]
) -> dict[str, Any]:
  """Mean grades of a model's completions of test stories.

  Args:
    experiment: the trained run; of a distilled model, the student writes.
    folder: its run folder.
    settings: "url" and "model" of the judge, the number of "stories", and the most "tokens" of a
      completion; half of the model's context is for the beginning.

  Returns:
    {"result": {}, "grades": {aspect: mean}, "graded": number of stories with grades}.
  """
  tokenizer = fit_tokenizer(experiment.data, experiment.tokenizer)
  model, variables = load_text(experiment).experiment.model, read_run_variables(folder)[0]
  if isinstance(model, Distilled):
    model, variables = model.student, part_of(variables, "student")
  texts, room = (
    beginnings(experiment.data.documents("test"), settings["stories"]),
    model.context // 2,
  )
  written = generate(
    model,
    variables,
    [tokenizer.encode(text, special=False)[-room:] for text in texts],
    jax.random.key(0),
    max_tokens=min(settings["tokens"], room),
    tokenizer=tokenizer,
    log_probs=False,
  )
  grades = assessed(settings["url"], settings["model"], zip(texts, written.texts, strict=True))
  return {"result": {}, "grades": pd.DataFrame(grades).mean().to_dict(), "graded": len(grades)}


def beginnings(documents: Iterable[str], count: int) -> list[str]:
  """The first half, in words, of each of the first `count` stories of several words."""
  halves = (words[: len(words) // 2] for words in map(str.split, documents))
  return [" ".join(half) for half in itertools.islice(filter(None, halves), count)]
