"""How good are stories, in the opinion of a language model behind an OpenAI-compatible endpoint?

Requests are made by the standard library. What an endpoint has answered is kept in a folder, so
that a run that was broken off, or a table made anew, asks for nothing twice.
"""

import contextlib
import dataclasses
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.studies.grouped import chat
from experiments.studies.grouped.chat import NoAnswer, head
from experiments.studies.grouped.grade_parser import Grades, Unparsable, parse, question, reminder
from vqjax.lab.data.files import atomic_file

__all__ = ["Grades", "Judge", "NoAnswer", "Unparsable", "mean_grades"]

LONGEST_WAIT = 120.0
"""Seconds that an endpoint may ask us to wait; of one that asks for more there is no answer."""


@dataclasses.dataclass(frozen=True)
class Judge:
  """A language model that grades stories, at temperature 0.

  Attributes:
    url: the endpoint's address up to its version, such as "http://127.0.0.1:8000/v1".
    model: the name by which the endpoint knows the model.
    cache: folder of the answers, a JSON file each; only those that hold grades are kept.
    key_variable: environment variable with the endpoint's key, sent as a bearer token if it is set.
    attempts: requests for one story, whether they fail or are answered with nonsense.
    timeout: seconds without a byte after which a request has failed.
    wait: seconds before the second request where the first failed; doubled from one to the next.
  """

  url: str
  model: str
  cache: Path
  key_variable: str = "OPENAI_API_KEY"
  attempts: int = 4
  timeout: float = 60.0
  wait: float = 1.0

  def __post_init__(self):
    chat.check_url(self.url)
    if not self.model:
      raise ValueError("model '' is no name; give that of a model of the endpoint")
    if self.attempts < 1 or self.timeout <= 0 or self.wait < 0:
      raise ValueError(
        f"attempts {self.attempts}, timeout {self.timeout} and wait {self.wait} allow no request;"
        " give at least 1, more than 0 and at least 0"
      )

  def grades(self, beginning: str, completion: str) -> Grades:
    """What the model thinks of a completion; an answer that it gave before is not asked for again.

    Raises:
      NoAnswer: the endpoint gives none; the message names it and what to check.
      Unparsable: none of its answers holds grades; the message names the story and the last answer.
    """
    messages = [{"role": "user", "content": question(beginning, completion)}]
    kept = self._kept(self._file(messages))
    if kept is not None:
      return kept
    try:
      return self._ask(messages)
    except Unparsable as error:
      raise Unparsable(f"{error}; the story is {head(beginning, 80)!r}") from error

  def _ask(self, messages: chat.Messages) -> Grades:
    """Asks until an answer holds grades.

    At temperature 0 the same question has the same answer: a model whose answer holds none sees it
    again, and is told what is wrong.
    """
    talk, problem = messages, None
    for attempt in range(self.attempts):
      answer = ""
      try:
        answer = self._answer(talk)
        grades = parse(answer)
      except chat.Busy as busy:
        problem = NoAnswer(
          f"no answer from {chat.route(self.url)} after {attempt + 1} requests: {busy}"
        )
        if attempt + 1 < self.attempts:
          self._pause(attempt, busy)
      except Unparsable as error:
        problem = Unparsable(f"{error}, in the answer {head(answer, 200)!r}")
        if answer:
          told = {"role": "user", "content": reminder(error)}
          talk = [*talk, {"role": "assistant", "content": answer}, told]
      else:
        self._keep(messages, answer)
        return grades
    raise problem

  def _pause(self, attempt: int, busy: chat.Busy) -> None:
    if busy.wait is not None and busy.wait > LONGEST_WAIT:
      raise NoAnswer(
        f"{chat.route(self.url)} wants to be asked again in {busy.wait:.0f} seconds ({busy});"
        " come back then"
      )
    time.sleep(self.wait * 2**attempt if busy.wait is None else busy.wait)

  def _answer(self, talk: chat.Messages) -> str:
    settings = {"key_variable": self.key_variable, "timeout": self.timeout}
    try:
      return chat.answer(self.url, self.model, talk, **settings)
    except chat.Cut as error:
      raise Unparsable(str(error)) from error

  def _file(self, messages: chat.Messages) -> Path:
    identity = json.dumps([self.url.rstrip("/"), self.model, messages])
    return self.cache / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"

  def _kept(self, file: Path) -> Grades | None:
    """The grades of an answer that is there; None also for a file that is damaged."""
    # Damage is no JSON, no text, another JSON than ours, or an answer that holds no grades.
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
      return parse(str(json.loads(file.read_text(encoding="utf-8"))["answer"]))
    return None

  def _keep(self, messages: chat.Messages, answer: str) -> None:
    record = {"url": self.url, "model": self.model, "messages": messages, "answer": answer}
    with atomic_file(self._file(messages)) as file:
      file.write(json.dumps(record, indent=2).encode())


def mean_grades(judge: Judge, stories: Sequence[tuple[str, str]]) -> dict[str, Any]:
  """The mean grades of (beginning, completion) as {"grades": {...}, "graded": n, "failed": m}.

  A story whose grades cannot be read counts as failed and joins no mean.

  Raises:
    NoAnswer: from the first story on that the endpoint gives none for; the others are not tried.
    Unparsable: there are no grades for any of them.
    ValueError: there is no story.
  """
  if not stories:
    raise ValueError("there are no stories to grade; give at least one")
  graded, failed = [], []
  for beginning, completion in stories:
    try:
      graded.append(judge.grades(beginning, completion))
    except Unparsable as error:
      failed.append(error)
  if not graded:
    raise failed[-1]
  means = {name: statistics.fmean(values) for name, values in zip(Grades._fields, zip(*graded))}
  return {"grades": means, "graded": len(graded), "failed": len(failed)}
