"""Layers follow from their declarations, explain their fields, and are pickled."""

import dataclasses
import inspect
import pickle
import re

import docstring_parser
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import vqjax
from tests import jitted
from tests.nnx.test_nnx import EMBEDDINGS, HEADS
from vqjax import quantizers
from vqjax.embeddings import DenseEmbedding
from vqjax.heads import CodebookHead, DenseHead, Head
from vqjax.layer import Layer
from vqjax.lm.models import Transformer
from vqjax.ops.scores import ScoreOptions
from vqjax.ops.vocab_parallel import Replicated
from vqjax.variables import Variable, integer_variable


def drawn(shape, axes, **options):
  return Variable(shape, axes, jax.nn.initializers.normal(), **options)


class Inner(Layer):
  def declare(self):
    return {"scale": drawn((5,), ("embed",), dtype=jnp.bfloat16)}

  def flops_per_token(self):
    return 0


class Outer(Layer):
  inner: Layer
  embedding: Layer | None = None

  def declare(self):
    double = lambda value, shape, dtype: (2 * value).astype(dtype)
    return {
      "weight": drawn((3, 5), ("vocab", "embed"), pad_value=0),
      "order": integer_variable((3,), ("vocab",), lambda: [2, 0, 1]),
      "doubled": Variable((3,), ("vocab",), double, jnp.uint8, "codes", source="order"),
      "inner": self.inner,
    } | ({} if self.embedding is None else {"embedding": self.embedding})

  def flops_per_token(self):
    return 30

  def __call__(self):
    return self.array("weight") * self.inner.array("scale")


def test_variables_are_created_as_they_are_declared():
  layer = Outer(Inner())
  made = layer.init(jax.random.key(0))
  shapes = {"weight": (3, 5), "inner": {"scale": (5,)}}
  assert jax.tree.map(jnp.shape, made["params"]) == shapes
  assert made["codes"]["order"].tolist() == [2, 0, 1]
  assert made["codes"]["doubled"].tolist() == [4, 0, 2]
  assert made["codes"]["doubled"].dtype == jnp.uint8
  np.testing.assert_array_equal(
    layer.apply(made), made["params"]["weight"] * made["params"]["inner"]["scale"]
  )


def test_size_and_axes_are_derived_and_a_tied_embedding_is_not_counted():
  for layer in (Outer(Inner()), Outer(Inner(), embedding=Inner())):
    assert layer.size() == (15 + 5, 4 * 15 + 2 * 5 + 4 * 3 + 3, 30)
  assert layer.logical_axes() == {
    "params": {
      "weight": ("vocab", "embed"),
      "inner": {"scale": ("embed",)},
      "embedding": {"scale": ("embed",)},
    },
    "codes": {"order": ("vocab",), "doubled": ("vocab",)},
  }


def test_arrays_with_a_pad_value_are_sharded_by_rows_and_the_others_replicated():
  layer = Outer(Inner())
  parts = layer.apply(layer.init(jax.random.key(0)), method="parts")
  assert parts["weight"].pad_value == 0
  assert isinstance(parts["order"], Replicated)
  assert isinstance(parts["inner"]["scale"], Replicated)


def test_an_undeclared_array_is_none():
  layer = Outer(Inner())
  assert layer.apply(layer.init(jax.random.key(0)), "bias", method="array") is None


def test_variables_of_another_shape_are_refused():
  layer = Outer(Inner())
  made = layer.init(jax.random.key(0))
  made["codes"] = made["codes"] | {"order": jnp.zeros(4, jnp.int32)}
  with pytest.raises(ValueError, match=r"`order` .*\(3,\).*\(4,\)"):
    layer.apply(made)


def test_axes_must_name_every_axis():
  with pytest.raises(ValueError, match=r"`axes` .*vocab"):
    drawn((3, 5), ("vocab",))


def _with(layer, **fields):
  """Sets fields to what a constructor that checks its annotations would refuse."""
  for name, value in fields.items():
    object.__setattr__(layer, name, value)
  return layer


BEYOND = float("inf"), float("nan")
WRONG_FIELDS = [
  (DenseHead(-5, 6), "`vocab` of DenseHead must be an integer of at least 1; got -5"),
  (_with(DenseHead(5, 6), vocab=5.5), "`vocab` .* got 5.5"),
  (DenseHead(5, 0), "`dim` .* got 0"),
  (_with(DenseHead(5, 6), embedding=nn.Dense(6)), "`embedding` must be an embedding .* a Dense"),
  (DenseHead(7, 4, embedding=DenseEmbedding(8, 4)), "`embedding` .*vocab 7 .*vocab 8"),
  *((DenseHead(7, 4, softcap=x), f"`softcap` .*{x}") for x in (0.0, *BEYOND)),
  *((DenseHead(7, 4, z_loss=x), f"`z_loss` .*{x}") for x in (-1.0, *BEYOND)),
  (DenseHead(7, 4, label_smoothing=1.0), "`label_smoothing` .*1.0"),
  (DenseHead(7, 4, output=vqjax.SigSoftmax(), softcap=3.0), "`output`"),
  *((CodebookHead(5, 6, codes), f"`codes` .* got {codes}") for codes in (0, 9)),
  (
    _with(CodebookHead(5, 6, 3), embedding=DenseEmbedding(5, 6)),
    "`embedding` must be a CodebookEmbedding; got a DenseEmbedding",
  ),
  *(
    (
      CodebookHead(7, 4, 3, embedding=vqjax.CodebookEmbedding(*sizes)),
      "`embedding` .*vocab 7, dim 4 and codes 3",
    )
    for sizes in ((8, 4, 3), (7, 5, 3), (7, 4, 2))
  ),
  *((CodebookHead(7, 4, 3, commitment=x), f"`commitment` .*{x}") for x in (-0.1, *BEYOND)),
  (vqjax.LearnedCodebookHead(20, 6, 5, candidates=6), "`candidates` .*6 for codes 5"),
  (vqjax.LearnedCodebookHead(20, 6, 5, 2, anneal=0), "anneal 0"),
  (vqjax.LearnedCodebookHead(20, 6, 5, 2, final_temperature=2.0), "final_temperature 2.0"),
  *((vqjax.ResidualCodebookHead(20, 6, 4, rank), f"`rank` .*{rank}") for rank in (0, 7)),
  (vqjax.ProductHead(10, 8, 4, 3), r"`subspaces` .*3.*\[1, 2, 4, 8\]"),
  (vqjax.ProductHead(10, 8, 0, 2), "`codes` .*0"),
  *(
    (vqjax.LearnedProductHead(7, 4, 3, 2, commitment=x), f"`commitment` .*{x}")
    for x in (-0.1, *BEYOND)
  ),
  (vqjax.LowRankHead(31, 12, 0), r"`rank` .*\[1, 12\].*0"),
  (vqjax.LowRankHead(31, 12, 13), r"`rank` .*\[1, 12\].*13"),
  (vqjax.LowRankHead(7, 12, 8), r"`rank` .*\[1, 7\].*8"),
  *((vqjax.MixtureHead(31, 12, count), f"`components` .*{count}") for count in (0, -1)),
  *((vqjax.ClassBasedHead(11, 4, count), f"`classes` .*{count}") for count in (0, 12)),
  *(
    (vqjax.AdaptiveHead(31, 12, cutoffs), rf"`cutoffs` .*\(0, 31\).*{re.escape(str(cutoffs))}")
    for cutoffs in ((), (0, 5), (5, 5), (7, 5), (5, 31), (-1,))
  ),
  *((vqjax.AdaptiveHead(31, 12, (5, 9), x), f"`factor` .*got {x}") for x in (0, 4)),
  *((vqjax.SampledSoftmaxHead(53, 6, samples=x), f"samples.*{x}") for x in (0, 54)),
  (vqjax.SampledSoftmaxHead(53, 6, samples=5, softcap=30.0), "`softcap` .*30.0"),
  (vqjax.SampledSoftmaxHead(53, 6, samples=5, label_smoothing=0.1), "`label_smoothing` .*0.1"),
  (vqjax.SampledSoftmaxHead(53, 6, samples=5, output=vqjax.SigSoftmax()), "`output`"),
  (vqjax.PackedHead(29, 12, 30), r"`row_groups` must be in \[1, vocab\]; got 30"),
  (vqjax.PackedHead(29, 12, 3, 0), "`units` must be at least 1; got 0"),
  (
    vqjax.PackedHead(29, 12, embedding=vqjax.PackedEmbedding(29, 8, 3)),
    "`embedding` must be a PackedEmbedding of vocab 29",
  ),
]


@pytest.mark.parametrize("method", ["size", "logical_axes"])
@pytest.mark.parametrize(
  ("head", "message"), WRONG_FIELDS, ids=[f"{type(h).__name__}, {m}" for h, m in WRONG_FIELDS]
)
def test_a_head_with_wrong_fields_has_neither_size_nor_axes(head, message, method):
  with pytest.raises(ValueError, match=message):
    getattr(head, method)()


def test_a_head_without_its_methods_cannot_be_constructed():
  class Incomplete(Head):
    def declare(self):
      return {}

  with pytest.raises(TypeError, match="_scores"):
    Incomplete(3, 2)


PUBLIC = [*HEADS, *EMBEDDINGS, *(n for n in quantizers.__all__ if n.endswith("Quantizer"))]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_docstring_of_a_layer_names_each_field_and_nothing_else(name):
  cls = getattr(vqjax, name)
  described = docstring_parser.parse(cls.__doc__, docstring_parser.DocstringStyle.GOOGLE).params
  fields = {field.name for field in dataclasses.fields(cls)} - {"parent", "name"}
  assert sorted(entry.arg_name for entry in described) == sorted(fields)


def test_signatures_are_shown_as_they_are_written():
  for function in (DenseHead.log_prob, CodebookHead.sample, vqjax.linear_log_prob):
    shown = str(inspect.signature(function))
    assert re.search(r"hidden: \W*Float\[Array(Like)?, \W*\*B D", shown)
    assert "Union" not in shown


def test_an_attribute_that_a_subclass_describes_again_has_its_words():
  class Base(Inner):
    """A base.

    Attributes:
      first: one
        of two lines.
      second: two.
    """

  class Derived(Base):
    """A subclass.

    Attributes:
      second: another.
      third: three.
    """

  entries = docstring_parser.parse(Derived.__doc__, docstring_parser.DocstringStyle.GOOGLE).params
  assert [(entry.arg_name, entry.description) for entry in entries] == [
    ("first", "one\nof two lines."),
    ("second", "another."),
    ("third", "three."),
  ]


@pytest.mark.parametrize("name", HEADS | EMBEDDINGS)
def test_an_unbound_layer_is_pickled(name):
  fields = (HEADS | EMBEDDINGS)[name]
  layer = getattr(vqjax, name)(101, 12, **fields)
  read = pickle.loads(pickle.dumps(layer))
  assert read == layer
  assert read.size() == layer.size()


def test_a_pickled_model_stays_tied():
  embedding = DenseEmbedding(13, 4)
  head = DenseHead(13, 4, embedding=embedding)
  model = Transformer(embedding=embedding, head=head, dim=4, layers=1, heads=2, context=3)
  read = pickle.loads(pickle.dumps(model))
  assert read == model
  assert read.head.embedding is read.embedding


def test_a_function_that_cannot_be_imported_is_refused_by_name():
  with pytest.raises((AttributeError, pickle.PicklingError), match=r"normal.<locals>.init"):
    pickle.dumps(DenseHead(13, 4, weight_init=nn.initializers.normal(0.02)))


def test_integer_tables_that_were_averaged_are_named():
  head = CodebookHead(41, 8, codes=7)
  hidden = np.ones((2, 8), np.float32)
  variables = jitted.init(head, jax.random.key(0), hidden)
  mean = jax.tree.map(lambda x: np.float32(0.5) * x, variables)
  with pytest.raises(ValueError, match=r"`assignment` of .* 'codes' must be integers.*'params'"):
    head.apply(mean, hidden, np.array([1, 2]), method="log_prob")


def test_a_list_of_mesh_axes_is_a_tuple_of_them():
  axes = ["fsdp", "model"]
  for made in (DenseHead(13, 4, vocab_axis=axes), ScoreOptions(vocab_axis=axes)):
    assert made.vocab_axis == ("fsdp", "model")
    hash(made)


@pytest.mark.parametrize(
  ("changes", "wanted"),
  [
    ({"z_loss": "x"}, "a number; got 'x'"),
    ({"z_loss": float("nan")}, "a number; got nan"),
    ({"token_bias": 3}, "True or False; got 3"),
    ({"codes": True}, "an integer; got True"),
    ({"vocab_axis": 3}, "a name or a tuple of names; got 3"),
    ({"codebook_init": 5}, "an initialiser or an array; got 5"),
    ({"dtype": np.int32}, "a floating-point dtype; got"),
  ],
)
def test_fields_of_another_type_are_refused(changes, wanted):
  (name,) = changes
  head = vqjax.CodebookHead(**{"vocab": 97, "dim": 16, "codes": 8} | changes)
  with pytest.raises(ValueError, match=f"`{name}` of CodebookHead must be {wanted}"):
    head.size()
