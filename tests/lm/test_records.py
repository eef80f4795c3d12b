"""Files of this project are read as they were written, or named with the remedy."""

import dataclasses
import json
import os
from typing import Any, Literal

import pytest

from vqjax.lm import records


@dataclasses.dataclass
class Part:
  count: int
  rates: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Schema:
  name: str
  status: Literal["good", "bad"]
  part: Part | None
  numbers: list[float]
  rest: Any = None


GOOD = {"name": "é", "status": "good", "part": {"count": 3}, "numbers": [1, 2.5], "more": 1}


def test_an_object_comes_back_with_members_that_the_schema_does_not_have(tmp_path):
  records.write(tmp_path / "x.json", GOOD)
  assert records.read(tmp_path / "x.json", Schema) == GOOD
  assert records.read(tmp_path / "absent.json", Schema) is None
  assert os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("at", range(0, 150, 3))
def test_a_flipped_bit_is_an_error_that_names_file_and_remedy(tmp_path, at):
  path = tmp_path / "x.json"
  records.write(path, GOOD)
  content = bytearray(path.read_bytes())
  for bit in range(8):
    damaged = content.copy()
    damaged[at % len(content)] ^= 1 << bit
    path.write_bytes(damaged)
    try:
      found, message = records.read(path, Schema, "Throw it away."), None
    except records.DamagedError as error:
      found, message = None, str(error)
    if message is None:  # a blank of another kind is no damage of the object
      assert found == GOOD
      assert content[at % len(content)] in b" \n"
    else:
      assert message.startswith(f"{path} is damaged")
      assert message.endswith("Throw it away.")


@pytest.mark.parametrize(
  ("change", "problem"),
  [
    ({"name": 7}, "`name` must be a text; got 7"),
    ({"status": "else"}, "`status` must be 'good' or 'bad'; got 'else'"),
    ({"status": []}, "`status` must be"),
    ({"part": {"count": True}}, "`part.count` must be an integer; got True"),
    ({"part": {}}, "`part.count` is missing"),
    ({"part": {"count": 1, "rates": {"a": "b"}}}, "`part.rates.a` must be a number; got 'b'"),
    ({"numbers": {}}, "`numbers` must be a JSON list"),
    ({"numbers": [1, 1e999]}, "`numbers.1` must be a number; got inf"),
    ({"numbers": [None]}, "`numbers.0` must be a number; got None"),
  ],
)
def test_another_shape_is_named(change, problem):
  text = json.dumps(GOOD | change).replace("Infinity", "1e999")
  with pytest.raises(records.DamagedError, match=f"here is damaged: {problem}"):
    records.parse_json(text, Schema, "here", "Mend it.", seal=False)


@pytest.mark.parametrize(
  ("content", "problem"),
  [
    (b"", "line 1, column 1 is not JSON"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"rest": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply|no checksum"),
    (b"\xff\xfe{}", "byte 0 is not UTF-8"),
    (b"[]", "it must be a JSON object; got "),
    (b"{}", "is damaged or of another version of vqjax: it has no checksum"),
    (b'{"name": NaN}', "NaN is not JSON"),
    (b'{"name": ' + b"9" * 5000 + b"}", "is damaged"),
    (b"{}\x00", "is not JSON"),
  ],
)
def test_what_is_not_json_is_named(tmp_path, content, problem):
  (tmp_path / "x.json").write_bytes(content)
  with pytest.raises(records.DamagedError, match=problem) as error:
    records.read(tmp_path / "x.json", Schema)
  assert str(tmp_path / "x.json") in str(error.value)
  assert "\n" not in str(error.value)


def test_messages_have_no_control_characters():
  text = json.dumps(GOOD | {"name": ["\x1b[31m\x07"]})
  with pytest.raises(records.DamagedError) as error:
    records.parse_json(text, Schema, "here", "Mend it.", seal=False)
  assert str(error.value).isprintable()
  assert records.printable("a\x1b[2J\x9b\u202eé\n") == "a\\x1b[2J\\x9b\\u202eé\n"


def test_damaged_files_set_aside_do_not_overwrite_each_other(tmp_path):
  names = []
  for _ in range(3):
    (tmp_path / "x").touch()
    names.append(records.set_aside(tmp_path / "x", tmp_path / "damaged").name)
  assert names == ["x", "x.1", "x.2"]
