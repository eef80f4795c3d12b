"""Runs converted from a dense run: their initial variables, fine-tuning and distillation."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from tests import tiny
from tests.jitted import apply, init
from vqjax import (
  AdaptiveHead,
  CodebookEmbedding,
  CodebookHead,
  DenseEmbedding,
  DenseHead,
  GroupedHead,
  Int8Embedding,
  PackedHead,
  ProductHead,
  ResidualCodebookHead,
  assign,
  convert,
)
from vqjax.lab import starting_points
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.data import WordTokenizer
from vqjax.lab.starting_points import starts
from vqjax.lab.starting_points.fine_tuning import converted
from vqjax.lab.starting_points.starts import dense_rows, token_stats
from vqjax.lab.training import fit, read_run_variables
from vqjax.lab.training.optimizer import partition
from vqjax.lab.training.program import Program
from vqjax.lab.training.run_folder import load_text
from vqjax.ops.groups import group_starts
from vqjax.ops.product import compose
from vqjax.sharding import MeshShape, make_mesh

V, D = FROM_TOKENIZER, 16


def log_prob(experiment, variables):
  """Log-probabilities of an experiment whose text says its vocabulary."""
  model = load_text(experiment).experiment.model
  tokens = np.arange(16).reshape(2, 8)
  return apply(model, variables, tokens, tokens[:, ::-1], method="log_prob")


@pytest.mark.slow
def test_the_bias_of_the_dense_head_is_kept(dense, monkeypatch):
  experiment, folder = dense
  given, step = read_run_variables(folder)
  vocab = len(given["params"]["head"]["weight"])
  given["params"]["head"]["bias"] = np.random.default_rng(0).normal(size=vocab).astype(np.float32)
  monkeypatch.setattr(starts, "read_run_variables", lambda *arguments: (given, step))
  head, target = ResidualCodebookHead(V, D, 4, D), convert.ToResidual(convert.KMeans())
  made = converted(experiment, folder, head.clone(token_bias=True), target, name="x")
  model = experiment.model.clone(head=DenseHead(V, D, use_bias=True))
  expected = log_prob(dataclasses.replace(experiment, model=model), given)
  np.testing.assert_allclose(log_prob(made, tiny.begun(made)[1]), expected, atol=2e-4)
  with pytest.raises(ValueError, match="`head` must have a bias"):
    tiny.begun(converted(experiment, folder, head, target, name="x"))


def test_codewords_are_mean_rows_and_the_bias_is_the_unigram_within_a_code(dense):
  experiment, folder = dense
  made = starting_points.fine_tuned_codebook(
    experiment, folder, codes=5, mapping=convert.FrequencyBins()
  )
  text, variables, _ = tiny.begun(made)
  trained = read_run_variables(folder)[0]["params"]
  rows = trained["head"]["weight"]
  counts = np.bincount(text.splits["train"].tokens, minlength=len(rows))
  table = np.asarray(variables["codes"]["head"]["assignment"])
  np.testing.assert_array_equal(table, assign.equal_count(counts, 5))
  head = variables["params"]["head"]
  for code in range(5):
    mine = table == code
    weights = counts[mine] + 1
    mean = (rows[mine] * weights[:, None]).sum(0) / weights.sum()
    np.testing.assert_allclose(head["codebook"][code], mean, atol=1e-5)
    share = softmax(np.asarray(head["token_bias"])[mine])
    np.testing.assert_allclose(share, weights / weights.sum(), atol=1e-5)
  jax.tree.map(np.testing.assert_array_equal, variables["params"]["blocks"], trained["blocks"])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("scope", "changed"),
  [
    (starting_points.HEAD, {"head", "final_norm"}),
    (starting_points.CODEBOOK, {"head"}),
  ],
)
def test_fine_tuning_changes_only_its_scope(dense, short, tmp_path, scope, changed):
  experiment, folder = dense
  new = starting_points.fine_tuned_codebook(experiment, folder, codes=5, scope=scope, train=short)
  _, before, _ = tiny.begun(new)
  result = fit(new, tmp_path / "run")
  assert result["status"] == "finished"
  after, _ = read_run_variables(tmp_path / "run")
  same = lambda a, b: jax.tree.all(jax.tree.map(np.array_equal, a, b))
  was, now = before["params"], after["params"]
  assert {name for name in was if not same(was[name], now[name])} == changed
  same_bias = same(was["head"]["token_bias"], now["head"]["token_bias"])
  assert same_bias == (scope == starting_points.CODEBOOK)
  np.testing.assert_array_equal(
    before["codes"]["head"]["assignment"], after["codes"]["head"]["assignment"]
  )


@pytest.mark.slow
def test_distillation_lowers_the_divergence_and_keeps_the_teacher(dense, short, tmp_path):
  experiment, folder = dense
  train = dataclasses.replace(short, steps=30, log_every=1, eval_every=30, save_every=30)
  new = starting_points.fine_tuned_codebook(
    experiment, folder, codes=20, distillation=2.0, temperature=2.0, train=train
  )
  result = fit(new, tmp_path / "run")
  assert result["head"]["class"] == "CodebookHead"
  terms = [row["distillation"] for row in tiny.rows(tmp_path / "run") if "distillation" in row]
  assert np.mean(terms[-5:]) < np.mean(terms[:5])
  after, _ = read_run_variables(tmp_path / "run")
  teacher = read_run_variables(folder)[0]["params"]
  jax.tree.map(np.testing.assert_array_equal, after["params"]["teacher"], teacher)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("student", "teacher", "weight", "temperature"),
  [
    (CodebookHead(57, D, 7, token_bias=True), DenseHead(57, D), 3.0, 2.0),
    (DenseHead(57, D, softcap=0.5), DenseHead(57, D, softcap=0.2), 1.0, 1.0),
  ],
)
def test_the_distillation_term_is_the_divergence_of_the_two_models(
  dense, student, teacher, weight, temperature
):
  both = ({"embedding": DenseEmbedding(57, D), "head": head} for head in (student, teacher))
  models = [dense[0].model.clone(**layers) for layers in both]
  model = starting_points.Distilled(*models, weight=weight, temperature=temperature)
  tokens = np.arange(16).reshape(2, 8)
  variables = init(model, jax.random.key(0), tokens, tokens, method="loss_terms")
  _, terms = apply(model, variables, tokens, tokens, method="loss_terms")
  logits = [
    np.asarray(apply(one, convert.part_of(variables, part), tokens), np.float64) / temperature
    for one, part in zip(models, ("student", "teacher"))
  ]
  p, q = (log_softmax(x, axis=-1) for x in logits)
  kl = (np.exp(q) * (q - p)).sum(-1).mean()
  # Differences of float32 log-probabilities near 4, 2^-22 each.
  found = terms["distillation"] / (weight * temperature**2)
  np.testing.assert_allclose(found, kl, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_tied_codebook_is_the_input_embedding(dense, tmp_path):
  experiment, folder = dense
  tied = starting_points.fine_tuned_codebook(experiment, folder, codes=7, tied=True)
  untied = starting_points.fine_tuned_codebook(experiment, folder, codes=7)
  one, two = (tiny.begun(made)[1] for made in (tied, untied))
  for collection, name in (("params", "codebook"), ("codes", "assignment")):
    expected = two[collection]["head"][name]
    np.testing.assert_array_equal(one[collection]["embedding"][name], expected)
  assert one["params"]["head"].keys() == {"token_bias"}
  assert fit(tied, tmp_path / "run")["head"]["tied"]


@pytest.mark.parametrize("token_bias", [False, True])
@pytest.mark.parametrize("scope", [starting_points.HEAD, starting_points.CODEBOOK])
def test_the_scope_of_a_tied_codebook_is_the_embedding(dense, scope, token_bias):
  made = starting_points.fine_tuned_codebook(
    *dense, codes=7, tied=True, token_bias=token_bias, scope=scope
  )
  sized = load_text(made).experiment
  shapes = Program(sized, make_mesh(MeshShape(data=1))).abstract_state.params
  own, frozen = (
    jax.tree.leaves_with_path(tree) for tree in partition(shapes, made.train.trainable)
  )
  names = {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in own}
  assert "embedding.codebook" in names
  assert ("head.token_bias" in names) == (token_bias and scope == starting_points.HEAD)
  assert not any(name.startswith(("blocks", "position")) for name in names)
  assert frozen


def begun_with(dense, start, **layers):
  """What `tiny.begun` returns for layers of the dense model, and a start."""
  model = dense[0].model.clone(**layers)
  return tiny.begun(dataclasses.replace(dense[0], model=model, init_from=start))


def test_a_mapping_from_scratch_sets_the_codes_of_a_head_or_of_its_embedding(dense):
  head = CodebookHead(V, D, 6, token_bias=True)
  text, variables, fresh = begun_with(dense, starting_points.Mapped(convert.Brown()), head=head)
  table = np.asarray(variables["codes"]["head"]["assignment"])
  assert table.shape == (text.experiment.model.head.vocab,)
  assert len(np.unique(table)) == 6
  codebooks = (of["params"]["head"]["codebook"] for of in (variables, fresh))
  np.testing.assert_array_equal(*codebooks)
  embedding = CodebookEmbedding(V, D, 9)
  tied = {"embedding": embedding, "head": CodebookHead(V, D, 9, embedding=embedding)}
  start = starting_points.Mapped(convert.Fixed(assign.Random(3)))
  _, variables, _ = begun_with(dense, start, **tied)
  found = variables["codes"]["embedding"]["assignment"]
  np.testing.assert_array_equal(found, assign.Random(3)(len(table), 9))


@pytest.mark.slow
def test_product_codes_approximate_the_rows_and_best_those_of_frequent_tokens(dense):
  experiment, folder = dense
  made = converted(experiment, folder, ProductHead(V, D, 8, 4), convert.ToProduct(), name="x")
  text, variables, _ = tiny.begun(made)
  rows = read_run_variables(folder)[0]["params"]["head"]["weight"]
  counts = np.bincount(text.splits["train"].tokens, minlength=len(rows))
  close = compose(variables["codes"]["head"]["codes"], variables["params"]["head"]["tables"])
  error = ((rows - np.asarray(close)) ** 2).sum(-1)
  spread = ((rows - rows.mean(0)) ** 2).sum(-1)
  assert error.mean() < spread.mean()
  order = np.argsort(-counts)
  assert error[order[:8]].mean() < error[order[-20:]].mean()


def test_rows_that_are_not_finite_and_heads_that_are_not_dense_are_refused():
  rows = np.ones((5, 3), np.float32)
  rows[2, 1] = np.nan
  with pytest.raises(ValueError, match=r"head of run 7 must be finite; got .* row 2 \(1 such"):
    dense_rows({"params": {"head": {"weight": rows}}}, "run 7")
  head = {"codebook": np.ones((2, 3)), "token_bias": np.ones(5)}
  with pytest.raises(ValueError, match=r"head of run 7 must be dense; got .* codebook, token_bias"):
    dense_rows({"params": {"head": head}}, "run 7")


def compressed(dense, **changes):
  return tiny.begun(starting_points.fine_tuned_codebook(*dense, **changes))


def distilled(dense, student, teacher):
  model = starting_points.Distilled(*(dense[0].model.clone(head=h) for h in (student, teacher)))
  jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 2), np.int32))


REFUSED = {
  "more codes than tokens": (
    lambda dense: compressed(dense, codes=1000),
    "`codes` must be .*; got 1000 for vocab",
  ),
  "another tokenizer": (
    lambda dense: compressed(
      (dataclasses.replace(dense[0], tokenizer=WordTokenizer(vocab=20)), dense[1]), codes=5
    ),
    "`tokenizer` must be that of the run",
  ),
  "a target of another head": (
    lambda dense: tiny.begun(
      converted(*dense, DenseHead(V, D), convert.ToCodebook(convert.KMeans()), name="x")
    ),
    "`head` must be a CodebookHead for ToCodebook; got a DenseHead",
  ),
  "a softcap that the new head cannot have": (
    lambda dense: starting_points.fine_tuned_codebook(
      dataclasses.replace(dense[0], model=dense[0].model.clone(head=DenseHead(V, D, softcap=30.0))),
      dense[1],
      codes=5,
    ),
    r"softcap, as the dense head has 30\.0; got a CodebookHead",
  ),
  **{
    f"a weight of {weight}": (
      lambda dense, weight=weight: compressed(dense, codes=5, distillation=weight),
      rf"weight` must be .*finite.*; got {weight}",
    )
    for weight in (-1.0, np.nan, np.inf)
  },
  "a teacher without a linear head": (
    lambda dense: distilled(dense, DenseHead(9, D), AdaptiveHead(9, D, (5,))),
    r"`teacher.head` must be linear, .*; got a AdaptiveHead",
  ),
  "a teacher of other tokens": (
    lambda dense: distilled(dense, DenseHead(9, D), DenseHead(12, D)),
    "`student` must have the teacher's 12 tokens; got 9",
  ),
  "a mapping for a dense head": (
    lambda dense: begun_with(dense, starting_points.Mapped(convert.Brown()), head=DenseHead(V, D)),
    "must have assignment .*; got a DenseHead",
  ),
  "products for a codebook": (
    lambda dense: begun_with(
      dense, starting_points.FromVectors(CONTEXTS, convert.ToProduct()), head=CodebookHead(V, D, 5)
    ),
    "must be a ProductHead .*; got a CodebookHead",
  ),
  "a bias for a head without one": (
    lambda dense: begun_with(dense, starting_points.Unigrams(), head=DenseHead(V, D)),
    "`head` must have a bias",
  ),
  "a text for a head that it gives nothing": (
    lambda dense: begun_with(
      dense,
      starting_points.FromText(),
      head=PackedHead(V, D),
      embedding=Int8Embedding(V, D, group=8),
    ),
    "`head` or `embedding` must have rows, codes or a bias",
  ),
  "a folder without a run": (
    lambda dense: compressed((dense[0], dense[1].with_name("none")), codes=5),
    r"`folder` must have a config\.json",
  ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_start_that_does_not_fit_is_refused(dense, wrong):
  make, message = REFUSED[wrong]
  with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
    make(dense)


CONTEXTS = convert.ContextVectors()


def vectors_of(text):
  """Vectors of the contexts of a text's tokens."""
  return CONTEXTS(token_stats(text, text.experiment.model.head.vocab), D)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_head_begins_with_given_vectors_of_unit_length(dense, tied):
  embedding = DenseEmbedding(V, D)
  layers = {"embedding": embedding, "head": DenseHead(V, D, embedding=embedding if tied else None)}
  start = starting_points.FromVectors(CONTEXTS, convert.ToDense())
  text, variables, _ = begun_with(dense, start, **layers)
  weight = variables["params"]["embedding" if tied else "head"]["weight"]
  np.testing.assert_array_equal(weight, vectors_of(text).astype(np.float32))
  np.testing.assert_allclose((weight**2).sum(axis=1).mean(), 1, rtol=1e-5)


@pytest.mark.slow
def test_a_product_head_begins_with_clusters_of_given_vectors_and_all_else_is_fresh(dense):
  head = ProductHead(V, D, 6, 4, token_bias=True)
  start = starting_points.FromVectors(CONTEXTS, convert.ToProduct())
  text, variables, fresh = begun_with(dense, start, head=head)
  codes, tables = variables["codes"]["head"]["codes"], variables["params"]["head"]["tables"]
  assert codes.dtype == np.uint8
  assert all(len(np.unique(column)) == 6 for column in codes.T)
  rows, close = vectors_of(text), np.asarray(compose(codes, tables))
  assert ((close - rows) ** 2).sum() < 0.7 * (rows**2).sum()
  others = lambda of: {name: tree for name, tree in of["params"].items() if name != "head"}
  jax.tree.map(np.testing.assert_array_equal, others(variables), others(fresh))


@pytest.mark.slow
def test_a_bias_from_unigrams_gives_the_frequencies_of_the_text_whatever_the_rows(dense):
  head, start = DenseHead(V, D, use_bias=True), starting_points.Unigrams(smoothing=0.5)
  text, variables, _ = begun_with(dense, start, head=head)
  vocab = text.experiment.model.head.vocab
  counts = np.bincount(text.splits["train"].tokens, minlength=vocab) + 0.5
  bias = variables["params"]["head"]["bias"]
  np.testing.assert_allclose(np.exp(bias.astype(np.float64)), counts / counts.sum(), rtol=1e-6)
  both = dataclasses.replace(start, start=starting_points.FromVectors(CONTEXTS, convert.ToDense()))
  after = begun_with(dense, both, head=head)[1]["params"]["head"]
  np.testing.assert_array_equal(after["bias"], bias)
  np.testing.assert_allclose(after["weight"], vectors_of(text), rtol=1e-6)


@pytest.mark.slow
def test_layers_begin_with_the_training_text_as_from_tokens_makes_them(dense):
  def begun(**layers):
    text, variables, fresh = begun_with(dense, starting_points.FromText(), **layers)
    stats = assign.TextStats.of(text.splits["train"].tokens, text.experiment.model.head.vocab)
    others = lambda of: {n: x for n, x in of["params"].items() if n not in ("head", "embedding")}
    jax.tree.map(np.testing.assert_array_equal, others(variables), others(fresh))
    return stats, variables

  stats, variables = begun(head=CodebookHead(V, D, 6, token_bias=True))
  np.testing.assert_array_equal(variables["codes"]["head"]["assignment"], stats.codes(6))
  bias = variables["params"]["head"]["token_bias"]
  np.testing.assert_array_equal(bias, stats.log_frequencies())
  np.testing.assert_array_equal(variables["params"]["embedding"]["weight"], stats.contexts(D))
  stats, variables = begun(head=GroupedHead(V, D, groups=5, order_init=convert.in_order))
  sizes = np.diff(group_starts(stats.vocab, 5))
  np.testing.assert_array_equal(variables["codes"]["head"]["order"], stats.order(sizes))
  embedding = DenseEmbedding(V, D)
  stats, variables = begun(embedding=embedding, head=DenseHead(V, D, embedding=embedding))
  np.testing.assert_array_equal(variables["params"]["embedding"]["weight"], stats.contexts(D))
