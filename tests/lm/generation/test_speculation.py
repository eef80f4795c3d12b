"""Speculative decoding gives what decoding without a drafter gives, in fewer passes."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests import jitted
from tests.contract import strict_modes
from tests.fakes import FakeTokenizer
from tests.jitted import results
from tests.lm.checkpoints.families import random_variables
from tests.lm.generation.reference import log_softmax
from vqjax import CodebookHead, DenseEmbedding, DenseHead
from vqjax.lm.drafting import Eagle
from vqjax.lm.drafting.eagle import initial_params
from vqjax.lm.generation import (
  GREEDY,
  Draft,
  DraftTree,
  EarlyExit,
  RoundTimes,
  Sampling,
  generate,
  speculation,
  stream,
)
from vqjax.lm.models import RMSNorm, Rotary, Transformer
from vqjax.sharding import MeshShape, make_mesh, shardings

V, D, NEW = 11, 8, 23
PROMPTS = [[5, 3, 1], [7], [7 * t * t % V for t in range(17)], [(5 * t + 1) % V for t in range(9)]]
CONTEXT = 17 + NEW
"""The longest prompt and its continuation fill the context."""

MAP = [9, 1, 4, 6, 0, 3, 7]
KEY = jax.random.key(0)


def decoder(layers, head, seed, embedding=None, **options):
  """A small decoder and random variables, large enough that tokens differ."""
  embedding = embedding or DenseEmbedding(head.vocab, D)
  model = Transformer(embedding, head, D, layers=layers, heads=2, context=CONTEXT, **options)
  return model, random_variables(model, 0.8, seed)


@functools.lru_cache
def target():
  """A decoder with a window, over which its caches wrap."""
  rotary = {"norm": RMSNorm(), "rotary": Rotary(), "window": 5}
  return decoder(2, DenseHead(V, D), seed=0, **rotary)


@functools.lru_cache
def drafter(name):
  """Drafters that always decide between the same lengths."""
  if name == "the model itself":
    return Draft(*target(), length=3, cost=0)
  if name == "codebook":
    return Draft(
      *decoder(1, CodebookHead(V, D, codes=5, token_bias=True), seed=1), length=3, cost=0
    )
  if name == "fewer tokens":
    return Draft(*decoder(1, DenseHead(7, D), seed=2), tokens=MAP, length=4, cost=0)
  head = DenseHead(7, D)
  variables = jitted.random_variables(head, seed=3)
  if name == "early exit":
    return EarlyExit(1, head, variables, tokens=np.array(MAP), length=2, cost=0)
  if name == "eagle":
    return Eagle(eagle_params(), length=3, cost=0)
  return Eagle(eagle_params(), head, variables, tokens=np.array(MAP), length=2, cost=0)


def drafter_shapes(model, variables):
  """The shapes of the parameters of a drafter on hidden vectors."""
  return jax.eval_shape(lambda: initial_params(model, variables, KEY))


def eagle_params():
  """Parameters that predict what the model's last norm leaves, and as much of anything else."""
  params, rng = jax.device_get(target()[1]["params"]), np.random.default_rng(4)
  start = jax.tree.map(lambda x: np.ones(x.shape, np.float32), drafter_shapes(*target()))
  start |= {"final_norm": params["final_norm"], "fuse": np.eye(2 * D, D, -D, np.float32)}
  start |= {"block": jax.tree.map(lambda x: x[-1], params["blocks"])}
  noise = lambda x: np.float32(0.2) * rng.standard_normal(x.shape, np.float32)
  return jax.tree.map(lambda x: jax.device_put(x + noise(x)), start)


NAMES = (
  *("the model itself", "codebook", "fewer tokens", "early exit"),
  *("eagle", "eagle, fewer tokens"),
)


@functools.lru_cache
def plain(rows=4):
  """Greedy continuations without a drafter."""
  return generate(*target(), PROMPTS[:rows], KEY, GREEDY, max_tokens=NEW)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_without_a_drafter(name):
  settings = {"max_tokens": NEW, "drafter": drafter(name)}
  with strict_modes():
    result = generate(*target(), PROMPTS, KEY, GREEDY, **settings)
  assert (result.tokens == plain().tokens).all()
  np.testing.assert_allclose(result.log_probs, plain().log_probs, atol=1e-5)
  assert (result.passes <= NEW).all()
  if name == "the model itself":  # the first token, and four in each further pass
    assert (result.passes == 1 + -(-(NEW - 1) // 4)).all()


def test_a_stop_token_within_a_draft_ends_its_row():
  stop = int(plain().tokens[0, 5])
  settings = {"max_tokens": NEW, "drafter": drafter("the model itself"), "stop": [stop]}
  result = generate(*target(), PROMPTS, KEY, GREEDY, **settings)
  for row, tokens in enumerate(plain().tokens.tolist()):
    length = tokens.index(stop) + 1 if stop in tokens else NEW
    assert result.tokens[row].tolist() == tokens[:length] + [-1] * (NEW - length)
    assert result.lengths[row] == length


@pytest.mark.slow
def test_a_single_row_is_that_of_the_batch():
  result = generate(
    *target(), PROMPTS[:1], KEY, GREEDY, max_tokens=NEW, drafter=drafter("codebook")
  )
  assert (result.tokens == plain().tokens[:1]).all()


class Digits(FakeTokenizer):
  """A tokenizer whose token n is the letter n of the alphabet."""

  vocab = V

  def encode(self, text, *, special=True):
    """The token of each letter."""
    return [ord(letter) - 97 for letter in text]

  def decode(self, tokens):
    """The letter of each token."""
    return "".join(chr(97 + int(token)) for token in tokens)


@pytest.mark.slow
def test_a_stream_has_the_same_text_and_tokens_are_drawn_among_the_allowed():
  allowed = np.arange(V) % 4 != np.arange(4)[:, None]
  given = *target(), PROMPTS, KEY, Sampling(0.9, top_p=0.9)
  settings = {"max_tokens": NEW, "tokenizer": Digits(), "allowed": allowed}
  settings["drafter"] = drafter("codebook")
  result = generate(*given, **settings, log_probs=False)
  assert (result.tokens % 4 != np.arange(4)[:, None]).all()
  pieces = list(stream(*given, **settings, chunk=5))
  assert ["".join(parts) for parts in zip(*pieces)] == result.texts
  assert len(pieces) > 2


ROWS, DRAWN = 20_000, 3


@functools.lru_cache
def log_prob_of_all():
  """Logits [V, ..., V] of each of the next three tokens, by full passes over all prefixes."""
  model, variables = target()
  found = []
  for known in range(DRAWN):
    prefixes = np.indices([V] * known).reshape(known, -1).T if known else np.zeros((1, 0), int)
    rows = np.concatenate([np.tile(PROMPTS[0], (len(prefixes), 1)), prefixes], 1).astype(np.int32)
    logits = np.asarray(jax.jit(model.apply)(variables, rows))[:, -1]
    found.append(logits.reshape(*[V] * known, V))
  return found


def p_value(sampling, name, log_probs=False, given=None):
  """Of Pearson's test that triples of tokens are drawn from the model's distribution."""
  result = generate(
    *(*(given or target()), [PROMPTS[0]] * ROWS, KEY, sampling),
    max_tokens=DRAWN,
    drafter=drafter(name) if isinstance(name, str) else name,
    log_probs=log_probs,
  )
  joint = np.ones(())
  for logits in log_prob_of_all():
    log_p = log_softmax(logits / sampling.temperature)
    if sampling.top_k:
      log_p[log_p < np.sort(log_p, -1)[..., -sampling.top_k, None]] = -np.inf
    if sampling.top_p:
      p = np.sort(np.exp(log_softmax(log_p)), -1)[..., ::-1]
      last = (np.cumsum(p, -1) < sampling.top_p).sum(-1)[..., None]
      edge = np.take_along_axis(np.sort(log_p, -1)[..., ::-1], last, -1)
      log_p[log_p < edge] = -np.inf
    joint = joint[..., None] * np.exp(log_softmax(log_p))
  index = np.ravel_multi_index(result.tokens.T, joint.shape)
  count, expected = np.bincount(index, minlength=joint.size), ROWS * joint.ravel()
  if count[expected == 0].any():
    return 0.0
  # Pearson's statistic needs five expected draws or so in each cell.
  rare = expected < 5
  merge = lambda x: np.append(x[~rare], x[rare].sum())
  count, expected = merge(count), merge(expected)
  return stats.chisquare(count[expected > 0], expected[expected > 0]).pvalue


DRAWS = {
  "temperature": (Sampling(0.8), "codebook"),
  "top-k": (Sampling(1.2, top_k=4), "fewer tokens"),
  "top-p": (Sampling(top_p=0.8), "early exit"),
  "hidden vectors": (Sampling(0.8), "eagle"),
  "hidden vectors, top-p": (Sampling(top_p=0.8), "eagle, fewer tokens"),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_distributed_as_the_model_says(name):
  assert p_value(*DRAWS[name]) > 1e-4


@pytest.mark.slow
def test_draws_over_a_sharded_vocabulary_are_distributed_as_the_model_says():
  model, variables = target()
  sharded = model.clone(head=model.head.clone(vocab_axis="model", parent=None), parent=None)
  mesh = make_mesh(MeshShape(model=8))
  placed = jax.device_put(variables, shardings(sharded.logical_axes(), variables, mesh))
  for made_without_the_mesh in (log_prob_of_all, lambda: drafter("early exit")):
    made_without_the_mesh()
  with jax.set_mesh(mesh):
    assert p_value(Sampling(0.8, top_p=0.9), "early exit", given=(sharded, placed)) > 1e-4


@pytest.mark.slow
def test_a_wrong_draft_distribution_is_noticed(monkeypatch):
  def wrong(target, number, draft_log_prob, *rest):
    return verify(target, number, jnp.full_like(draft_log_prob, -np.log(V)), *rest)

  verify = speculation.verify
  monkeypatch.setattr(speculation, "verify", wrong)
  # Another program than that of the test above, which has been compiled.
  assert p_value(Sampling(0.8), "codebook", log_probs=True) < 1e-9


@pytest.mark.slow
def test_drafts_that_are_rejected_become_shorter_and_end(monkeypatch):
  lengths = []

  def recorded(*args, program):
    lengths.append(program.length)
    return advance(*args, program=program)

  advance = speculation.advance
  monkeypatch.setattr(speculation, "advance", recorded)
  unused = next(v for v in range(V) if v not in plain().tokens)
  head = DenseHead(1, D)
  never = EarlyExit(1, head, jitted.random_variables(head), tokens=[unused], length=2, cost=0.3)
  result = generate(*target(), PROMPTS, KEY, GREEDY, max_tokens=NEW, drafter=never)
  assert (result.tokens == plain().tokens).all()
  assert lengths == [2, 1, 0]


def test_drafting_ends_where_half_a_deviation_more_would_not_pay():
  program = Draft(*target(), length=3, cost=0.1, overhead=0.2).program(
    target()[0], GREEDY, 3, has_log_probs=False
  )
  state = speculation.State(*[None] * len(speculation.State._fields))
  length = lambda accepted, verified: program.best_length(
    state._replace(accepted=accepted, verified=verified)
  )
  # 1 + a + a² + a³ against 1.5, 1 + a against 1.3: a has to be above 0.34, or above 0.3.
  accepted, verified = np.float32([[12, 1, 1, 1, 6, 3, 0], [12, 3, 4, 12, 20, 20, 1]])
  assert results(jax.vmap(length), accepted, verified).tolist() == [3, 3, 1, 0, 1, 0, 0]


def test_rounds_count_as_their_tokens_are_chosen():
  own = dataclasses.replace(drafter("codebook"), cost=0.25, drawn=RoundTimes(0.5, 2.0))
  program = lambda sampling, own: own.program(target()[0], sampling, 3, False)
  times = lambda *given: (program(*given).cost, program(*given).overhead)
  assert (times(GREEDY, own), times(Sampling(0.8), own)) == ((0.25, 0.0), (0.5, 2.0))
  assert times(Sampling(0.8), dataclasses.replace(own, drawn=None)) == (0.25, 0.0)
  # A cost of 0 always drafts.
  assert times(Sampling(0.8), dataclasses.replace(own, cost=0)) == (0, 0.0)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8)])
def test_scores_of_nan_draft_a_token_that_the_model_can_read(sampling):
  program = drafter("the model itself").program(target()[0], sampling, 3, has_log_probs=False)
  draft = lambda head: program._draft(head, jnp.full((2, D), jnp.nan), KEY)[0]
  variables = {"params": {"weight": np.ones((V, D), np.float32)}}
  number = results(lambda v: DenseHead(V, D).apply(v, method=draft), variables)
  assert ((number >= 0) & (number < V)).all()


def trimmed(size, **options):
  """A drafter of another vocabulary."""
  return EarlyExit(1, DenseHead(size, D), {"params": {"weight": np.ones((size, D))}}, **options)


BAD = {
  "no draft": (lambda: Draft(*target(), length=0), ["length", "0", "4 is usual"]),
  "a length of yes": (lambda: Eagle({}, length=True), ["length", "True", "4 is usual"]),
  "a cost of a whole token": (lambda: Draft(*target(), cost=1.0), ["cost", "1.0"]),
  "a negative overhead": (lambda: Draft(*target(), overhead=-2.0), ["overhead", "-2.0"]),
  "a cost of draws": (lambda: Draft(*target(), drawn=RoundTimes(1.5)), ["cost", "1.5"]),
  "another vocabulary": (lambda: trimmed(7), ["7", str(V), "tokens"]),
  "a map of another length": (lambda: trimmed(7, tokens=MAP[:6]), ["(6,)", "7"]),
  "a map out of range": (lambda: trimmed(2, tokens=[0, V]), [str(V), "d2t"]),
  "a map with repetitions": (lambda: trimmed(2, tokens=[3, 3]), ["1 repetitions"]),
  "no parameters": (lambda: Draft(target()[0], {}), ["variables", "[]", "'params'"]),
  "all blocks": (lambda: EarlyExit(2), ["layers", "2"]),
  "a head without variables": (lambda: EarlyExit(1, DenseHead(V, D)), ["variables"]),
  "a head of another width": (lambda: EarlyExit(1, DenseHead(V, 5), {}), ["dim", "5"]),
  "a block of another model": (
    lambda: Eagle(drafter_shapes(*decoder(1, DenseHead(V, D), seed=0))),
    ["attention_norm/bias", "(8,)"],
  ),
  "a context that is too short": (
    lambda: Draft(target()[0].clone(context=4), target()[1]),
    ["context", "4", "5"],
  ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_drafter_that_does_not_fit_is_refused(name):
  make, parts = BAD[name]
  with pytest.raises(ValueError, match="must") as error:
    generate(*target(), [[1, 2]], KEY, GREEDY, max_tokens=3, drafter=make())
  assert all(part in str(error.value) for part in parts)


@pytest.mark.skipif("VQJAX_RUNTIME_TYPES" in os.environ, reason="calls are checked by jaxtyping")
def test_a_small_model_alone_is_no_drafter():
  with pytest.raises(TypeError, match=r"got a Transformer.* Draft\(model, variables\)"):
    generate(*target(), [[1, 2]], KEY, GREEDY, max_tokens=3, drafter=target()[0])


@pytest.mark.skipif("VQJAX_RUNTIME_TYPES" in os.environ, reason="calls are checked by jaxtyping")
@pytest.mark.parametrize(
  ("make", "parts"),
  [
    (lambda: Draft(*target(), length=2.5), ["length", "2.5", "4 is usual"]),
    (lambda: Eagle({}, length=3.0), ["length", "3.0", "4 is usual"]),
    (lambda: EarlyExit(1.5), ["layers", "1.5", "A quarter"]),
    (lambda: DraftTree([(0,), (0, 0.5)]), ["paths", "(0, 0.5)", "likeliest"]),
    (lambda: DraftTree.chain(2.5), ["length", "2.5"]),
    (lambda: DraftTree.best(np.array([[0]]), 2.5), ["size", "2.5"]),
  ],
)
def test_a_number_that_is_not_an_integer_is_refused_at_once(make, parts):
  with pytest.raises(ValueError, match=r"must (be an|have ranks that are) integer") as error:
    make()
  assert all(part in str(error.value) for part in parts)


def test_a_penalty_is_refused():
  sampling = Sampling(repetition_penalty=1.1)
  with pytest.raises(ValueError, match=r"repetition_penalty.*1\.1"):
    generate(*target(), [[1]], KEY, sampling, max_tokens=3, drafter=drafter("codebook"))
