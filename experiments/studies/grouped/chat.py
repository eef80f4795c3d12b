"""What does a language model behind an OpenAI-compatible endpoint answer?"""

import contextlib
import email.utils
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request

Messages = list[dict[str, str]]
"""A talk: {"role": "user" or "assistant", "content": text}, one after another."""


class NoAnswer(OSError):
  """The endpoint cannot be reached, refuses, or speaks another protocol: so it will for others."""


class Busy(Exception):
  """What another attempt may mend.

  Attributes:
    wait: seconds after which the endpoint wants to be asked again, or None.
  """

  def __init__(self, reason: str, wait: float | None = None):
    super().__init__(reason)
    self.wait = wait


class Cut(Exception):
  """The endpoint broke an answer off at its limit of tokens."""


def route(url: str) -> str:
  """Where an endpoint takes talks."""
  return url.rstrip("/") + "/chat/completions"


def answer(url: str, model: str, messages: Messages, *, key_variable: str, timeout: float) -> str:
  """The model's answer to a talk at temperature 0, in one request; "" where it says nothing.

  Args:
    url: the endpoint's address, one that passes `check_url`.
    model: the name by which the endpoint knows the model.
    messages: the talk, the last word the user's.
    key_variable: environment variable with the endpoint's key, sent as a bearer token if it is set.
    timeout: seconds without a byte after which the request has failed.

  Raises:
    Busy: there is none now: no connection, too many requests, an error of the server, no JSON.
    Cut: there is half of one.
    NoAnswer: the endpoint refuses.
    ValueError: the key is none.
  """
  body = {"model": model, "messages": messages, "temperature": 0}
  request = urllib.request.Request(route(url), json.dumps(body).encode(), _headers(key_variable))
  try:
    with _OPENER.open(request, timeout=timeout) as response:
      found = response.read()
  except urllib.error.HTTPError as error:
    said = f"HTTP {error.code}: {_said(error)}"
    if error.code in (408, 429) or error.code >= 500:
      raise Busy(said, _retry_after(error.headers.get("Retry-After"))) from error
    checks = f"check url, model {model!r} and the key in ${key_variable}"
    raise NoAnswer(f"{route(url)} refuses: {said}; {checks}") from error
  except (OSError, http.client.HTTPException) as error:
    reason = getattr(error, "reason", None) or error
    reason = str(reason) or type(reason).__name__
    raise Busy(f"{reason}; is it up, and is its address right?") from error
  return _content(found)


def _headers(key_variable: str) -> dict[str, str]:
  key = os.environ.get(key_variable, "").strip()
  if not (key.isascii() and key.isprintable()):
    raise ValueError(f"${key_variable} has characters that no key has; set it anew")
  own = {"Authorization": f"Bearer {key}"} if key else {}
  return {"Content-Type": "application/json"} | own


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
    start = head(found.decode(errors="replace"), 200)
    raise Busy(f"{start!r} is no chat completion; most urls end in /v1") from None
  if cut:
    raise Cut(f"the endpoint cut the answer off after {len(content)} characters")
  return content


def _said(error: urllib.error.HTTPError) -> str:
  """What the server says of its error."""
  try:
    text = error.read().decode(errors="replace")
  except (OSError, http.client.HTTPException):
    text = ""
  with contextlib.suppress(ValueError, LookupError, TypeError):
    text = str(json.loads(text)["error"]["message"])
  return head(text or str(error.reason), 300)


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


def check_url(url: str) -> None:
  """ValueError where the address is not that of an endpoint."""
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


def head(text: str, length: int) -> str:
  """The text, or its beginning and three dots, at most `length` characters in all."""
  return text if len(text) <= length else text[: length - 3] + "..."
