"""Files of models and outputs of commands: nothing wrong is taken for something.

What is read is a value that the whole file has, or one error that names the file and a remedy, in
time and memory that follow from the file's length. VQJAX_EXAMPLES multiplies the examples.
"""

import importlib
import json
import os
import re
import resource
import stat
import time
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lm.checkpoints.families import CONFIGS, LLAMA3, YARN, small
from tests.lm.checkpoints.test_gguf import plain, written
from tests.test_parsers import json_values, many
from vqjax.cli import COMMANDS
from vqjax.commands.console import OutputFile
from vqjax.lm import checkpoints, records
from vqjax.lm.sources import readers
from vqjax.lm.sources.schema import HARMLESS

EDGES = [0, -1, 1, 2**31 - 1, 2**31, 2**63, 10**18, 10**400, 1e-300, 1e300, -0.0, "", "x", [], {}]
EDGES += [None, True, False, float("nan"), float("inf"), [None], {"a": {}}, "\x1b[31m\n", [[0]]]
edges = st.sampled_from(EDGES) | json_values


@pytest.fixture(autouse=True)
def bounds():
  """A file of kilobytes is read in seconds, and in less than a gigabyte."""
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  yield
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def read(path, load=checkpoints.inspect):
  """What is read, or None for an error that is one clear line; nothing takes 20 seconds."""
  began = time.monotonic()
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      return load(path)
  except (ValueError, FileNotFoundError) as error:
    message = str(error)
  finally:
    assert time.monotonic() - began < 20
  assert str(path) in message or "`model_type`" in message, message
  assert re.search(r"[.;:] [A-Z`\w].*\.$", message, re.DOTALL), message
  assert records.printable(message) == message
  return None


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
  """The saved folder of each family."""
  path = tmp_path_factory.mktemp("folder") / "model"
  checkpoints.save(path, *small(request.param))
  return path


@many
@given(st.data())
def test_configs(folder, data):
  file = folder / "config.json"
  text = file.read_text()
  config, scaling = json.loads(text), st.sampled_from([LLAMA3, YARN, {"type": "linear"}])
  names = st.sampled_from([*config, "rope_parameters", "sliding_window", "mlp_bias"]) | st.text()
  inner = st.sampled_from([*LLAMA3, *YARN, "type", "mscale"])
  nested = st.builds(lambda own, key, x: own | {key: x}, scaling, inner, edges)
  key, value = data.draw(names), data.draw(edges | nested)
  expected = read(folder)
  try:
    file.write_text(json.dumps(config | {key: value}))
    found = read(folder)
  finally:
    file.write_text(text)
  # The parts of a model do not depend on numbers such as an epsilon; sizes are the tensors'.
  if found is not None and key not in ("max_position_embeddings", "n_positions"):
    assert found == expected
  if found is not None and key not in config and value is not None:
    assert key in HARMLESS or key.startswith("_") or key in ("rope_parameters", "mlp_bias")


@many
@given(st.data())
def test_indices(folder, data):
  index, shard = folder / "model.safetensors.index.json", folder / "a.safetensors"
  tensors = [*readers.open_source(folder).tensors]
  names = edges | st.sampled_from(["a.safetensors", "../a.safetensors", str(shard), "config.json"])
  entries = st.dictionaries(st.sampled_from(tensors) | st.text(), names, max_size=3)
  whole = dict.fromkeys(tensors, shard.name)
  given = edges | st.fixed_dictionaries({"weight_map": edges})
  given |= entries.map(lambda own: {"weight_map": whole | own})
  content = json.dumps(data.draw(given))
  (folder / "model.safetensors").rename(shard)
  try:
    index.write_text(content)
    found = read(folder, readers.open_source)
  finally:
    index.unlink(missing_ok=True)
    shard.rename(folder / "model.safetensors")
  assert found is None or {*found.files} == {shard}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def gguf_file(request, tmp_path_factory):
  """A GGUF, and what it was made of: its path, the family and the folder."""
  folder = tmp_path_factory.mktemp("gguf")
  checkpoints.save(folder / "folder", *plain(request.param))
  written(folder / "model.gguf", request.param, folder / "folder")
  return folder / "model.gguf", request.param, folder / "folder"


NUMBERS = [1e38, -1.0, 1e-30, float("nan"), float("inf"), True, False, 0, 1, 2**31, 2**32 - 1]
metadata_values = st.sampled_from(["", "x", "\x1b[31m", *NUMBERS, [1, 2], ["a"]])


@many
@given(st.data())
def test_metadata_of_a_gguf(gguf_file, tmp_path_factory, data):
  path, name, folder = gguf_file
  other = path.with_name("other.gguf")
  known = [*readers.gguf_header(path).metadata]
  further = [f"llama.{key}" for key in (*readers.GGUF_NEUTRAL, *readers.GGUF_ROPE.values())]
  keys = st.sampled_from(known + further) | st.text(min_size=1)
  more = data.draw(st.dictionaries(keys, metadata_values | st.none(), min_size=1, max_size=2))
  more.pop("general.architecture", None)  # the library writes it
  written(other, name, folder, more=more)
  found = read(other)
  if found is not None:
    assert found.params == checkpoints.inspect(path).params


def check_flips(path, content, places, load, expected, named=None):
  """With one bit flipped at each place, a file is refused or has the same numbers."""
  for at in places:
    changed = bytearray(content)
    changed[at] ^= 1 << (at * 5 % 8)  # another bit of each byte
    path.write_bytes(changed)
    found = read(named or path, load)
    assert found is None or equal(found, expected), (at, content[max(0, at - 20) : at + 20])


EVERY = [
  pytest.mark.slow,
  pytest.mark.timeout(1800),
  pytest.mark.skipif("VQJAX_EXAMPLES" not in os.environ, reason="every byte before a release"),
]
STEPS = [pytest.param(1, marks=EVERY), 31]
"""Every byte; or one in so many."""


def numbers_of(path):
  """The numbers of all tensors of a folder, and its config."""
  source = readers.open_source(path)
  for name, tensor in source.tensors.items():
    readers.verify_tensor(name, tensor, path)
  return source.config, {name: x.read(slice(None)) for name, x in source.tensors.items()}


def equal(one, other):
  """Whether configs and arrays are the same."""
  is_same = lambda a, b: np.array_equal(a, b) and a.dtype == b.dtype
  return one[0] == other[0] and one[1].keys() == other[1].keys() and all(
    is_same(x, other[1][name]) for name, x in one[1].items()
  )  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_a_flipped_bit_in_the_header_of_safetensors(folder, step):
  file = folder / "model.safetensors"
  content, expected = file.read_bytes(), numbers_of(folder)
  places = range(0, 8 + int.from_bytes(content[:8], "little"), step)
  try:
    check_flips(file, content, places, numbers_of, expected, folder)
  finally:
    file.write_bytes(content)


@pytest.mark.parametrize("step", STEPS)
def test_a_flipped_bit_in_the_header_of_a_gguf(gguf_file, step):
  """In the name or the type of a key, or in what describes a tensor; values have no checksum."""
  path, *_ = gguf_file
  content, parsed = path.read_bytes(), readers.gguf_header(path)
  first = min(entry.first for entry in parsed.entries.values())
  spans = [range(24), range(max(span.stop for span in parsed.spans.values()), first)]
  for key, span in parsed.spans.items():
    spans.append(range(span.start, span.start + 8 + len(key.encode()) + 4))
  places = [at for span in spans for at in span][::step]
  load = lambda path: (checkpoints.inspect(path), numbers_of(path))[1]
  check_flips(path.with_name("flipped.gguf"), content, places, load, numbers_of(path))


# --- every output of every command ---


def outputs_of(monkeypatch):
  """(command, option, whether it must be new) of every option that names an output."""
  found = []

  def parsed(parser, *_, **__):
    for action in parser._actions:
      command = parser.prog.removeprefix("vqjax ")
      if action.type is OutputFile:
        found.append((command, action.option_strings[0], False))
      elif action.option_strings[:1] == ["--out"] and command != "cluster":  # a run folder
        found.append((command, "--out", True))
    return 0

  for name in COMMANDS.keys() - {"study"}:  # its `--out` is a folder of runs
    module = importlib.import_module(f"vqjax.commands.{name}")
    with monkeypatch.context() as patch:
      patch.setattr(module, "run", parsed, raising=False)
      patch.setattr(module, "with_config", parsed, raising=False)
      module.main([])
  return found


def test_every_output_of_every_command_goes_where_it_is_sent(tmp_path, monkeypatch, capsys):
  """The check before the work, with the work itself left out."""
  given = {
    "inspect": ["{model}", "--vocabulary"],
    "lens": ["{model}", "--prompt", "a"],
    "table": ["{model}"],
    "plan": ["{model}", "--topology", "v5e:4x4"],
    "floor": ["{model}"],
    "export": ["{model}", "--to", "Q4_0"],
    "compress": ["{model}", "--kl", "1", "--text", "{text}"],
    "trim": ["{model}", "--keep-tokens", "9", "--text", "{text}"],
    "grow": ["{model}", "--tokens", "{text}"],
    "draft": ["{model}", "--text", "{text}"],
  }
  (tmp_path / "model").mkdir()
  (tmp_path / "text").write_text("words of a text")
  (tmp_path / "empty").mkdir()
  places = {"model": str(tmp_path / "model"), "text": str(tmp_path / "text")}
  wrong = {"folder": tmp_path / "empty", "below a file": tmp_path / "text" / "x"}
  before = sorted(tmp_path.rglob("*"))
  options = outputs_of(monkeypatch)
  assert len(options) == 13
  for command, option, is_new in options:
    if command == "lens" and is_new:
      given["lens"] = ["{model}", "--fit", "{text}"]
    refused = wrong | ({"device": "/dev/null", "file": tmp_path / "text"} if is_new else {})
    if is_new and command in ("export", "compress", "grow", "trim"):
      refused["missing folder"] = tmp_path / "none" / "x"
    for kind, path in refused.items():
      if kind == "folder" and command in ("compress", "grow", "trim"):
        continue  # an empty folder is filled
      call = [part.format(**places) for part in given[command]]
      module = importlib.import_module(f"vqjax.commands.{command}")
      assert module.main([*call, option, str(path)]) == 2, (command, option, kind)
      last = capsys.readouterr().err.strip().splitlines()[-1]
      assert last.startswith("error: "), (command, option, kind, last)
      assert "out`" in last if is_new else f"`{option}`" in last, (command, option, kind, last)
  assert sorted(tmp_path.rglob("*")) == before
  assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
