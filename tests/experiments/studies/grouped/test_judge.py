"""The judge of stories against a local server: parsing, retries, cache and errors."""

import contextlib
import email.utils
import http.server
import json
import socket
import threading

import pytest

from experiments.studies.grouped.judge import (
  FORMAT,
  LONGEST_WAIT,
  EndpointError,
  Grades,
  Judge,
  UnreadableGrades,
  mean_grades,
  parse_grades,
  question,
)

LINE = "Grammar: 8/10, Creativity: 7/10, Consistency: 7/10, Plot: 6/10, Age group: E (10-12)"
EXPECTED = Grades(8, 7, 7, 6, 11)


@pytest.mark.parametrize(
  "answer",
  [
    LINE,
    f"The language is good.\n\n{LINE}\n",
    f"Grammar: the sentences are correct.\nPlot: it wanders.\n\n{LINE}",
    f"{LINE}\n{LINE}",
    f"<think>Grammar: 2/10, or Plot: 99?</think>{LINE}",
    "Grammar: 8 / 10, Creativity: 7.0, Consistency: 7 out of 10, Plot: 6, Age group: E.",
    "**Age group:** E\n- **Plot**: 6/10 (thin)\n- Consistency = 7\nGrammar - 8\nCreativity: *7*",
    '{"grammar": 8, "creativity": 7, "consistency": 7.0, "plot": 6, "age_group": "E (10-12)"}',
    "grammar: 8/10; CREATIVITY: 7/10; Consistency: 7/10; Plot: 6/10; Age: e: 10 to 12 years old",
  ],
)
def test_grades_are_read_in_many_forms(answer):
  assert parse_grades(answer) == EXPECTED


@pytest.mark.parametrize(
  ("group", "years"),
  [
    ("A (3 or under)", 2.5),
    ("A: 3 or younger", 2.5),
    ("B (4-5)", 4.5),
    ("C", 6.5),
    ("D (8-9)", 8.5),
    ("E (10\N{EN DASH}12)", 11),
    ("F (13-16 years)", 14.5),
  ],
)
def test_an_age_is_the_middle_of_its_group(group, years):
  assert parse_grades(LINE.replace("E (10-12)", group)).age == years


@pytest.mark.parametrize(
  ("old", "new", "names"),
  [
    (LINE, "", "grammar"),
    (LINE, FORMAT, "grammar"),
    (LINE, "I would give it eight out of ten.", "grammar"),
    (LINE, f"<think>{LINE}", "ends before its grades"),
    ("Plot: 6/10, ", "", "plot"),
    ("Plot: 6/10", "Plot: 6/10, Plot: 5/10", "plot has several"),
    *(("8/10", value, "grammar has no") for value in ("nan", "inf/10", "eight")),
    *(
      ("8/10", value, f"grammar .*{value}")
      for value in ("11/10", "10.5", "-8/10", "4/5", "80/100", "80%", "8e0", "8,5/10", "7-8")
    ),
    *(("8/10", value, f"grammar .*{value}") for value in ("7/10 or 8/10", "8 slips")),
    (", Age group: E (10-12)", "", "age group has no"),
    ("E (10-12)", "G (17-20)", r"age group .*'G \(17-20\)'"),
    *(("E (10-12)", value, f"age group .*'[{value}]") for value in ("E or F", "11", "?")),
    ("E (10-12)", "E (8-9)", "age group E .* 10-12"),
    ("E (10-12)", "E, Age: D", "age group has several"),
  ],
)
def test_an_answer_without_clear_grades_is_refused(old, new, names):
  with pytest.raises(UnreadableGrades, match=names):
    parse_grades(LINE.replace(old, new))


def test_the_question_has_the_story_unchanged():
  message = question("Once {completion}", " upon {beginning} a %s \udc80")
  assert "Once {completion}*** upon {beginning} a %s \udc80\n" in message
  assert message.endswith(FORMAT)


def completion(text, **choice):
  return 200, {"choices": [{"message": {"role": "assistant", "content": text}, **choice}]}


class Endpoint:
  """A server that sends `replies` in order, and the last one again and again.

  A reply is a status, a body (bytes, or a value that becomes JSON) and optionally headers.
  """

  def __init__(self):
    endpoint = self
    self.requests, self.replies = [], [completion(LINE)]

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        endpoint.requests.append((self.path, self.headers, body))
        reply = endpoint.replies[0] if len(endpoint.replies) == 1 else endpoint.replies.pop(0)
        status, content, headers = (*reply, {})[:3]
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        # A client that timed out has closed the connection.
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
  endpoint = Endpoint()
  thread = threading.Thread(target=endpoint.server.serve_forever, kwargs={"poll_interval": 0.01})
  thread.start()
  yield endpoint
  endpoint.server.shutdown()
  endpoint.server.server_close()
  thread.join()


@pytest.fixture
def endpoint(server, monkeypatch):
  monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the requests of a client
  monkeypatch.setenv("NO_PROXY", "127.0.0.1")
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  server.requests, server.replies = [], [completion(LINE)]
  return server


@pytest.fixture
def judge(endpoint, tmp_path):
  return Judge(endpoint.url, "teacher", tmp_path / "answers", timeout=5)


def test_one_request_gets_the_grades_of_a_story(judge, endpoint, monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
  assert judge.grades("Once upon", " a time.") == EXPECTED
  [(path, headers, body)] = endpoint.requests
  assert path == "/v1/chat/completions"
  assert headers["Authorization"] == "Bearer secret"
  message = {"role": "user", "content": question("Once upon", " a time.")}
  assert body == {"model": "teacher", "messages": [message], "temperature": 0}


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
def test_a_temporary_failure_is_retried(judge, endpoint, reply):
  endpoint.replies = [reply, completion(LINE)]
  assert judge.grades("Once", " upon.") == EXPECTED
  first, second = endpoint.requests
  assert "Authorization" not in first[1]
  assert first[2] == second[2]


def test_waits_follow_retry_after_up_to_two_minutes(judge, endpoint, monkeypatch):
  waits = []
  monkeypatch.setattr("time.sleep", waits.append)
  endpoint.replies = [(500, b""), (429, b"", {"Retry-After": "7"}), (502, b"bad"), completion(LINE)]
  judge.grades("Once", " upon.")
  assert waits[1] == 7
  assert 0 < waits[0] < waits[2]
  endpoint.requests.clear()
  endpoint.replies = [(429, b"spent", {"Retry-After": str(1 + LONGEST_WAIT)})]
  with pytest.raises(EndpointError, match=r"HTTP 429: spent"):
    judge.grades("Twice", " upon.")
  assert len(endpoint.requests) == 1


def test_an_answer_without_grades_is_sent_back(judge, endpoint):
  endpoint.replies = [completion("Lovely!"), completion(LINE)]
  assert judge.grades("Once", " upon.") == EXPECTED
  talk = endpoint.requests[1][2]["messages"]
  assert [message["role"] for message in talk] == ["user", "assistant", "user"]
  assert talk[1]["content"] == "Lovely!"
  assert "grammar" in talk[2]["content"]
  assert FORMAT in talk[2]["content"]


def test_persistent_nonsense_names_answer_and_story_and_is_not_cached(judge, endpoint):
  endpoint.replies = [completion("Lovely!")]
  with pytest.raises(UnreadableGrades, match=r"grammar.*'Lovely!'.*'Once'"):
    judge.grades("Once", " upon.")
  assert len(endpoint.requests) == judge.attempts
  assert not judge.cache.exists()


def test_an_answer_is_cached_by_endpoint_model_and_story(judge, endpoint):
  assert judge.grades("Once", " upon.") == judge.grades("Once", " upon.")
  Judge(endpoint.url + "/", "teacher", judge.cache).grades("Once", " upon.")
  assert len(endpoint.requests) == 1
  Judge(endpoint.url, "other", judge.cache).grades("Once", " upon.")
  judge.grades("Once", " upon a time.")
  assert len(endpoint.requests) == 3
  assert len(list(judge.cache.iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"answer": 3}', b'{"answer": "Fine!"}', b"\xff"])
def test_a_damaged_answer_is_requested_again(judge, endpoint, damage):
  judge.grades("Once", " upon.")
  [file] = judge.cache.iterdir()
  whole = file.read_bytes()
  file.write_bytes(damage)
  with pytest.warns(UserWarning, match=r"is asked again: .*json is damaged"):
    assert judge.grades("Once", " upon.") == EXPECTED
  assert len(endpoint.requests) == 2
  assert file.read_bytes() == whole


@pytest.mark.parametrize(
  ("reply", "names"),
  [
    ((401, {"error": {"message": "Incorrect key"}}), "HTTP 401: Incorrect key"),
    ((404, b"no such model"), r"HTTP 404: no such model.*'teacher'"),
    ((400, b""), "HTTP 400: Bad Request"),
    ((302, b"", {"Location": "http://127.0.0.1:1/"}), "HTTP 302"),
  ],
)
def test_a_refusal_is_not_retried(judge, endpoint, reply, names):
  endpoint.replies = [reply]
  with pytest.raises(EndpointError, match=names) as raised:
    mean_grades(judge, [("Once", " upon."), ("Twice", " upon.")])
  assert endpoint.url in str(raised.value)
  assert len(endpoint.requests) == 1


@pytest.mark.parametrize("reply", [(500, b"broken"), (200, b"welcome"), (200, b"[]")])
def test_a_broken_endpoint_is_tried_for_one_story_only(judge, endpoint, reply):
  endpoint.replies = [reply]
  with pytest.raises(EndpointError, match=f"{endpoint.url}/chat/completions gives no answer"):
    mean_grades(judge, [("Once", " upon."), ("Twice", " upon.")])
  assert len(endpoint.requests) == judge.attempts


def test_an_endpoint_that_is_not_there_is_named(tmp_path, endpoint):
  with socket.socket() as bound:  # bound, but nobody listens
    bound.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
    with pytest.raises(EndpointError, match=rf"{url}.*refused"):
      Judge(url, "teacher", tmp_path).grades("Once", " upon.")


def test_means_leave_out_stories_without_grades(judge, endpoint):
  object.__setattr__(judge, "attempts", 1)
  other = LINE.replace("8/10", "5/10").replace("E (10-12)", "B (4-5)")
  endpoint.replies = [completion(LINE), completion("Lovely!"), completion(other)]
  stories = [("One", " two."), ("Three", " four."), ("Five", " six.")]
  means = {"grammar": 6.5, "creativity": 7, "consistency": 7, "plot": 6, "age": 7.75}
  assert mean_grades(judge, stories) == {"grades": means, "graded": 2, "failed": 1}
  endpoint.replies = [completion("Lovely!")]
  with pytest.raises(UnreadableGrades, match="'Eight'"):
    mean_grades(judge, [("Seven", ""), ("Eight", "")])
  with pytest.raises(ValueError, match="`stories`"):
    mean_grades(judge, [])


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("url", "127.0.0.1:8000/v1"),
    ("url", "file:///etc/hosts"),
    ("url", "http://"),
    ("url", "http://host:port/v1"),
    ("url", "http://host/v1?key=1"),
    ("url", "http://ho st/v1"),
    ("url", "http://host/v1/chat/completions"),
    ("model", ""),
    ("attempts", 0),
    ("timeout", 0.0),
  ],
)
def test_invalid_fields_are_named(tmp_path, field, value):
  with pytest.raises(ValueError, match=f"`{field}`.*got") as raised:
    Judge(**({"url": "http://host/v1", "model": "teacher", "cache": tmp_path} | {field: value}))
  assert str(value) in str(raised.value)


def test_an_invalid_key_is_not_shown(judge, endpoint, monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "sec\nret")
  with pytest.raises(ValueError, match=r"^\$OPENAI_API_KEY") as raised:
    judge.grades("Once", " upon.")
  assert "sec" not in str(raised.value)
  assert endpoint.requests == []


def raw_server(send):
  """Starts a server that answers each connection by `send(connection)`; returns its URL."""
  listening = socket.create_server(("127.0.0.1", 0))

  def serve():
    with contextlib.suppress(OSError):
      while True:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
          connection.recv(2**16)
          send(connection)

  threading.Thread(target=serve, daemon=True).start()
  return f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


@pytest.mark.parametrize("start", [None, b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_endpoint_that_sends_nothing_or_byte_by_byte_times_out(tmp_path, start):
  over = threading.Event()

  def drip(connection):
    connection.sendall(start or b"")
    while not over.wait(0.02):
      connection.sendall(b"x" if start else b"")

  judge = Judge(raw_server(drip), "teacher", tmp_path, timeout=0.3, attempts=1)
  with pytest.raises(EndpointError, match="timed out"):
    judge.grades("Once", " upon.")
  over.set()


def test_an_answer_of_any_length_ends_at_a_limit(tmp_path, monkeypatch):
  monkeypatch.setattr("experiments.studies.grouped.judge.MOST_BYTES", 2**18)
  sent = []

  def flood(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while len(sent) < 10_000:
      sent.append(connection.send(bytes(2**16)))

  judge = Judge(raw_server(flood), "teacher", tmp_path, timeout=20, attempts=1)
  with pytest.raises(EndpointError, match="longer than 262,144 bytes"):
    judge.grades("Once", " upon.")
  assert sum(sent) < 2**26


@pytest.mark.parametrize("status", [200, 400])
def test_deep_json_and_escape_sequences_are_text_in_an_error(judge, endpoint, status):
  for body in (b"[" * 100_000, b"\x1b[31m\x1b]0;title\x07red"):
    endpoint.replies = [(status, body)]
    with pytest.raises(EndpointError) as raised:
      judge.grades("Once", " upon.")
    assert str(raised.value).isprintable()
