"""Is a judge asked until there is an answer, asked once, and told of where there is none?"""

import contextlib
import email.utils
import http.server
import json
import socket
import threading

import pytest

from experiments.studies.grouped.grade_parser import FORMAT, Grades, Unparsable, question
from experiments.studies.grouped.judge import Judge, NoAnswer, mean_grades

LINE = "Grammar: 8/10, Creativity: 7/10, Consistency: 7/10, Plot: 6/10, Age group: E (10-12)"
EXPECTED = Grades(8, 7, 7, 6, 11)


def completion(text, **choice):
  return 200, {"choices": [{"message": {"role": "assistant", "content": text}, **choice}]}


class Endpoint:
  """A server that replies what it was told to, the last reply over and over.

  A reply is a status, a body (bytes, or what becomes JSON) and perhaps headers.
  """

  def __init__(self):
    endpoint = self
    self.requests, self.replies = [], [completion(LINE)]

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        endpoint.requests.append((self.path, dict(self.headers), body))
        reply = endpoint.replies[0] if len(endpoint.replies) == 1 else endpoint.replies.pop(0)
        status, content, headers = (*reply, {})[:3]
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        # Who was not listened to may hang up.
        with contextlib.suppress(ConnectionError):
          self.send_response(status)
          for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
          self.end_headers()
          self.wfile.write(content)

      def log_message(self, *arguments):
        pass

    self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture(scope="module")
def server():
  made = Endpoint()
  thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
  thread.start()
  yield made
  made.server.shutdown()
  made.server.server_close()
  thread.join()


@pytest.fixture
def endpoint(server, monkeypatch):
  monkeypatch.setenv("NO_PROXY", "127.0.0.1")
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  server.requests, server.replies = [], [completion(LINE)]
  return server


@pytest.fixture
def judge(endpoint, tmp_path):
  return Judge(endpoint.url, "teacher", tmp_path / "answers", wait=0, timeout=5)


def test_one_request_asks_for_the_grades_of_a_story(judge, endpoint, monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
  assert judge.grades("Once upon", " a time.") == EXPECTED
  [(path, headers, body)] = endpoint.requests
  assert path == "/v1/chat/completions"
  assert headers["Authorization"] == "Bearer secret"
  asked = {"role": "user", "content": question("Once upon", " a time.")}
  assert body == {"model": "teacher", "messages": [asked], "temperature": 0}


@pytest.mark.parametrize(
  "reply",
  [
    (503, b"starting"),
    (429, {"error": {"message": "slowly"}}, {"Retry-After": "0"}),
    (429, b"", {"Retry-After": email.utils.formatdate(0, usegmt=True)}),
    (200, b"<html>"),
    (200, {"choices": []}),
    (200, b"{", {"Content-Length": "9"}),
    completion(None),
    completion(" "),
    completion(LINE, finish_reason="length"),
  ],
)
def test_what_may_pass_is_asked_again(judge, endpoint, reply):
  endpoint.replies = [reply, completion(LINE)]
  assert judge.grades("Once", " upon.") == EXPECTED
  first, second = endpoint.requests
  assert "Authorization" not in first[1]
  assert first[2] == second[2]


def test_waits_double_and_the_endpoints_own_wait_goes_before(judge, endpoint, monkeypatch):
  waits = []
  monkeypatch.setattr("time.sleep", waits.append)
  object.__setattr__(judge, "wait", 0.5)
  endpoint.replies = [(500, b""), (429, b"", {"Retry-After": "7"}), (502, b"bad"), completion(LINE)]
  judge.grades("Once", " upon.")
  assert waits == [0.5, 7, 2]
  endpoint.replies = [(429, b"spent", {"Retry-After": "3600"})]
  with pytest.raises(NoAnswer, match=r"again in 3600 seconds .*spent"):
    judge.grades("Twice", " upon.")


def test_nonsense_is_shown_to_who_said_it(judge, endpoint):
  endpoint.replies = [completion("Lovely!"), completion(LINE)]
  assert judge.grades("Once", " upon.") == EXPECTED
  talk = endpoint.requests[1][2]["messages"]
  assert [message["role"] for message in talk] == ["user", "assistant", "user"]
  assert talk[1]["content"] == "Lovely!"
  assert "no grade for grammar" in talk[2]["content"]
  assert FORMAT in talk[2]["content"]


def test_nonsense_forever_names_answer_and_story_and_is_not_kept(judge, endpoint):
  endpoint.replies = [completion("Lovely!")]
  with pytest.raises(Unparsable, match=r"no grade for grammar.*'Lovely!'.*'Once'"):
    judge.grades("Once", " upon.")
  assert len(endpoint.requests) == judge.attempts
  assert not judge.cache.exists()


def test_an_answer_is_asked_for_once(judge, endpoint):
  assert judge.grades("Once", " upon.") == judge.grades("Once", " upon.")
  assert len(endpoint.requests) == 1
  Judge(endpoint.url + "/", "teacher", judge.cache).grades("Once", " upon.")
  assert len(endpoint.requests) == 1
  Judge(endpoint.url, "other", judge.cache).grades("Once", " upon.")
  judge.grades("Once", " upon a time.")
  assert len(endpoint.requests) == 3
  assert len(list(judge.cache.iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"answer": 3}', b'{"answer": "Fine!"}', b"\xff"])
def test_a_damaged_answer_is_asked_for_anew(judge, endpoint, damage):
  judge.grades("Once", " upon.")
  [file] = judge.cache.iterdir()
  whole = file.read_bytes()
  file.write_bytes(damage)
  assert judge.grades("Once", " upon.") == EXPECTED
  assert len(endpoint.requests) == 2
  assert file.read_bytes() == whole


@pytest.mark.parametrize(
  ("reply", "message"),
  [
    ((401, {"error": {"message": "Incorrect key"}}), "HTTP 401: Incorrect key"),
    ((404, b"no such model"), r"HTTP 404: no such model; check url, model 'teacher' and the key"),
    ((400, b""), r"HTTP 400: Bad Request"),
    ((302, b"", {"Location": "http://127.0.0.1:1/"}), "HTTP 302"),
  ],
)
def test_a_refusal_is_told_at_once(judge, endpoint, reply, message):
  endpoint.replies = [reply]
  with pytest.raises(NoAnswer, match=message) as raised:
    mean_grades(judge, [("Once", " upon."), ("Twice", " upon.")])
  assert endpoint.url in str(raised.value)
  assert len(endpoint.requests) == 1


@pytest.mark.parametrize("reply", [(500, b"broken"), (200, b"welcome"), (200, b"[]")])
def test_an_endpoint_that_stays_broken_is_tried_for_one_story(judge, endpoint, reply):
  endpoint.replies = [reply]
  with pytest.raises(NoAnswer, match=rf"no answer from {endpoint.url}/chat/completions after 4"):
    mean_grades(judge, [("Once", " upon."), ("Twice", " upon.")])
  assert len(endpoint.requests) == judge.attempts


def test_an_endpoint_that_is_not_there_is_named(tmp_path, endpoint):
  with socket.socket() as taken:  # bound, but nobody listens
    taken.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    judge = Judge(url, "teacher", tmp_path, wait=0)
    with pytest.raises(NoAnswer, match=rf"{url}.*refused.*is it up, and is its address right"):
      judge.grades("Once", " upon.")


def test_an_endpoint_that_says_nothing_is_not_waited_for(tmp_path, endpoint):
  with socket.create_server(("127.0.0.1", 0)) as silent:
    url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
    judge = Judge(url, "teacher", tmp_path, wait=0, timeout=0.05, attempts=2)
    with pytest.raises(NoAnswer, match=r"after 2 requests.*timed out"):
      judge.grades("Once", " upon.")


def test_means_leave_out_what_could_not_be_graded(judge, endpoint):
  object.__setattr__(judge, "attempts", 1)
  other = LINE.replace("8/10", "5/10").replace("E (10-12)", "B (4-5)")
  endpoint.replies = [completion(LINE), completion("Lovely!"), completion(other)]
  stories = [("One", " two."), ("Three", " four."), ("Five", " six.")]
  means = {"grammar": 6.5, "creativity": 7, "consistency": 7, "plot": 6, "age": 7.75}
  assert mean_grades(judge, stories) == {"grades": means, "graded": 2, "failed": 1}
  endpoint.replies = [completion("Lovely!")]
  with pytest.raises(Unparsable, match="'Eight'"):
    mean_grades(judge, [("Seven", ""), ("Eight", "")])
  with pytest.raises(ValueError, match="no stories"):
    mean_grades(judge, [])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"url": "127.0.0.1:8000/v1"}, "url '127.0.0.1:8000/v1' is not the address"),
    ({"url": "file:///etc/hosts"}, "is not the address"),
    ({"url": "http://"}, "is not the address"),
    ({"url": "http://host:port/v1"}, "is not the address"),
    ({"url": "http://host/v1?key=1"}, "is not the address"),
    ({"url": "http://ho st/v1"}, "is not the address"),
    ({"url": "http://host/v1/chat/completions"}, "leave /chat/completions out"),
    ({"model": ""}, "model '' is no name"),
    ({"attempts": 0}, "attempts 0"),
    ({"timeout": 0.0}, "timeout 0.0"),
  ],
)
def test_a_judge_that_cannot_be_asked_is_none(tmp_path, change, message):
  with pytest.raises(ValueError, match=message.replace("?", r"\?")):
    Judge(**({"url": "http://host/v1", "model": "teacher", "cache": tmp_path} | change))


def test_a_key_that_is_none_is_not_shown(judge, endpoint, monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "sec\nret")
  with pytest.raises(ValueError, match=r"^\$OPENAI_API_KEY has") as raised:
    judge.grades("Once", " upon.")
  assert "sec" not in str(raised.value)
  assert endpoint.requests == []
