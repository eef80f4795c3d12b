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

from vqjax import DenseEmbedding
from vqjax.lab import config
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train, override
from vqjax.ngrams import NGramEmbedding
from vqjax.ops.ngrams import CanonicalHash, PolynomialHash
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


def test_overrides_reach_fields_at_every_depth_and_are_applied_together():
  before = make()
  fields = ["model.head.codes=512", "train.steps=20", "train.warmup=2", "data.path=/x"]
  changed = override(before, [*fields, "model.blocks.1.features=3", "seed=1_000"])
  assert changed.model.head.codes == 512
  assert (changed.train.steps, changed.train.warmup, changed.seed) == (20, 2, 1000)
  assert changed.data.path == pathlib.Path("/x")
  # The original and what is untouched stay as they are.
  assert (before.model.blocks[1].features, changed.model.blocks[1].features) == (11, 3)
  assert changed.model.blocks[0] is before.model.blocks[0]
  assert changed.model.embedding is before.model.embedding
  assert changed.model.parent is None


def test_parts_have_the_width_of_their_model_unless_they_have_or_get_another():
  for name in ("lm_codebook", "lm_grouped", "lm_tied"):
    model = override(config.load_config(ROOT / "configs" / f"{name}.py"), ["model.dim=64"]).model
    assert (model.dim, model.embedding.dim, model.head.dim) == (64, 64, 64)
  assert model.head.embedding is model.embedding
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


def test_one_mesh_axis_is_a_name_and_several_are_a_tuple():
  experiment = dataclasses.replace(make(), model=DenseEmbedding(13, 4))
  axis = lambda text: override(experiment, [f"model.vocab_axis={text}"]).model.vocab_axis
  assert axis("model") == "model"
  assert axis("fsdp,model") == axis("(fsdp, model)") == ("fsdp", "model")
  assert axis("none") is None


REFUSED = {
  "model.hed.codes=4": r"`model\.hed`.*embedding, head, blocks.*model\.head\?",
  "train.step=4": r"`train\.step`.*learning_rate.*train\.steps\?",
  "codes=4": r"codes.*model\.head\.codes\?",
  "model.parent=4": r"model\.parent",
  "model.blocks.2.features=4": r"model\.blocks\.2.*0, 1",
  "model.head.codes=1e3": r"`model\.head\.codes` must be int; got '1e3'.*1000",
  "model.head.codes=many": "must be int; got 'many'",
  "model.head.temperature=warm": "must be float; got 'warm'",
  "model.head.limit=few": r"must be int \| None; got 'few'",
  "model.head.biased=1": "must be bool; got '1'.*true or false",
  "model.head.tile=1,2,3": r"tuple\[int, int\] \| None.*2 values",
  "model.embedding.param_dtype=float": "must be dtype; got 'float'.*bfloat16",
  "model.head=4": r"`model\.head`.*a Head.*model\.head\.codes",
  "model.head.activation=relu": r"model\.head\.activation.*gelu.*Edit the config",
  "train.steps.more=4": r"`train\.steps`.*the int 1000",
  "train.optimizer.warmup=4": r"`train\.optimizer`.*None\. Did you mean train\.warmup\?",
  "train.steps": r"train\.steps.*=VALUE",
  "train.accumulate=3": "`train.accumulate` must divide batch 16; got 3",
  "model.embedding.dim=8 model.head.embedding.dim=9": "one value; got 8 and 9",
  "train.mesh=8": r"`train.mesh` must .*\(data=\.\.\., fsdp=\.\.\., model=\.\.\.\)",
  "train.mesh=(dat=8)": "got dat,.*data, fsdp, model",
  "train.mesh=(data=8,data=4)": "one value; got 8 and 4",
  "train.mesh=(data=all)": r"`data` must be int \| None; got 'all'",
  "train.mesh=(data=0)": "data.* 0",
  "train.mesh=(data=8) train.mesh.model=2": "`train.mesh` must be set as a whole or by its fields",
  "train.batch=1000000000000": r"`train.batch` must be in \[1, 1048576\]; got 1000000000000",
  "train.steps=2147483648": r"`train.steps` must be in \[1, 2147483647\]",
  "train.learning_rate=inf": "`train.learning_rate` must be a finite number; got inf",
  "train.learning_rate=nan": "`train.learning_rate` must be",
  "train.weight_decay=inf": "`train.weight_decay` must be a finite number",
  "model.embedding.dtype=int32": "dtype` must be a floating-point format; got int32",
  "model.embedding.dtype=bool": "dtype` must be",
  "name=/etc/x": "`name` must be a name for a folder: .*; got '/etc/x'",
  **dict.fromkeys(
    ("name=../x", "name=..", "name=", "name=a\x1b[31m", "name=a\nb", f"name={'x' * 200}"),
    "`name` must be",
  ),
}


@pytest.mark.parametrize("assignments", REFUSED)
def test_a_wrong_override_is_refused_by_name_with_a_remedy(assignments):
  with pytest.raises(ValueError, match=f"(?s){REFUSED[assignments]}"):
    override(make(), assignments.split(" "))


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


def test_the_vocabulary_comes_from_the_tokenizer_and_another_is_an_error():
  model = config.with_vocab(make(), 8192).model
  assert model.embedding.vocab == model.head.embedding.vocab == 8192
  changed = override(make(), ["model.head.embedding.vocab=5000"])
  with pytest.raises(ValueError, match=r"embedding.vocab` must be .* 8192 tokens; got 5000"):
    config.with_vocab(changed, 8192)


@pytest.mark.parametrize("rows", [FROM_TOKENIZER, 50])
def test_the_rows_of_a_table_of_ngrams_come_from_its_hash(rows):
  ngrams = PolynomialHash(13, order=2, sizes=(20, 21))
  lookup = NGramEmbedding(ngrams, DenseEmbedding(rows, 4))
  model = config.with_vocab(dataclasses.replace(make(), model=lookup), 13).model
  assert (model.table.vocab, model.ngrams) == (rows or 41, ngrams)


def test_a_hash_of_canonical_ids_has_as_many_ids_as_the_tokenizer_tokens():
  ngrams = CanonicalHash(PolynomialHash(5, order=2, sizes=(20, 21)), np.arange(13) % 5)
  made = dataclasses.replace(make(), model=NGramEmbedding(ngrams, DenseEmbedding(0, 4)))
  model = config.with_vocab(made, 13).model
  assert (model.table.vocab, model.ngrams) == (41, ngrams)
  with pytest.raises(ValueError, match=r"ngrams.vocab` must be the tokenizer's 14 tokens; got 13"):
    config.with_vocab(made, 14)


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


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"steps": 1.5}, "`train.steps` must be an integer; got 1.5"),
    ({"keep": True}, "`train.keep` must be an integer; got True"),
    ({"clip": "1"}, "`train.clip` must be a number; got '1'"),
    ({"trainable": "head"}, "`train.trainable` must be a tuple of texts; got 'head'"),
    ({"mesh": 2}, "`train.mesh` must be a MeshShape; got 2"),
  ],
)
def test_a_field_of_another_type_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    Train(**changes)


def test_a_config_file_is_loaded_by_path(config_file):
  loaded = config.load_config(config_file)
  assert loaded.name == "file"
  assert override(loaded, ["data.path=other"]).data.path == "other"


def test_a_missing_config_lists_the_others_and_a_file_must_define_an_experiment(config_file):
  with pytest.raises(FileNotFoundError, match=r"apple.py\? .* has apple"):
    config.load_config(config_file.with_name("aple.py"))
  with pytest.raises(FileNotFoundError, match="nowhere"):
    config.load_config(config_file.parent / "nowhere" / "apple.py")
  config_file.write_text("x = 1")
  with pytest.raises(ValueError, match=r"function experiment\(\)"):
    config.load_config(config_file)
  config_file.write_text("def experiment():\n  return 7")
  with pytest.raises(ValueError, match="Experiment; got 7"):
    config.load_config(config_file)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("def experiment(:\n", r"apple.py, line 1: SyntaxError: invalid syntax\. Correct this line\.$"),
    ("import math\nimport absent\n", "apple.py, line 2: ModuleNotFoundError: No module named 'abs"),
    ("from vqjax import CodebookHed\n", "apple.py, line 1: ImportError: .* Correct this line"),
    ("def experiment():\n  return Experimen()\n", "apple.py, line 2: NameError: .*Experimen'"),
    (
      "from vqjax.lab.config import Train\ndef experiment():\n  return Train(steps=0)\n",
      "apple.py, line 3: `train.steps` must be .*; got 0",
    ),
    (
      "from vqjax.lab import config\ndef experiment():\n  return config.Train(lerning_rate=1)\n",
      r"apple.py, line 3: TypeError: .*'lerning_rate'\. Did you mean learning_rate\?$",
    ),
  ],
)
def test_an_error_in_a_config_has_its_line(config_file, text, message):
  config_file.write_text(text)
  with pytest.raises(ValueError, match=message) as error:
    config.load_config(config_file)
  assert "\n" not in str(error.value)


def test_another_process_has_the_same_hash_and_a_config_imports_its_neighbours(config_file):
  folder = config_file.parent / "paper"
  folder.mkdir()
  (folder / "base.py").write_text(config_file.read_text())
  (folder / "pear.py").write_text("from configs.paper.base import experiment")
  found = "config_hash(load_config(sys.argv[1]))"
  code = f"import sys; from vqjax.lab.config import config_hash, load_config; print({found})"
  env = os.environ | {"PYTHONHASHSEED": "17", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
  command = [sys.executable, "-c", code, str(folder / "pear.py")]
  other = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=True)
  here = config.config_hash(config.load_config(config_file))
  assert other.stdout.strip() == here
  assert len(here) == 12
  assert int(here, 16) >= 0


def test_a_neighbour_in_a_package_does_not_hide_a_library(config_file):
  package = config_file.parents[1] / "heads_of_mine"
  package.mkdir()
  text = "from heads_of_mine.absent_library import experiment\nimport absent_library\n"
  for name, content in ("__init__", ""), ("absent_library", config_file.read_text()), ("a", text):
    (package / f"{name}.py").write_text(content)
  with pytest.raises(ValueError, match="line 2: ModuleNotFoundError: No module named 'absent_lib"):
    config.load_config(package / "a.py")


def test_tied_and_untied_models_have_different_hashes():
  tied = make(Embedding(13))
  untied = dataclasses.replace(tied, model=tied.model.clone(head=Head(Embedding(13))))
  assert config.config_hash(tied) != config.config_hash(untied)
  changed = config.describe(untied), config.describe(tied)
  same_as = "model.head.embedding.same_as: absent here, 'model.embedding' there"
  assert config.difference(*changed) == [same_as]


def test_the_hash_ignores_where_code_lies_and_how_it_is_written(config_file, monkeypatch):
  before = config.config_hash(config.load_config(config_file))
  moved = config_file.parents[1] / "elsewhere" / "pear.py"
  moved.parent.mkdir()
  code = config_file.read_text().replace("7, kernel", "7,\n    kernel")
  moved.write_text("# A comment.\n" + code)
  assert config.config_hash(config.load_config(moved)) == before
  tied = config.config_hash(make())
  monkeypatch.setattr(Embedding, "__module__", "another.module")
  assert config.config_hash(make()) == tied
  # Nor is the mesh part of the identity.
  elsewhere = override(make(), ["train.mesh=(data=2, fsdp=2, model=2)"])
  assert config.config_hash(elsewhere) == tied
  assert config.describe(elsewhere) == config.describe(make())


def test_the_hash_ignores_a_new_field_with_a_default_and_counts_a_changed_value():
  old = dataclasses.make_dataclass("Data", [("path", str)], frozen=True)
  new = dataclasses.make_dataclass("Data", [("path", str), ("limit", int, 3)], frozen=True)
  hash_of = lambda **fields: config.config_hash(dataclasses.replace(make(), **fields))
  hashes = [hash_of(data=data) for data in (old("a"), new("a"), new("a", 4), old("b"))]
  assert hashes[0] == hashes[1]
  assert len(set(hashes)) == 3
  # An int in a float field is the same number.
  assert hash_of(train=Train(clip=1)) == hash_of(train=Train(clip=1.0))


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
    (tuple(range(20_000)), ["int[20000] sha256:"]),
  ],
)
def test_functions_and_arrays_have_stable_descriptions(function, expected):
  text = config.describe(function)
  assert " at 0x" not in text
  for fragment in expected:
    assert fragment in text


def test_a_callable_object_has_its_fields_and_one_without_a_description_is_refused():
  head = config.describe(make(activation=Scaled(3.0)))["model"]["head"]
  assert head["activation"] == {"class": "Scaled", "by": 3.0}
  for value, named in ((object(), "object"), (lambda x: x + 41, "lambda")):
    with pytest.raises(ValueError, match=rf"`model.head.activation` must .* got .*{named}"):
      config.describe(make(activation=value))


def test_a_hash_of_all_tokens_is_part_of_an_identity():
  made = lambda ids: CanonicalHash(PolynomialHash(5, order=2, sizes=(20,)), ids)
  ids = np.arange(20_000) % 5
  assert config.config_hash(made(ids)) == config.config_hash(made([*ids]))
  assert config.config_hash(made(ids)) != config.config_hash(made(ids[::-1]))


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


def test_an_object_of_plain_values_is_written_with_its_fields():
  for text, expected in (
    ("=(data=2, fsdp=2, model=2)", MeshShape(2, 2, 2)),
    ("=(model=4)", MeshShape(model=4)),
    ("=(data=None,fsdp=8,)", MeshShape(fsdp=8)),
    ("=()", MeshShape()),
    (".model=2", MeshShape(model=2)),
  ):
    assert override(make(), [f"train.mesh{text}"]).train.mesh == expected
