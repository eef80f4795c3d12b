"""Stories that a trained language model writes, and a judge's grades of them, as in Table 1.

python -m experiments.studies.grouped.stories RUN... --judge-url URL --judge-model NAME

The instrument is that of TinyStories (Eldan and Li, 2023): a judge reads the beginning of a story
and a model's completion, assesses the completion in words, and then grades it.
"""

import argparse
import itertools
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Literal

import jax
import pandas as pd
import pydantic

from experiments.studies.study_page import read_paper
from vqjax.commands.models import load_model
from vqjax.lab.data import Stories
from vqjax.lm.generation import generate

STORIES, MOST_TOKENS = 30, 200
"""Number of graded stories, and most tokens of a completion."""

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


def graded(run: str, texts: Sequence[str], url: str, model: str) -> dict[str, float]:
  """Mean grades of a model's completions of beginnings, and the number of stories with grades.

  Half of the model's context is for the beginning.

  Args:
    run: the run folder; of a distilled model, the student writes.
    texts: the beginnings.
    url: the address of the judge, as of `assessed`.
    model: the judge's name there.
  """
  writer, variables, tokenizer = load_model(run)
  room = writer.context // 2
  written = generate(
    writer,
    variables,
    [tokenizer.encode(text, special=False)[-room:] for text in texts],
    jax.random.key(0),
    max_tokens=min(MOST_TOKENS, room),
    tokenizer=tokenizer,
    log_probs=False,
  )
  grades = assessed(url, model, zip(texts, written.texts, strict=True))
  return pd.DataFrame(grades).mean().to_dict() | {"stories": len(grades)}


def beginnings(documents: Iterable[str], count: int) -> list[str]:
  """The first half, in words, of each of the first `count` stories of several words."""
  halves = (words[: len(words) // 2] for words in map(str.split, documents))
  return [" ".join(half) for half in itertools.islice(filter(None, halves), count)]


def main(arguments: Sequence[str] | None = None) -> None:
  """Print the grades of runs beside the paper's."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder of a language model")
  parser.add_argument("--judge-url", required=True, help="an OpenAI-compatible endpoint")
  parser.add_argument("--judge-model", required=True, help="its name of the model")
  parser.add_argument("--held-out", default=Stories.held_out, help="file of the stories")
  options = parser.parse_args(arguments)
  documents = Stories(held_out=options.held_out).documents("test")
  texts, judge = beginnings(documents, STORIES), (options.judge_url, options.judge_model)
  lines = {pathlib.Path(run).name: graded(run, texts, *judge) for run in options.runs}
  printed = read_paper(pathlib.Path(__file__).with_name("paper.csv"))["1"]
  print(pd.DataFrame(lines | printed).T.to_string())


if __name__ == "__main__":
  main()
