"""How good are stories, in the opinion of a language model behind an OpenAI-compatible endpoint?

Requests are made by the standard library. What an endpoint has answered is kept in a folder, so
that a run that was broken off, or a table made anew, asks for nothing twice.
"""

import contextlib
import dataclasses
import email.utils
import hashlib
import http.client
import json
import os
import re
import statistics
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.grades import Grades, Unparsable, parse, question, reminder
from vqjax.data.files import atomic_file

__all__ = ["Grades", "Judge", "NoAnswer", "Unparsable", "mean_grades"]

Messages = list[dict[str, str]]

LONGEST_WAIT = 120.0
"""Seconds that an endpoint may ask us to wait; of one that asks for more there is no answer."""


class NoAnswer(OSError):
  """The endpoint cannot be reached, refuses, or speaks another protocol: so it will for others."""


class _Busy(Exception):
  """What another attempt may mend.

  Attributes:
    wait: seconds after which the endpoint wants to be asked again, or None.
  """

  def __init__(self, reason: str, wait: float | None = None):
    super().__init__(reason)
    self.wait = wait


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
    _check_url(self.url)
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
      raise Unparsable(f"{error}; the story is {_head(beginning, 80)!r}") from error

  def _ask(self, messages: Messages) -> Grades:
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
      except _Busy as busy:
        problem = NoAnswer(f"no answer from {self._route} after {attempt + 1} requests: {busy}")
        if attempt + 1 < self.attempts:
          self._pause(attempt, busy)
      except Unparsable as error:
        problem = Unparsable(f"{error}, in the answer {_head(answer, 200)!r}")
        if answer:
          told = {"role": "user", "content": reminder(error)}
          talk = [*talk, {"role": "assistant", "content": answer}, told]
      else:
        self._keep(messages, answer)
        return grades
    raise problem

  def _pause(self, attempt: int, busy: _Busy) -> None:
    if busy.wait is not None and busy.wait > LONGEST_WAIT:
      raise NoAnswer(
        f"{self._route} wants to be asked again in {busy.wait:.0f} seconds ({busy}); come back then"
      )
    time.sleep(self.wait * 2**attempt if busy.wait is None else busy.wait)

  @property
  def _route(self) -> str:
    return self.url.rstrip("/") + "/chat/completions"

  def _answer(self, messages: Messages) -> str:
    """The model's answer to a talk; `_Busy` where another attempt may have one."""
    body = {"model": self.model, "messages": messages, "temperature": 0}
    request = urllib.request.Request(self._route, json.dumps(body).encode(), self._headers())
    try:
      with _OPENER.open(request, timeout=self.timeout) as response:
        found = response.read()
    except urllib.error.HTTPError as error:
      raise self._failure(error) from error
    except (OSError, http.client.HTTPException) as error:
      reason = getattr(error, "reason", None) or error
      raise _Busy(f"{reason!r}; is it up, and is its address right?") from error
    return _content(found)

  def _headers(self) -> dict[str, str]:
    key = os.environ.get(self.key_variable, "").strip()
    if not (key.isascii() and key.isprintable()):
      raise ValueError(f"${self.key_variable} has characters that no key has; set it anew")
    own = {"Authorization": f"Bearer {key}"} if key else {}
    return {"Content-Type": "application/json"} | own

  def _failure(self, error: urllib.error.HTTPError) -> Exception:
    said = f"HTTP {error.code}: {_said(error)}"
    if error.code in (408, 429) or error.code >= 500:
      return _Busy(said, _retry_after(error.headers.get("Retry-After")))
    return NoAnswer(
      f"{self._route} refuses: {said}; check url, model {self.model!r} and the key in"
      f" ${self.key_variable}"
    )

  def _file(self, messages: Messages) -> Path:
    identity = json.dumps([self.url.rstrip("/"), self.model, messages])
    return self.cache / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"

  def _kept(self, file: Path) -> Grades | None:
    """The grades of an answer that is there; None also for a file that is damaged."""
    # Damage is no JSON, no text, another JSON than ours, or an answer that holds no grades.
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
      return parse(str(json.loads(file.read_text(encoding="utf-8"))["answer"]))
    return None

  def _keep(self, messages: Messages, answer: str) -> None:
    record = {"url": self.url, "model": self.model, "messages": messages, "answer": answer}
    with atomic_file(self._file(messages)) as file:
      file.write(json.dumps(record, indent=2).encode())


class _Unmoved(urllib.request.HTTPRedirectHandler):
  """Follows no redirection, which would take the key to another host."""

  def redirect_request(self, *arguments):
    return None


_OPENER = urllib.request.build_opener(_Unmoved)


def _content(found: bytes) -> str:
  """The text of a chat completion; none where the model said none."""
  try:
    choice = json.loads(found)["choices"][0]
    content, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
    content = "" if content is None else content.strip()
  except (ValueError, LookupError, TypeError, AttributeError):
    head = _head(found.decode(errors="replace"), 200)
    raise _Busy(f"{head!r} is no chat completion; most urls end in /v1") from None
  if cut:
    raise Unparsable(f"the endpoint cut the answer off after {len(content)} characters")
  return content


def _said(error: urllib.error.HTTPError) -> str:
  """What the server says of its error."""
  try:
    text = error.read().decode(errors="replace")
  except (OSError, http.client.HTTPException):
    text = ""
  with contextlib.suppress(ValueError, LookupError, TypeError):
    text = str(json.loads(text)["error"]["message"])
  return _head(text or str(error.reason), 300)


def _retry_after(header: str | None) -> float | None:
  """Seconds of a Retry-After, which is a number of them or a date."""
  if header is None:
    return None
  if re.fullmatch(r"[0-9]+", header.strip()):
    return float(header)
  try:
    return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
  except ValueError:
    return None


def _check_url(url: str) -> None:
  try:
    parts = urllib.parse.urlsplit(url)
    whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
  except ValueError:  # no port, or no address
    whole = False
  if not whole or parts.query or parts.fragment or not re.fullmatch(r"[!-~]+", url):
    raise ValueError(
      f"url {url!r} is not the address of an endpoint; give one such as http://127.0.0.1:8000/v1"
    )
  if parts.path.rstrip("/").endswith("/chat/completions"):
    raise ValueError(f"url {url!r} has the route in it; leave /chat/completions out")


def _head(text: str, length: int) -> str:
  return text if len(text) <= length else text[: length - 3] + "..."


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
