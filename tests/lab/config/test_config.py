"""Does an experiment survive being loaded, overridden, described, hashed and explained?"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from rich.console import Console

from vqjax.lab import config
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train, override
from vqjax.sharding import MeshShape
from vqjax.types import Dtype


class Embedding(nn.Module):
  """A table of vectors.

  Attributes:
    vocab: rows of the table.
    dim: width of a row,
      in floats.
  """

  vocab: int
  dim: int = 5
  init: nn.initializers.Initializer = nn.initializers.normal(0.02)
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def setup(self):
    self.table = self.param("table", self.init, (self.vocab, self.dim), self.param_dtype)

  def __call__(self, tokens):
    return self.table[tokens]


class Head(nn.Module):
  """Scores by the rows of an embedding."""

  embedding: Embedding
  codes: int = 3
  temperature: float = 1.0
  limit: int | None = None
  tile: tuple[int, int] | None = None
  widths: tuple[int, ...] = (2, 3)
  mode: str = "exact"
  biased: bool = False
  activation: Any = nn.gelu

  def __call__(self, hidden):
    return hidden @ self.embedding.table.T


class Model(nn.Module):
  """An embedding and a head that may share it."""

  embedding: Embedding
  head: Head
  blocks: tuple[nn.Module, ...] = ()

  def __call__(self, tokens):
    return self.head(self.embedding(tokens))


@dataclasses.dataclass(frozen=True)
class Folder:
  """A source of text.

  Args:
    path: where the text lies.
  """

  path: pathlib.Path = pathlib.Path("text")


def make(embedding=None, **fields) -> Experiment:
  embedding = Embedding(FROM_TOKENIZER) if embedding is None else embedding
  blocks = (nn.Dense(7), nn.Dense(11))
  model = Model(embedding, Head(embedding, **fields), blocks)
  return Experiment("tied", model, Folder(), Folder(), Folder())


def test_overrides_reach_fields_at_every_depth():
  changed = override(
    make(), ["model.head.codes=512", "train.steps=1_000", "seed=3", "data.path=/x"]
  )
  assert changed.model.head.codes == 512
  assert changed.train.steps == 1000
  assert changed.seed == 3
  assert changed.data.path == pathlib.Path("/x")


@pytest.mark.parametrize(
  ("assignment", "expected"),
  [
    ("temperature=2", 2.0),
    ("temperature=1e-3", 1e-3),
    ("limit=9", 9),
    ("limit=None", None),
    ("tile=(8, 16)", (8, 16)),
    ("tile=8,16", (8, 16)),
    ("tile=none", None),
    ("widths=5", (5,)),
    ("widths=()", ()),
    ("mode=a=b", "a=b"),
    ("biased=true", True),
    ("embedding.dtype=bfloat16", jnp.bfloat16),
    ("embedding.param_dtype=float16", jnp.float16),
    ("embedding.dtype=None", None),
  ],
)
def test_a_text_becomes_the_annotated_type(assignment, expected):
  head = override(make(), [f"model.head.{assignment}"]).model.head
  path = assignment.partition("=")[0]
  found = functools.reduce(getattr, path.split("."), head)
  assert found == expected
  assert type(found) is type(expected)


@pytest.mark.parametrize(
  ("assignment", "fragments"),
  [
    ("model.hed.codes=4", ["model.hed", "did you mean model.head?", "embedding, head, blocks"]),
    ("train.step=4", ["train.step", "did you mean train.steps?", "learning_rate"]),
    ("codes=4", ["unknown field codes", "model.head.codes"]),
    ("model.parent=4", ["unknown field model.parent"]),
    ("model.blocks.2.features=4", ["unknown field model.blocks.2", "0, 1"]),
    ("model.head.codes=1e3", ["'1e3' is not int", "write 1000"]),
    ("model.head.codes=many", ["'many' is not int"]),
    ("model.head.temperature=warm", ["'warm' is not float"]),
    ("model.head.limit=few", ["'few' is not int | None"]),
    ("model.head.biased=1", ["'1' is not bool", "true or false"]),
    ("model.head.tile=1,2,3", ["tuple[int, int] | None", "write 2 values"]),
    ("model.embedding.param_dtype=float", ["'float' is not dtype", "bfloat16"]),
    ("model.head=4", ["model.head holds a Head", "model.head.codes"]),
    ("model.head.activation=relu", ["model.head.activation", "gelu", "edit the config"]),
    ("train.steps.more=4", ["train.steps is the int 1000", "no fields"]),
    ("train.steps", ["no '='", "train.steps=VALUE"]),
    ("train.accumulate=3", ["train.accumulate 3 does not divide batch 16"]),
  ],
)
def test_a_wrong_override_says_what_and_how_to_mend_it(assignment, fragments):
  with pytest.raises(ValueError) as error:  # noqa: PT011 (the fragments are the match)
    override(make(), [assignment])
  for fragment in fragments:
    assert fragment in str(error.value)


def test_a_field_set_to_two_values_is_an_error_even_through_a_shared_object():
  paths = ["model.embedding.dim=8", "model.head.embedding.dim=9"]
  with pytest.raises(ValueError, match="set to 8 and to 9"):
    override(make(), paths)


def test_overrides_that_are_valid_only_together_are_applied_together():
  changed = override(make(), ["train.steps=20", "train.warmup=2"])
  assert (changed.train.steps, changed.train.warmup) == (20, 2)


@pytest.mark.parametrize("path", ["model.embedding.dim", "model.head.embedding.dim"])
def test_a_tied_embedding_stays_tied(path):
  model = config.with_vocab(override(make(), [f"{path}=8"]), 13).model
  assert model.embedding is model.head.embedding
  assert model.embedding.dim == 8
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.arange(3))["params"]
  assert jax.tree.map(jnp.shape, shapes) == {"embedding": {"table": (13, 8)}}


def test_equal_embeddings_that_are_two_objects_stay_two():
  model = Model(Embedding(13), Head(Embedding(13)))
  changed = override(dataclasses.replace(make(), model=model), ["model.embedding.dim=8"]).model
  assert (changed.embedding.dim, changed.head.embedding.dim) == (8, 5)


def test_overriding_leaves_the_original_and_untouched_objects_alone():
  before = make()
  after = override(before, ["model.blocks.1.features=3"])
  assert before.model.blocks[1].features == 11
  assert after.model.blocks[0] is before.model.blocks[0]
  assert after.model.head is before.model.head
  assert after.model.parent is None


def test_the_vocabulary_comes_from_the_tokenizer():
  model = config.with_vocab(make(), 8192).model
  assert model.embedding.vocab == model.head.embedding.vocab == 8192


def test_another_vocabulary_than_the_tokenizers_is_an_error():
  changed = override(make(), ["model.head.embedding.vocab=5000"])
  with pytest.raises(
    ValueError, match=r"embedding.vocab is 5000 but the tokenizer has 8192 tokens"
  ):
    config.with_vocab(changed, 8192)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"steps": 0}, "train.steps 0 is below 1"),
    ({"learning_rate": 0.0}, "train.learning_rate 0.0 is not positive"),
    ({"weight_decay": -1.0}, "train.weight_decay -1.0 is negative"),
    ({"beta2": 1.0}, "train.beta2 1.0 is outside"),
    ({"final_fraction": 2.0}, "train.final_fraction 2.0 is outside"),
    ({"batch": 6, "accumulate": 4}, "train.accumulate 4 does not divide batch 6"),
  ],
)
def test_impossible_training_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    Train(**{"warmup": 1} | fields)


CONFIG = """
  import dataclasses
  from flax import linen as nn
  from vqjax.lab.config import Experiment

  @dataclasses.dataclass(frozen=True)
  class Source:
    path: "str" = "text"

  def experiment():
    init = nn.with_partitioning(nn.initializers.normal(0.02), ("vocab", None))
    keep = frozenset({"apple", "pear", "plum", "quince"})
    bias = lambda key, shape, dtype=None: 0 * key
    model = nn.Dense(7, kernel_init=init, bias_init=bias)
    return Experiment("file", model, Source(), keep, Source())
"""


@pytest.fixture
def config_file(tmp_path):
  path = tmp_path / "configs" / "apple.py"
  path.parent.mkdir()
  path.write_text(textwrap.dedent(CONFIG))
  return path


def test_a_config_file_is_loaded_by_path(config_file):
  loaded = config.load(config_file)
  assert loaded.name == "file"
  assert override(loaded, ["data.path=other"]).data.path == "other"


def test_a_missing_config_lists_the_ones_there(config_file):
  with pytest.raises(FileNotFoundError, match=r"did you mean .*apple.py\? .* has: apple"):
    config.load(config_file.with_name("aple.py"))
  with pytest.raises(FileNotFoundError, match="there is no folder"):
    config.load(config_file.parent / "nowhere" / "apple.py")


def test_a_config_file_must_define_an_experiment(config_file):
  config_file.write_text("x = 1")
  with pytest.raises(AttributeError, match="no function experiment"):
    config.load(config_file)
  config_file.write_text("def experiment():\n  return 7")
  with pytest.raises(TypeError, match="returned 7"):
    config.load(config_file)


def test_the_hash_is_the_same_in_every_process(config_file):
  code = "import sys; from vqjax import config; print(config.config_hash(config.load(sys.argv[1])))"
  environment = {**os.environ, "PYTHONHASHSEED": "17", "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-c", code, str(config_file)]
  other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
  here = config.config_hash(config.load(config_file))
  assert other.stdout.strip() == here
  assert len(here) == 12
  assert int(here, 16) >= 0


def test_the_hash_tells_tied_from_untied():
  tied = make(Embedding(13))
  untied = dataclasses.replace(tied, model=tied.model.clone(head=Head(Embedding(13))))
  assert config.config_hash(tied) != config.config_hash(untied)
  changed = config.describe(untied), config.describe(tied)
  same_as = "model.head.embedding.same_as: absent here, 'model.embedding' there"
  assert config.difference(*changed) == [same_as]


def test_an_int_in_a_float_field_is_the_same_experiment():
  one, whole = (dataclasses.replace(make(), train=Train(clip=clip)) for clip in (1, 1.0))
  assert config.config_hash(one) == config.config_hash(whole)


def test_a_description_names_classes_and_is_json():
  described = json.loads(json.dumps(config.describe(make())))
  assert described["class"] == "vqjax.lab.config.experiment.Experiment"
  assert described["model"]["head"]["class"].endswith("Head")
  assert described["model"]["embedding"]["param_dtype"] == "float32"
  flat = config.flatten(described)
  assert flat["model.head.codes"] == 3
  assert flat["model.blocks.1.features"] == 11
  assert flat["model.head.widths"] == [2, 3]
  assert "model.parent" not in flat


@dataclasses.dataclass(frozen=True)
class Scaled:
  by: float = 2.0

  def __call__(self, x):
    return self.by * x


@pytest.mark.parametrize(
  ("function", "expected"),
  [
    (nn.initializers.normal(0.02), ["jax.nn.initializers.normal", "stddev=0.02"]),
    (nn.initializers.zeros_init(), ["jax.nn.initializers.zeros"]),
    (
      nn.with_partitioning(nn.initializers.normal(0.5), ("v", None)),
      ["with_partitioning", "fn=jax.nn.initializers.normal", "stddev=0.5", "names=[v, None]"],
    ),
    (functools.partial(nn.gelu, approximate=False), ["gelu(approximate=False)"]),
    (jnp.tanh, ["tanh"]),
    (nn.relu, ["relu"]),
    (Scaled(3.0).__call__, ["Scaled(by=3.0).__call__"]),
    (lambda x: x + 41, ["lambda x: x + 41"]),
    (np.float32, ["float32"]),
    (Scaled, ["Scaled"]),
    (np.arange(3, dtype=np.int32), ["int32[3] sha256:"]),
  ],
)
def test_functions_and_arrays_read_the_same_everywhere(function, expected):
  text = config.describe(function)
  assert " at 0x" not in text
  for fragment in expected:
    assert fragment in text


def test_a_callable_object_is_described_by_its_fields():
  described = config.describe(make(activation=Scaled(3.0)))
  assert config.flatten(described)["model.head.activation.by"] == 3.0


def test_a_value_without_a_stable_description_is_an_error():
  with pytest.raises(TypeError, match=r"model.head.activation holds object, .* frozen dataclass"):
    config.describe(make(activation=object()))


def test_a_difference_names_both_values():
  here = override(make(), ["model.head.codes=512", "model.head.widths=4"])
  lines = config.difference(config.describe(here), config.describe(make()))
  assert lines == [
    "model.head.codes: 512 here, 3 there",
    "model.head.widths: [4] here, [2, 3] there",
  ]


def test_help_shows_every_field_with_type_value_and_meaning():
  console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
  console.print(config.help_text(make()))
  lines = {
    line.split()[0]: " ".join(line.split())
    for line in console.export_text().splitlines()
    if line.strip()
  }
  assert lines["model.embedding.dim"] == "model.embedding.dim int = 5 width of a row, in floats."
  assert "micro-batches" in lines["train.accumulate"]
  assert lines["data.path"] == "data.path Path = text where the text lies."
  assert "model.head.activation" not in lines
  assert "same object as model.embedding" in lines["model.head.embedding"]


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("(data=2, fsdp=2, model=2)", MeshShape(2, 2, 2)),
    ("(model=4)", MeshShape(model=4)),
    ("(data=None,fsdp=8,)", MeshShape(fsdp=8)),
    ("()", MeshShape()),
  ],
)
def test_an_object_of_plain_values_is_written_with_its_fields(text, expected):
  assert override(make(), [f"train.mesh={text}"]).train.mesh == expected
  assert override(make(), ["train.mesh.model=2"]).train.mesh == MeshShape(model=2)


@pytest.mark.parametrize(
  ("texts", "message"),
  [
    (["=8"], r"write \(data=\.\.\., fsdp=\.\.\., model=\.\.\.\)"),
    (["=(dat=8)"], "write each of data, fsdp, model at most once"),
    (["=(data=8, data=8)"], "write each of data, fsdp, model at most once"),
    (["=(data=all)"], r"'all' is not int \| None"),
    (["=(data=0)"], r"train\.mesh\.data 0 is below 1"),
    (["=(data=8)", ".model=2"], "train.mesh is set, and so are fields of it"),
  ],
)
def test_a_mesh_that_is_not_one_says_what_to_write(texts, message):
  with pytest.raises(ValueError, match=message):
    override(make(), [f"train.mesh{text}" for text in texts])


def test_where_a_run_is_computed_is_no_part_of_what_it_is():
  elsewhere = override(make(), ["train.mesh=(data=2, fsdp=2, model=2)"])
  assert config.config_hash(elsewhere) == config.config_hash(make())
  assert config.describe(elsewhere) == config.describe(make())
