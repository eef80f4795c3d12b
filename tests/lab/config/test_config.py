"""Tests of loading, overriding, describing, hashing and explaining an experiment."""

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

ROOT = pathlib.Path(__file__).parents[3]


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


class Wide(nn.Module):
  """Parts with a width of their own or that of the model."""

  parts: Any
  dim: int = 5


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


def test_the_parts_of_a_model_share_its_width():
  configs = pathlib.Path(__file__).parents[3] / "configs"
  for name in ("lm_codebook", "lm_grouped", "lm_tied"):
    model = override(config.load_config(configs / f"{name}.py"), ["model.dim=64"]).model
    assert (model.dim, model.embedding.dim, model.head.dim) == (64, 64, 64)
  assert model.head.embedding is model.embedding


def test_parts_of_another_width_and_parts_that_are_set_keep_theirs():
  parts = {name: Embedding(7, dim) for name, dim in (("same", 5), ("narrow", 3), ("given", 5))}
  made = dataclasses.replace(make(), model=Wide(parts))
  parts = override(made, ["model.dim=11", "model.parts.given.dim=13"]).model.parts
  assert {name: part.dim for name, part in parts.items()} == {"same": 11, "narrow": 3, "given": 13}


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
    ("model.hed.codes=4", ["`model.hed`", "model.head?", "embedding, head, blocks"]),
    ("train.step=4", ["`train.step`", "train.steps?", "learning_rate"]),
    ("codes=4", ["codes", "model.head.codes?"]),
    ("model.parent=4", ["model.parent"]),
    ("model.blocks.2.features=4", ["model.blocks.2", "0, 1"]),
    ("model.head.codes=1e3", ["`model.head.codes` must be int; got '1e3'", "1000"]),
    ("model.head.codes=many", ["must be int; got 'many'"]),
    ("model.head.temperature=warm", ["must be float; got 'warm'"]),
    ("model.head.limit=few", ["must be int | None; got 'few'"]),
    ("model.head.biased=1", ["must be bool; got '1'", "true or false"]),
    ("model.head.tile=1,2,3", ["tuple[int, int] | None", "2 values"]),
    ("model.embedding.param_dtype=float", ["must be dtype; got 'float'", "bfloat16"]),
    ("model.head=4", ["`model.head`", "a Head", "model.head.codes"]),
    ("model.head.activation=relu", ["model.head.activation", "gelu", "Edit the config"]),
    ("train.steps.more=4", ["`train.steps`", "the int 1000"]),
    ("train.steps", ["train.steps", "=VALUE"]),
    ("train.accumulate=3", ["`train.accumulate` must divide batch 16; got 3"]),
  ],
)
def test_a_wrong_override_is_refused_with_a_remedy(assignment, fragments):
  with pytest.raises(ValueError) as error:  # noqa: PT011 (the fragments are the match)
    override(make(), [assignment])
  for fragment in fragments:
    assert fragment in str(error.value)


def test_a_field_set_to_two_values_is_an_error_even_through_a_shared_object():
  paths = ["model.embedding.dim=8", "model.head.embedding.dim=9"]
  with pytest.raises(ValueError, match=r"one value; got 8 and 9"):
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
  with pytest.raises(ValueError, match=r"embedding.vocab` must be .* 8192 tokens; got 5000"):
    config.with_vocab(changed, 8192)


def test_training_with_a_number_out_of_range_is_refused():
  for wrong in ({"steps": 0}, {"learning_rate": 0.0}, {"weight_decay": -1.0}, {"beta2": 1.0}):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"`train.{name}` must be .*; got {value}"):
      Train(**wrong)


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
    model = nn.Dense(7, kernel_init=init)
    return Experiment("file", model, Source(), keep, Source())
"""


@pytest.fixture
def config_file(tmp_path):
  path = tmp_path / "configs" / "apple.py"
  path.parent.mkdir()
  path.write_text(textwrap.dedent(CONFIG))
  return path


def test_a_config_file_is_loaded_by_path(config_file):
  loaded = config.load_config(config_file)
  assert loaded.name == "file"
  assert override(loaded, ["data.path=other"]).data.path == "other"


def test_a_config_in_a_folder_imports_its_neighbours(config_file):
  folder = config_file.parent / "paper"
  folder.mkdir()
  (folder / "base.py").write_text(config_file.read_text())
  (folder / "pear.py").write_text("from configs.paper.base import experiment")
  code = "import sys; from vqjax.lab import config; print(config.load(sys.argv[1]).name)"
  command = [sys.executable, "-c", code, str(folder / "pear.py")]
  environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(config.__file__).parents[3])}
  done = subprocess.run(
    command, env=environment, cwd=folder, capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == "file"


def test_a_missing_config_lists_the_others_of_its_folder(config_file):
  with pytest.raises(FileNotFoundError, match=r"apple.py\? .* has apple"):
    config.load_config(config_file.with_name("aple.py"))
  with pytest.raises(FileNotFoundError, match="nowhere"):
    config.load_config(config_file.parent / "nowhere" / "apple.py")


def test_a_config_file_must_define_an_experiment(config_file):
  config_file.write_text("x = 1")
  with pytest.raises(ValueError, match=r"function experiment\(\)"):
    config.load_config(config_file)
  config_file.write_text("def experiment():\n  return 7")
  with pytest.raises(ValueError, match="Experiment; got 7"):
    config.load_config(config_file)


def test_the_hash_is_the_same_in_every_process(config_file):
  code = (
    "import sys; from vqjax.lab import config;print(config.config_hash(config.load(sys.argv[1])))"
  )
  environment = {**os.environ, "PYTHONHASHSEED": "17", "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-c", code, str(config_file)]
  other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
  here = config.config_hash(config.load_config(config_file))
  assert other.stdout.strip() == here
  assert len(here) == 12
  assert int(here, 16) >= 0


def test_tied_and_untied_models_have_different_hashes():
  tied = make(Embedding(13))
  untied = dataclasses.replace(tied, model=tied.model.clone(head=Head(Embedding(13))))
  assert config.config_hash(tied) != config.config_hash(untied)
  changed = config.describe(untied), config.describe(tied)
  same_as = "model.head.embedding.same_as: absent here, 'model.embedding' there"
  assert config.difference(*changed) == [same_as]


def test_an_int_in_a_float_field_is_the_same_experiment():
  one, whole = (dataclasses.replace(make(), train=Train(clip=clip)) for clip in (1, 1.0))
  assert config.config_hash(one) == config.config_hash(whole)


def test_the_hash_ignores_where_code_lies_and_how_it_is_written(config_file, monkeypatch):
  before = config.config_hash(config.load_config(config_file))
  moved = config_file.parents[1] / "elsewhere" / "pear.py"
  moved.parent.mkdir()
  moved.write_text(
    "# A comment.\n" + config_file.read_text().replace("7, kernel", "7,\n    kernel")
  )
  assert config.config_hash(config.load_config(moved)) == before
  tied = config.config_hash(make())
  monkeypatch.setattr(Embedding, "__module__", "another.module")
  assert config.config_hash(make()) == tied


def test_the_hash_ignores_a_new_field_with_a_default_and_counts_a_changed_value():
  old = dataclasses.make_dataclass("Data", [("path", str)], frozen=True)
  new = dataclasses.make_dataclass("Data", [("path", str), ("limit", int, 3)], frozen=True)
  hashes = [
    config.config_hash(dataclasses.replace(make(), data=data))
    for data in (old("a"), new("a"), new("a", 4), old("b"))
  ]
  assert hashes[0] == hashes[1]
  assert len(set(hashes)) == 3


def test_a_description_names_classes_and_is_json():
  described = json.loads(json.dumps(config.describe(make())))
  assert described["class"] == "Experiment"
  model = described["model"]
  assert model["head"]["class"] == "Head"
  assert (model["head"]["codes"], model["head"]["widths"]) == (3, [2, 3])
  assert model["embedding"]["param_dtype"] == "float32"
  assert model["blocks"][1]["features"] == 11
  assert "parent" not in model


@dataclasses.dataclass(frozen=True)
class Scaled:
  by: float = 2.0

  def __call__(self, x):
    return self.by * x


@pytest.mark.parametrize(
  ("function", "expected"),
  [
    (nn.initializers.normal(0.02), ["normal.init(", "stddev=0.02"]),
    (nn.initializers.zeros_init(), ["zeros"]),
    (
      nn.with_partitioning(nn.initializers.normal(0.5), ("v", None)),
      ["with_partitioning", "fn=normal", "stddev=0.5", "names=[v, None]"],
    ),
    (functools.partial(nn.gelu, approximate=False), ["gelu(approximate=False)"]),
    (jnp.tanh, ["tanh"]),
    (nn.relu, ["relu"]),
    (Scaled(3.0).__call__, ["Scaled(by=3.0).__call__"]),
    (np.float32, ["float32"]),
    (Scaled, ["Scaled"]),
    (np.arange(3, dtype=np.int32), ["int32[3] sha256:"]),
  ],
)
def test_functions_and_arrays_have_stable_descriptions(function, expected):
  text = config.describe(function)
  assert " at 0x" not in text
  for fragment in expected:
    assert fragment in text


def test_a_callable_object_is_described_by_its_fields():
  head = config.describe(make(activation=Scaled(3.0)))["model"]["head"]
  assert head["activation"] == {"class": "Scaled", "by": 3.0}


@pytest.mark.parametrize(("value", "named"), [(object(), "object"), (lambda x: x + 41, "lambda")])
def test_a_value_without_a_stable_description_is_refused(value, named):
  with pytest.raises(ValueError, match=rf"`model.head.activation` must have .* got .*{named}"):
    config.describe(make(activation=value))


def test_a_difference_names_both_values():
  here = override(make(), ["model.head.codes=512", "model.head.widths=4"])
  lines = config.difference(config.describe(here), config.describe(make()))
  assert sorted(lines) == [
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
    (["=8"], r"`train.mesh` must .*\(data=\.\.\., fsdp=\.\.\., model=\.\.\.\)"),
    (["=(dat=8)"], "got dat,.*data, fsdp, model"),
    (["=(data=8, data=4)"], "one value; got 8 and 4"),
    (["=(data=all)"], r"`data` must be int \| None; got 'all'"),
    (["=(data=0)"], r"data.* 0"),
    (["=(data=8)", ".model=2"], "`train.mesh` must be set as a whole or by its fields"),
  ],
)
def test_a_wrong_mesh_is_refused_with_a_remedy(texts, message):
  with pytest.raises(ValueError, match=message):
    override(make(), [f"train.mesh{text}" for text in texts])


def test_the_mesh_is_not_part_of_the_identity():
  elsewhere = override(make(), ["train.mesh=(data=2, fsdp=2, model=2)"])
  assert config.config_hash(elsewhere) == config.config_hash(make())
  assert config.describe(elsewhere) == config.describe(make())


@pytest.mark.parametrize(
  ("assignment", "message"),
  [
    ("train.batch=1000000000000", r"`train.batch` must be in \[1, 1048576\]; got 1000000000000"),
    ("train.steps=2147483648", r"`train.steps` must be in \[1, 2147483647\]"),
    ("train.learning_rate=inf", "`train.learning_rate` must be a finite number; got inf"),
    ("train.learning_rate=nan", "`train.learning_rate` must be"),
    ("train.weight_decay=inf", "`train.weight_decay` must be a finite number"),
    ("model.head.dtype=int32", "`model.head.dtype` must be a floating-point format; got int32"),
    ("model.head.dtype=bool", "`model.head.dtype` must be"),
    ("name=/etc/x", "`name` must be a name for a folder: .*; got '/etc/x'"),
    ("name=../x", "`name` must be"),
    ("name=..", "`name` must be"),
    ("name=", "`name` must be"),
    ("name=a\x1b[31m", "`name` must be"),
    ("name=a\nb", "`name` must be"),
    (f"name={'x' * 200}", "`name` must be"),
  ],
)
def test_an_absurd_value_is_refused_by_name(assignment, message):
  with pytest.raises(ValueError, match=message):
    override(config.load_config(ROOT / "configs" / "lm_dense.py"), [assignment])
