"""Grades of stories by a language model behind an OpenAI-compatible endpoint.

The instrument is that of TinyStories (Eldan and Li, 2023): a judge reads the beginning of a story
and a model's completion, assesses the completion in words, and then grades it. Answers are cached
in a folder, so that an interrupted or repeated run does not send a request twice.
"""

import dataclasses
import hashlib
import json
import os
import re
import statistics
import threading
import urllib.parse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vqjax.lm import records

ASPECTS = ("grammar", "creativity", "consistency", "plot")
"""What is graded from 0 to 10."""

AGE_GROUPS = {"A": (2, 3), "B": (4, 5), "C": (6, 7), "D": (8, 9), "E": (10, 12), "F": (13, 16)}
"""Age groups that a judge chooses from: first and last year.

Group A is "3 or under". It has no first year; here it spans two years as its neighbours do.
"""

MAX_GRADE = 10
LONGEST_WAIT = 120.0
"""Seconds that openai waits between two requests at most; a longer Retry-After is a failure."""

MOST_BYTES = 2**22
"""The longest answer, in bytes."""

_YEARS = {
  group: f"{last} or under" if group == "A" else f"{first}-{last}"
  for group, (first, last) in AGE_GROUPS.items()
}
_GROUPS = ", ".join(f"{group} ({years})" for group, years in _YEARS.items())

FORMAT = f"{', '.join(f'{name.capitalize()}: ?/{MAX_GRADE}' for name in ASPECTS)}, Age group: ?"
FORMAT += " (its years)"
"""The last line of an answer, with a question mark for each value to fill in."""

_QUESTION = f"""\
A student was given the beginning of a story and had to go on with it. Below is the whole text: \
the symbol *** stands where the given beginning ends and the student's own part starts. The \
beginning may break off in the middle of a sentence.

STORY

Judge the student's part alone, as a teacher of language would.

First write a short assessment in words: is the language correct, are there ideas of its own, does \
it go on from the beginning (its people, places and events, and the sentence that was broken off), \
and does what happens make sense?

Then grade grammar, creativity, consistency with the beginning, and whether the plot makes sense, \
each from 0 (worst) to {MAX_GRADE} (best). Guess also how old the student is, by one of these \
groups of years: {_GROUPS}.

The last line of your answer has exactly this form, with your grades in place of the question \
marks:
{FORMAT}"""


@dataclasses.dataclass
class _Kept:
  """Schema of a cached answer."""

  answer: str


@dataclasses.dataclass
class _Message:
  content: str | None


@dataclasses.dataclass
class _Choice:
  message: _Message
  finish_reason: str | None = None


@dataclasses.dataclass
class _Completion:
  """Schema of a chat completion."""

  choices: list[_Choice]


class EndpointError(OSError):
  """The endpoint is unreachable, rejects the request, or breaks the protocol."""


class UnreadableGrades(ValueError):
  """An answer has no grades, or has contradictory or impossible ones."""


class _BrokenAnswer(EndpointError):
  """An answer that is not a chat completion, as of an endpoint that is starting."""


class Grades(NamedTuple):
  """A judge's grades of one story, from 0 to 10, and an age.

  Attributes:
    grammar: grade of the completion's language.
    creativity: grade of its ideas.
    consistency: grade of its consistency with the beginning.
    plot: grade of whether the completion makes sense.
    age: in years, of a child that would write so: the middle of the age group that the judge chose.
      TinyStories does not say how ages are computed from groups.
  """

  grammar: float
  creativity: float
  consistency: float
  plot: float
  age: float


def question(beginning: str, completion: str) -> str:
  """The message that asks a judge to grade a story."""
  return _QUESTION.replace("STORY", f"{beginning}***{completion}", 1)


_MARK = re.compile(
  r"\b(?P<name>" + "|".join(ASPECTS) + r"|age(?:[ _]+group)?)(?:\s*[:=]|\s+[-–—]\s)\s*",
  re.IGNORECASE,
)
_REST = r"[\s,;.|()\[\]{}]*"
_GRADE = re.compile(
  rf"([0-9]+(?:\.[0-9]+)?)(?:\s*(?:/|out of)\s*{MAX_GRADE}(?![\w%])[^0-9/]*|{_REST})",
  re.IGNORECASE,
)
_GROUP = re.compile(
  r"([A-Z])(?:[\s(:,-]+([0-9]+)(?:\s*(?:-|–|—|to)\s*([0-9]+)|\s+(?:or|and)\s+\w+)?"
  rf"(?:\s*years?(?:[ -]old)?)?)?{_REST}",
  re.IGNORECASE,
)


def parse_grades(answer: str) -> Grades:
  """The grades of an answer: in any order, in bold, as "8 / 10", "8.5" or "8".

  Raises:
    UnreadableGrades: a grade is missing, is not a number from 0 to 10, or has several values; the
      age group is not one of the six, or has the years of another.
  """
  text = answer.rpartition("</think>")[2]  # a reasoning model's draft grades do not count
  if "<think>" in text:
    raise UnreadableGrades("the answer ends before its grades")
  text = re.sub(r"[*`\"]", "", text)
  marks = list(_MARK.finditer(text))
  values: dict[str, set[float]] = {name: set() for name in Grades._fields}
  for mark, next_mark in zip(marks, [*marks[1:], None]):
    value = text[mark.end() : next_mark.start() if next_mark else None].split("\n")[0]
    value, name = value.strip().lstrip("([ "), mark["name"].lower()
    name = "age" if name.startswith("age") else name
    # Words are a heading such as "Grammar: the sentences are correct", not a grade.
    if value and not re.match(r"[A-Za-z]\w" if name == "age" else r"[A-Za-z]", value):
      values[name].add(_age(value) if name == "age" else _grade(name, value))
  for name, different in values.items():
    if len(different) != 1:
      problem = "several values" if different else "no value"
      raise UnreadableGrades(f"{'age group' if name == 'age' else name} has {problem}")
  return Grades(**{name: different.pop() for name, different in values.items()})


def _grade(name: str, value: str) -> float:
  match = _GRADE.fullmatch(value)
  if match is None or float(match[1]) > MAX_GRADE:
    raise UnreadableGrades(f"{name} must be from 0 to {MAX_GRADE}; got {_start(value, 60)!r}")
  return float(match[1])


def _age(value: str) -> float:
  match = _GROUP.fullmatch(value)
  group = match[1].upper() if match else None
  if group not in AGE_GROUPS:
    raise UnreadableGrades(f"age group must be one of {_GROUPS}; got {_start(value, 60)!r}")
  years = [year for year in match.groups()[1:] if year]
  if years and years != re.findall("[0-9]+", _YEARS[group]):
    raise UnreadableGrades(
      f"age group {group} must have the years {_YEARS[group]}; got {_start(value, 60)!r}"
    )
  return sum(AGE_GROUPS[group]) / 2


def _start(text: str, length: int) -> str:
  return text if len(text) <= length else text[: length - 3] + "..."


@dataclasses.dataclass(frozen=True)
class Judge:
  """A language model that grades stories at temperature 0.

  Attributes:
    url: the endpoint's address up to its version, such as "http://127.0.0.1:8000/v1".
    model: the endpoint's name of the model.
    cache: folder of the answers, one JSON file each; only answers with grades are kept.
    key_variable: environment variable with the endpoint's key; sent as a bearer token if it is set.
    attempts: most requests for one story.
    timeout: seconds after which a request without a whole answer has failed.
  """

  url: str
  model: str
  cache: Path
  key_variable: str = "OPENAI_API_KEY"
  attempts: int = 4
  timeout: float = 60.0

  def __post_init__(self):
    try:
      parts = urllib.parse.urlsplit(self.url)
      is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
      is_address = False
    if not is_address or parts.query or parts.fragment or not re.fullmatch(r"[!-~]+", self.url):
      raise ValueError(
        f"`url` must be an address such as http://127.0.0.1:8000/v1; got {self.url!r}. Correct it."
      )
    if parts.path.rstrip("/").endswith("/chat/completions"):
      raise ValueError(f"`url` must end before /chat/completions; got {self.url!r}. Leave it out.")
    if not self.model:
      raise ValueError("`model` must name a model of the endpoint; got ''. Give its name.")
    for name, is_valid in (
      ("attempts", self.attempts >= 1),
      ("timeout", self.timeout > 0),
    ):
      if not is_valid:
        raise ValueError(f"`{name}` must be positive; got {getattr(self, name)}. Leave it out.")

  def grades(self, beginning: str, completion: str) -> Grades:
    """The grades of a completion, from the cache if the model has answered before.

    Raises:
      EndpointError: the endpoint gives no answer; the message names it and what to check.
      UnreadableGrades: no answer has grades; the message names the story and the last answer.
    """
    messages = [{"role": "user", "content": question(beginning, completion)}]
    identity = json.dumps([self.url.rstrip("/"), self.model, messages])
    file = self.cache / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
    try:
      kept = records.read(file, _Kept)
      if kept is not None:
        return parse_grades(kept["answer"])
    except (OSError, ValueError) as error:
      warnings.warn(f"the judge is asked again: {error}", stacklevel=2)
    try:
      grades, answer = self._ask(messages)
    except UnreadableGrades as error:
      raise UnreadableGrades(f"{error}; the story is {_start(beginning, 80)!r}") from error
    record = {"url": self.url, "model": self.model, "messages": messages, "answer": answer}
    records.write(file, record)
    return grades

  def _ask(self, messages: list[dict[str, str]]) -> tuple[Grades, str]:
    """Send requests until an answer has grades.

    At temperature 0 the same messages have the same answer. After an answer without grades, the
    model is therefore sent that answer and what is wrong with it.
    """
    talk, problem = messages, None
    for _ in range(self.attempts):
      answer = ""
      try:
        answer = self._answer(talk)
        return parse_grades(answer), answer
      except UnreadableGrades as error:
        problem = UnreadableGrades(f"{error}, in the answer {_start(answer, 200)!r}")
        if answer:
          reminder = f"I cannot read your grades: {error}. Answer with this one line, filled in:"
          reminder = {"role": "user", "content": f"{reminder}\n{FORMAT}"}
          talk = [*talk, {"role": "assistant", "content": answer}, reminder]
      except _BrokenAnswer as error:
        problem = error
    raise problem

  def _answer(self, messages: list[dict[str, str]]) -> str:
    """The answer to messages; "" if the model answers nothing."""
    import openai  # takes seconds, and only the judge needs it

    key = os.environ.get(self.key_variable, "").strip()
    if not (key.isascii() and key.isprintable()):
      raise ValueError(
        f"${self.key_variable} must have printable ASCII characters only; got others. Set it."
      )
    client = openai.OpenAI(
      base_url=self.url,
      api_key=key or "none",
      timeout=self.timeout,
      max_retries=self.attempts - 1,
      # A redirection would send the stories to another host.
      http_client=openai.DefaultHttpxClient(follow_redirects=False),
    )
    request = {"model": self.model, "messages": messages, "temperature": 0}
    if not key:
      request["extra_headers"] = {"Authorization": openai.omit}

    def send() -> bytes:
      create = client.chat.completions.with_streaming_response.create
      with create(**request) as response:
        content = b""
        for part in response.iter_bytes():
          content += part
          if len(content) > MOST_BYTES:
            raise ValueError(f"it is longer than {MOST_BYTES:,} bytes")
      return content

    try:
      # Closed even while the thread reads, which then fails.
      with client:
        most = self.attempts * self.timeout + (self.attempts - 1) * LONGEST_WAIT
        reply = _within(most, send)
      completion = records.parse_json(reply, _Completion, "the answer", "", seal=False)
      (choice, *_) = completion["choices"]
    except openai.APIStatusError as error:
      text = error.body.get("message") if isinstance(error.body, dict) else error.body
      text = text or error.response.reason_phrase
      raise self._failed(EndpointError, f"HTTP {error.status_code}: {text}") from error
    except (openai.APIConnectionError, TimeoutError) as error:
      raise self._failed(EndpointError, str(error.__cause__ or error)) from error
    except Exception as error:  # of the answer, or of httpx in the middle of it
      reason = f"no chat completion ({error}); most urls end in /v1"
      raise self._failed(_BrokenAnswer, reason) from error
    content = (choice["message"]["content"] or "").strip()
    if choice.get("finish_reason") == "length":
      raise UnreadableGrades(f"the endpoint cut the answer off after {len(content)} characters")
    return content

  def _failed(self, kind: type[EndpointError], reason: str) -> EndpointError:
    return kind(
      f"{self.url.rstrip('/')}/chat/completions gives no answer:"
      f" {records.printable(_start(reason, 300))}. Check the url, that the endpoint is up, the"
      f" model {self.model!r} and the key in ${self.key_variable}."
    )


def _within(seconds: float, call: Callable[[], bytes]) -> bytes:
  """The value of a call that ends in time.

  In a thread, because a timeout of a socket counts from one byte to the next, and an endpoint that
  sends them one by one would never end.
  """
  outcome: list[bytes | Exception] = []

  def run() -> None:
    try:
      outcome.append(call())
    except Exception as error:
      outcome.append(error)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  thread.join(seconds)
  if not outcome:
    raise TimeoutError(f"timed out: no whole answer within {seconds:g} seconds")
  if isinstance(outcome[0], Exception):
    raise outcome[0]
  return outcome[0]


def mean_grades(judge: Judge, stories: Sequence[tuple[str, str]]) -> dict[str, Any]:
  """Mean grades of pairs of beginning and completion.

  Returns:
    {"grades": {aspect: mean}, "graded": number of graded stories, "failed": number of stories whose
    grades could not be read, which are in no mean}.

  Raises:
    EndpointError: the endpoint gives no answer for a story; no further story is tried.
    UnreadableGrades: no story has grades.
    ValueError: `stories` is empty.
  """
  if not stories:
    raise ValueError("`stories` must have at least one story; got none. Give some.")
  graded, failures = [], []
  for beginning, completion in stories:
    try:
      graded.append(judge.grades(beginning, completion))
    except UnreadableGrades as error:
      failures.append(error)
  if not graded:
    raise failures[-1]
  means = {name: statistics.fmean(values) for name, values in zip(Grades._fields, zip(*graded))}
  return {"grades": means, "graded": len(graded), "failed": len(failures)}
