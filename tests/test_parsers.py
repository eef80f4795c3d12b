"""No input of a parser ends in anything but a value or a clear error."""

import dataclasses
import json
import os
import pathlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vqjax.embeddings.compact import CompactEmbedding
from vqjax.embeddings.table_file import open_table
from vqjax.lab import config
from vqjax.lab.data import BPETokenizer, SentencePieceTokenizer, WordTokenizer
from vqjax.lab.run_files import Config, MetricsRow, Result
from vqjax.lm import records

EXAMPLES = int(os.environ.get("VQJAX_EXAMPLES", "1"))
ROOT = pathlib.Path(__file__).parents[1]

many = settings(
  max_examples=25 * EXAMPLES,
  deadline=None,
  derandomize=True,
  database=None,
  suppress_health_check=list(HealthCheck),
)

json_values = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=9,
)


def result(parse, *arguments, error=ValueError, **options):
  """Returns (value, None), or (None, the message of the error that a parser may raise)."""
  try:
    return parse(*arguments, **options), None
  except error as problem:
    message = str(problem)
  assert len(message) > 10
  return None, message


@pytest.mark.parametrize("schema", [Config, Result, MetricsRow])
@many
@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_records(schema, content):
  for seal in (True, False):
    parse, error = records.parse_json, records.DamagedError
    value, message = result(parse, content, schema, "a file", "Restore it.", seal=seal, error=error)
    if message is None:
      assert isinstance(value, dict)
    else:
      assert message.startswith("a file is ")
      assert message.endswith("Restore it.")


@dataclasses.dataclass
class Anything:
  """Schema of every object."""


@many
@given(st.dictionaries(st.text(), json_values))
def test_what_is_sealed_is_read_back(value):
  try:
    text = json.dumps(records.sealed(value))
  except ValueError:  # NaN and infinity are not JSON
    return
  value.pop(records.CHECKSUM, None)

  assert records.parse_json(text, Anything, "a file", "") == value


EXPERIMENT = config.load_config(ROOT / "configs" / "lm_codebook.py")
PATHS = ["train.steps", "train.learning_rate", "model.dim", "model.head", "name", "seed", "train"]
PATHS += ["model.head.codes", "model.head.dtype", "train.mesh", "train.trainable", "data.path", ""]


@many
@given(
  st.sampled_from(PATHS) | st.text(), st.text() | st.floats().map(str) | st.integers().map(str)
)
def test_overrides(path, text):
  changed, message = result(config.override, EXPERIMENT, [f"{path}={text}"])
  assert message or len(config.config_hash(changed)) == 12


@pytest.fixture(scope="module")
def compact(tmp_path_factory):
  """A compact file, and its content."""
  path = tmp_path_factory.mktemp("compact") / "x.safetensors"
  values = np.random.default_rng(0).standard_normal((2, 4, 3), np.float32)
  data = np.random.default_rng(1).integers(0, 256, 5, np.uint8)
  fields = {"vocab": 10, "dim": 6, "codes": 4, "subspaces": 2, "additive": False}
  CompactEmbedding(data, values, **fields).save(path)
  return path, path.read_bytes()


@many
@given(st.data())
def test_table_files(compact, data):
  path, whole = compact
  at = data.draw(st.integers(0, len(whole)))
  length = data.draw(st.integers(0, 40))
  damaged = whole[:at] + data.draw(st.binary(max_size=40)) + whole[at + length :]
  other = path.with_name("damaged.safetensors")
  other.write_bytes(damaged)
  found, message = result(open_table, other)
  if message is None:
    path.write_bytes(whole)
    np.testing.assert_array_equal(found[np.arange(10)], open_table(path)[np.arange(10)])
  else:
    assert str(other) in message


@pytest.mark.parametrize(
  "tokenizer",
  [WordTokenizer(), BPETokenizer(), SentencePieceTokenizer()],
  ids=lambda t: type(t).__name__,
)
@many
@given(st.text() | json_values.map(json.dumps))
def test_states_of_tokenizers(tokenizer, state):
  found, message = result(tokenizer.load, state)
  assert message or found.vocab > max(found.eos) >= 0
