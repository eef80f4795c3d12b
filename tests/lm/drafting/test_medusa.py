"""Medusa's blocks: exact drafts of trees, their training loss, and their files."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract import strict_modes
from tests.jitted import random_variables, results
from tests.lm.generation import test_speculation as speculated
from tests.lm.generation.reference import log_softmax
from tests.lm.generation.test_speculation import (
  CONTEXT,
  KEY,
  MAP,
  NEW,
  PROMPTS,
  D,
  V,
  plain,
  target,
)
from vqjax import CodebookHead, DenseHead, RoutedHead
from vqjax.lm.drafting import (
  Medusa,
  MedusaBlocks,
  load_medusa,
  medusa_loss,
  medusa_ranks,
  save_medusa,
)
from vqjax.lm.generation import (
  GREEDY,
  DraftTree,
  RoundTimes,
  Sampling,
  TreeDraft,
  Typical,
  generate,
  speculation,
  unstacked,
)
from vqjax.lm.generation.decoding import padded
from vqjax.lm.generation.kv_cache import prefill

TREE = DraftTree([(0, 0, 0), (0, 1), (1, 0), (2,), (0, 2), (3,)])
HEADS = {
  "the model's": lambda: None,
  "fewer tokens": lambda: DenseHead(7, D),
  "codebook": lambda: CodebookHead(V, D, codes=5, token_bias=True),
  "routed": lambda: RoutedHead(V, D, clusters=3, budget=2),
}


def blocks(count=3, dim=D):
  """Random blocks."""
  rng = np.random.default_rng(4)
  weight, bias = (rng.standard_normal((count, *size), np.float32) for size in ((dim, dim), (dim,)))
  return MedusaBlocks(*map(jax.device_put, (0.3 * weight, 0.1 * bias)))


def medusa(name="the model's", **options):
  """A drafter that always drafts its tree."""
  head = HEADS[name]()
  options = {"tree": TREE, "cost": 0, "tokens": MAP if name == "fewer tokens" else None} | options
  if head is None:
    return Medusa(blocks(), **options)
  return Medusa(blocks(), head, random_variables(head, seed=5), **options)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", HEADS)
def test_greedy_tokens_are_those_without_a_drafter(name):
  # The typical rule is exact where decoding is greedy.
  given = {"max_tokens": NEW, "drafter": medusa(name, typical=Typical())}
  result = generate(*target(), PROMPTS, KEY, GREEDY, **given)
  assert (result.tokens == plain().tokens).all()
  np.testing.assert_allclose(result.log_probs, plain().log_probs, atol=1e-5)
  assert (result.passes < NEW).any()


@pytest.mark.slow
def test_a_tree_of_one_path_is_a_chain():
  drafter = speculated.drafter("fewer tokens")
  given = {"max_tokens": NEW, "log_probs": False}
  chain = TreeDraft(drafter, DraftTree.chain(drafter.length), cost=0)
  one, same = (
    generate(*target(), PROMPTS, KEY, GREEDY, drafter=each, **given) for each in (drafter, chain)
  )
  assert (same.tokens == plain().tokens).all()
  assert (same.passes == one.passes).all()


@pytest.mark.slow
def test_a_tree_may_be_wider_than_the_tokens_that_have_a_score():
  head = DenseHead(V, D, use_bias=True)
  bias = np.where(np.arange(V) == 3, 0, -np.inf).astype(np.float32)
  variables = {"params": {"weight": np.ones((V, D), np.float32), "bias": bias}}
  drafter = Medusa(blocks(), head, variables, tree=TREE, cost=0)
  result = generate(*target(), PROMPTS, KEY, GREEDY, max_tokens=NEW, drafter=drafter)
  assert (result.tokens == plain().tokens).all()


@pytest.mark.slow
def test_greedy_tokens_are_those_without_a_tree_of_the_first_blocks():
  drafter = TreeDraft(speculated.drafter("early exit"), TREE, cost=0)
  given = {"max_tokens": NEW, "log_probs": False}
  result = generate(*target(), PROMPTS, KEY, GREEDY, drafter=drafter, **given)
  assert (result.tokens == plain().tokens).all()
  assert (result.passes < NEW).any()


@pytest.mark.slow
def test_the_cache_after_rounds_is_that_of_a_pass_over_the_text(monkeypatch):
  states = []
  advance = speculation.advance

  def recorded(*args, program):
    state, length = advance(*args, program=program)
    states.append(jax.tree.map(np.array, state._replace(log_probs=None)))
    return state, length

  monkeypatch.setattr(speculation, "advance", recorded)
  tokens = generate(*target(), PROMPTS, KEY, GREEDY, max_tokens=NEW, drafter=medusa()).tokens
  model, variables = target()[0], unstacked(target()[1])
  texts = [[*prompt, *row] for prompt, row in zip(PROMPTS, tokens.tolist())]
  given = model, variables, *map(jnp.asarray, padded(texts, CONTEXT)), CONTEXT
  for ring, whole in zip(states[-1].rings, prefill(*given, rejected=CONTEXT)[1], strict=True):
    slots = ring.key.shape[1]
    window = slots - TREE.size  # that of the block, or all positions
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts)):
      last = int(states[-1].step[row])  # the latest token is in no cache
      number = np.arange(max(last + 1 - window, -len(prompt)), last)
      # The whole text is the prompt there: position t is in slot t + slots - length of the text.
      other = len(prompt) + number + whole.key.shape[1] - len(text)
      for own, their in zip(ring[:2], whole[:2]):
        np.testing.assert_allclose(own[row, number % slots], their[row, other], atol=2e-5)


DRAWS = {
  "temperature": (Sampling(0.8), "codebook"),
  "filters": (Sampling(1.2, top_k=6, top_p=0.9), "fewer tokens"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_draws_along_trees_are_distributed_as_the_model_says(name):
  sampling, head = DRAWS[name]
  assert speculated.p_value(sampling, medusa(head)) > 1e-4


@pytest.mark.slow
def test_no_rule_accepts_a_token_that_is_not_allowed():
  allowed = np.arange(V) % 4 != np.arange(4)[:, None]
  given = *target(), PROMPTS, KEY, Sampling(1.5)
  drafter = medusa(typical=Typical(0.01, 0.01))
  result = generate(*given, max_tokens=NEW, allowed=allowed, drafter=drafter, log_probs=False)
  assert (result.tokens % 4 != np.arange(4)[:, None]).all()
  assert (result.passes < NEW).any()


@pytest.mark.slow
def test_typical_acceptance_changes_the_distribution():
  assert speculated.p_value(Sampling(0.8), medusa(typical=Typical())) < 1e-9


def test_typical_acceptance_takes_the_longest_likely_path():
  rows, typical = 40, Typical(0.15, 0.6)
  rng = np.random.default_rng(6)
  logits = 1.5 * rng.normal(size=(rows, TREE.size + 1, V)).astype(np.float32)
  tokens = np.argsort(rng.random((rows, V)), axis=1)[:, : TREE.size + 1].astype(np.int32)
  head = DenseHead(V, V)
  program = medusa(typical=typical).program(target()[0], Sampling(0.7), 3, False)
  rule = lambda head: program._typical(head, jnp.asarray(logits), jnp.asarray(tokens), KEY, None)
  eye = {"params": {"weight": np.eye(V, dtype=np.float32)}}
  found = results(lambda v: head.apply(v, method=rule), eye)[0]
  log_p = log_softmax(logits / 0.7)
  entropy = -(np.exp(log_p) * log_p).sum(-1)
  enough = np.minimum(np.log(0.15), np.log(0.6) - entropy)
  for row in range(rows):
    best = (0, 0.0, 0)
    for node, path in enumerate(TREE.nodes):
      way = [TREE.nodes.index(path[:k]) for k in range(len(path) + 1)]
      steps = list(itertools.pairwise(way))
      scores = [log_p[row, before, tokens[row, after]] for before, after in steps]
      if all(score > enough[row, before] for score, (before, _) in zip(scores, steps)):
        best = max(best, (len(path), sum(scores), node)) if path else best
    assert found[row] == best[2]
  assert len(set(found.tolist())) > 4


@pytest.mark.slow
def test_trees_that_are_rejected_are_given_up(monkeypatch):
  lengths = []
  advance = speculation.advance

  def recorded(*args, program):
    lengths.append(program.length)
    return advance(*args, program=program)

  monkeypatch.setattr(speculation, "advance", recorded)
  unused = next(v for v in range(V) if v not in plain().tokens)
  head = DenseHead(1, D)
  never = Medusa(
    *(blocks(), head, random_variables(head)),
    tokens=[unused],
    tree=DraftTree.chain(2),
    cost=0.3,
  )
  result = generate(*target(), PROMPTS, KEY, GREEDY, max_tokens=NEW, drafter=never)
  assert (result.tokens == plain().tokens).all()
  assert lengths == [2, 0]


def test_the_loss_and_the_ranks_are_those_of_dense_logits():
  rng = np.random.default_rng(7)
  hidden = rng.normal(size=(9, D)).astype(np.float32)
  targets = rng.choice(MAP, size=(9, 3)).astype(np.int32)
  drafter = medusa("fewer tokens")
  weight = np.asarray(drafter.variables["params"]["weight"], np.float64)
  inner = np.einsum("nd,kde->nke", hidden, np.asarray(drafter.blocks.weight, np.float64))
  inner += np.asarray(drafter.blocks.bias)
  log_p = log_softmax((hidden[:, None] + inner / (1 + np.exp(-inner))) @ weight.T)
  number = np.array([[MAP.index(token) for token in row] for row in targets])
  number[4, 1] = -1
  of_target = np.take_along_axis(log_p, number[..., None], axis=-1)[..., 0]
  wanted = [-of_target[number[:, k] >= 0, k].mean() for k in range(3)]
  model, variables = target()

  def program(variables, hidden, number, targets):
    given = drafter.blocks, hidden, number, drafter.head, drafter.variables
    loss = medusa_loss(model, variables, *given)
    return loss, medusa_ranks(drafter, model, unstacked(variables), hidden, targets, 4)

  with strict_modes():
    loss, found = results(program, variables, hidden, number, targets)
  np.testing.assert_allclose(loss, wanted, rtol=1e-5)
  order = np.argsort(-log_p, axis=-1)[..., :4]
  is_target = np.asarray(MAP)[order] == targets[..., None]
  ranks = np.where(is_target.any(-1), is_target.argmax(-1), -1)
  assert (found == ranks).all()


BAD = {
  "blocks of another dim": (lambda: Medusa(blocks(dim=5)), ["blocks", "(3, 8, 8)", "(3, 5, 5)"]),
  "a head of another dim": (lambda: Medusa(blocks(), DenseHead(V, 5), {}), ["head", "dim 8", "5"]),
  "a head without variables": (lambda: Medusa(blocks(), DenseHead(V, D)), ["variables"]),
  "no map": (lambda: medusa("fewer tokens", tokens=None), ["tokens", "vocab 7"]),
  "a tree that is too deep": (lambda: medusa(tree=DraftTree.chain(4)), ["tree", "3", "depth 4"]),
  "a rank without a token": (lambda: medusa(tree=DraftTree([(V,)])), ["tree", "11 tokens", "11"]),
  "a tree of another drafter": (lambda: TreeDraft(medusa(), TREE), ["drafter", "Medusa"]),
  "a typical rule without bounds": (lambda: Typical(0.0), ["epsilon", "0.0"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_drafter_that_does_not_fit_is_refused(name):
  make, parts = BAD[name]
  with pytest.raises(ValueError, match="must") as error:
    generate(*target(), [[1, 2]], KEY, GREEDY, max_tokens=3, drafter=make())
  assert all(part in str(error.value) for part in parts)


@pytest.mark.programs(40)  # more than others where it is the first
def test_a_file_gives_the_drafter_back_and_fits_no_other_model(tmp_path):
  times = {"cost": 0.25, "overhead": 0.5, "drawn": RoundTimes(0.5, 2.0)}
  path, drafter, (model, variables) = tmp_path / "medusa", medusa("codebook", **times), target()
  save_medusa(drafter, path, variables)
  assert [file.name for file in tmp_path.iterdir()] == ["medusa"]
  found = load_medusa(path, model, variables, drafter.head)
  assert (found.tree, found.tokens) == (TREE, None)
  assert (found.times(GREEDY), found.times(Sampling())) == ((0.25, 0.5), (0.5, 2.0))
  jax.tree.map(np.testing.assert_array_equal, found.blocks, drafter.blocks)
  jax.tree.map(np.testing.assert_array_equal, found.variables, drafter.variables)
  with pytest.raises(ValueError, match=r"`head` must be the output layer in the file"):
    load_medusa(path, model, variables)
  other = jax.tree.map(lambda x: 2 * np.asarray(x), variables)
  with pytest.raises(ValueError, match=r"must be a drafter of this model"):
    load_medusa(path, model, other, drafter.head)
  path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(ValueError, match=r"must be a file of `save_medusa`"):
    load_medusa(path, model, variables, drafter.head)
