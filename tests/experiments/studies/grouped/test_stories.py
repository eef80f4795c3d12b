"""Stories of a model, and a judge behind a local server."""

import contextlib
import http.server
import json
import threading

import openai
import pytest

from experiments.studies.grouped.stories import assessed, beginnings

GRADES = {"grammar": 8, "creativity": 7.5, "consistency": 7, "plot": 6}
ANSWER = {"assessment": "The language is good."} | GRADES | {"age_group": "10-12"}
KEPT = GRADES | {"age": 11}


def test_a_beginning_is_the_first_half_in_words_of_a_story_of_several():
  stories = ["Once upon a time there was.", "Lone", "", "Tom\n\nran a long way."]
  assert beginnings(iter(stories), 1) == ["Once upon a"]
  assert beginnings(stories, 3) == ["Once upon a", "Tom ran"]


@contextlib.contextmanager
def endpoint(replies):
  """The URL of a server that gives each reply (status, body) once, and the requests to it."""
  requests, left = [], list(replies)

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
      requests.append((self.path, self.headers, body))
      status, value = left.pop(0)
      content = json.dumps(value).encode()
      self.send_response(status)
      for name, text in {"Content-Length": str(len(content)), "Location": "/v2"}.items():
        self.send_header(name, text)
      self.send_header("Content-Type", "application/json")
      self.end_headers()
      self.wfile.write(content)

    def log_message(self, *arguments):
      pass

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", requests
    server.shutdown()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
  monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the requests of a client
  monkeypatch.setenv("NO_PROXY", "127.0.0.1")
  monkeypatch.setenv("OPENAI_API_KEY", "secret")


def reply(answer, **choice):
  content = answer if isinstance(answer, str) else json.dumps(answer)
  message = {"role": "assistant", "content": content}
  choice = {"index": 0, "finish_reason": "stop", "message": message} | choice
  return 200, {"id": "1", "object": "chat.completion", "created": 0, "model": "m"} | {
    "choices": [choice]
  }


def test_a_request_has_the_story_and_the_form_of_the_answer():
  with endpoint([reply(ANSWER)]) as (url, requests):
    assert assessed(url, "teacher", [("Once {upon}", " a %s time.")]) == [KEPT]
  [(path, headers, body)] = requests
  assert path == "/v1/chat/completions"
  assert headers["Authorization"] == "Bearer secret"
  assert (body["model"], body["temperature"]) == ("teacher", 0)
  assert "\nOnce {upon}*** a %s time.\n" in body["messages"][0]["content"]
  schema = body["response_format"]["json_schema"]["schema"]
  assert list(schema["properties"]) == list(ANSWER)


@pytest.mark.parametrize(
  "wrong",
  [
    reply(ANSWER | {"plot": 11}),
    reply(ANSWER | {"grammar": "good"}),
    reply(ANSWER | {"age_group": "17-20"}),
    reply("Lovely!"),
    reply(ANSWER, finish_reason="length"),
  ],
)
def test_an_answer_without_grades_is_left_out(wrong):
  with endpoint([wrong, reply(ANSWER)]) as (url, _):
    assert assessed(url, "teacher", [("Once", " upon."), ("Twice", " upon.")]) == [KEPT]


def test_a_temporary_failure_is_retried_and_a_refusal_or_another_address_is_not():
  with endpoint([(503, "starting"), reply(ANSWER)]) as (url, _):
    assert assessed(url, "teacher", [("Once", " upon.")]) == [KEPT]
  for status in (401, 302):
    with endpoint([(status, "no")]) as (url, requests):
      with pytest.raises(openai.APIStatusError, match=str(status)):
        assessed(url, "teacher", [("Once", " upon."), ("Twice", " upon.")])
      assert len(requests) == 1
