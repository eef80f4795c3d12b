"""Runs converted from a dense run: their initial variables, fine-tuning and distillation."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jitted import apply
from vqjax import (
  AdaptiveHead,
  CodebookEmbedding,
  CodebookHead,
  DenseEmbedding,
  DenseHead,
  LearnedProductHead,
  ProductHead,
  ResidualCodebookHead,
  assign,
  convert,
)
from vqjax.lab import conversion
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.conversion import starts
from vqjax.lab.conversion.compress import converted
from vqjax.lab.conversion.starts import dense_rows, token_stats
from vqjax.lab.data import WordTokenizer
from vqjax.lab.training import fit, read_variables
from vqjax.lab.training.optimizer import partition
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.run import load_text
from vqjax.ops.product import compose
from vqjax.sharding import MeshShape, make_mesh

V, D = 0, 16  # the tokenizer says V


def initial(experiment):
  """(experiment with its vocabulary, the variables that its run begins with, text)."""
  text = load_text(experiment)
  program = Program(text.experiment, make_mesh(MeshShape(data=1)))
  fresh = jax.device_get(program.init(keys(0)[0]).variables)
  return text.experiment, experiment.init_from(text, text.experiment.model, fresh), text


def log_prob(experiment, variables):
  tokens = jnp.arange(16).reshape(2, 8) % experiment.model.head.vocab
  variables = jax.tree.map(jnp.asarray, variables)
  return apply(experiment.model, variables, tokens, tokens[:, ::-1], method="log_prob")


@pytest.mark.slow
def test_a_code_for_each_token_reproduces_the_dense_model(dense):
  experiment, folder = dense
  vocab = load_text(experiment).experiment.model.head.vocab
  mapping = convert.Fixed(assign.contiguous)
  same = conversion.compress(experiment, folder, codes=vocab, mapping=mapping, token_bias=False)
  new, variables, _ = initial(same)
  expected = log_prob(load_text(experiment).experiment, read_variables(folder)[0])
  np.testing.assert_allclose(log_prob(new, variables), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("head", "target"),
  [
    (ResidualCodebookHead(V, D, 4, D), convert.ToResidual(convert.KMeans())),
    (ProductHead(V, D, 54, 4, token_bias=True), convert.ToProduct(power=0.5, iterations=60)),
    (LearnedProductHead(V, D, 54, 2), convert.ToLearnedProduct()),
  ],
)
def test_a_head_that_can_represent_all_rows_reproduces_the_dense_model(dense, head, target):
  experiment, folder = dense
  vocab = load_text(experiment).experiment.model.head.vocab
  assert vocab <= 57
  if isinstance(head, (ProductHead, LearnedProductHead)):
    head = head.clone(codes=vocab)
  new, variables, _ = initial(converted(experiment, folder, head, target, name="x"))
  expected = log_prob(load_text(experiment).experiment, read_variables(folder)[0])
  np.testing.assert_allclose(log_prob(new, variables), expected, atol=2e-4)


@pytest.mark.slow
def test_the_bias_of_the_dense_head_is_kept(dense, monkeypatch):
  experiment, folder = dense
  given, step = read_variables(folder)
  vocab = len(given["params"]["head"]["weight"])
  given["params"]["head"]["bias"] = np.random.default_rng(0).normal(size=vocab).astype(np.float32)
  monkeypatch.setattr(starts, "read_variables", lambda *arguments: (given, step))
  head, target = ResidualCodebookHead(V, D, 4, D), convert.ToResidual(convert.KMeans())
  with_bias = head.clone(token_bias=True)
  new, variables, _ = initial(converted(experiment, folder, with_bias, target, name="x"))
  text = load_text(experiment).experiment
  trained = text.model.clone(head=text.model.head.clone(use_bias=True))
  expected = log_prob(dataclasses.replace(text, model=trained), given)
  np.testing.assert_allclose(log_prob(new, variables), expected, atol=2e-4)
  with pytest.raises(ValueError, match="`head` must have a bias"):
    initial(converted(experiment, folder, head, target, name="x"))


@pytest.mark.slow
def test_codewords_are_mean_rows_and_the_bias_is_the_unigram_within_a_code(dense):
  experiment, folder = dense
  _, variables, text = initial(
    conversion.compress(experiment, folder, codes=5, mapping=convert.FrequencyBins())
  )
  rows = read_variables(folder)[0]["params"]["head"]["weight"]
  counts = np.bincount(text.splits["train"].tokens, minlength=len(rows))
  table = np.asarray(variables["codes"]["head"]["assignment"])
  np.testing.assert_array_equal(table, assign.equal_count(counts, 5))
  head = variables["params"]["head"]
  for code in range(5):
    mine = table == code
    weights = counts[mine] + 1
    mean = (rows[mine] * weights[:, None]).sum(0) / weights.sum()
    np.testing.assert_allclose(head["codebook"][code], mean, atol=1e-5)
    share = jax.nn.softmax(head["token_bias"][mine])
    np.testing.assert_allclose(share, weights / weights.sum(), atol=1e-5)
  body = read_variables(folder)[0]["params"]["blocks"]
  jax.tree.map(np.testing.assert_array_equal, variables["params"]["blocks"], body)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("scope", "changed"),
  [
    (conversion.HEAD, {"head", "final_norm"}),
    (conversion.CODEBOOK, {"head"}),
  ],
)
def test_fine_tuning_changes_only_its_scope(dense, short, tmp_path, scope, changed):
  experiment, folder = dense
  new = conversion.compress(experiment, folder, codes=5, scope=scope, train=short)
  _, before, _ = initial(new)
  result = fit(new, tmp_path / "run")
  assert result["status"] == "finished"
  after, _ = read_variables(tmp_path / "run")
  differ = {
    name
    for name, tree in before["params"].items()
    if any(
      (np.asarray(a) != np.asarray(b)).any()
      for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(after["params"][name]))
    )
  }
  assert differ == changed
  same_bias = np.array_equal(
    before["params"]["head"]["token_bias"], after["params"]["head"]["token_bias"]
  )
  assert same_bias == (scope == conversion.CODEBOOK)
  np.testing.assert_array_equal(
    before["codes"]["head"]["assignment"], after["codes"]["head"]["assignment"]
  )


@pytest.mark.slow
def test_distillation_lowers_the_divergence_and_keeps_the_teacher(dense, short, tmp_path):
  experiment, folder = dense
  train = dataclasses.replace(short, steps=30, log_every=1, eval_every=30, save_every=30)
  new = conversion.compress(
    experiment, folder, codes=20, distillation=2.0, temperature=2.0, train=train
  )
  result = fit(new, tmp_path / "run")
  assert result["head"]["class"] == "CodebookHead"
  rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  terms = [json.loads(row).get("distillation") for row in rows]
  terms = [term for term in terms if term is not None]
  assert np.mean(terms[-5:]) < np.mean(terms[:5])
  after, _ = read_variables(tmp_path / "run")
  teacher = read_variables(folder)[0]["params"]
  jax.tree.map(np.testing.assert_array_equal, after["params"]["teacher"], teacher)


@pytest.mark.slow
def test_the_distillation_term_is_the_divergence_of_the_two_models(dense):
  experiment, folder = dense
  new, variables, _ = initial(
    conversion.compress(experiment, folder, codes=7, distillation=3.0, temperature=2.0)
  )
  tokens = jnp.arange(16).reshape(2, 8)
  variables = jax.tree.map(jnp.asarray, variables)
  _, terms = new.model.apply(variables, tokens, tokens, method="loss_terms")
  of = lambda part: {name: tree[part] for name, tree in variables.items() if part in tree}
  p = jax.nn.log_softmax(new.model.student.apply(of("student"), tokens) / 2)
  q = jax.nn.log_softmax(new.model.teacher.apply(of("teacher"), tokens) / 2)
  kl = (jnp.exp(q) * (q - p)).sum(-1).mean()
  np.testing.assert_allclose(terms["distillation"], 3 * 4 * kl, rtol=1e-4)


@pytest.mark.slow
def test_the_distillation_term_uses_the_softcaps_of_both_heads(dense):
  experiment, _ = dense
  sized = lambda head: (
    load_text(
      dataclasses.replace(experiment, model=experiment.model.clone(head=head))
    ).experiment.model
  )
  student, teacher = (sized(DenseHead(V, D, softcap=cap)) for cap in (0.5, 0.2))
  model = conversion.Distilled(student, teacher, weight=1.0)
  tokens = jnp.arange(16).reshape(2, 8)
  variables = model.init(jax.random.key(0), tokens, tokens, method="loss_terms")
  _, terms = model.apply(variables, tokens, tokens, method="loss_terms")
  of = lambda part: {name: tree[part] for name, tree in variables.items()}
  p = jax.nn.log_softmax(student.apply(of("student"), tokens))
  q = jax.nn.log_softmax(teacher.apply(of("teacher"), tokens))
  # Differences of float32 log-probabilities near 4, 2^-22 each.
  kl = (jnp.exp(q) * (q - p)).sum(-1).mean()
  np.testing.assert_allclose(terms["distillation"], kl, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_tied_codebook_is_the_input_embedding(dense, tmp_path):
  experiment, folder = dense
  tied = conversion.compress(experiment, folder, codes=7, tied=True)
  untied = conversion.compress(experiment, folder, codes=7)
  one, two = (initial(made)[1] for made in (tied, untied))
  for collection, name in (("params", "codebook"), ("codes", "assignment")):
    expected = two[collection]["head"][name]
    np.testing.assert_array_equal(one[collection]["embedding"][name], expected)
  assert one["params"]["head"].keys() == {"token_bias"}
  assert fit(tied, tmp_path / "run")["head"]["tied"]


@pytest.mark.slow
@pytest.mark.parametrize("token_bias", [False, True])
@pytest.mark.parametrize("scope", [conversion.HEAD, conversion.CODEBOOK])
def test_the_scope_of_a_tied_codebook_is_the_embedding(dense, scope, token_bias):
  made = conversion.compress(*dense, codes=7, tied=True, token_bias=token_bias, scope=scope)
  sized = load_text(made).experiment
  shapes = Program(sized, make_mesh(MeshShape(data=1))).abstract_state.params
  own, frozen = (
    jax.tree.leaves_with_path(tree) for tree in partition(shapes, made.train.trainable)
  )
  names = {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in own}
  assert "embedding.codebook" in names
  assert ("head.token_bias" in names) == (token_bias and scope == conversion.HEAD)
  assert not any(name.startswith(("blocks", "position")) for name in names)
  assert frozen


def test_a_mapping_from_scratch_reaches_a_tied_head(dense):
  experiment, _ = dense
  embedding = CodebookEmbedding(FROM_TOKENIZER, 16, 9)
  head = CodebookHead(FROM_TOKENIZER, 16, 9, embedding=embedding, token_bias=True)
  model = experiment.model.clone(head=head, embedding=embedding)
  start = conversion.Mapped(convert.Fixed(assign.Random(3)))
  sized, variables, _ = initial(dataclasses.replace(experiment, model=model, init_from=start))
  expected = assign.Random(3)(sized.model.head.vocab, 9)
  np.testing.assert_array_equal(variables["codes"]["embedding"]["assignment"], expected)


def test_a_mapping_from_scratch_sets_only_the_codes_and_the_bias(dense):
  experiment, _ = dense
  head = CodebookHead(V, D, 6, token_bias=True)
  scratch = dataclasses.replace(
    experiment,
    model=experiment.model.clone(head=head),
    init_from=conversion.Mapped(convert.Brown()),
  )
  new, variables, text = initial(scratch)
  table = np.asarray(variables["codes"]["head"]["assignment"])
  assert table.shape == (new.model.head.vocab,)
  assert len(np.unique(table)) == 6
  fresh = jax.device_get(Program(text.experiment, make_mesh(MeshShape(data=1))).init(keys(0)[0]))
  np.testing.assert_array_equal(
    variables["params"]["head"]["codebook"], fresh.params["head"]["codebook"]
  )


@pytest.mark.slow
def test_product_codes_approximate_the_rows_and_best_those_of_frequent_tokens(dense):
  experiment, folder = dense
  head = ProductHead(V, D, 8, 4)
  rows = read_variables(folder)[0]["params"]["head"]["weight"]
  _, variables, text = initial(converted(experiment, folder, head, convert.ToProduct(), name="x"))
  counts = np.bincount(text.splits["train"].tokens, minlength=len(rows))
  head = variables["params"]["head"]
  made = compose(jnp.asarray(variables["codes"]["head"]["codes"]), jnp.asarray(head["tables"]))
  error = ((rows - made) ** 2).sum(-1)
  spread = ((rows - rows.mean(0)) ** 2).sum(-1)
  assert error.mean() < spread.mean()
  order = np.argsort(-counts)
  assert error[order[:8]].mean() < error[order[-20:]].mean()


class TestBadInput:
  def test_a_dense_row_that_is_nan_is_named(self):
    rows = np.ones((5, 3), np.float32)
    rows[2, 1] = np.nan
    with pytest.raises(ValueError, match=r"head of run 7 must be finite; got .* row 2 \(1 such"):
      dense_rows({"params": {"head": {"weight": rows}}}, "run 7")

  def test_a_head_that_is_not_dense_is_refused(self):
    head = {"codebook": np.ones((2, 3)), "token_bias": np.ones(5)}
    with pytest.raises(
      ValueError, match="head of run 7 must be dense; got one with codebook, token_bias"
    ):
      dense_rows({"params": {"head": head}}, "run 7")

  def test_more_codes_than_tokens_are_refused(self, dense):
    with pytest.raises(ValueError, match=r"`codes` must be .*; got 1000 for vocab"):
      initial(conversion.compress(*dense, codes=1000))

  def test_another_tokenizer_is_refused(self, dense):
    experiment = dataclasses.replace(dense[0], tokenizer=WordTokenizer(vocab=20))
    with pytest.raises(ValueError, match="`tokenizer` must be that of the run"):
      initial(conversion.compress(experiment, dense[1], codes=5))

  def test_a_target_of_another_head_is_refused(self, dense):
    wrong = converted(*dense, DenseHead(V, D), convert.ToCodebook(convert.KMeans()), name="x")
    with pytest.raises(
      ValueError, match="`head` must be a CodebookHead for ToCodebook; got a DenseHead"
    ):
      initial(wrong)

  def test_a_softcap_that_the_new_head_cannot_have_is_refused(self, dense):
    model = dense[0].model.clone(head=DenseHead(V, D, softcap=30.0))
    with pytest.raises(
      ValueError, match=r"softcap, as the dense head has 30\.0; got a CodebookHead"
    ):
      conversion.compress(dataclasses.replace(dense[0], model=model), dense[1], codes=5)

  @pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
  def test_an_invalid_weight_of_the_distillation_is_refused(self, dense, weight):
    with pytest.raises(ValueError, match=rf"weight` must be .*finite.*; got {weight}"):
      initial(conversion.compress(*dense, codes=5, distillation=weight))

  def test_a_teacher_without_a_linear_head_is_refused(self, dense):
    model = conversion.Distilled(
      dense[0].model, dense[0].model.clone(head=AdaptiveHead(9, D, (5,)))
    )
    tokens = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"`teacher.head` must be linear, .*; got a AdaptiveHead"):
      model.init(jax.random.key(0), tokens)

  def test_a_teacher_of_other_tokens_is_refused(self, dense):
    student, teacher = (dense[0].model.clone(head=DenseHead(v, D)) for v in (9, 12))
    with pytest.raises(ValueError, match="`student` must have the teacher's 12 tokens; got 9"):
      conversion.Distilled(student, teacher).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))

  @pytest.mark.slow
  @pytest.mark.parametrize(
    ("head", "start", "message"),
    [
      (
        DenseHead(V, D),
        conversion.Mapped(convert.Brown()),
        "must have assignment .*; got a DenseHead",
      ),
      (
        CodebookHead(V, D, 5),
        conversion.FromVectors(convert.ContextVectors(), convert.ToProduct()),
        "must be a ProductHead .*; got a CodebookHead",
      ),
    ],
  )
  def test_a_start_for_another_head_is_refused(self, dense, head, start, message):
    model = dense[0].model.clone(head=head)
    with pytest.raises((TypeError, ValueError), match=message):
      initial(dataclasses.replace(dense[0], model=model, init_from=start))

  def test_a_folder_without_a_run_is_refused(self, dense, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`folder` must have a config\.json"):
      initial(conversion.compress(dense[0], tmp_path, codes=5))


CONTEXTS = convert.ContextVectors()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_head_begins_with_given_vectors_of_unit_length(dense, tied):
  experiment, _ = dense
  embedding = DenseEmbedding(V, D)
  head = DenseHead(V, D, embedding=embedding if tied else None)
  start = conversion.FromVectors(CONTEXTS, convert.ToDense())
  model = experiment.model.clone(embedding=embedding, head=head)
  new, variables, text = initial(dataclasses.replace(experiment, model=model, init_from=start))
  weight = variables["params"]["embedding" if tied else "head"]["weight"]
  expected = CONTEXTS(token_stats(text, new.model.head.vocab), D)
  np.testing.assert_array_equal(weight, expected.astype(np.float32))
  np.testing.assert_allclose((weight**2).sum(axis=1).mean(), 1, rtol=1e-5)


@pytest.mark.slow
def test_a_product_head_begins_with_clusters_of_given_vectors_and_all_else_is_fresh(dense):
  experiment, _ = dense
  head = ProductHead(V, D, 6, 4, token_bias=True)
  start = conversion.FromVectors(CONTEXTS, convert.ToProduct())
  scratch = dataclasses.replace(
    experiment, model=experiment.model.clone(head=head), init_from=start
  )
  new, variables, text = initial(scratch)
  codes, tables = variables["codes"]["head"]["codes"], variables["params"]["head"]["tables"]
  assert codes.dtype == np.uint8
  assert all(len(np.unique(column)) == 6 for column in codes.T)
  rows = CONTEXTS(token_stats(text, new.model.head.vocab), D)
  close = np.asarray(compose(jnp.asarray(codes), jnp.asarray(tables)))
  assert ((close - rows) ** 2).sum() < 0.7 * (rows**2).sum()
  fresh = jax.device_get(Program(text.experiment, make_mesh(MeshShape(data=1))).init(keys(0)[0]))
  others = lambda params: {name: tree for name, tree in params.items() if name != "head"}
  jax.tree.map(np.testing.assert_array_equal, others(variables["params"]), others(fresh.params))


@pytest.mark.slow
def test_a_bias_from_unigrams_gives_the_frequencies_of_the_text_whatever_the_rows(dense):
  experiment, _ = dense
  model = experiment.model.clone(head=DenseHead(V, D, use_bias=True))
  start = conversion.Unigrams(smoothing=0.5)
  new, variables, text = initial(dataclasses.replace(experiment, model=model, init_from=start))
  counts = np.bincount(text.splits["train"].tokens, minlength=new.model.head.vocab) + 0.5
  bias = variables["params"]["head"]["bias"].astype(np.float64)
  np.testing.assert_allclose(np.exp(bias), counts / counts.sum(), rtol=1e-6)
  both = dataclasses.replace(start, start=conversion.FromVectors(CONTEXTS, convert.ToDense()))
  _, after, _ = initial(dataclasses.replace(experiment, model=model, init_from=both))
  np.testing.assert_array_equal(
    after["params"]["head"]["bias"], variables["params"]["head"]["bias"]
  )
  rows = CONTEXTS(token_stats(text, new.model.head.vocab), D)
  np.testing.assert_allclose(after["params"]["head"]["weight"], rows, rtol=1e-6)
  without = experiment.model.clone(head=DenseHead(V, D))
  with pytest.raises(ValueError, match="`head` must have a bias"):
    initial(dataclasses.replace(experiment, model=without, init_from=start))
